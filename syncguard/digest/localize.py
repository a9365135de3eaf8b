"""Where a tensor differs: partial digests on a grid, and a search that halves boxes.

Stable. The search is pure: it is told how to ask for partial digests of boxes, in rounds, so that the answers may
come from another process. A tensor of n rows and m columns is narrowed in about log2(n) + log2(m) rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise, product
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from syncguard.digest.partial import DEFAULT_KEY_SEED, DigestJob, KeySeed, PartialDigest
from syncguard.errors import DigestInputError
from syncguard.spec import Box

if TYPE_CHECKING:
    from syncguard.digest.partial import DigestEngine
    from syncguard.spec import DType

Ask: TypeAlias = Callable[[Sequence[Box]], Sequence[PartialDigest]]
"""Asks one side for the partial digests of boxes of the full tensor; one call is one round trip."""

_CELLS_MAX: Final = 1 << 16


def grid_boxes(box: Box, grid: tuple[int, ...]) -> list[Box]:
    """Return the cells of a box cut into `grid[d]` nearly equal parts per dimension, in row-major order.

    Dimensions shorter than their number of parts are cut into single indices.

    Raises:
        DigestInputError: The grid has another rank, a part count below 1, or more than 65,536 cells.
    """
    cells = 1
    for parts in grid:
        cells *= parts
    if len(grid) != len(box.sizes) or any(parts < 1 for parts in grid) or cells > _CELLS_MAX:
        raise DigestInputError(
            "not a grid of the box",
            expected=f"{len(box.sizes)} part counts of 1 or more, at most {_CELLS_MAX} cells",
            found=grid,
            where=box,
            todo="ask for a coarser grid, then for parts of it",
        )
    cuts = []
    for offset, size, wanted in zip(box.offsets, box.sizes, grid, strict=True):
        parts = max(1, min(wanted, size))
        edges = [offset + size * part // parts for part in range(parts + 1)]
        cuts.append(list(pairwise(edges)))
    return [Box(tuple(low for low, _ in cell), tuple(high - low for low, high in cell)) for cell in product(*cuts)]


def grid_partials(
    engine: DigestEngine,
    view: Any,
    dtype: DType,
    shape: tuple[int, ...],
    box: Box,
    grid: tuple[int, ...],
    *,
    fqn: str = "",
    key_seed: KeySeed = DEFAULT_KEY_SEED,
) -> list[tuple[Box, PartialDigest]]:
    """Return the cells of a held box and their partial digests, which add up to that of the box.

    Args:
        engine: Implementation to use.
        view: Memory of the box, as in `DigestJob`.
        dtype: Element type.
        shape: Full logical shape.
        box: Where `view` lies.
        grid: Parts per dimension.
        fqn: Logical name, for messages.
        key_seed: Seed of the key tables.

    Raises:
        DigestInputError: See `grid_boxes` and `DigestEngine.partials`.
    """
    cells = grid_boxes(box, grid)
    jobs = [DigestJob(view[window(cell, box)], dtype, shape, cell, fqn) for cell in cells]
    return list(zip(cells, engine.partials(jobs, key_seed=key_seed), strict=True))


def window(cell: Box, box: Box) -> tuple[slice, ...]:
    """Return the slices of a view of `box` that show `cell`."""
    return tuple(
        slice(low - origin, low - origin + size)
        for low, origin, size in zip(cell.offsets, box.offsets, cell.sizes, strict=True)
    )


def localize(
    box: Box, ask_expected: Ask, ask_observed: Ask, *, limit: int = 16, smallest: tuple[int, ...] | None = None
) -> list[Box]:
    """Return disjoint boxes, as small as asked for, that hold every difference found.

    Each round cuts the suspects in half along their longest dimension and asks both sides for one half; the other
    half follows by subtraction.  It ends when no suspect can be cut, or when more than `limit` suspects would
    have to be followed; the boxes returned then are larger, but still hold all differences.

    Args:
        box: Box to search.
        ask_expected: Asks the side that is right.
        ask_observed: Asks the side under suspicion.
        limit: Most suspects followed in one round.
        smallest: Sizes below which a box is not cut; single elements when None.

    Returns:
        Differing boxes in order; empty when both sides agree on the whole box.
    """
    floor = smallest or (1,) * len(box.sizes)
    (expected,), (observed,) = ask_expected([box]), ask_observed([box])
    suspects = [(box, expected, observed)] if expected != observed else []
    while suspects and len(suspects) <= limit:
        cuts = [_halve(suspect, floor) for suspect, _, _ in suspects]
        asked = [halves[0] for halves in cuts if halves]
        if not asked:
            break
        answers = iter(zip(ask_expected(asked), ask_observed(asked), strict=True))
        following = []
        for (suspect, expected, observed), halves in zip(suspects, cuts, strict=True):
            if not halves:
                following.append((suspect, expected, observed))
                continue
            left_expected, left_observed = next(answers)
            if left_expected != left_observed:
                following.append((halves[0], left_expected, left_observed))
            if expected - left_expected != observed - left_observed:
                following.append((halves[1], expected - left_expected, observed - left_observed))
        suspects = following
    return sorted(suspect for suspect, _, _ in suspects)


def _halve(box: Box, floor: tuple[int, ...]) -> tuple[Box, Box] | None:
    """Return both halves along the longest dimension that may still be cut; None when there is none."""
    dimension = max(
        (d for d in range(len(box.sizes)) if box.sizes[d] > floor[d] and box.sizes[d] > 1),
        key=lambda d: box.sizes[d],
        default=None,
    )
    if dimension is None:
        return None
    half = box.sizes[dimension] // 2
    sizes, offsets = list(box.sizes), list(box.offsets)
    sizes[dimension] = half
    left = Box(box.offsets, tuple(sizes))
    offsets[dimension] += half
    sizes[dimension] = box.sizes[dimension] - half
    return left, Box(tuple(offsets), tuple(sizes))
