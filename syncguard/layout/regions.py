"""Which elements of a resident tensor a chain of views keeps, as boxes of a grid that all chains on it share.

Narrow, Select and Transpose keep boxes. Unflatten followed by Select keeps every n-th row (interleaved gate and up), so
the dimension is split into digits (`index = high * n + low`) in which such a set is a box again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING

from syncguard.layout.ops import Narrow, Select, Transpose, Unflatten, shape_after
from syncguard.layout.repack import split_chain

if TYPE_CHECKING:
    from collections.abc import Sequence

    from syncguard.layout.ops import ViewOp

Spans = tuple[tuple[int, int], ...]
"""A box as `(first, past the last)` in each dimension: cheaper than `Box` where there are a hundred thousand."""


class UnprovableRegionError(ValueError):
    """A chain of views whose set of elements has no form here; the caller must not count it as covered."""


@dataclass(slots=True)
class _Axis:
    """One axis of the view: it walks `length` steps of `stride` indices along a dimension of the resident tensor."""

    dim: int
    stride: int
    length: int


@dataclass(slots=True)
class _Lattice:
    """A dimension's kept indices: `base + sum(x_i * stride_i)`."""

    base: int
    axes: list[tuple[int, int]] = field(default_factory=list)

    def interval(self) -> tuple[int, int] | None:
        """Return `[start, stop)` when the indices are contiguous."""
        reach = 1
        for stride, length in sorted(self.axes):
            if length == 1:
                continue
            if stride != reach:
                return None
            reach *= length
        return self.base, self.base + reach


def regions_of(
    shape: tuple[int, ...], chains: Sequence[tuple[ViewOp, ...]]
) -> tuple[tuple[int, ...], list[list[Spans]]]:
    """Return the shape of the shared grid, and for each chain the boxes of it that the chain keeps.

    Args:
        shape: Resident shape in elements.
        chains: Views that fit the shape, one chain per claim.

    Raises:
        UnprovableRegionError: A chain keeps a set of elements that is no union of few boxes.

    Chains that move bytes are bijections up to their last such operation. Where all chains on a tensor begin with the
    same ones, elements of what they give stand for those of the tensor.
    """
    fronts = {split_chain(chain)[0] for chain in chains}
    if fronts - {()}:
        if len(fronts) > 1:
            msg = f"claims in {len(fronts)} arrangements of the same bytes"
            raise UnprovableRegionError(msg)
        (front,) = fronts
        if any(isinstance(op, (Narrow, Select)) for op in front):
            msg = "elements are dropped before bytes are moved"
            raise UnprovableRegionError(msg)
        shape, chains = shape_after(shape, front), [chain[len(front) :] for chain in chains]
    if not any(isinstance(op, Unflatten) for chain in chains for op in chain):
        return shape, [[box_of(shape, chain)[0]] for chain in chains]
    kept = [_lattices(shape, chain) for chain in chains]
    radices = [_radices(size, [lattices[dim] for lattices in kept]) for dim, size in enumerate(shape)]
    grid = tuple(radix for digits in radices for radix in digits)
    return grid, [_boxes(lattices, radices) for lattices in kept]


def box_of(shape: tuple[int, ...], chain: tuple[ViewOp, ...]) -> tuple[Spans, tuple[int, ...]]:
    """Return what a chain without Unflatten keeps, always one box, and which dimension each of its view's is.

    Raises:
        UnprovableRegionError: The chain has another operation than Narrow, Select and Transpose.
    """
    spans = [(0, size) for size in shape]
    dims = list(range(len(shape)))
    for op in chain:
        if isinstance(op, Narrow):
            low = spans[dims[op.dim]][0] + op.start
            spans[dims[op.dim]] = (low, low + op.length)
        elif isinstance(op, Select):
            dim = dims.pop(op.dim)
            low = spans[dim][0] + op.index
            spans[dim] = (low, low + 1)
        elif isinstance(op, Transpose):
            dims[op.dim0], dims[op.dim1] = dims[op.dim1], dims[op.dim0]
        else:
            msg = f"{type(op).__name__} is not a view of boxes"
            raise UnprovableRegionError(msg)
    return tuple(spans), tuple(dims)


