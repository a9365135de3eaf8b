"""Looking inside an SGLang rank: intermediate outputs of one prefill, through the same route as the probe.

Off unless the operator sets `SYNCGUARD_INSIDE_DIR` in the server's environment: a request can start and stop a capture,
but never say where it is written. While a capture runs, forward hooks keep the outputs of the named modules; stopping it
removes the hooks and writes one safetensors file a rank. Not for a serving worker: hooks slow every forward, and CUDA
graphs replay without them (prefill runs without graphs by default).
"""

from __future__ import annotations

import json
import logging
import os
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import httpx
import msgspec

from syncguard.errors import EngineError, SyncguardError, UnsupportedError, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from syncguard.replay.record import ReplayRecord

logger = logging.getLogger(__name__)

DIRECTORY_VARIABLE: Final = "SYNCGUARD_INSIDE_DIR"
ACTION_PREFIX: Final = "syncguard-inside:"
INSIDE_KEY: Final = "syncguard-inside"


class InsideRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Start a capture of these modules, or stop it.

    Attributes:
        start: Whether to start; otherwise stop and write.
        modules: Module names; none takes embedding, layers and final norm.
    """

    start: bool
    modules: tuple[str, ...] = ()


class InsideAnswer(msgspec.Struct, frozen=True):
    """What a rank did.

    Attributes:
        modules: Modules captured, in the order of the computation.
        file: File written, on the rank's machine; empty after a start.
        error: Why nothing was done; empty where it was.
    """

    modules: tuple[str, ...] = ()
    file: str = ""
    error: str = ""


class RankCapture:
    """The capture of one rank process."""

    def __init__(self, directory: Path) -> None:
        """Keep the directory that the operator named."""
        self._directory = directory
        self._open: tuple[ExitStack, Any, tuple[str, ...]] | None = None

    def on_check(self, original: Any, checker: Any, action: str, *args: Any, **kwargs: Any) -> Any:
        """Answer our actions and pass on all others; an AROUND hook of `WeightChecker.handle`."""
        if not action.startswith(ACTION_PREFIX):
            return original(checker, action, *args, **kwargs)
        placement = checker._parallelism_info(role=kwargs["role"]).model_dump()  # noqa: SLF001 - the checker's own identity
        try:
            request = msgspec.json.decode(action.removeprefix(ACTION_PREFIX), type=InsideRequest)
            answer = self._start(checker, request) if request.start else self._stop(placement)
        except Exception as error:  # raised, it would leave the other ranks waiting in the gather
            logger.exception("syncguard capture failed")
            self._close()
            said = error.text() if isinstance(error, SyncguardError) else str(error)
            answer = InsideAnswer(error=f"{type(error).__name__}: {said}")
        return {
            "checksums": {INSIDE_KEY: msgspec.json.encode(answer).decode()},
            "per_gpu_checksum": "",
            "parallelism_info": placement,
        }

    def _start(self, checker: Any, request: InsideRequest) -> InsideAnswer:
        from syncguard.replay.intermediates import capturing, usual_points

        self._close()
        model = checker._get_model()  # noqa: SLF001 - the live model
        names = request.modules or tuple(usual_points(model))
        stack = ExitStack()
        self._open = (stack, stack.enter_context(capturing(model, names)), names)
        return InsideAnswer(modules=names)

    def _stop(self, placement: dict[str, Any]) -> InsideAnswer:
        from safetensors.torch import save_file

        if self._open is None:
            raise UsageError("stop of a capture", expected="one that was started", found="none")
        _, capture, names = self._open
        self._close()
        target = self._directory / f"tp{placement['tp_rank']}-pp{placement['pp_rank']}.safetensors"
        beside = target.with_suffix(".part")
        save_file({name: value.contiguous() for name, value in capture.values.items()}, beside)
        beside.replace(target)
        return InsideAnswer(modules=tuple(name for name in names if name in capture.values), file=str(target))

    def _close(self) -> None:
        if self._open is not None:
            self._open[0].close()
            self._open = None


def install() -> None:
    """Register the hook where the operator asked for it; called in each SGLang process, does nothing otherwise."""
    directory = os.environ.get(DIRECTORY_VARIABLE, "")
    if not directory:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    capture = RankCapture(Path(directory))
    HookRegistry.register("sglang.srt.utils.weight_checker.WeightChecker.handle", capture.on_check, HookType.AROUND)


def look_inside(base_url: str, record: ReplayRecord, modules: Sequence[str] = ()) -> list[InsideAnswer]:
    """Capture one prefill of a record's ids on an idle server, after a flush.

    Args:
        base_url: The server.
        record: Record whose ids are scored.
        modules: Module names; none takes embedding, layers and final norm.

    Returns:
        One answer a rank, with the file that it wrote.

    Raises:
        EngineError: The server refused, a rank failed, or the flush was not confirmed.
        UnsupportedError: The server does not look inside.
    """
    with httpx.Client(base_url=base_url, timeout=300, trust_env=False) as http:
        _ask(http, InsideRequest(start=True, modules=tuple(modules)))
        try:
            flushed = http.post("/flush_cache")
            if flushed.status_code != httpx.codes.OK:
                raise EngineError(
                    "flush before a capture", expected="Cache flushed.", found=flushed.text, where=base_url
                )
            body = {
                "input_ids": record.input_ids.tolist(),
                "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
                "return_logprob": True,
                "logprob_start_len": record.prompt_length - 1,
            }
            scored = http.post("/generate", json=body)
            if scored.status_code != httpx.codes.OK:
                raise EngineError("prefill of a capture", expected="HTTP 200", found=scored.text[:200], where=base_url)
        finally:
            answers = _ask(http, InsideRequest(start=False))
    return answers


def _ask(http: httpx.Client, request: InsideRequest) -> list[InsideAnswer]:
    response = http.post("/weights_checker", json={"action": ACTION_PREFIX + msgspec.json.encode(request).decode()})
    try:
        body = response.json()
    except json.JSONDecodeError as error:
        raise EngineError("a capture", expected="JSON", found=response.text[:200], where=http.base_url) from error
    texts = [
        text
        for rank in body.get("ranks") or []
        for key, text in rank.get("checksums", {}).items()
        if key == INSIDE_KEY or key.endswith(f".{INSIDE_KEY}")
    ]
    if not texts:
        raise UnsupportedError(
            "looking inside this server",
            expected=f"our plugin and {DIRECTORY_VARIABLE} in the server's environment",
            found=str(body.get("message", response.status_code)),
            where=http.base_url,
            todo="start a server for diagnosis with both",
        )
    answers = [msgspec.json.decode(text, type=InsideAnswer) for text in texts]
    failed = next((answer for answer in answers if answer.error), None)
    if failed is not None:
        raise EngineError("a capture in a rank", found=failed.error, where=http.base_url)
    return answers
