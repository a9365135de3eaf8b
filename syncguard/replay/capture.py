"""Filling a record: generate once (A), replay on the rollout worker (B), score with the trainer (C).

Against small protocols: any engine adapter and any callable causal model fit. The order of passes matters. The first warm
pass at a new state runs *before* any flush, on the prefix cache as the update left it: that is where keys and values
of old weights are seen. Then come the cold passes, each after a confirmed flush, then the other warm passes on a cache
filled by the very same ids.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from syncguard.errors import EngineError, RecordError, ScoreError
from syncguard.replay.packing import segments_of
from syncguard.replay.record import A, ReplayRecord, ScoreKey, b_key
from syncguard.replay.scores import check_returned_ids, checked_scores, response_scores_from_logits

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import numpy.typing as npt

    from syncguard.replay.record import State
    from syncguard.replay.scores import FloatArray


class Generated(Protocol):
    """A response and the scores recorded while generating it."""

    @property
    def response_ids(self) -> Sequence[int]:
        """Token ids."""

    @property
    def logprobs_nats(self) -> Sequence[float]:
        """Score of each, in nats."""

    @property
    def weight_version_label(self) -> str:
        """Label that the engine attached."""

    @property
    def settings(self) -> Mapping[str, float]:
        """Sampling settings as sent."""


class Rescored(Protocol):
    """Prefill scores of a saved response."""

    @property
    def response_ids(self) -> Sequence[int]:
        """Token ids as the engine returned them."""

    @property
    def logprobs_nats(self) -> Sequence[float]:
        """Score of each, in nats."""

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens taken from the prefix cache; -1 where the engine does not say."""


class Decoded(Protocol):
    """Scores by teacher-forced decode, or why there are none."""

    @property
    def scoring(self) -> Rescored | None:
        """The scores, None where the engine cannot."""

    @property
    def how(self) -> str:
        """Path that computed them."""

    @property
    def cannot(self) -> str:
        """Why there are none."""


class Flushed(Protocol):
    """Answer to a flush."""

    @property
    def confirmed(self) -> bool:
        """Whether the engine says that its prefix cache is empty."""

    @property
    def detail(self) -> str:
        """Its words."""


class RolloutWorker(Protocol):
    """The part of an engine adapter that a capture needs."""

    def generate(self, prompt_ids: Sequence[int], *, max_new_tokens: int, seed: int) -> Generated:
        """Generate one response at temperature 1 without filters."""

    def score(self, input_ids: Sequence[int], *, prompt_length: int) -> Rescored:
        """Score a saved response by prefill."""

    def flush(self) -> Flushed:
        """Empty the prefix cache."""


class DecodingWorker(RolloutWorker, Protocol):
    """A worker that may be able to decode saved ids."""

    def score_by_decode(self, input_ids: Sequence[int], *, prompt_length: int) -> Decoded:
        """Score a saved response by teacher-forced incremental decode."""


def capture_generation(
    engine: RolloutWorker, prompt_ids: Sequence[int], *, max_new_tokens: int, seed: int, **fields: Any
) -> ReplayRecord:
    """Generate one response and keep exact ids and A.

    Args:
        engine: The rollout worker.
        prompt_ids: Ids from the model's own tokenizer and chat template.
        max_new_tokens: Limit of the response.
        seed: Sampling seed.
        **fields: Other fields of the record, such as `worker`, `record_id`, `model_revision`, `meta`.

    Raises:
        ScoreError: As many scores as ids did not come back, or one is not finite.
    """
    made = engine.generate(prompt_ids, max_new_tokens=max_new_tokens, seed=seed)
    if not made.response_ids:
        raise ScoreError("the worker generated no token", expected="1 or more", found=0, todo="use another prompt")
    scores = checked_scores(made.logprobs_nats, label="A", count=len(made.response_ids))
    return ReplayRecord(
        input_ids=np.array([*prompt_ids, *made.response_ids], dtype=np.int64),
        prompt_length=len(prompt_ids),
        scores={A: scores},
        sampling={**made.settings, "seed": seed, "max_new_tokens": max_new_tokens},
        **{"versions": {"old": made.weight_version_label}, **fields},
    )


