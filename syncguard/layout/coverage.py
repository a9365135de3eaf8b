"""Proof that claims cover tensors exactly once: no element unclaimed, none claimed twice.

Pure arithmetic on boxes. A set of boxes is split along planes that cut none of them, so that thousands of experts cost
one sort and not a comparison of all pairs; only boxes that overlap, or interlock like a pinwheel, are cut.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from typing import TYPE_CHECKING

from syncguard.layout.ops import shape_after
from syncguard.layout.regions import Spans, UnprovableRegionError, regions_of
from syncguard.spec import Box

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from syncguard.layout.model import RankLayout, ResidentTensor
    from syncguard.layout.ops import ViewOp

MAX_NAMED = 8
"""Problems named per tensor; more would only hide the first."""


class ProblemKind(str, Enum):
    """What is wrong with the claims on a resident tensor."""

    HOLE = "hole"
    """Elements that no claim covers."""
    OVERLAP = "overlap"
    """Elements that two claims cover."""
    UNKNOWN_RESIDENT = "unknown_resident"
    """A claim names a tensor that the rank does not hold."""
    EMPTY_RESIDENT = "empty_resident"
    """The tensor has no element (repacked and dropped by the engine), so an equal digest would show nothing."""
    BAD_VIEW = "bad_view"
    """The view does not fit the resident tensor, or does not have the sizes of the box."""
    UNPROVABLE = "unprovable"
    """The view is outside what this proof can express; treated as not covered."""


@dataclass(frozen=True, slots=True, order=True)
class ResidentProblem:
    """A resident tensor whose elements are not each claimed exactly once.

    Attributes:
        resident: Name of the resident tensor.
        kind: What is wrong.
        detail: The box, and the claims that meet there.
    """

    resident: str
    kind: ProblemKind
    detail: str

    def __str__(self) -> str:
        """Return one line."""
        return f"{self.resident}: {self.kind.value}: {self.detail}"


@dataclass(frozen=True, slots=True)
class _Claim:
    ops: tuple[ViewOp, ...]
    name: str
    box: Box | None = None

    def __str__(self) -> str:
        # Written only where there is a problem: there may be a hundred thousand claims.
        return f"{self.name}{'' if self.box is None else self.box}"


def partition_problems(shape: tuple[int, ...], boxes: Sequence[Box]) -> tuple[str, ...]:
    """Say where boxes fail to tile a tensor; empty when they cover each element exactly once.

    Equal boxes of replicas must be merged by the caller: here they are an overlap. Empty boxes cover nothing and are
    ignored if they lie inside.

    Args:
        shape: Full shape in elements.
        boxes: The boxes that are held, in any order.

    Returns:
        At most `MAX_NAMED` lines such as `hole [0:1, 4:8)`, each naming its boxes.
    """
    problems = [f"outside {shape}: box {box}" for box in boxes if not box.inside(shape)][:MAX_NAMED]
    if problems:
        return tuple(problems)
    whole = tuple((0, size) for size in shape)
    named: list[_Named] = [(_spans(box), box) for box in boxes if box.count]
    return tuple(f"{kind.value} {text}" for kind, text in _tiling(whole, named))


def resident_problems(layout: RankLayout) -> tuple[ResidentProblem, ...]:
    """Say which resident tensors are not claimed exactly once, element by element.

    A claim is a binding that is not an alias, a padding, or a derived, exempt or unbound entry (the last two claim the
    whole tensor). Residents that alias another one need no claim. Whether something is unbound is a question of its own.

    Args:
        layout: What one rank holds.

    Returns:
        Problems sorted by resident name; empty when the proof succeeds.
    """
    residents = {resident.name: resident for resident in layout.residents}
    claims: dict[str, list[_Claim]] = {name: [] for name in residents}
    problems: list[ResidentProblem] = []
    for name, claim in _claims(layout):
        if name in claims:
            claims[name].append(claim)
        else:
            problems.append(ResidentProblem(name, ProblemKind.UNKNOWN_RESIDENT, f"claimed by {claim}"))
    problems += _alias_problems(layout, residents)
    for name, resident in residents.items():
        if not resident.alias_of:
            problems += _claims_problems(resident, claims[name])
    return tuple(sorted(problems))


def _claims(layout: RankLayout) -> Iterable[tuple[str, _Claim]]:
    for binding in layout.bindings:
        if not binding.alias:
            yield binding.resident, _Claim(binding.ops, binding.shard.tensor.fqn, binding.shard.box)
    for padding in layout.paddings:
        yield padding.resident, _Claim(padding.ops, f"padding ({padding.reason})")
    for derived in layout.derived:
        yield derived.resident, _Claim(derived.ops, f"derived by {derived.rule}")
    for exempt in layout.exempt:
        yield exempt.resident, _Claim((), "exempt")
    for unbound in layout.unbound:
        if unbound.resident:
            yield unbound.resident, _Claim((), "unbound")


def _alias_problems(layout: RankLayout, residents: dict[str, ResidentTensor]) -> Iterable[ResidentProblem]:
    for binding in layout.bindings:
        resident = residents.get(binding.resident)
        if not binding.alias:
            continue
        if resident is None:
            yield ResidentProblem(binding.resident, ProblemKind.UNKNOWN_RESIDENT, f"alias {binding.shard.tensor.fqn}")
        elif _view_problem(resident.shape, binding.ops, binding.shard.box.sizes):
            yield ResidentProblem(
                binding.resident,
                ProblemKind.BAD_VIEW,
                f"alias {binding.shard.tensor.fqn}: {_view_problem(resident.shape, binding.ops, binding.shard.box.sizes)}",
            )
        elif not binding.shard.box.inside(binding.shard.tensor.shape):
            yield ResidentProblem(binding.resident, ProblemKind.BAD_VIEW, f"box outside {binding.shard.tensor.shape}")
    for resident in residents.values():
        if resident.alias_of and resident.alias_of not in residents:
            yield ResidentProblem(
                resident.name, ProblemKind.UNKNOWN_RESIDENT, f"aliases {resident.alias_of}, which is not there"
            )
    for binding in layout.bindings:
        if not binding.alias and not binding.shard.box.inside(binding.shard.tensor.shape):
            yield ResidentProblem(
                binding.resident,
                ProblemKind.BAD_VIEW,
                f"box {binding.shard.box} is outside {binding.shard.tensor.fqn} {binding.shard.tensor.shape}",
            )


def _claims_problems(resident: ResidentTensor, claims: list[_Claim]) -> list[ResidentProblem]:
    name = resident.name
    if 0 in resident.shape:
        if any(claim.box is None and claim.name in {"unbound", "exempt"} for claim in claims):
            return []
        held = ", ".join(map(str, claims[:MAX_NAMED])) or "nothing"
        return [ResidentProblem(name, ProblemKind.EMPTY_RESIDENT, f"shape {resident.shape}, claimed by {held}")]
    if len(claims) == 1 and not claims[0].ops and (claims[0].box is None or claims[0].box.sizes == resident.shape):
        return []  # one claim on the whole tensor, as most are
    for claim in claims:
        wrong = _view_problem(resident.shape, claim.ops, claim.box.sizes if claim.box is not None else None)
        if wrong:
            return [ResidentProblem(name, ProblemKind.BAD_VIEW, f"{claim}: {wrong}")]
    try:
        shape, regions = regions_of(resident.shape, [claim.ops for claim in claims])
    except UnprovableRegionError as error:
        return [ResidentProblem(name, ProblemKind.UNPROVABLE, str(error))]
    named: list[_Named] = [
        (spans, claim)
        for claim, boxes in zip(claims, regions, strict=True)
        for spans in boxes
        if all(start < stop for start, stop in spans)
    ]
    return [ResidentProblem(name, kind, text) for kind, text in _tiling(tuple((0, n) for n in shape), named)]


def _view_problem(shape: tuple[int, ...], ops: tuple[ViewOp, ...], sizes: tuple[int, ...] | None) -> str:
    try:
        got = shape_after(shape, ops)
    except (ValueError, IndexError) as error:
        return str(error)
    if sizes is not None and got != sizes:
        return f"the view has shape {got}, the box {sizes}"
    return ""


_Named = tuple[Spans, "_Claim | Box"]


def _spans(box: Box) -> Spans:
    return tuple((start, start + size) for start, size in zip(box.offsets, box.sizes, strict=True))


def _written(spans: Spans) -> str:
    return "[" + ", ".join(f"{start}:{stop}" for start, stop in spans) + "]"


def _tiling(whole: Spans, named: list[_Named]) -> list[tuple[ProblemKind, str]]:
    """Return holes and overlaps of boxes (each inside `whole`, none empty), at most `MAX_NAMED`."""
    if any(start == stop for start, stop in whole):
        return []
    found: list[tuple[ProblemKind, str]] = []
    stack = [(whole, named)]
    while stack and len(found) < MAX_NAMED:
        region, inside = stack.pop()
        if not inside:
            found.append((ProblemKind.HOLE, _written(region)))
        elif all(spans == region for spans, _ in inside):
            if len(inside) > 1:
                labels = ", ".join(str(claim) for _, claim in inside[:MAX_NAMED])
                found.append((ProblemKind.OVERLAP, f"{_written(region)} of {labels}"))
        else:
            stack.extend(reversed(_split(region, inside)))
    return found


def _split(region: Spans, named: list[_Named]) -> list[tuple[Spans, list[_Named]]]:
    """Cut a region along the first dimension with planes that cut no box, or through boxes where there is none."""
    for dim, (low, high) in enumerate(region):
        planes = _free_planes(low, high, sorted([spans[dim] for spans, _ in named]))
        if planes:
            return _cut(region, named, dim, planes)
    for dim, (low, high) in enumerate(region):  # overlap or pinwheel: cut boxes at the plane of one of them
        edges = sorted({edge for spans, _ in named for edge in spans[dim] if low < edge < high})
        if edges:
            return _cut(region, named, dim, [edges[len(edges) // 2]])
    msg = "a region whose boxes all fill it has nothing to cut"
    raise AssertionError(msg)


def _free_planes(low: int, high: int, ordered: list[tuple[int, int]]) -> list[int]:
    planes: list[int] = []
    reach = low
    for start, stop in ordered:
        if start >= reach:
            if low < reach < high:
                planes.append(reach)
            if start > reach:
                planes.append(start)
        reach = max(reach, stop)
    if low < reach < high:
        planes.append(reach)
    return planes


def _cut(region: Spans, named: list[_Named], dim: int, planes: list[int]) -> list[tuple[Spans, list[_Named]]]:
    edges = [region[dim][0], *planes, region[dim][1]]
    before, after = region[:dim], region[dim + 1 :]
    parts: list[tuple[Spans, list[_Named]]] = [((*before, edge, *after), []) for edge in pairwise(edges)]
    first = 0
    for spans, claim in sorted(named, key=lambda item: item[0][dim]):
        start, stop = spans[dim]
        while edges[first + 1] <= start:
            first += 1
        index = first
        while index < len(parts) and edges[index] < stop:
            held = max(start, edges[index]), min(stop, edges[index + 1])
            parts[index][1].append((spans if held == (start, stop) else (*spans[:dim], held, *spans[dim + 1 :]), claim))
            index += 1
    return parts
