"""Shapes that a fault leaves in the difference of two paths; each search is pure and returns None when it is not there.

`suspect` is the path thought to be wrong, `reference` one that others agree with, both response-aligned in nats; a
difference is always suspect minus reference. The tests are relative to the difference itself where they can be, so that
they hold for float32 (noise near 1e-6 nat) and for bfloat16 (noise near 1e-2 nat).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    from syncguard.replay.scores import FloatArray, IntArray

MIN_TOKENS: Final = 8
"""Fewest active tokens in which a shape is looked for."""

OFFSET_RESIDUAL_FACTOR: Final = 1.5
"""Noise across engines that repeats do not show, as a multiple of the fixed limit (measured: 0.0125 to 0.0128 nat at 0.01)."""

_OFFSET_RESIDUAL = 0.4  # what remains beside a constant, as a share of it
_SHIFT_RESIDUAL = 0.35  # what remains after shifting, as a share of the unshifted error
_VISIBLE_TEMPERATURE = 0.02  # a change of 1/T under this is never seen
_TEMPERATURE_WRONG = 0.02  # tokens on the impossible side of log p / T
_TEMPERATURE_EXPLAINED = 0.05  # variance that the score itself must explain
_TEMPERATURE_STUDENT = 4.0  # slope over its standard error
_TEMPERATURE_SLOPE = (0.1, 2.0)  # slope over 1/T - 1; the entropy of each row, not recorded, moves it around 1
_DIVERGED_SHARE = 0.35  # tokens beyond noise after a divergence
_CALM_SHARE = 0.06  # and before it
_DIVERGENCE_NATS = 8.0  # log-likelihood gained by the change point; its 2 free parameters are worth about 2
_TAIL_SHARE = 0.35  # most tokens are still at noise
_TAIL_REACH = 10.0  # the largest difference over the MAE of the body; noise alone reaches about 4
_SINGLE_SHARE = 0.02  # up to this share the tail is single tokens


@dataclass(frozen=True, slots=True)
class ConstantOffset:
    """The difference is one number.

    Attributes:
        offset_nats: Median difference.
        from_position: 0, or 1 where the first token is not offset.
        residual_mae: MAE that remains without it.
    """

    offset_nats: float
    from_position: int
    residual_mae: float


def find_constant_offset(
    delta: FloatArray, positions: IntArray, *, residual_nats: float, residual_share: float = 0.0
) -> ConstantOffset | None:
    """Look for one constant on all tokens, or on all but those at response position 0.

    Args:
        delta: [active] suspect minus reference.
        positions: [active] response positions.
        residual_nats: MAE that noise alone may leave; weights can add almost a constant, but leave more than noise.
        residual_share: Share of the constant that may be left instead, where noise between the engines is not known.
    """
    later = positions > 0
    rest = delta[later]
    if rest.size < MIN_TOKENS:
        return None
    center = float(np.median(rest))
    residual = float(np.abs(rest - center).mean())
    allowed = max(residual_nats, residual_share * abs(center))
    if center == 0 or residual > min(_OFFSET_RESIDUAL * abs(center), allowed):
        return None
    first = delta[~later]
    spared = first.size > 0 and float(np.abs(first).mean()) < abs(center) / 2
    return ConstantOffset(center, 1 if spared else 0, residual)


@dataclass(frozen=True, slots=True)
class Shift:
    """The suspect holds the right scores at the wrong positions.

    Attributes:
        by: `suspect[i]` is `reference[i - by]`.
        shifted_mae: MAE after undoing it.
        unshifted_mae: MAE before.
        from_position: First position that is shifted.
    """

    by: int
    shifted_mae: float
    unshifted_mae: float
    from_position: int = 0


def find_shift(suspect: FloatArray, reference: FloatArray, mask: IntArray, *, start: int = 0) -> Shift | None:
    """Look for scores moved by one position, from `start` on."""
    active = mask[start:] == 1
    ours, theirs = suspect[start:], reference[start:]
    both = active[1:] & active[:-1]
    if both.sum() < MIN_TOKENS:
        return None
    found: list[Shift] = []
    for by, moved, fixed in ((1, ours[1:], theirs[:-1]), (-1, ours[:-1], theirs[1:])):
        before = float(np.abs(ours - theirs)[active].mean())
        after = float(np.abs(moved - fixed)[both].mean())
        if before > 0 and after <= _SHIFT_RESIDUAL * before:
            found.append(Shift(by, after, before, start))
    return min(found, key=lambda shift: shift.shifted_mae, default=None)


PaddingKind: TypeAlias = Literal["mask", "padding", "either"]


@dataclass(frozen=True, slots=True)
class ZeroScores:
    """Active tokens hold exactly 0 (p = 1) where the reference does not.

    Attributes:
        kind: `mask` when they lie where a mask moved by one, or a compacted list, would put them; `padding` otherwise;
            `either` where both fit.
        positions: Response positions of the zeros.
        detail: What was recognized.
    """

    kind: PaddingKind
    positions: tuple[int, ...]
    detail: str


def find_zero_scores(
    suspect: FloatArray, reference: FloatArray, mask: IntArray, *, noise_nats: float
) -> ZeroScores | None:
    """Look for missing scores that were filled with zeros.

    Args:
        suspect: [response].
        reference: [response].
        mask: [response].
        noise_nats: Reference scores nearer to 0 than this cannot be told from 0.
    """
    active = mask == 1
    visible = np.abs(reference) > max(noise_nats, 1e-4)
    zero = active & (suspect == 0) & visible
    if not zero.any():
        return None
    places = tuple(int(at) for at in np.flatnonzero(zero))
    index = np.flatnonzero(active)
    if index.size < active.size:
        # A list of active scores only, laid out from the start: its zeros are the tail that was never filled.
        packed = suspect[: index.size]
        error = float(np.abs(packed - reference[index]).mean())
        if not suspect[index.size :].any() and error < _SHIFT_RESIDUAL * float(
            np.abs(suspect - reference)[active].mean()
        ):
            return ZeroScores("mask", places, "a compacted list of active scores was laid out from position 0")
    starts = active & ~np.concatenate(([False], active[:-1]))
    ends = active & ~np.concatenate((active[1:], [False]))
    border = np.zeros_like(active)
    border[[0, -1]] = True  # the response's own border is an edge only where the mask was cut out of the whole sequence
    for edge, name in ((starts & visible, "first"), (ends & visible, "last")):
        if not (zero & ~edge).any() and not (edge & ~zero & ~border).any():
            kind: PaddingKind = "mask" if zero.sum() > 1 else "either"
            return ZeroScores(kind, places, f"only the {name} token of every active run is 0: the mask moved by one")
    return ZeroScores("padding", places, f"{len(places)} active tokens hold exactly 0, which says p = 1")


@dataclass(frozen=True, slots=True)
class TemperatureShape:
    """The difference grows with the score, as dividing logits by T makes it.

    Attributes:
        temperature: Temperature of the sampling settings that was tested.
        slope: Slope of the difference on the score; 1/T - 1 when all rows had equal entropy.
        student: Slope over its standard error.
        explained: Share of the variance explained.
    """

    temperature: float
    slope: float
    student: float
    explained: float


def find_temperature(
    suspect: FloatArray, reference: FloatArray, temperature: float, *, tolerance_nats: float
) -> TemperatureShape | None:
    """Look for a temperature on one side only, whichever it is.

    With p the raw probabilities of a row, log p_T = log p / T - log sum(p^(1/T)). The sum is at least 1 for T > 1 and at most
    1 for T < 1, so log p_T lies on a known side of log p / T on *every* token, and the difference has a known slope on
    log p. Scores alone cannot prove it; the same logits scored both ways can.

    Args:
        suspect: [active] scores.
        reference: [active] scores.
        temperature: Temperature of the sampling settings; at 1 there is nothing to confuse.
        tolerance_nats: Differences up to this are noise.
    """
    if abs(1 / temperature - 1) < _VISIBLE_TEMPERATURE or suspect.size < 2 * MIN_TOKENS:
        return None
    for heated, raw in ((suspect, reference), (reference, suspect)):
        bound = heated - raw / temperature
        wrong = bound > tolerance_nats if temperature > 1 else bound < -tolerance_nats
        if float(wrong.mean()) <= _TEMPERATURE_WRONG:
            delta = heated - raw
            # Without its largest differences the slope must still be there: one outlier makes a slope of its own.
            kept = np.argsort(np.abs(delta))[: delta.size - max(1, int(_SINGLE_SHARE * delta.size))]
            shape = _temperature_slope(delta[kept], raw[kept], temperature)
            if shape is not None:
                return shape
    return None


def _temperature_slope(delta: FloatArray, raw: FloatArray, temperature: float) -> TemperatureShape | None:
    x, y = raw - raw.mean(), delta - delta.mean()
    energy, total = float(x @ x), float(y @ y)
    if energy == 0 or total == 0:
        return None
    slope = float(x @ y) / energy
    residual = y - slope * x
    left = float(residual @ residual)
    error = math.sqrt(left / (delta.size - 2) / energy)
    shape = TemperatureShape(temperature, slope, abs(slope) / max(error, 1e-300), 1 - left / total)
    low, high = _TEMPERATURE_SLOPE
    fits = low <= slope / (1 / temperature - 1) <= high and shape.student >= _TEMPERATURE_STUDENT
    return shape if fits and shape.explained >= _TEMPERATURE_EXPLAINED else None


@dataclass(frozen=True, slots=True)
class Divergence:
    """At noise up to a position, beyond it afterwards.

    Attributes:
        position: First position of the disagreeing part.
        before_mae: MAE before it.
        after_mae: MAE from it on.
        gained_nats: Log-likelihood gained by the change point.
    """

    position: int
    before_mae: float
    after_mae: float
    gained_nats: float


def find_divergence(delta: FloatArray, positions: IntArray, *, tolerance_nats: float) -> Divergence | None:
    """Look for one change point between agreement and disagreement.

    Args:
        delta: [active] suspect minus reference of one response.
        positions: [active] response positions.
        tolerance_nats: Differences above this are beyond noise.
    """
    beyond = np.abs(delta) > tolerance_nats
    n = beyond.size
    if n < 2 * MIN_TOKENS or not beyond.any():
        return None
    cut = np.arange(1, n)
    before = np.cumsum(beyond)[:-1]
    after = int(beyond.sum()) - before
    gained = _bernoulli(before, cut) + _bernoulli(after, n - cut) - _bernoulli(beyond.sum(), np.asarray(n))
    rising = (after / (n - cut) >= _DIVERGED_SHARE) & (before / cut <= _CALM_SHARE)
    if not rising.any():
        return None
    at = int(np.where(rising, gained, -np.inf).argmax())
    if gained[at] < _DIVERGENCE_NATS:
        return None
    error = np.abs(delta)
    return Divergence(
        int(positions[at + 1]), float(error[: at + 1].mean()), float(error[at + 1 :].mean()), float(gained[at])
    )


def _bernoulli(hits: npt.ArrayLike, trials: npt.NDArray[np.int64]) -> FloatArray:
    """Log-likelihood of the maximum-likelihood rate."""
    h, n = np.asarray(hits, dtype=np.float64), trials.astype(np.float64)
    rate = np.clip(h / n, 1e-12, 1 - 1e-12)
    return np.asarray(h * np.log(rate) + (n - h) * np.log1p(-rate), dtype=np.float64)


@dataclass(frozen=True, slots=True)
class Tail:
    """Most tokens agree, some do not.

    Attributes:
        count: Tokens beyond noise.
        share: Their share.
        body_mae: MAE of the others.
        largest: Largest absolute difference.
        single: Whether these are single tokens rather than a share of the response.
    """

    count: int
    share: float
    body_mae: float
    largest: float
    single: bool


def find_tail(delta: FloatArray, *, limit_nats: float, tolerance_nats: float) -> Tail | None:
    """Look for a heavy tail over a body at noise.

    Args:
        delta: [active] suspect minus reference.
        limit_nats: MAE that the body must be under.
        tolerance_nats: Differences above this are beyond noise.
    """
    error = np.abs(delta)
    out = error > tolerance_nats
    count = int(out.sum())
    if error.size < MIN_TOKENS or count == 0 or count > _TAIL_SHARE * error.size:
        return None
    body = float(error[~out].mean())
    if body >= limit_nats or float(error.max()) < _TAIL_REACH * body:
        return None
    single = count <= max(1, int(_SINGLE_SHARE * error.size))
    return Tail(count, count / error.size, body, float(error.max()), single)
