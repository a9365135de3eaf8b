"""Filling a record: generate once (A), replay on the rollout worker (B), score with the trainer (C).

Against small protocols: any engine adapter and any callable causal model fit. The order of passes matters. The first warm
pass at a new state runs *before* any flush, on the prefix cache as the update left it: that is where keys and values
of old weights are seen. Then come the cold passes, each after a confirmed flush, then the other warm passes on a cache
filled by the very same ids.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from syncguard.errors import EngineError, ScoreError
from syncguard.replay.packing import require_one_context
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


class BatchWorker(RolloutWorker, Protocol):
    """A worker that takes several samples in one call."""

    def generate_batch(
        self, prompts: Sequence[Sequence[int]], *, max_new_tokens: int, seed: int
    ) -> Sequence[Generated]:
        """Generate for several prompts in one call; the seeds count up."""

    def score_batch(self, items: Sequence[tuple[Sequence[int], int]]) -> Sequence[Rescored]:
        """Score several saved responses, (ids, prompt length) each, in one call."""


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
    return _record_of(prompt_ids, made, {"seed": seed, "max_new_tokens": max_new_tokens}, fields)


def capture_batch(
    engine: BatchWorker,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    seed: int,
    names: Sequence[str],
    **fields: Any,
) -> list[ReplayRecord]:
    """Generate for several prompts in one call; each record names the whole batch, whose company may change its scores.

    Args:
        engine: The rollout worker.
        prompts: Ids of each prompt.
        max_new_tokens: Limit of a response.
        seed: Sampling seed of the first response; the next ones follow.
        names: Record id of each, unique in the batch.
        **fields: Other fields of the records.

    Raises:
        ScoreError: As many scores as ids did not come back, or one is not finite.
    """
    made = engine.generate_batch(prompts, max_new_tokens=max_new_tokens, seed=seed)
    return [
        _record_of(
            prompt,
            one,
            {"seed": seed + index, "max_new_tokens": max_new_tokens},
            {**fields, "record_id": names[index], "batch": tuple(names)},
        )
        for index, (prompt, one) in enumerate(zip(prompts, made, strict=True))
    ]


def capture_calls(
    engine: RolloutWorker,
    first_prompt: Sequence[int],
    next_prompt: Callable[[Sequence[ReplayRecord]], Sequence[int] | None],
    *,
    max_new_tokens: int,
    seed: int,
    record_id: str,
    **fields: Any,
) -> list[ReplayRecord]:
    """Record a conversation as the list of its model calls, each with the very ids that the call was given.

    Args:
        engine: The rollout worker.
        first_prompt: Ids of the first call.
        next_prompt: Given the calls so far, returns the ids of the next one (history, tool results, next turn), or None at
            the end. They need not begin with the ids of the last call: templates drop and rewrite parts of a history.
        max_new_tokens: Limit of each response.
        seed: Sampling seed of the first call; the next ones follow.
        record_id: Name of the conversation; the calls are `NAME/0`, `NAME/1`, ….
        **fields: Other fields of every record; a `call` is kept beside `conversation` and `index`.

    Raises:
        ScoreError: As many scores as ids did not come back, or one is not finite.
    """
    calls: list[ReplayRecord] = []
    prompt: Sequence[int] | None = first_prompt
    told = dict(fields.pop("call", {}))
    while prompt is not None:
        index = len(calls)
        call = {**told, "conversation": record_id, "index": index}
        name = f"{record_id}/{index}"
        calls.append(
            capture_generation(
                engine,
                prompt,
                max_new_tokens=max_new_tokens,
                seed=seed + index,
                **{**fields, "record_id": name, "batch": (name,), "call": call},
            )
        )
        prompt = next_prompt(calls)
    return calls


def _record_of(
    prompt_ids: Sequence[int], made: Generated, settings: Mapping[str, int], fields: Mapping[str, Any]
) -> ReplayRecord:
    if not made.response_ids:
        raise ScoreError("the worker generated no token", expected="1 or more", found=0, todo="use another prompt")
    scores = checked_scores(made.logprobs_nats, label="A", count=len(made.response_ids))
    return ReplayRecord(
        input_ids=np.array([*prompt_ids, *made.response_ids], dtype=np.int64),
        prompt_length=len(prompt_ids),
        scores={A: scores},
        sampling={**made.settings, **settings},
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
        _flush(engine)
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


def _flush(engine: RolloutWorker | _OneByOne) -> None:
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
