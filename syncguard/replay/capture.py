"""Filling a record of `generate`: replay on the rollout worker (B), decode again (D), score with the trainer (C).

Against small protocols: any engine adapter and any callable causal model fit. The order of passes matters. The first warm
pass at a new state runs *before* any flush, on the prefix cache as the update left it: that is where keys and values
of old weights are seen. Then come the cold passes, each after a confirmed flush, then the other warm passes on a cache
filled by the very same ids.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np

from syncguard.errors import EngineError
from syncguard.replay.packing import require_one_context
from syncguard.replay.record import ReplayRecord, ScoreKey, b_key
from syncguard.replay.scores import check_returned_ids, checked_scores, response_scores_from_logits

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    from syncguard.replay.record import State
    from syncguard.replay.scores import FloatArray
    from syncguard.replay.workers import BatchWorker, DecodingWorker, Rescored, RolloutWorker


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
        UnsupportedError: A record of a call with inputs beside ids.
    """
    return replay_batch(
        _OneByOne(engine),
        [record],
        state,
        vocab_size=vocab_size,
        cold=cold,
        warm=warm,
        version=version,
        on_pass=on_pass,
    )[0]


class _OneByOne:
    """A worker whose batches are single calls."""

    def __init__(self, engine: RolloutWorker) -> None:
        self.flush = engine.flush
        self._score = engine.score

    def score_batch(self, items: Sequence[tuple[Sequence[int], int]]) -> Sequence[Rescored]:
        return [self._score(ids, prompt_length=prompt_length) for ids, prompt_length in items]


def replay_batch(
    engine: BatchWorker | _OneByOne,
    records: Sequence[ReplayRecord],
    state: State,
    *,
    vocab_size: int,
    cold: int = 2,
    warm: int = 1,
    version: str = "",
    on_pass: Callable[[str], None] | None = None,
) -> list[ReplayRecord]:
    """Return the records with B at one state, all of them scored in one call a pass, as they were generated.

    Args:
        engine: The rollout worker, with no other traffic.
        records: Records of one batch, in its order.
        state: `old` before the update, `new` after it.
        vocab_size: Vocabulary size of the engine, for the id that it reports as 0.
        cold: Number of passes after a confirmed flush.
        warm: Number of passes with a warm prefix cache; at `old` all of them after the cold ones.
        version: Weight version label at this state.
        on_pass: Called with the key of each pass of each record.

    Raises:
        EngineError: A flush was refused.
        RecordError: A packed record.
        ScoreError: Scores of other ids, or not finite.
        UnsupportedError: A record of a call with inputs beside ids.
    """
    require_one_context(records)
    items = [(record.input_ids.tolist(), record.prompt_length) for record in records]
    taken: list[dict[ScoreKey, FloatArray]] = [{} for _ in records]
    cached: list[dict[str, int]] = [{} for _ in records]

    def take(key: ScoreKey) -> None:
        for index, (record, found) in enumerate(zip(records, engine.score_batch(items), strict=True)):
            check_returned_ids(record.response_ids, found.response_ids, vocab_size or int(record.input_ids.max()) + 1)
            taken[index][key] = checked_scores(found.logprobs_nats, label=str(key), count=record.response_length)
            cached[index][str(key)] = found.cached_tokens
            if on_pass is not None:
                on_pass(str(key))

    as_found = 1 if warm and state == "new" else 0
    if as_found:
        take(b_key(0, state, "warm"))
    for index in range(cold):
        require_flush(engine)
        take(b_key(index, state, "cold"))
    for index in range(as_found, warm):
        take(b_key(index, state, "warm"))
    done = []
    for record, scores, hits in zip(records, taken, cached, strict=True):
        versions = {**record.versions, state: version} if version else dict(record.versions)
        meta = {**record.meta, "cached_tokens": {**record.meta.get("cached_tokens", {}), **hits}}
        done.append(record.with_scores(scores, versions=versions, meta=meta))
    return done


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
    require_one_context([record])
    ids = record.input_ids.tolist()
    taken: dict[ScoreKey, FloatArray] = {}
    cached: dict[str, int] = dict(record.meta.get("cached_tokens", {}))
    said: dict[str, str] = {}
    for index in range(passes):
        require_flush(engine)
        found = engine.score_by_decode(ids, prompt_length=record.prompt_length)
        if found.scoring is None:
            said = {"cannot": found.cannot}
            break
        key = ScoreKey("D", state, "", index)
        check_returned_ids(record.response_ids, found.scoring.response_ids, int(record.input_ids.max()) + 2)
        taken[key] = checked_scores(found.scoring.logprobs_nats, label=str(key), count=record.response_length)
        said = {"how": found.how}
        cached[str(key)] = found.scoring.cached_tokens
        if on_pass is not None:
            on_pass(str(key))
    return record.with_scores(taken, meta={**record.meta, "cached_tokens": cached, "decode": said})


def require_flush(engine: RolloutWorker | _OneByOne, where: str = "") -> None:
    """Empty the prefix cache before a cold pass.

    Args:
        engine: The rollout worker.
        where: Its address, for the message.

    Raises:
        EngineError: The engine did not confirm it.
    """
    flushed = engine.flush()
    if not flushed.confirmed:
        raise EngineError(
            "the prefix cache was not flushed before a cold pass",
            expected="a confirmed flush",
            found=flushed.detail,
            where=where,
            todo="drain the worker's requests, then try again",
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
