"""Real records for the confusion matrix: the embedded engine, a Transformers trainer, real optimizer steps.

A base holds the scores of one response at T0 and T1 for each of several workers (up to date, stale, torn, with an old
prefix cache), plus the trainer's logits. A look-alike is made of it as a record would have shown it: weight faults are the
scores of the worker that had them, handling faults are done to real scores.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from syncguard.engines.faults import Fault, FaultKind, FaultPlan
from syncguard.engines.local import LocalEngine, LocalWorker
from syncguard.replay import A, Kind, ReplayRecord, ScoreKey, b_key, c_key, response_scores_from_logits
from syncguard.replay.trainer import frozen

sys.path.insert(0, str(Path(__file__).parents[1] / "engines"))
from tiny_models import VOCAB_SIZE, save_tiny_checkpoint, tiny_model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PROMPT_LENGTH = 8
RESPONSE_LENGTH = 64


@dataclass
class Base:
    """Scores of one response, float64 [response] each, and logits [length, vocabulary] of the trainer at T0 and T1."""

    ids: np.ndarray
    a: np.ndarray
    b_old: np.ndarray
    warm_old: np.ndarray
    b_new: dict[str, np.ndarray]
    warm: dict[str, np.ndarray]
    d_old: np.ndarray
    d_new: dict[str, np.ndarray]
    logits_old: np.ndarray
    logits_new: np.ndarray

    def c(self, which: str = "old", temperature: float = 1.0) -> np.ndarray:
        rows = {"old": self.logits_old, "new": self.logits_new}[which]
        return response_scores_from_logits(rows, self.ids, PROMPT_LENGTH, temperature=temperature)


def scored(engine: LocalEngine, ids: np.ndarray, *, flush: bool = False) -> np.ndarray:
    if flush:
        engine.flush()
    return np.array(engine.score(ids.tolist(), prompt_length=PROMPT_LENGTH).logprobs_nats)


def decoded(engine: LocalEngine, ids: np.ndarray) -> np.ndarray:
    engine.flush()
    return np.array(engine.score_by_decode(ids.tolist(), prompt_length=PROMPT_LENGTH).scoring.logprobs_nats)


def generated(engine: LocalEngine, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    prompt = rng.integers(3, VOCAB_SIZE - 1, PROMPT_LENGTH).tolist()
    found = engine.generate(prompt, max_new_tokens=RESPONSE_LENGTH, seed=int(rng.integers(1 << 30)))
    return np.array([*prompt, *found.response_ids]), np.array(found.logprobs_nats)


def logits_of(model: torch.nn.Module, ids: np.ndarray) -> np.ndarray:
    with frozen(model):
        return model(input_ids=torch.tensor(ids).unsqueeze(0), use_cache=False).logits[0].float().numpy()


def train_step(model: torch.nn.Module, ids: np.ndarray, learning_rate: float) -> None:
    model.requires_grad_(True)
    rows = model(input_ids=torch.tensor(ids), use_cache=False).logits[:, PROMPT_LENGTH - 1 : -1].float()
    targets = torch.tensor(ids[:, PROMPT_LENGTH:])
    scores = torch.log_softmax(rows, -1).gather(2, targets.unsqueeze(2)).squeeze(2)
    reward = torch.where(torch.arange(len(ids)) % 2 == 0, 1.0, -1.0).unsqueeze(1)
    (-(reward * scores).mean()).backward()
    torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.0).step()
    model.zero_grad()
    model.requires_grad_(False)


def bases(dtype: str, count: int, *, per_update: int = 10, seed: int = 0) -> Iterator[Base]:
    """Yield real bases: each update is one optimizer step, and each response is carried across it on four workers."""
    rng = np.random.default_rng(seed)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = save_tiny_checkpoint(Path(folder), dtype=getattr(torch, dtype))
        model = tiny_model(dtype=getattr(torch, dtype))
        faults = {
            "good": None,
            "stale": FaultKind.SKIP_PUSH,
            "torn": FaultKind.TORN_PUSH,
            "cache": FaultKind.UPDATE_KEEPS_CACHE,
        }
        plans = {name: FaultPlan() for name in faults}
        workers = {name: LocalWorker(checkpoint, faults=plans[name]) for name in faults}
        engines = {name: LocalEngine(worker) for name, worker in workers.items()}
        made = 0
        while made < count:
            responses = [generated(engines["good"], rng) for _ in range(per_update)]
            for _ in range(per_update):
                prompt = rng.integers(3, VOCAB_SIZE - 1, PROMPT_LENGTH).tolist()
                found = engines["good"].generate(
                    prompt, max_new_tokens=RESPONSE_LENGTH, seed=int(rng.integers(1 << 30))
                )
                responses.append((np.array([*prompt, *found.response_ids]), np.array(found.logprobs_nats)))
            engines["cache"].flush()
            for ids, _ in responses:
                scored(engines["cache"], ids)
            old = [
                (
                    scored(engines["good"], ids, flush=True),
                    scored(engines["good"], ids),
                    decoded(engines["good"], ids),
                    logits_of(model, ids),
                )
                for ids, _ in responses
            ]
            train_step(model, np.stack([ids for ids, _ in responses]), float(rng.uniform(5e-4, 3e-3)))
            tensors = {name: value.clone() for name, value in model.state_dict().items()}
            for name, kind in faults.items():
                if kind is not None:
                    plans[name].arm(Fault(kind))
                workers[name].push(tensors.items(), label="run@1")
            warmed = [{name: scored(engines[name], ids) for name in ("good", "cache")} for ids, _ in responses]
            for (ids, a), (b_old, warm_old, d_old, logits_old), warm in zip(responses, old, warmed, strict=True):
                b_new = {name: scored(engine, ids, flush=True) for name, engine in engines.items()}
                d_new = {name: decoded(engines[name], ids) for name in ("good", "stale")}
                yield Base(ids, a, b_old, warm_old, b_new, warm, d_old, d_new, logits_old, logits_of(model, ids))
                made += 1
                if made == count:
                    return
            for name in ("stale", "torn", "cache"):  # every worker starts the next update from the right weights
                workers[name].push(tensors.items(), label="run@1")


def record_of(base: Base, _: np.random.Generator, **parts: np.ndarray | float) -> ReplayRecord:
    """Return a record of a base, with some scores replaced."""
    c_old = parts.get("c_old", base.c("old"))
    scores = {A: parts.get("a", base.a), c_key(0, "old"): c_old, c_key(1, "old"): c_old}
    scores |= {b_key(0, "old"): parts.get("b0", base.b_old), b_key(1, "old"): parts.get("b1", base.b_old)}
    scores[b_key(0, "old", "warm")] = base.warm_old
    scores |= {ScoreKey("D", state): parts[f"d_{state}"] for state in ("old", "new") if f"d_{state}" in parts}
    if "b_new" in parts:
        c_new = parts.get("c_new", base.c("new"))
        scores |= {b_key(i, "new"): parts["b_new"] for i in (0, 1)} | {c_key(i, "new"): c_new for i in (0, 1)}
        scores[b_key(0, "new", "warm")] = parts.get("warm", parts["b_new"])
    return ReplayRecord(
        input_ids=base.ids,
        prompt_length=PROMPT_LENGTH,
        mask=parts.get("mask"),
        scores=scores,
        sampling={"temperature": parts.get("temperature", 1.0)},
        meta={"num_experts": parts.get("experts", 0)},
    )


def misaligned(base: Base, rng: np.random.Generator) -> ReplayRecord:
    mask = np.ones(base.a.size, np.int64)
    for start in (14, 37):
        mask[start : start + int(rng.integers(3, 7))] = 0
    return record_of(base, rng, mask=mask, a=np.where(np.roll(mask, 1) == 1, base.a, 0.0))


def heated(base: Base, rng: np.random.Generator) -> ReplayRecord:
    temperature = float(rng.choice((0.6, 0.7, 1.3, 1.5)))
    return record_of(base, rng, temperature=temperature, c_old=base.c("old", temperature))


def shifted(values: np.ndarray, by: int) -> np.ndarray:
    rolled = np.roll(values, by)
    rolled[0 if by > 0 else -1] = -2.0
    return rolled


def offset(values: np.ndarray, rng: np.random.Generator, start: int) -> np.ndarray:
    moved = values.copy()
    moved[start:] += rng.choice((-1, 1)) * rng.uniform(0.08, 0.3)
    return moved


def flipped(values: np.ndarray, rng: np.random.Generator, share: float) -> np.ndarray:
    out = rng.random(values.size) < share
    return values + np.where(out, rng.choice((-1, 1), values.size) * rng.uniform(0.3, 2.0, values.size), 0.0)


def single(values: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    out = values.copy()
    out[rng.integers(values.size)] -= rng.uniform(0.1, 0.3) * values.size
    return out


def retokenized(base: Base, rng: np.random.Generator) -> np.ndarray:
    start = int(rng.integers(12, base.a.size - 24))
    return np.concatenate([base.a[:start], base.c("new")[start - 1 : -1]])


def jumbled(values: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return values + rng.laplace(0, rng.uniform(0.15, 0.6), values.size)


def decode_apart(base: Base, rng: np.random.Generator) -> ReplayRecord:
    a = jumbled(base.a, rng)
    return record_of(base, rng, a=a, d_old=a)


MAKERS: dict[str, tuple[Callable[[Base, np.random.Generator], ReplayRecord], set[Kind]]] = {
    "clean": (record_of, {Kind.AGREEMENT}),
    "clean update": (lambda b, r: record_of(b, r, b_new=b.b_new["good"], warm=b.warm["good"]), {Kind.AGREEMENT}),
    "constant offset from position 1 (A)": (lambda b, r: record_of(b, r, a=offset(b.a, r, 1)), {Kind.OFFSET}),
    "constant offset on C": (lambda b, r: record_of(b, r, c_old=offset(b.c(), r, 0)), {Kind.OFFSET}),
    "temperature on one side": (heated, {Kind.TEMPERATURE}),
    "shift by one": (lambda b, r: record_of(b, r, c_old=shifted(b.c(), int(r.choice((-1, 1))))), {Kind.SHIFT}),
    "mask misaligned": (misaligned, {Kind.MASK}),
    "zero-padded scores": (
        lambda b, r: record_of(b, r, a=np.where(np.arange(b.a.size) < b.a.size - r.integers(3, 12), b.a, 0.0)),
        {Kind.ZERO_PADDING},
    ),
    "retokenized ids": (lambda b, r: record_of(b, r, a=retokenized(b, r)), {Kind.RETOKENIZED}),
    "stale weights": (lambda b, r: record_of(b, r, b_new=b.b_new["stale"]), {Kind.STALE_WEIGHTS}),
    "torn update": (lambda b, r: record_of(b, r, b_new=b.b_new["torn"]), {Kind.PARTIAL_UPDATE}),
    "stale prefix cache": (
        lambda b, r: record_of(b, r, b_new=b.b_new["cache"], warm=b.warm["cache"]),
        {Kind.STALE_PREFIX_CACHE},
    ),
    "unstable B": (
        lambda b, r: record_of(b, r, b1=b.b_old + r.laplace(0, r.uniform(0.08, 0.4), b.a.size)),
        {Kind.UNSTABLE},
    ),
    "router differences (MoE)": (
        lambda b, r: record_of(b, r, c_old=flipped(b.c(), r, r.uniform(0.1, 0.25)), experts=8),
        {Kind.ROUTING},
    ),
    "one outlier": (lambda b, r: record_of(b, r, c_old=single(b.c(), r)), {Kind.OUTLIER}),
    "decode apart from prefill": (decode_apart, {Kind.DECODE_PATH}),
    "A altered after the engine": (
        lambda b, r: record_of(b, r, a=jumbled(b.a, r), d_old=b.d_old),
        {Kind.EXTRACTION},
    ),
    "decode keeps the old weights": (
        lambda b, r: record_of(b, r, b_new=b.b_new["good"], warm=b.warm["good"], d_old=b.d_old, d_new=b.d_new["stale"]),
        {Kind.DECODE_PATH},
    ),
    "clean update, decoded": (
        lambda b, r: record_of(b, r, b_new=b.b_new["good"], warm=b.warm["good"], d_old=b.d_old, d_new=b.d_new["good"]),
        {Kind.AGREEMENT},
    ),
    "trainer scored another version": (
        lambda b, r: record_of(b, r, b_new=b.b_new["good"], c_new=b.c("old")),
        {Kind.TRAINER_STATE},
    ),
}
