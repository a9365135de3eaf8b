"""Records of known faults with the noise levels of the field, each from its own seed.

A language model is stood in for by rows of logits of varying entropy; temperature, wrong versions and staleness are
computed from rows, not painted onto scores. Noise is Laplace-distributed, which has the heavy tails that were measured, with a
mean absolute error of 0.008 to 0.017 nat within a path and across engines.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from syncguard.replay import A, Kind, ReplayRecord, ScoreKey, b_key, c_key

if TYPE_CHECKING:
    from collections.abc import Callable

VOCABULARY = 64
NOISE_NATS = (0.008, 0.017)
TEMPERATURES = (0.5, 0.6, 0.7, 1.3, 1.5)


@dataclass
class Draft:
    """Scores of one response while a fault is being made."""

    rng: np.random.Generator
    mask: np.ndarray
    rows: np.ndarray
    ids: np.ndarray
    temperature: float
    noise: float
    experts: int
    scores: dict[str, np.ndarray]
    update: bool = False

    @property
    def length(self) -> int:
        return self.ids.size

    def jitter(self) -> np.ndarray:
        return self.rng.laplace(0, self.noise, self.length)

    def fill(self, name: str, truth: np.ndarray, *, exact: bool = False) -> None:
        self.scores[name] = np.minimum(truth if exact else truth + self.jitter(), -1e-7)


def log_softmax(rows: np.ndarray) -> np.ndarray:
    top = rows - rows.max(-1, keepdims=True)
    return top - np.log(np.exp(top).sum(-1, keepdims=True))


def chosen(rows: np.ndarray, ids: np.ndarray) -> np.ndarray:
    return log_softmax(rows)[np.arange(ids.size), ids]


def moved(draft: Draft, size: float) -> np.ndarray:
    """Rows after a weight change of about `size` nat on a score."""
    return draft.rows + draft.rng.normal(0, size, draft.rows.shape)


def draft(seed: int, *, update: bool) -> Draft:
    """A clean response: A, B and C at noise, C's repeat exact as measured, B's not."""
    rng = np.random.default_rng(seed)
    length = int(rng.integers(96, 320))
    rows = rng.normal(0, 1, (length, VOCABULARY)) * rng.uniform(1.0, 5.0, (length, 1))
    temperature = float(rng.choice(TEMPERATURES)) if rng.random() < 0.5 else 1.0
    probability = np.exp(log_softmax(rows / temperature))
    ids = np.array([rng.choice(VOCABULARY, p=row / row.sum()) for row in probability])
    mask = np.ones(length, np.int64)
    if rng.random() < 0.5:  # turns of a conversation: runs of tool tokens do not count
        for start in rng.choice(np.arange(8, length - 16), size=3, replace=False):
            mask[start : start + int(rng.integers(3, 9))] = 0
    one = Draft(rng, mask, rows, ids, temperature, float(rng.uniform(*NOISE_NATS)), 0, {}, update)
    one.experts = int(rng.choice((0, 8)))
    truth = chosen(rows, ids)
    for name in ("A", "B0.old", "B1.old", "C0.old"):
        one.fill(name, truth)
    one.scores["C1.old"] = one.scores["C0.old"].copy()
    if update:
        carry_over(one, moved(one, float(rng.uniform(0.4, 1.2))))
    return one


def carry_over(
    one: Draft, rows: np.ndarray, *, worker_rows: np.ndarray | None = None, trainer_rows: np.ndarray | None = None
) -> None:
    """Replay at T1: the worker holds `worker_rows`, the trainer scores with `trainer_rows`."""
    worker = chosen(rows if worker_rows is None else worker_rows, one.ids)
    for name in ("B0.new", "B1.new", "W0.new"):
        one.fill(name, worker)
    one.fill("C0.new", chosen(rows if trainer_rows is None else trainer_rows, one.ids))
    one.scores["C1.new"] = one.scores["C0.new"].copy()


def both_c(one: Draft, state: str, values: np.ndarray) -> None:
    one.scores[f"C0.{state}"] = values
    one.scores[f"C1.{state}"] = values.copy()


def sided(one: Draft) -> tuple[str, np.ndarray]:
    """Pick the path that a handling fault is on."""
    side = "A" if one.rng.random() < 0.5 else "C"
    return side, (one.scores["A"] if side == "A" else one.scores["C0.old"]).copy()


def put(one: Draft, side: str, values: np.ndarray) -> None:
    if side == "A":
        one.scores["A"] = values
    else:
        both_c(one, "old", values)


def clean(one: Draft) -> None:
    """Nothing is wrong."""


def offset_on_a(one: Draft) -> None:
    one.scores["A"][1:] += one.rng.choice((-1, 1)) * one.rng.uniform(0.08, 0.3)


def offset_on_c(one: Draft) -> None:
    both_c(one, "old", one.scores["C0.old"] + one.rng.choice((-1, 1)) * one.rng.uniform(0.08, 0.3))


def temperature(one: Draft) -> None:
    one.temperature = float(one.rng.choice(TEMPERATURES))
    side, _ = sided(one)
    put(one, side, np.minimum(chosen(one.rows / one.temperature, one.ids) + one.jitter(), -1e-7))


def shift(one: Draft) -> None:
    side, values = sided(one)
    by = int(one.rng.choice((-1, 1)))
    rolled = np.roll(values, by)
    rolled[0 if by > 0 else -1] = -one.rng.exponential(1.5)
    put(one, side, rolled)


def misaligned_mask(one: Draft) -> None:
    side, values = sided(one)
    one.mask[:] = 1
    for start in range(20, one.length - 12, 37):
        one.mask[start : start + int(one.rng.integers(3, 9))] = 0
    active = one.mask == 1
    if one.rng.random() < 0.5:
        by = int(one.rng.choice((-1, 1)))
        out = np.where(np.roll(active, by), values, 0.0)
        if by > 0:
            out[0] = 0.0
        else:
            out[-1] = 0.0
    else:
        out = np.zeros(one.length)
        out[: active.sum()] = values[active]
    put(one, side, out)


def zero_padded(one: Draft) -> None:
    side, values = sided(one)
    if one.rng.random() < 0.5:
        values[-int(one.rng.integers(4, 40)) :] = 0.0
    else:
        values[one.rng.random(one.length) < one.rng.uniform(0.05, 0.4)] = 0.0
    put(one, side, values)


def retokenized(one: Draft) -> None:
    side, values = sided(one)
    start = int(one.rng.integers(24, one.length - 40))
    if one.rng.random() < 0.5:  # other ids and another prefix from here on
        other = moved(one, float(one.rng.uniform(0.6, 1.5)))
        values[start:] = (chosen(other, one.ids) + one.jitter())[start:]
    else:  # one token became two, the rest is moved
        values[start + 1 :] = values[start:-1].copy()
        values[start] -= one.rng.exponential(2.0)
    put(one, side, np.minimum(values, -1e-7))


def stale_weights(one: Draft) -> None:
    new = moved(one, float(one.rng.uniform(0.3, 3.0)))
    carry_over(one, new, worker_rows=one.rows)
    if one.rng.random() < 0.5:  # deterministic engines repeat T0 to the last bit
        for name in ("B0.new", "B1.new", "W0.new"):
            one.scores[name] = one.scores["B0.old"].copy()


def torn_update(one: Draft) -> None:
    half, rest = one.rng.normal(0, 0.7, one.rows.shape), one.rng.normal(0, 0.7, one.rows.shape)
    carry_over(one, one.rows + half + rest, worker_rows=one.rows + half)


def stale_prefix_cache(one: Draft) -> None:
    """Cold replay is right; with the old prefix's keys and values the scores lie between both states."""
    new = moved(one, float(one.rng.uniform(0.5, 1.5)))
    carry_over(one, new)
    share = one.rng.uniform(0.3, 1.0)
    one.fill("W0.new", chosen(share * one.rows + (1 - share) * new, one.ids))


