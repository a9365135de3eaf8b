"""One question to the probes of every rank of an SGLang server, later pipeline stages included.

`/weights_checker` gathers over the tensor-parallel ranks of the first stage only (`weight_updater.py`, SGLang 0.5.23). The
other stages get the same request a moment later, and leave their answers in the store of their process group under the
request's nonce (`sglang_stages`); the first stage hands them over when it is asked again.
"""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

import httpx

from syncguard.engines.probe_wire import ProbeAnswer, ProbeOp, ProbeRequest, decode_answer, encode_request
from syncguard.engines.sglang_stages import ANSWER_KEY
from syncguard.errors import EngineError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable

COLLECT_WAIT_S: Final = 60.0
"""Longest wait for later stages: each finishes its running batch, then digests what it holds."""
_COLLECT_PAUSE_S: Final = 0.02
_COLLECT_PAUSE_MAX_S: Final = 0.5


@dataclass(slots=True)
class _Gathered:
    """What came so far.

    Attributes:
        texts: Each answer once: with DP attention every leader returns the whole list.
        leaders: Ranks of the first stage that answered for the served model.
        ranks: Ranks of all stages that did.
        stages: Pipeline stages of the server.
        expected: Ranks that there should be, by their own group sizes.
    """

    texts: dict[str, ProbeAnswer] = field(default_factory=dict)
    leaders: int = 0
    ranks: int = 0
    stages: int = 1
    expected: int = 0

    def complete(self) -> bool:
        return self.ranks >= self.leaders * self.stages


@dataclass(frozen=True, slots=True)
class ProbeChannel:
    """The way to the probes of one server.

    Attributes:
        post: Sends a payload to `/weights_checker`; returns the HTTP status and the JSON body.
        url: Of the server, for messages.
        sleep: Waits, in seconds.
        clock: Seconds that never go back.
    """

    post: Callable[[dict[str, Any]], tuple[int, dict[str, Any]]]
    url: str
    sleep: Callable[[float], object] = time.sleep
    clock: Callable[[], float] = time.monotonic

    def ask(self, request: ProbeRequest) -> tuple[list[ProbeAnswer], int]:
        """Return every rank's answer, and how many ranks there should be by their own group sizes.

        A stage that does not answer in time is missing from the answers; it is never waited for without end.

        Raises:
            UnsupportedError: The server has no probe.
            EngineError: The request failed in a rank.
            UnreachableError: The server did not answer.
        """
        named = replace(request, nonce=secrets.token_hex(8))
        gathered = _Gathered()
        self._round(named, gathered)
        deadline_s, pause_s = self.clock() + COLLECT_WAIT_S, _COLLECT_PAUSE_S
        while not gathered.complete() and self.clock() < deadline_s:
            self.sleep(pause_s)
            pause_s = min(2 * pause_s, _COLLECT_PAUSE_MAX_S)
            self._round(ProbeRequest(ProbeOp.COLLECT, nonce=named.nonce), gathered)
        return list(gathered.texts.values()), gathered.expected

    def _round(self, request: ProbeRequest, gathered: _Gathered) -> None:
        status_code, body = self.post({"action": encode_request(request)})
        message = str(body.get("message", ""))
        if not body.get("success") and "Unsupported action" in message:
            raise UnsupportedError(
                "in-rank probe of syncguard",
                expected="our plugin in every rank",
                found="an SGLang without it",
                where=self.url,
                todo="install syncguard in the engine's environment and let SGLANG_PLUGINS, if set, name it",
            )
        if status_code != httpx.codes.OK or not body.get("success"):
            raise EngineError(
                f"probe request {request.op.value}",
                expected="success",
                found=f"HTTP {status_code} {message}".strip(),
                where=self.url,
                todo="see the engine's log",
            )
        for index, rank in enumerate(body.get("ranks") or []):
            for info in rank.get("parallelism_info") or []:
                sizes = (int(info.get(key) or 1) for key in ("size", "tp_size"))
                gathered.expected = max(gathered.expected, *sizes)
                gathered.stages = max(gathered.stages, int(info.get("pp_size") or 1))
            for key, text in sorted(rank.get("checksums", {}).items()):
                role, _, name = key.rpartition(".")
                if name != ANSWER_KEY or text in gathered.texts:
                    continue
                gathered.texts[text] = decode_answer(text, f"{self.url} rank {index}")
                if not role.endswith("draft"):
                    gathered.ranks += 1
                    gathered.leaders += request.op is not ProbeOp.COLLECT
