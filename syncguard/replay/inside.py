"""Looking inside: where, between embedding and final norm, two computations of the same record part. Pure numpy.

Both sides give the same points in the same order, each [tokens, channels]: the embedding, the residual stream after each
layer, the final norm. The first interval in which the relative error grows beyond what rounding adds is where to put more
points (attention, feed-forward); there, the operator's captured input is replayed against a reference.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np

from syncguard.errors import ScoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import numpy.typing as npt

    Side: TypeAlias = Callable[[Sequence[str]], Mapping[str, npt.ArrayLike]]

LOGITS: Final = "logits"
"""Point of the logits of the response, whatever module or function makes them."""
CHOSEN: Final = "#chosen"
WEIGHTS: Final = "#weights"
"""Suffixes of the two values of a router: expert ids and routing weights."""
GROWTH: Final = 8.0
"""Growth of the relative error from one point to the next that rounding does not make."""
FLOORS: Final[dict[str, float]] = {"float32": 2e-6, "bfloat16": 2e-2, "float16": 2e-3}
"""Relative error that rounding leaves, by the dtype of the computation; unit roundoff times a few operations."""
ACROSS_ENGINES: Final[dict[str, float]] = {"float32": 2e-5, "bfloat16": 2e-2, "float16": 4e-3}
"""The same between two implementations (measured, SGLang against Transformers: 4e-7 in float32, 0.018 in bfloat16)."""
_AT_ONCE: Final = 8


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


def join_ranks(
    ranks: Sequence[Mapping[str, npt.ArrayLike]],
) -> tuple[dict[str, npt.ArrayLike], tuple[str, ...]]:
    """Return what the ranks of one replica hold together, and the points at which they contradict each other.

    Attention and feed-forward of a tensor-parallel rank give addends, or the sum where they reduce it themselves: equal
    values are the sum, others are added. Every other point is held whole by each rank.
    """
    joined: dict[str, npt.ArrayLike] = {}
    contradicted = []
    for name, first in ranks[0].items():
        values = [np.asarray(rank[name]) for rank in ranks if name in rank]
        same = all(np.array_equal(value, values[0]) for value in values)
        if not same and name.endswith((".self_attn", ".mlp")):
            joined[name] = np.sum(np.asarray(values, dtype=np.float64), axis=0)
            continue
        joined[name] = first
        if not same:
            contradicted.append(name)
    return joined, tuple(contradicted)


def inner_points(name: str) -> tuple[str, ...]:
    """Return the points inside a decoder layer, or none where there is nothing between its ends."""
    return (f"{name}.self_attn", f"{name}.mlp") if is_layer(name) else ()


def is_layer(name: str) -> bool:
    """Return whether a point is a whole decoder layer, `model.layers.N`."""
    head, _, number = name.rpartition(".")
    return head == "model.layers" and number.isdigit()


def is_router(name: str) -> bool:
    """Return whether a point is the experts of a layer, whose inputs say how tokens were routed."""
    return name.endswith(".mlp.experts")


def locate(
    left: Side,
    right: Side,
    points: Sequence[str],
    *,
    floor: float,
    at_once: int = _AT_ONCE,
    on_pass: Callable[[InsideReport], None] | None = None,
) -> list[InsideReport]:
    """Narrow down where two computations part: few points over all layers, then inside the interval, then inside the layer.

    Args:
        left: Captures points of one side: names → [tokens, channels] each.
        right: The same of the other side.
        points: All points in the order of the computation, as `usual_points` gives them.
        floor: Relative error that rounding explains.
        at_once: Most points between the ends of one pass, so that a capture stays small.
        on_pass: Called with the report of each pass.

    Returns:
        The report of each pass; the last one is the narrowest. One report, with no end, where all points agree.
    """
    asked = _spread(points, at_once)
    reports: list[InsideReport] = []
    while True:
        found = find_growth(left(asked), right(asked), asked, floor=floor)
        reports.append(found)
        if on_pass is not None:
            on_pass(found)
        if found.end is None:
            return reports
        inside = _between(points, found.start or "", found.end)
        if inside:
            asked = [*filter(None, [found.start]), *_spread(inside, at_once), found.end]
        elif found.refine and not any(name in asked for name in found.refine):
            asked = [*filter(None, [found.start]), *found.refine, found.end]
        else:
            return reports


def _between(points: Sequence[str], start: str, end: str) -> list[str]:
    """Return the points strictly inside an interval; none where it is inside a layer already."""
    if end not in points or (start and start not in points):
        return []
    return list(points[points.index(start) + 1 if start else 0 : points.index(end)])


def _spread(points: Sequence[str], at_once: int) -> list[str]:
    """Return at most `at_once` points, the first and the last among them, evenly spread."""
    if len(points) <= at_once:
        return list(points)
    picks = np.unique(np.linspace(0, len(points) - 1, at_once).round().astype(int))
    return [points[index] for index in picks]


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
        name: Experts whose routing was compared.
    """

    tokens: int
    flipped_share: float
    reordered_share: float
    weight_mae: float
    first_flipped: int
    name: str = ""


def compare_routers(
    left: Mapping[str, npt.ArrayLike], right: Mapping[str, npt.ArrayLike], names: Sequence[str]
) -> tuple[RoutingGap, ...]:
    """Compare the captured routing of several layers, in their order.

    Raises:
        ScoreError: A layer is missing on a side, or shapes disagree.
    """
    gaps = []
    for name in names:
        for key in (f"{name}{CHOSEN}", f"{name}{WEIGHTS}"):
            if key not in left or key not in right:
                raise ScoreError("routing was not captured", expected=key, found="left" if key in right else "right")
        ours, theirs = f"{name}{CHOSEN}", f"{name}{WEIGHTS}"
        gaps.append(replace(compare_routing(left[ours], right[ours], left[theirs], right[theirs]), name=name))
    return tuple(gaps)


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