def _lattices(shape: tuple[int, ...], chain: tuple[ViewOp, ...]) -> list[_Lattice]:
    axes = [_Axis(dim, 1, size) for dim, size in enumerate(shape)]
    bases = [0] * len(shape)
    for op in chain:
        if isinstance(op, Narrow):
            axis = axes[op.dim]
            bases[axis.dim] += op.start * axis.stride
            axes[op.dim] = _Axis(axis.dim, axis.stride, op.length)
        elif isinstance(op, Select):
            axis = axes.pop(op.dim)
            bases[axis.dim] += op.index * axis.stride
        elif isinstance(op, Transpose):
            axes[op.dim0], axes[op.dim1] = axes[op.dim1], axes[op.dim0]
        elif isinstance(op, Unflatten):
            axis = axes[op.dim]
            axes[op.dim : op.dim + 1] = [
                _Axis(axis.dim, axis.stride * prod(op.sizes[index + 1 :]), size) for index, size in enumerate(op.sizes)
            ]
        else:
            msg = f"{type(op).__name__} is not a view of boxes"
            raise UnprovableRegionError(msg)
    lattices = [_Lattice(base) for base in bases]
    for axis in axes:
        lattices[axis.dim].axes.append((axis.stride, axis.length))
    return lattices


def _radices(size: int, lattices: list[_Lattice]) -> tuple[int, ...]:
    """Return digit sizes, most significant first, in which every lattice of this dimension is a box."""
    strides: set[int] = set()
    for lattice in lattices:
        if lattice.interval() is None and all(length for _, length in lattice.axes):
            strides |= {stride for stride, length in lattice.axes if length > 1}
            runs = sorted((stride, length) for stride, length in lattice.axes if length > 1)
            if runs and runs[0][0] == 1:  # a contiguous run inside each step
                strides |= {runs[1][0]}
    digits: list[int] = []
    below = 1
    for stride in sorted(strides - {1}):
        if stride % below or size % stride:
            msg = f"strides {sorted(strides)} of a dimension of {size} have no common digits"
            raise UnprovableRegionError(msg)
        digits.insert(0, stride // below)
        below = stride
    return (size // below, *digits)


def _boxes(lattices: list[_Lattice], radices: list[tuple[int, ...]]) -> list[Spans]:
    boxes: list[Spans] = [()]
    for lattice, digits in zip(lattices, radices, strict=True):
        pieces = _pieces(lattice, digits)
        boxes = [
            box + tuple((start, start + size) for start, size in zip(offsets, sizes, strict=True))
            for box in boxes
            for offsets, sizes in pieces
        ]
    return boxes


def _pieces(lattice: _Lattice, digits: tuple[int, ...]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    if any(length == 0 for _, length in lattice.axes):
        return [((0,) * len(digits), (0,) * len(digits))]
    interval = lattice.interval()
    if interval is not None:
        return _interval_pieces(*interval, digits)
    offsets, sizes = [], []
    weight = prod(digits)
    rest = lattice.base
    for radix in digits:
        weight //= radix
        offset, rest = divmod(rest, weight)
        size = 1
        for stride, length in sorted(lattice.axes):  # axes that walk this digit
            if length > 1 and weight <= stride < weight * radix:
                if stride % weight or stride // weight != size:
                    msg = f"a step of {stride} inside a digit of {radix} x {weight}"
                    raise UnprovableRegionError(msg)
                size *= length
        if offset + size > radix:
            msg = f"steps carry over a digit of {radix}"
            raise UnprovableRegionError(msg)
        offsets.append(offset)
        sizes.append(size)
    return [(tuple(offsets), tuple(sizes))]


def _interval_pieces(start: int, stop: int, digits: tuple[int, ...]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Cut `[start, stop)` into boxes of mixed-radix digits: a partial head, full middle rows, a partial tail."""
    if len(digits) == 1:
        return [((start,), (stop - start,))]
    weight = prod(digits[1:])
    inner = digits[1:]
    first, last = -(-start // weight), stop // weight
    if first > last:  # within one row
        row = start // weight
        return [((row, *o), (1, *s)) for o, s in _interval_pieces(start - row * weight, stop - row * weight, inner)]
    pieces: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    if start < first * weight:
        row = first - 1
        pieces += [((row, *o), (1, *s)) for o, s in _interval_pieces(start - row * weight, weight, inner)]
    if last > first:
        pieces.append(((first, *(0,) * len(inner)), (last - first, *inner)))
    if stop > last * weight:
        pieces += [((last, *o), (1, *s)) for o, s in _interval_pieces(0, stop - last * weight, inner)]
    return pieces
