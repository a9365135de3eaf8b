"""Engine addresses of the replay commands: a running SGLang server, or the embedded engine on a checkpoint folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from syncguard.engines.sglang import SglangEngine
from syncguard.errors import CheckpointError, UnsupportedError, UsageError

if TYPE_CHECKING:
    from syncguard.engines.base import EngineAdapter

EMBEDDED: Final = "embedded:"
FLUSH_WAIT_S: Final = 10.0
"""A router's health check is a short generation; a flush waits for it instead of failing the command."""
ADDRESS_HELP: Final = (
    "Engine: http://HOST:PORT of an SGLang server, or embedded:FOLDER for our own engine on a checkpoint."
)


def embedded_folder(address: str) -> Path | None:
    """Return the checkpoint folder of an embedded engine's address, or None for another address."""
    return Path(address.removeprefix(EMBEDDED)) if address.startswith(EMBEDDED) else None


def open_engine(address: str) -> EngineAdapter:
    """Return the adapter of an address.

    Raises:
        CheckpointError: The embedded engine cannot load its folder.
        UnsupportedError: The embedded engine needs torch, which is not installed.
        UsageError: Neither form.
    """
    folder = embedded_folder(address)
    if folder is not None:
        try:
            from syncguard.engines.local import LocalEngine, LocalWorker
        except ImportError as error:
            raise UnsupportedError(
                "the embedded engine", expected="torch", found=error, todo="pip install 'syncguard[torch]'"
            ) from error
        return LocalEngine(LocalWorker(folder))
    if not address.startswith(("http://", "https://")):
        raise UsageError("engine address", expected="http://HOST:PORT or embedded:FOLDER", found=address)
    return SglangEngine(address, flush_wait_s=FLUSH_WAIT_S)


def load_trainer(folder: Path, dtype: str) -> Any:
    """Return a Transformers model of a checkpoint folder; nothing is downloaded and no remote code runs.

    Raises:
        CheckpointError: The folder cannot be loaded.
        UnsupportedError: torch or Transformers are not installed.
    """
    try:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging
    except ImportError as error:
        raise UnsupportedError(
            "scores of a trainer", expected="torch and transformers", found=error, todo="pip install 'syncguard[torch]'"
        ) from error
    logging.disable_progress_bar()  # our own bar says what goes on
    try:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, trust_remote_code=False, local_files_only=True)
    except (OSError, ValueError) as error:
        raise CheckpointError("cannot load the trainer's checkpoint", found=error, where=folder) from error