def unstable_b(one: Draft) -> None:
    wobble = one.rng.uniform(0.08, 0.4)
    for name in ("B0.old", "B1.old"):
        one.scores[name] = one.scores[name] + one.rng.laplace(0, wobble, one.length)


def router_differences(one: Draft) -> None:
    one.experts = 8
    flipped = one.rng.random(one.length) < one.rng.uniform(0.08, 0.25)
    side, values = sided(one)
    values[flipped] += (one.rng.choice((-1, 1), one.length) * one.rng.uniform(0.15, 2.0, one.length))[flipped]
    put(one, side, np.minimum(values, -1e-7))


def one_outlier(one: Draft) -> None:
    """A single token far off; the MAE of a short response notices it."""
    side, values = sided(one)
    at = int(one.rng.choice(np.flatnonzero(one.mask)))
    values[at] -= one.rng.uniform(0.06, 0.12) * one.length
    put(one, side, values)


def wrong_trainer_version(one: Draft) -> None:
    new = moved(one, float(one.rng.uniform(0.4, 2.0)))
    carry_over(one, new, trainer_rows=one.rows)


def faint_temperature(one: Draft) -> None:
    """Beside the noise: only agreement or `ambiguous` may be said, or temperature where it can be seen."""
    one.temperature = float(one.rng.choice((0.95, 1.05)))
    put(one, "C", np.minimum(chosen(one.rows / one.temperature, one.ids) + one.jitter(), -1e-7))


