"""Looking inside an SGLang rank: intermediate outputs of one prefill, and teacher-forced decode, by the probe's route.

Off unless the operator sets `SYNCGUARD_INSIDE_DIR` in the server's environment: a request can start and stop a capture,
but never say where it is written. While a capture runs, forward hooks keep the outputs of the named modules; stopping it
removes the hooks and writes one safetensors file a rank. Not for a serving worker: hooks slow every forward, CUDA
graphs replay without them (prefill runs without graphs by default), and a forced response is put into whatever request runs.
"""

from __future__ import annotations

import json
import logging
import os
import time
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import httpx
import msgspec

from syncguard.engines.sglang_forced import SAMPLERS, ForcedResponse
from syncguard.errors import EngineError, SyncguardError, UnreachableError, UnsupportedError, UsageError
from syncguard.replay.inside import CHOSEN

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from syncguard.replay.record import ReplayRecord

logger = logging.getLogger(__name__)

FLUSH_WAIT_S: Final = 10.0
DIRECTORY_VARIABLE: Final = "SYNCGUARD_INSIDE_DIR"
ACTION_PREFIX: Final = "syncguard-inside:"
INSIDE_KEY: Final = "syncguard-inside"


class InsideRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Start a capture or a forced response, or stop what was started.

    Attributes:
        op: `list` names the points, `capture` starts hooks, `force` arms a response, `stop` ends either and answers.
        modules: Points to capture; none takes embedding, layers, final norm and logits.
        operator: Module whose input and output are saved too; none where empty.
        response_ids: Ids to force.
        prompt_length: Position of the first of them.
    """

    op: Literal["list", "capture", "force", "stop"]
    modules: tuple[str, ...] = ()
    operator: str = ""
    response_ids: tuple[int, ...] = ()
    prompt_length: int = 0


class InsideAnswer(msgspec.Struct, frozen=True):
    """What a rank did.

    Attributes:
        modules: Points, in the order of the computation: captured ones, or all of the model after `list`.
        routers: Experts whose routing can be captured; only after `list`.
        file: File written, on the rank's machine; empty after a start.
        operator_file: File of the operator's input; empty where none was asked for.
        forced: Tokens that were forced.
        error: Why nothing was done; empty where it was.
    """

    modules: tuple[str, ...] = ()
    routers: tuple[str, ...] = ()
    file: str = ""
    operator_file: str = ""
    forced: int = 0
    error: str = ""


class RankCapture:
    """The capture of one rank process."""

    def __init__(self, directory: Path, forced: ForcedResponse) -> None:
        """Keep the directory that the operator named, and the sampler's hook."""
        self._directory = directory
        self._forced = forced
        self._open: tuple[ExitStack, Any, tuple[str, ...], str] | None = None
        self._armed = False

    def on_check(self, original: Any, checker: Any, action: str, *args: Any, **kwargs: Any) -> Any:
        """Answer our actions and pass on all others; an AROUND hook of `WeightChecker.handle`."""
        if not action.startswith(ACTION_PREFIX):
            return original(checker, action, *args, **kwargs)
        placement = checker._parallelism_info(role=kwargs["role"]).model_dump()  # noqa: SLF001 - the checker's own identity
        try:
            request = msgspec.json.decode(action.removeprefix(ACTION_PREFIX), type=InsideRequest)
            answer = self._answer(checker, request, placement)
        except Exception as error:  # raised, it would leave the other ranks waiting in the gather
            logger.exception("syncguard capture failed")
            with suppress(Exception):
                self._close()
            said = error.text() if isinstance(error, SyncguardError) else str(error)
            answer = InsideAnswer(error=f"{type(error).__name__}: {said}")
        return {
            "checksums": {INSIDE_KEY: msgspec.json.encode(answer).decode()},
            "per_gpu_checksum": "",
            "parallelism_info": placement,
        }

    def _answer(self, checker: Any, request: InsideRequest, placement: dict[str, Any]) -> InsideAnswer:
        if request.op == "stop":
            return self._stop(placement)
        self._close()
        if request.op == "force":
            self._forced.arm(request.response_ids, request.prompt_length)
            self._armed = True
            return InsideAnswer()
        from syncguard.replay.intermediates import capturing, routers_of, saving_operator_input, usual_points

        model = checker._get_model()  # noqa: SLF001 - the live model
        names = request.modules or tuple(usual_points(model))
        if request.op == "list":
            return InsideAnswer(modules=names, routers=tuple(routers_of(model)))
        stack = ExitStack()
        file = str(self._file(placement, "operator-")) if request.operator else ""
        capture = stack.enter_context(capturing(model, names, guarded=True))
        self._open = (stack, capture, names, file)
        if file:
            stack.enter_context(saving_operator_input(model, request.operator, file, guarded=True))
        return InsideAnswer(modules=names)

    def _stop(self, placement: dict[str, Any]) -> InsideAnswer:
        from safetensors.torch import save_file

        if self._armed:
            self._close()
            return InsideAnswer(forced=self._forced.forced, error=self._forced.error)
        if self._open is None:
            raise UsageError("stop of a capture", expected="one that was started", found="none")
        _, capture, names, operator_file = self._open
        self._close()
        if capture.error:
            return InsideAnswer(error=capture.error)
        target = self._file(placement)
        beside = target.with_suffix(".part")
        save_file({name: value.contiguous() for name, value in capture.values.items()}, beside)
        beside.replace(target)
        kept = tuple(name for name in names if name in capture.values or f"{name}{CHOSEN}" in capture.values)
        return InsideAnswer(modules=kept, file=str(target), operator_file=operator_file)

    def _file(self, placement: dict[str, Any], kind: str = "") -> Path:
        return self._directory / f"{kind}tp{placement['tp_rank']}-pp{placement['pp_rank']}.safetensors"

    def _close(self) -> None:
        self._forced.disarm()
        opened, self._open, self._armed = self._open, None, False
        if opened is not None:
            opened[0].close()


