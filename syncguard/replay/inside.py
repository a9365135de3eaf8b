"""Looking inside: where, between embedding and final norm, two computations of the same record part. Pure numpy.

Both sides give the same points in the same order, each [tokens, channels]: the embedding, the residual stream after each
layer, the final norm. The first interval in which the relative error grows beyond what rounding adds is where to put more
points (attention, feed-forward); there, the operator's captured input is replayed against a reference.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from syncguard.errors import ScoreError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

GROWTH: Final = 8.0
"""Growth of the relative error from one point to the next that rounding does not make."""
FLOORS: Final[dict[str, float]] = {"float32": 2e-6, "bfloat16": 2e-2, "float16": 2e-3}
"""Relative error that rounding leaves, by the dtype of the computation; unit roundoff times a few operations."""


@dataclass(frozen=True, slots=True)
class PointGap:
    """Disagreement at one point.

    Attributes:
        name: Module whose output it is.
        relative: |left - right| over |right|, Frobenius norms.
        maximum: Largest absolute difference.
        worst_token: Token of it, from 0.
        growth: Relative error over that of the point before, both at least the floor.
    """

    name: str
    relative: float
    maximum: float
    worst_token: int
    growth: float


@dataclass(frozen=True, slots=True)
class InsideReport:
    """Where two computations part.

    Attributes:
        points: All points in order.
        start: Last point that agrees, `""` when the very first differs; None when all agree.
        end: First point that does not; None when all agree.
        refine: Points to capture next, inside the interval.
        reason: One sentence.
    """

    points: tuple[PointGap, ...]
    start: str | None
    end: str | None
    refine: tuple[str, ...]
    reason: str

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)


def find_growth(
    left: Mapping[str, npt.ArrayLike],
    right: Mapping[str, npt.ArrayLike],
    names: Sequence[str],
    *,
    floor: float = FLOORS["float32"],
) -> InsideReport:
    """Return the first interval in which the disagreement grows.

    Args:
        left: Point → [tokens, channels] of one side.
        right: Point → [tokens, channels] of the other.
        names: Points in the order of the computation.
        floor: Relative error that rounding explains at any point.

    Raises:
        ScoreError: A point is missing on a side, or tokens and channels do not match.
    """
    points: list[PointGap] = []
    before, start, end = floor, "", None
    for name in names:
        gap = _gap(left, right, name, max(before, floor), floor)
        points.append(gap)
        if end is None and gap.relative > floor and gap.growth >= GROWTH:
            end = name
            start = points[-2].name if len(points) > 1 else ""
        before = gap.relative
    if end is None:
        worst = max(points, key=lambda point: point.relative)
        return InsideReport(
            tuple(points),
            None,
            None,
            (),
            f"all points agree; largest relative error {worst.relative:.3g} at {worst.name}",
        )
    found = next(point for point in points if point.name == end)
    reason = f"the relative error grows by {found.growth:.3g} to {found.relative:.3g} between {start or 'the input'} and {end}"
    return InsideReport(tuple(points), start, end, inner_points(end), reason)


def inner_points(name: str) -> tuple[str, ...]:
    """Return the points inside a decoder layer, or none where there is nothing between its ends."""
    tail = name.rpartition(".")[2]
    return (f"{name}.self_attn", f"{name}.mlp") if tail.isdigit() else ()


def _gap(
    left: Mapping[str, npt.ArrayLike], right: Mapping[str, npt.ArrayLike], name: str, before: float, floor: float
) -> PointGap:
    if name not in left or name not in right:
        raise ScoreError(
            "a point was not captured",
            expected=name,
            found="right" if name in left else "left",
            todo="capture both sides",
        )
    ours, theirs = np.asarray(left[name], dtype=np.float64), np.asarray(right[name], dtype=np.float64)
    if ours.shape != theirs.shape or ours.ndim != 2:  # noqa: PLR2004 - tokens and channels
        raise ScoreError(
            "points of different computations",
            expected=f"[tokens, channels] {theirs.shape}",
            found=ours.shape,
            where=name,
            todo="flush the prefix cache first, and compare the same ids",
        )
    delta = ours - theirs
    norm = float(np.linalg.norm(theirs))
    relative = float(np.linalg.norm(delta)) / norm if norm > 0 else float(np.abs(delta).max())
    if not np.isfinite(relative):
        raise ScoreError("a point is not finite", where=name, todo="look for an overflow at this point")
    per_token = np.abs(delta).max(axis=1)
    return PointGap(name, relative, float(per_token.max()), int(per_token.argmax()), max(relative, floor) / before)


@dataclass(frozen=True, slots=True)
class RoutingGap:
    """How the routers of two computations differ in one layer.

    Attributes:
        tokens: Tokens compared.
        flipped_share: Share of tokens with another set of experts.
        reordered_share: Share with the same set in another order of weight.
        weight_mae: MAE of the routing weights of experts chosen on both sides.
        first_flipped: First token with another set, -1 without one.
    """

    tokens: int
    flipped_share: float
    reordered_share: float
    weight_mae: float
    first_flipped: int


def compare_routing(
    left_experts: npt.ArrayLike, right_experts: npt.ArrayLike, left_weights: npt.ArrayLike, right_weights: npt.ArrayLike
) -> RoutingGap:
    """Compare expert choices and weights of the same tokens.

    Args:
        left_experts: int [tokens, top_k] expert ids.
        right_experts: int [tokens, top_k] expert ids.
        left_weights: [tokens, top_k] routing weights.
        right_weights: [tokens, top_k] routing weights.

    Raises:
        ScoreError: Shapes disagree.
    """
    ours, theirs = np.asarray(left_experts), np.asarray(right_experts)
    weights, others = np.asarray(left_weights, dtype=np.float64), np.asarray(right_weights, dtype=np.float64)
    if not ours.shape == theirs.shape == weights.shape == others.shape or ours.ndim != 2:  # noqa: PLR2004
        raise ScoreError("routing of different computations", expected=theirs.shape, found=ours.shape)
    same_set = (np.sort(ours, axis=1) == np.sort(theirs, axis=1)).all(axis=1)
    same_order = (ours == theirs).all(axis=1)
    shared = ours[:, :, None] == theirs[:, None, :]
    gaps = np.abs(weights[:, :, None] - others[:, None, :])[shared]
    flipped = np.flatnonzero(~same_set)
    return RoutingGap(
        tokens=int(ours.shape[0]),
        flipped_share=float((~same_set).mean()),
        reordered_share=float((same_set & ~same_order).mean()),
        weight_mae=float(gaps.mean()) if gaps.size else 0.0,
        first_flipped=int(flipped[0]) if flipped.size else -1,
    )