def replay_on_worker(
    engine: RolloutWorker,
    record: ReplayRecord,
    state: State,
    *,
    vocab_size: int,
    cold: int = 2,
    warm: int = 1,
    version: str = "",
    on_pass: Callable[[str], None] | None = None,
) -> ReplayRecord:
    """Return the record with B at one state: one warm pass on the cache as found, cold passes, further warm passes.

    Args:
        engine: The rollout worker, with no other traffic.
        record: A record whose B is not yet taken at this state.
        state: `old` before the update, `new` after it.
        vocab_size: Vocabulary size of the engine, for the id that it reports as 0.
        cold: Number of passes after a confirmed flush.
        warm: Number of passes with a warm prefix cache; at `old` all of them after the cold ones.
        version: Weight version label at this state.
        on_pass: Called with the key of each pass that is done.

    Raises:
        EngineError: A flush was refused.
        RecordError: A packed record, which no engine takes as one request.
        ScoreError: Scores of other ids, or not finite.
    """
    _require_one_context(record)
    ids = record.input_ids.tolist()
    taken: dict[ScoreKey, FloatArray] = {}
    cached: dict[str, int] = {}

    def take(key: ScoreKey) -> None:
        found = engine.score(ids, prompt_length=record.prompt_length)
        check_returned_ids(record.response_ids, found.response_ids, vocab_size or int(record.input_ids.max()) + 1)
        taken[key] = checked_scores(found.logprobs_nats, label=str(key), count=record.response_length)
        cached[str(key)] = found.cached_tokens
        if on_pass is not None:
            on_pass(str(key))

    as_found = 1 if warm and state == "new" else 0
    if as_found:
        take(b_key(0, state, "warm"))
    for index in range(cold):
        _flush(engine)
        take(b_key(index, state, "cold"))
    for index in range(as_found, warm):
        take(b_key(index, state, "warm"))
    versions = dict(record.versions)
    if version:
        versions[state] = version
    meta = {**record.meta, "cached_tokens": {**record.meta.get("cached_tokens", {}), **cached}}
    return record.with_scores(taken, versions=versions, meta=meta)


def decode_on_worker(
    engine: DecodingWorker,
    record: ReplayRecord,
    state: State,
    *,
    passes: int = 2,
    on_pass: Callable[[str], None] | None = None,
) -> ReplayRecord:
    """Return the record with D, the saved response decoded again token by token, each pass after a confirmed flush.

    A-D and D-B split a gap between generation and prefill: the decode path, or what happened to A afterwards. An engine
    that cannot decode saved ids is named in `meta["decode"]`, and no score is taken.

    Raises:
        EngineError: A flush was refused, or other requests ran.
        RecordError: A packed record.
        ScoreError: Scores of other ids, or not finite.
    """
    _require_one_context(record)
    ids = record.input_ids.tolist()
    taken: dict[ScoreKey, FloatArray] = {}
    said: dict[str, str] = {}
    for index in range(passes):
        _flush(engine)
        found = engine.score_by_decode(ids, prompt_length=record.prompt_length)
        if found.scoring is None:
            said = {"cannot": found.cannot}
            break
        key = ScoreKey("D", state, "", index)
        check_returned_ids(record.response_ids, found.scoring.response_ids, int(record.input_ids.max()) + 2)
        taken[key] = checked_scores(found.scoring.logprobs_nats, label=str(key), count=record.response_length)
        said = {"how": found.how}
        if on_pass is not None:
            on_pass(str(key))
    return record.with_scores(taken, meta={**record.meta, "decode": said})


def _require_one_context(record: ReplayRecord) -> None:
    if len(segments_of(record)) > 1:
        raise RecordError(
            "a packed record on a rollout worker",
            expected="one context a request",
            found=f"{len(segments_of(record))} samples in a row",
            where=record.record_id or "record",
            todo="replay the records that replay.packing.unpacked gives",
        )


def _flush(engine: RolloutWorker) -> None:
    flushed = engine.flush()
    if not flushed.confirmed:
        raise EngineError(
            "the prefix cache was not flushed before a cold pass",
            expected="a confirmed flush",
            found=flushed.detail,
            todo="drain the worker's requests, then replay",
        )


def score_with_trainer(
    record: ReplayRecord,
    forward: Callable[[ReplayRecord], npt.ArrayLike],
    state: State,
    *,
    path: Literal["C", "G"] = "C",
    passes: int = 2,
    on_pass: Callable[[str], None] | None = None,
) -> ReplayRecord:
    """Return the record with C at one state, or with C' (`G`), the gradient-enabled forward.

    Args:
        record: A record whose C is not yet taken at this state.
        forward: Returns [length, vocabulary] logits of the record's ids, or [response] response-aligned scores, from
            frozen weights. `replay.trainer` makes one of a torch model.
        state: `old` before the update, `new` after it.
        path: `C` for a frozen forward, `G` for the one that training runs.
        passes: Number of forwards.
        on_pass: Called with the key of each pass that is done.

    Raises:
        ScoreError: A shape that is neither, or a score that is not finite.
    """
    taken: dict[ScoreKey, FloatArray] = {}
    for index in range(passes):
        values = np.asarray(forward(record))
        key = ScoreKey(path, state, "", index)
        if values.ndim == 1:
            taken[key] = checked_scores(values, label=str(key), count=record.response_length)
        else:
            taken[key] = response_scores_from_logits(values, record.input_ids, record.prompt_length)
        if on_pass is not None:
            on_pass(str(key))
    return record.with_scores(taken)