def two_faults(one: Draft) -> None:
    offset_on_a(one)
    both_c(one, "old", np.minimum(chosen(moved(one, 1.0), one.ids), -1e-7))


def decode_apart(one: Draft) -> None:
    """Decode computes something else each time; A was generated by it."""
    one.scores["A"] = np.minimum(one.scores["A"] + one.rng.laplace(0, one.rng.uniform(0.15, 0.6), one.length), -1e-7)
    one.fill("D0.old", one.scores["A"])


def altered_after_engine(one: Draft) -> None:
    """Decode repeats what prefill says; only the recorded A is off."""
    one.fill("D0.old", chosen(one.rows, one.ids))
    one.scores["A"] = np.minimum(one.scores["A"] + one.rng.laplace(0, one.rng.uniform(0.15, 0.6), one.length), -1e-7)


def decode_keeps_old(one: Draft) -> None:
    """Prefill followed the update, decode did not: captured graphs, or a decode worker that kept T0."""
    one.fill("D0.new", chosen(one.rows, one.ids))


def decoded_clean(one: Draft) -> None:
    one.fill("D0.old", chosen(one.rows, one.ids))
    one.scores["D0.new"] = np.minimum(one.scores["B0.new"] + one.jitter(), -1e-7)


def small_update(one: Draft) -> None:
    carry_over(one, moved(one, 0.002))


AMBIGUOUS_TOO = Kind.AMBIGUOUS

CASES: dict[str, tuple[Callable[[Draft], None], bool, set[Kind]]] = {
    # name: (fault, carried across an update, right answers)
    "clean": (clean, False, {Kind.AGREEMENT}),
    "clean update": (clean, True, {Kind.AGREEMENT}),
    "constant offset from position 1 (A)": (offset_on_a, False, {Kind.OFFSET}),
    "constant offset on C": (offset_on_c, False, {Kind.OFFSET}),
    "temperature on one side": (temperature, False, {Kind.TEMPERATURE}),
    "shift by one": (shift, False, {Kind.SHIFT}),
    "mask misaligned": (misaligned_mask, False, {Kind.MASK}),
    "zero-padded scores": (zero_padded, False, {Kind.ZERO_PADDING}),
    "retokenized ids": (retokenized, False, {Kind.RETOKENIZED}),
    "stale weights": (stale_weights, True, {Kind.STALE_WEIGHTS}),
    "torn update": (torn_update, True, {Kind.PARTIAL_UPDATE}),
    "stale prefix cache": (stale_prefix_cache, True, {Kind.STALE_PREFIX_CACHE}),
    "unstable B": (unstable_b, False, {Kind.UNSTABLE}),
    "router differences (MoE)": (router_differences, False, {Kind.ROUTING}),
    "one outlier": (one_outlier, False, {Kind.OUTLIER}),
    "trainer scored another version": (wrong_trainer_version, True, {Kind.TRAINER_STATE}),
    "faint temperature": (faint_temperature, False, {Kind.AGREEMENT, Kind.AMBIGUOUS, Kind.TEMPERATURE}),
    "two faults": (two_faults, False, {Kind.AMBIGUOUS}),
    "decode apart from prefill": (decode_apart, False, {Kind.DECODE_PATH}),
    "A altered after the engine": (altered_after_engine, False, {Kind.EXTRACTION}),
    "decode keeps the old weights": (decode_keeps_old, True, {Kind.DECODE_PATH}),
    "clean update, decoded": (decoded_clean, True, {Kind.AGREEMENT}),
    "update too small": (small_update, True, {Kind.NO_POWER}),
}


def make_record(case: str, seed: int) -> ReplayRecord:
    """Return the record of a case; the same seed gives the same record."""
    fault, update, _ = CASES[case]
    one = draft(seed * 7919 + sorted(CASES).index(case), update=update)
    fault(one)
    keys = {"A": A}
    for state in ("old", "new"):
        keys |= {f"B{i}.{state}": b_key(i, state) for i in (0, 1)} | {f"C{i}.{state}": c_key(i, state) for i in (0, 1)}
        keys |= {f"W0.{state}": b_key(0, state, "warm"), f"D0.{state}": ScoreKey("D", state)}
    return ReplayRecord(
        input_ids=np.concatenate([np.arange(8), one.ids]),
        prompt_length=8,
        mask=one.mask,
        scores={keys[name]: values for name, values in one.scores.items()},
        sampling={"temperature": one.temperature},
        meta={"num_experts": one.experts},
        record_id=f"{case} {seed}",
    )
