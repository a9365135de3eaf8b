"""Which implementation runs where: the fastest one that works here, and a loud word when it is not the usual one."""

from __future__ import annotations

import importlib.util
import logging
from typing import TYPE_CHECKING

from syncguard.digest.reference import NumpyEngine
from syncguard.errors import UnsupportedError

if TYPE_CHECKING:
    from syncguard.digest.partial import DigestEngine

_log = logging.getLogger(__name__)


def engine_for(device: str = "cpu") -> DigestEngine:
    """Return the fastest engine for tensors on a device; warns when a fast path is missing.

    Args:
        device: A torch device string; "cpu" also takes numpy arrays.
    """
    if device.split(":", maxsplit=1)[0] == "cpu":
        return NumpyEngine()
    return _torch_engine()


def available_engines() -> list[DigestEngine]:
    """Return every engine that can run in this process, fastest first; imports what they need."""
    engines: list[DigestEngine] = []
    if importlib.util.find_spec("torch") is not None:
        engines.append(_torch_engine())
    engines.append(NumpyEngine())
    return engines


def _torch_engine() -> DigestEngine:
    try:
        from syncguard.digest.torch_path import TorchEngine
    except ImportError as error:
        raise UnsupportedError(
            "no digest for tensors outside host memory", expected="torch", found=error, todo="install syncguard[torch]"
        ) from error
    return TorchEngine()
