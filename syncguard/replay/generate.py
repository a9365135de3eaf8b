"""Generating once and keeping A: single calls, batches in one call, and conversations as lists of model calls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from syncguard.errors import ScoreError
from syncguard.replay.record import A, ReplayRecord
from syncguard.replay.scores import checked_scores

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from syncguard.replay.workers import BatchWorker, Generated, RolloutWorker


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
