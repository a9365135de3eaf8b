"""Which shape the gap between two paths has: the patterns of `patterns`, in the order in which they exclude each other.

Strong shapes (zeros, shift, constant) cannot come from weights. Weak ones (temperature, divergence, tail) can, so where
an update is involved they are asked only after staleness.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from syncguard.replay.explain import Kind
from syncguard.replay.patterns import (
    MIN_TOKENS,
    OFFSET_RESIDUAL_FACTOR,
    find_constant_offset,
    find_divergence,
    find_shift,
    find_tail,
    find_temperature,
    find_zero_scores,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from syncguard.replay.scores import FloatArray, IntArray

# x MAE noise; of Laplace-distributed noise 0.7 % and 0.03 % lie further out
_BEYOND: Final = 5.0
_FAR_BEYOND: Final = 8.0
_OFFSET_SHARE: Final = 0.3  # of a constant may be left beside it where noise between the engines is not known


@dataclass(frozen=True, slots=True, eq=False)
class PairView:
    """Two paths over one response or several, with what a shape is judged against.

    Attributes:
        suspects: Per response [response] scores of the path that stands apart.
        references: Per response [response] scores of a path that others agree with.
        masks: Per response [response] loss masks.
        side: Name of the suspect path.
        noise_nats: Measured MAE noise.
        limit_nats: MAE under which two paths agree.
        temperature: Temperature of the sampling settings.
        experts: Number of experts of the model, 0 where dense or unknown.
        fixed_limit_nats: The policy's fixed limit.
        noise_known: Whether `noise_nats` holds the noise between the two engines, which only agreement at T0 shows.
    """

    suspects: Sequence[FloatArray]
    references: Sequence[FloatArray]
    masks: Sequence[IntArray]
    side: str
    noise_nats: float
    limit_nats: float
    temperature: float = 1.0
    experts: int = 0
    fixed_limit_nats: float = 0.01
    noise_known: bool = False

    @property
    def tolerance_nats(self) -> float:
        """Difference of a single token that is beyond noise."""
        return max(self.limit_nats, _BEYOND * self.noise_nats)

    def delta(self, index: int) -> tuple[FloatArray, IntArray]:
        """Return suspect minus reference of one response on its active tokens, and their positions."""
        places = np.flatnonzero(self.masks[index]).astype(np.int64)
        return (self.suspects[index] - self.references[index])[places], places

    def joined(self) -> tuple[FloatArray, IntArray, FloatArray]:
        """Return difference, position and reference score of all active tokens."""
        parts = [self.delta(index) for index in range(len(self.masks))]
        references = [ref[mask == 1] for ref, mask in zip(self.references, self.masks, strict=True)]
        return np.concatenate([d for d, _ in parts]), np.concatenate([p for _, p in parts]), np.concatenate(references)


@dataclass(frozen=True, slots=True)
class Shape:
    """A recognized shape.

    Attributes:
        kind: The diagnosis it stands for.
        detail: What was seen, with numbers.
        candidates: Explanations that fit, where it is ambiguous.
    """

    kind: Kind
    detail: str
    candidates: tuple[str, ...] = ()


def strong_shape(view: PairView) -> Shape | None:
    """Return a shape that no weights can make: zeros, misaligned mask, shift, constant offset."""
    each = range(len(view.masks))
    return (
        _agreed([_zeros(view, index) or _shift(view, index) for index in each])
        or _offset(view, *view.joined()[:2])
        or _agreed([_offset(view, *view.delta(index)) for index in each])
    )


def weak_shape(view: PairView) -> Shape | None:
    """Return a shape that other weights could imitate: temperature, divergence from a position, tail."""
    return _temperature(view) or _agreed([_divergence(view, index) for index in range(len(view.masks))]) or _tail(view)


def missing_scores(view: PairView) -> Shape | None:
    """Return zeros in place of scores, which on confident tokens hide under any limit of a mean."""
    return _agreed([_zeros(view, index) for index in range(len(view.masks))])


def _agreed(found: Sequence[Shape | None]) -> Shape | None:
    """Return the shape that most responses show; one response in two must show it."""
    counts = Counter(shape.kind.value for shape in found if shape is not None)
    if not counts:
        return None
    value, votes = counts.most_common(1)[0]
    if 2 * votes < len(found):
        return None
    return next(shape for shape in found if shape is not None and shape.kind.value == value)


def _zeros(view: PairView, index: int) -> Shape | None:
    zero = find_zero_scores(
        view.suspects[index], view.references[index], view.masks[index], noise_nats=view.tolerance_nats
    )
    if zero is None:
        return None
    kinds = {"mask": Kind.MASK, "padding": Kind.ZERO_PADDING, "either": Kind.AMBIGUOUS}
    both = (Kind.MASK.value, Kind.ZERO_PADDING.value) if zero.kind == "either" else ()
    return Shape(kinds[zero.kind], f"{view.side}: {zero.detail}", both)


def _shift(view: PairView, index: int) -> Shape | None:
    moved = find_shift(view.suspects[index], view.references[index], view.masks[index])
    if moved is None or _divergence(view, index) is not None:  # a shift that begins later is another event
        return None
    place = "previous" if moved.by > 0 else "next"
    return Shape(
        Kind.SHIFT,
        f"{view.side} at a token is the score of the {place} one; undone, MAE falls from {moved.unshifted_mae:.4g} to "
        f"{moved.shifted_mae:.4g} nat",
    )


def _offset(view: PairView, delta: FloatArray, positions: IntArray) -> Shape | None:
    share = 0.0 if view.noise_known else _OFFSET_SHARE
    noise = max(view.limit_nats, OFFSET_RESIDUAL_FACTOR * view.fixed_limit_nats)
    found = find_constant_offset(delta, positions, residual_nats=noise, residual_share=share)
    if found is None or _temperature(view) is not None:  # rows of high entropy make a temperature look constant
        return None
    return Shape(
        Kind.OFFSET,
        f"{view.side} is {found.offset_nats:+.4f} nat off from position {found.from_position} on; without that "
        f"{found.residual_mae:.4g} nat remains",
    )


def _temperature(view: PairView) -> Shape | None:
    delta, _, reference = view.joined()
    heated = find_temperature(delta + reference, reference, view.temperature, tolerance_nats=view.tolerance_nats)
    if heated is None:
        return None
    return Shape(
        Kind.TEMPERATURE,
        f"the gap of {view.side} grows with the score: slope {heated.slope:+.3f}, a temperature of {heated.temperature:g} on one "
        f"side gives about {1 / heated.temperature - 1:+.3f}",
    )


def _divergence(view: PairView, index: int) -> Shape | None:
    delta, positions = view.delta(index)
    found = find_divergence(delta, positions, tolerance_nats=view.tolerance_nats)
    if found is None:
        return None
    said = f"{view.side} agrees up to position {found.position - 1} ({found.before_mae:.4g} nat) and not from {found.position} on"
    start = max(0, found.position)
    moved = find_shift(view.suspects[index], view.references[index], view.masks[index], start=start)
    tail = f", where the scores are moved by {moved.by:+d}" if moved else f" ({found.after_mae:.4g} nat)"
    return Shape(Kind.RETOKENIZED, said + tail)


def _tail(view: PairView) -> Shape | None:
    delta, _, _ = view.joined()
    if delta.size < MIN_TOKENS:
        return None
    tolerance = max(view.limit_nats, _FAR_BEYOND * view.noise_nats)
    found = find_tail(delta, limit_nats=view.limit_nats, tolerance_nats=tolerance)
    if found is None:
        return None
    said = (
        f"{found.count} of {delta.size} tokens of {view.side} differ, by up to {found.largest:.4g} nat; "
        f"the others agree ({found.body_mae:.4g} nat)"
    )
    if found.single:
        return Shape(Kind.OUTLIER, said)
    return Shape(Kind.ROUTING if view.experts > 0 else Kind.TAIL, said)