def install() -> None:
    """Register the hook where the operator asked for it; called in each SGLang process, does nothing otherwise."""
    directory = os.environ.get(DIRECTORY_VARIABLE, "")
    if not directory:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    forced = ForcedResponse()
    capture = RankCapture(Path(directory), forced)
    HookRegistry.register("sglang.srt.utils.weight_checker.WeightChecker.handle", capture.on_check, HookType.AROUND)
    for target in SAMPLERS:
        HookRegistry.register(target, forced.on_sample, HookType.AROUND)


def list_points(base_url: str) -> InsideAnswer:
    """Return the points of the server's model and the experts whose routing it can show.

    Raises:
        EngineError: A rank failed.
        UnreachableError: The server does not answer.
        UnsupportedError: The server does not look inside.
    """
    with _client(base_url) as http:
        return ask_ranks(http, InsideRequest("list"))[0]


def look_inside(
    base_url: str, record: ReplayRecord, modules: Sequence[str] = (), *, operator: str = ""
) -> list[InsideAnswer]:
    """Capture one prefill of a record's ids on an idle server, after a flush.

    Args:
        base_url: The server.
        record: Record whose ids are scored.
        modules: Points; none takes embedding, layers, final norm and logits.
        operator: Module whose input and output are saved too, for a replay against a reference.

    Returns:
        One answer a rank, with the files that it wrote.

    Raises:
        EngineError: The server refused, a rank failed, or the flush was not confirmed.
        UnreachableError: The server does not answer.
        UnsupportedError: The server does not look inside.
    """
    with _client(base_url) as http:
        ask_ranks(http, InsideRequest("capture", tuple(modules), operator))
        try:
            _flush(http)
            body = {
                "input_ids": record.input_ids.tolist(),
                "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
                "return_logprob": True,
                "logprob_start_len": record.prompt_length - 1,
            }
            scored = _post(http, "/generate", body)
            if scored.status_code != httpx.codes.OK:
                raise EngineError("prefill of a capture", expected="HTTP 200", found=scored.text[:200], where=base_url)
        finally:
            answers = ask_ranks(http, InsideRequest("stop"))
    return answers


@contextmanager
def forcing(http: httpx.Client, response_ids: Sequence[int], prompt_length: int) -> Iterator[list[InsideAnswer]]:
    """Let the ranks put these ids in place of sampled ones while the block runs.

    Yields:
        A list that holds each rank's answer after the block.

    Raises:
        EngineError: A rank saw another request than ours.
        UnreachableError: The server does not answer.
        UnsupportedError: The server does not look inside.
    """
    ask_ranks(http, InsideRequest("force", response_ids=tuple(response_ids), prompt_length=prompt_length))
    answers: list[InsideAnswer] = []
    try:
        yield answers
    finally:
        answers += ask_ranks(http, InsideRequest("stop"))


def _client(base_url: str) -> httpx.Client:
    return httpx.Client(base_url=base_url, timeout=300, trust_env=False)


def _flush(http: httpx.Client) -> None:
    """Empty the prefix cache; a server that has just answered, or answers a health check, refuses for a moment."""
    deadline_s = time.monotonic() + FLUSH_WAIT_S
    while True:
        said = _post(http, "/flush_cache", {})
        if said.status_code == httpx.codes.OK:
            return
        if time.monotonic() >= deadline_s:
            raise EngineError(
                "flush before a capture", expected="Cache flushed.", found=said.text, where=str(http.base_url)
            )
        time.sleep(0.1)


def _post(http: httpx.Client, path: str, payload: dict[str, Any]) -> httpx.Response:
    try:
        return http.post(path, json=payload)
    except httpx.HTTPError as error:
        raise UnreachableError(
            "the engine did not answer",
            found=f"{type(error).__name__}: {error}",
            where=f"{http.base_url}{path.removeprefix('/')}",
            todo="check that the server runs and that the address is right",
        ) from error


def ask_ranks(http: httpx.Client, request: InsideRequest) -> list[InsideAnswer]:
    """Send a request to every rank and return their answers.

    Raises:
        EngineError: The server does not answer in JSON, or a rank failed.
        UnreachableError: The server does not answer.
        UnsupportedError: The server does not look inside.
    """
    response = _post(http, "/weights_checker", {"action": ACTION_PREFIX + msgspec.json.encode(request).decode()})
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
            found=str(body.get("message", response.status_code)).partition("=")[0],  # SGLang repeats the whole action
            where=http.base_url,
            todo="start a server for diagnosis with both",
        )
    answers = [msgspec.json.decode(text, type=InsideAnswer) for text in texts]
    failed = next((answer for answer in answers if answer.error), None)
    if failed is not None:
        raise EngineError("a capture in a rank", found=failed.error, where=http.base_url)
    return answers
