"""SGLang as a rollout worker, over its HTTP interface (0.5.23); needs neither sglang nor torch in this process.

Digests, layouts and epochs come from our probe through `/weights_checker`; scores from `/generate`. What the server
says of itself (labels, success flags) is carried, never trusted.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

import httpx
import msgspec

from syncguard.engines.base import DecodeScoring, EngineStatus, FlushResult, Generation, RankScrub, Scoring
from syncguard.engines.probe_wire import (
    ProbeAnswer,
    ProbeOp,
    ProbeRequest,
    unpack_observation,
)
from syncguard.engines.sglang_channel import ProbeChannel
from syncguard.engines.sglang_inside import forcing
from syncguard.errors import EngineError, ScoreError, UnreachableError, UnsupportedError
from syncguard.layout.model import RankLayout
from syncguard.manifest.model import RankObservation
from syncguard.manifest.observed import TARGET

if TYPE_CHECKING:
    from typing_extensions import Self

RESPONSE_LIMIT_BYTES: Final = 1 << 30
_FLUSH_AGAIN_S: Final = 0.1
SETTINGS: Final[dict[str, float]] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
}
"""Sampling in which the raw model's probabilities and those sampled from are the same."""


def _sampling(max_new_tokens: int, seed: int) -> dict[str, Any]:
    return {**SETTINGS, "max_new_tokens": max_new_tokens, "ignore_eos": True, "sampling_seed": seed}


class SglangEngine:
    """One SGLang server.

    Args:
        base_url: Such as `http://127.0.0.1:30000`.
        api_key: The server's API or admin key; sent as a bearer token, never logged.
        timeout_s: Seconds that one call may take.
        flush_wait_s: Seconds for which a refused flush is asked again, since a router's health check is a short generation.
            (The server's own `?timeout=` does not wake a scheduler that sleeps while idle, 0.5.23.)
        transport: HTTP transport, for proxies.
    """

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str = "",
        timeout_s: float = 300.0,
        flush_wait_s: float = 0.0,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        """Open a connection pool; nothing is sent yet."""
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._url = base_url.rstrip("/")
        self._client = httpx.Client(
            base_url=self._url,
            headers=headers,
            timeout=httpx.Timeout(timeout_s, connect=min(10.0, timeout_s)),
            transport=transport,
            trust_env=False,
        )
        self._flush_wait_s = flush_wait_s
        self._vocab_size = 0
        self._layouts: dict[str, RankLayout] = {}
        self._engine = ""
        self._replicas = 1
        self._schedulers = 1
        self._described: frozenset[str] | None = None

    def __enter__(self) -> Self:
        """Return self."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the connections."""
        self.close()

    def status(self) -> EngineStatus:
        """Return identity, update epoch and label of every rank."""
        answers, expected = self._ask(ProbeRequest(ProbeOp.STATUS))
        info = self._get_json("/model_info")
        incarnations = frozenset(answer.status.incarnation for answer in answers if answer.status is not None)
        if incarnations != self._described:  # another server may answer at this address since
            server = self._get_json("/server_info")
            # Whole data-parallel replicas; with DP attention the ranks of all are in one tensor-parallel group.
            self._schedulers = int(server.get("dp_size") or 1)
            self._replicas = 1 if server.get("enable_dp_attention") else self._schedulers
            self._engine = f"sglang {server.get('version', '')}".strip()
            self._described = incarnations
        return EngineStatus(
            engine=self._engine,
            model=str(info.get("model_path", "")),
            weight_version_label=str(info.get("weight_version") or ""),
            expected_ranks=expected * self._replicas,
            ranks=tuple(answer.status for answer in answers if answer.status is not None),
            vocab_size=self._vocab_size,
            replicas=self._schedulers,
        )

    def layouts(self) -> tuple[RankLayout, ...]:
        """Return the layout of every rank; the very same objects as before for ranks whose layout did not change.

        A rank walks its model each time, but sends the layout only if the agent has none of that fingerprint: a large
        model's is megabytes, and what was proven of it is kept with the object.
        """
        answers, _ = self._ask(ProbeRequest(ProbeOp.LAYOUT, known_layouts=tuple(self._layouts)))
        layouts = []
        for answer in answers:
            layout = answer.layout if answer.layout is not None else self._layouts.get(answer.known_layout)
            if layout is None:
                continue
            layouts.append(layout)
            if layout.fingerprint in self._layouts:
                continue
            for shard in layout.shards():
                if layout.rank.role == TARGET and shard.tensor.fqn.endswith("embed_tokens.weight"):
                    self._vocab_size = shard.tensor.shape[0]
        self._layouts = {layout.fingerprint: layout for layout in layouts}
        return tuple(layouts)

    def observe(self, key_seed: bytes) -> tuple[RankObservation, ...]:
        """Digest every rank's resident memory under a key seed."""
        answers, _ = self._ask(ProbeRequest(ProbeOp.OBSERVE, key_seed.hex()))
        return tuple(unpack_observation(answer) for answer in answers)

    def scrub(self, key_seed: bytes, *, turn: int, budget_bytes: int) -> tuple[RankScrub, ...]:
        """Digest the bytes of every rank that are due in this turn."""
        request = ProbeRequest(ProbeOp.SCRUB, key_seed.hex(), turn=turn, budget_bytes=budget_bytes)
        answers, _ = self._ask(request)
        return tuple(answer.scrub for answer in answers if answer.scrub is not None)

    def flush(self) -> FlushResult:
        """Empty the prefix cache; anything but 200 with SGLang's own confirmation is not confirmed.

        Of several data-parallel schedulers SGLang repeats the answer of one (`tokenizer_control_mixin.py`, 0.5.23), so
        that each rank's own count must have grown.
        """
        try:
            before = self.status() if self._described is None or self._schedulers > 1 else None
        except UnsupportedError:  # without our probe a worker is never ready, but its scores can still be looked at
            return self._flush_without_probe()
        if before is None or self._schedulers == 1:
            return self._flush()
        said = self._flush()
        counts = {(rank.rank, rank.incarnation): rank.flushes for rank in before.ranks}
        after = self.status().ranks
        kept = [str(r.rank) for r in after if r.flushes <= counts.get((r.rank, r.incarnation), r.flushes)]
        if said.confirmed and (kept or len(after) != before.expected_ranks):
            words = (
                f"one of {self._schedulers} schedulers confirmed, but not {', '.join(kept) or 'every rank answered'}"
            )
            return FlushResult(confirmed=False, detail=words)
        return said

    def _flush_without_probe(self) -> FlushResult:
        schedulers = int(self._get_json("/server_info").get("dp_size") or 1)
        if schedulers > 1:
            words = f"{schedulers} schedulers, of which SGLang reports one, and no probe that counts for each"
            return FlushResult(confirmed=False, detail=words)
        return self._flush()

    def _flush(self) -> FlushResult:
        deadline_s = time.monotonic() + self._flush_wait_s
        while True:
            response = self._send("POST", "/flush_cache", {}, accept_errors=True)
            words = response.text.strip().splitlines()[0] if response.text.strip() else f"HTTP {response.status_code}"
            confirmed = response.status_code == httpx.codes.OK and words.startswith("Cache flushed")
            if confirmed or time.monotonic() >= deadline_s:
                return FlushResult(confirmed, words)
            time.sleep(_FLUSH_AGAIN_S)

    def generate(self, prompt_ids: Sequence[int], *, max_new_tokens: int, seed: int) -> Generation:
        """Generate one response at temperature 1 with no filter, recording A.

        Raises:
            EngineError: The answer lacks scores, or has another number of them than tokens.
            ScoreError: A score is not finite.
        """
        ids, scores, meta = self._generated(self._generate(prompt_ids, max_new_tokens, seed))
        label = str(meta.get("weight_version") or "")
        return Generation(
            ids, scores, label, {**SETTINGS, "max_new_tokens": float(max_new_tokens), "seed": float(seed)}
        )

    def generate_batch(
        self, prompts: Sequence[Sequence[int]], *, max_new_tokens: int, seed: int
    ) -> tuple[Generation, ...]:
        """Generate for several prompts in one call, as `generate` does for one; the seeds count up from `seed`.

        Raises:
            EngineError: Another number of answers than prompts, or what `generate` raises.
        """
        settings = [_sampling(max_new_tokens, seed + index) for index in range(len(prompts))]
        payload = {"input_ids": [list(one) for one in prompts], "sampling_params": settings, "return_logprob": True}
        made = []
        for index, body in enumerate(self._post_batch(payload, len(prompts))):
            ids, scores, meta = self._generated(body)
            said = {**SETTINGS, "max_new_tokens": float(max_new_tokens), "seed": float(seed + index)}
            made.append(Generation(ids, scores, str(meta.get("weight_version") or ""), said))
        return tuple(made)

    def score_batch(self, items: Sequence[tuple[Sequence[int], int]]) -> tuple[Scoring, ...]:
        """Score several saved responses by prefill in one call; each item is its ids and its prompt length."""
        payload = {
            "input_ids": [list(ids) for ids, _ in items],
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": [prompt_length - 1 for _, prompt_length in items],
        }
        bodies = self._post_batch(payload, len(items))
        return tuple(self._scored(body, len(ids) - at) for body, (ids, at) in zip(bodies, items, strict=True))

    def _post_batch(self, payload: dict[str, Any], count: int) -> list[dict[str, Any]]:
        response = self._send("POST", "/generate", payload)
        try:
            bodies = msgspec.json.decode(response.content, type=list[dict[str, Any]])
        except msgspec.MsgspecError as error:
            raise EngineError("answer to a batch", expected="a JSON list", found=error, where=self._url) from error
        if len(bodies) != count:
            raise EngineError("answer to a batch", expected=f"{count} answers", found=len(bodies), where=self._url)
        return bodies

    def _generated(self, body: dict[str, Any]) -> tuple[tuple[int, ...], tuple[float, ...], dict[str, Any]]:
        meta = body.get("meta_info", {})
        ids, scores = self._scores(meta.get("output_token_logprobs"), "generation")
        if list(ids) != list(body.get("output_ids", [])) or len(ids) != meta.get("completion_tokens"):
            raise EngineError(
                "scores of a generation",
                expected=f"{meta.get('completion_tokens')} scores for {body.get('output_ids')}",
                found=f"{len(ids)} scores for {list(ids)}",
                where=self._url,
                todo="see the engine's log",
            )
        return ids, scores, meta

    def _generate(self, prompt_ids: Sequence[int], max_new_tokens: int, seed: int) -> dict[str, Any]:
        sampling = _sampling(max_new_tokens, seed)
        payload = {"input_ids": list(prompt_ids), "sampling_params": sampling, "return_logprob": True}
        return self._post_json("/generate", payload)

    def score_by_decode(self, input_ids: Sequence[int], *, prompt_length: int) -> DecodeScoring:
        """Score a saved response by the server's own decode, each sampled id replaced by the saved one in the rank.

        Needs a server that looks inside (`sglang_inside`) and has no other traffic.

        Raises:
            EngineError: Another request ran meanwhile.
        """
        saved = [int(token) for token in input_ids[prompt_length:]]
        try:
            with forcing(self._client, saved, prompt_length) as answers:
                ids, scores, meta = self._generated(self._generate(input_ids[:prompt_length], len(saved), 0))
        except UnsupportedError as error:
            return DecodeScoring(None, cannot=error.text())
        if any(answer.forced != len(saved) for answer in answers):
            return DecodeScoring(None, cannot="this server draws its tokens where our hook does not see it")
        how = "decode of the engine, the sampler's choice replaced in the rank"
        return DecodeScoring(Scoring(ids, scores, int(meta.get("cached_tokens", -1))), how)

    def score(self, input_ids: Sequence[int], *, prompt_length: int, replica: int = 0) -> Scoring:
        """Score a saved response by prefill; no new tokens.

        With several data-parallel schedulers the request names its own (`routed_dp_rank`), and the answer must say so.
        SGLang reports the id `vocab_size - 1` as 0 among input tokens (`logprob_result_processor.py`, 0.5.23) and takes
        ids beyond the vocabulary without an error; ids are returned as reported, and the caller compares them.
        """
        response_length = len(input_ids) - prompt_length
        if prompt_length < 1 or response_length < 1:
            raise ScoreError(
                "replay request",
                expected="a prompt and a response",
                found=f"{len(input_ids)} ids, prompt {prompt_length}",
            )
        payload: dict[str, Any] = {
            "input_ids": list(input_ids),
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": prompt_length - 1,
        }
        if self._schedulers > 1 or replica:
            payload["routed_dp_rank"] = replica
        body = self._post_json("/generate", payload)
        answered = body.get("meta_info", {}).get("dp_rank")
        if "routed_dp_rank" in payload and answered != replica:
            raise EngineError(
                "replay on one data-parallel replica",
                expected=f"an answer of replica {replica}",
                found=f"one of replica {answered}",
                where=self._url,
            )
        return self._scored(body, response_length)

    def _scored(self, body: dict[str, Any], response_length: int) -> Scoring:
        meta = body.get("meta_info", {})
        entries = meta.get("input_token_logprobs")
        if not isinstance(entries, list) or len(entries) < response_length:
            raise EngineError(
                "scores of a replay",
                expected=f"{response_length} response scores",
                found=len(entries) if isinstance(entries, list) else "none",
                where=self._url,
                todo="see the engine's log",
            )
        ids, scores = self._scores(entries[-response_length:], "replay")
        return Scoring(ids, scores, int(meta.get("cached_tokens", -1)))

    def close(self) -> None:
        """Close the connections; the server goes on."""
        self._client.close()

    def _scores(self, entries: Any, what: str) -> tuple[tuple[int, ...], tuple[float, ...]]:
        try:
            ids = tuple(int(entry[1]) for entry in entries)
            scores = tuple(float(entry[0]) for entry in entries)
        except (TypeError, ValueError, IndexError) as error:
            raise EngineError(
                f"scores of a {what}", expected="[logprob, id, text]", found=error, where=self._url
            ) from error
        for position, score in enumerate(scores):
            if not math.isfinite(score):
                raise ScoreError(
                    f"score of a {what}",
                    expected="a finite log-probability",
                    found=score,
                    where=f"{self._url} response position {position}",
                    todo="look at the logits of this position before trusting any other score",
                )
        return ids, scores

    def _ask(self, request: ProbeRequest) -> tuple[list[ProbeAnswer], int]:
        return ProbeChannel(self._post_check, self._url).ask(request)

    def _post_check(self, payload: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        response = self._send("POST", "/weights_checker", payload, accept_errors=True)
        return response.status_code, self._decoded(response)

    def _get_json(self, path: str) -> dict[str, Any]:
        return self._decoded(self._send("GET", path, None))

    def _post_json(self, path: str, payload: dict[str, Any]) -> dict[str, Any]:
        return self._decoded(self._send("POST", path, payload))

    def _decoded(self, response: httpx.Response) -> dict[str, Any]:
        try:
            body = msgspec.json.decode(response.content)
        except msgspec.MsgspecError as error:
            raise EngineError(
                "answer of the engine",
                expected="JSON",
                found=f"HTTP {response.status_code} {response.text[:200]!r}",
                where=str(response.request.url),
                todo="check that this address is an SGLang server",
            ) from error
        if not isinstance(body, dict):
            raise EngineError("answer of the engine", expected="a JSON object", found=type(body), where=self._url)
        return body

    def _send(
        self, method: str, path: str, payload: dict[str, Any] | None, *, accept_errors: bool = False
    ) -> httpx.Response:
        try:
            response = self._client.request(method, path, json=payload)
        except httpx.HTTPError as error:
            raise UnreachableError(
                "the engine did not answer",
                found=f"{type(error).__name__}: {error}",
                where=f"{self._url}{path}",
                todo="check that the server runs and that the address is right",
            ) from error
        if len(response.content) > RESPONSE_LIMIT_BYTES:
            raise EngineError("answer of the engine", expected="at most 1 GiB", found=len(response.content), where=path)
        if response.status_code != httpx.codes.OK and not accept_errors:
            raise EngineError(
                f"{method} {path}",
                expected="HTTP 200",
                found=f"HTTP {response.status_code} {response.text[:300]!r}",
                where=self._url,
                todo="see the engine's log",
            )
        return response
