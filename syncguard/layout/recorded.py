"""What an engine's own loader did, followed symbolically: which box of a resident tensor came from which elements.

For architectures without a rule. A recorder inside the rank (`engines.loader_record`) runs the loader on tensors without
memory and reports every copy as strides; here copies become pieces, pieces are composed through temporaries, and what is
left at the end becomes bindings marked `RECORDED`. A recorded binding trusts the loader: that the loader itself is right
shows only in the replay. Nothing is guessed: what was not followed has no piece, hence is named as unbound.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Final

from syncguard.spec import Box

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence


ZERO: Final = "(zero)"
"""Source of elements that the loader set to zero."""
UNKNOWN: Final = "(not followed)"
"""Source of elements that came through an operation outside the followed ones."""
PIECES_MAX: Final = 4096
"""Pieces of one tensor; a map of more is refused, not truncated."""


class UnfollowedError(ValueError):
    """A view or copy that has no form here; the caller must not count its elements as known."""


@dataclass(frozen=True, slots=True)
class Strided:
    """A view of a storage, in elements.

    Attributes:
        offset: First element.
        sizes: Shape.
        strides: Step of each dimension; 0 repeats one element.
    """

    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a tensor whose elements came from an affine run through one checkpoint tensor.

    Attributes:
        box: Where, in the tensor's own dimensions.
        source: Checkpoint name, `ZERO` or `UNKNOWN`.
        offset: Row-major element of the source at the origin of the box.
        strides: Step in the source for each dimension of the box, in elements.
    """

    box: Box
    source: str
    offset: int
    strides: tuple[int, ...]

    @classmethod
    def constant(cls, sizes: tuple[int, ...], source: str) -> Piece:
        """Return a piece over a whole tensor that is of no checkpoint tensor: `ZERO` or `UNKNOWN`."""
        return cls(Box.whole(sizes), source, 0, (0,) * len(sizes))

    def within(self, box: Box) -> Piece | None:
        """Return the part inside a box, None when there is none."""
        low = tuple(max(a, b) for a, b in zip(self.box.offsets, box.offsets, strict=True))
        high = tuple(
            min(a + n, b + m)
            for a, n, b, m in zip(self.box.offsets, self.box.sizes, box.offsets, box.sizes, strict=True)
        )
        if any(start >= stop for start, stop in zip(low, high, strict=True)):
            return None
        steps = (start - own for start, own in zip(low, self.box.offsets, strict=True))
        offset = self.offset + sum(n * stride for n, stride in zip(steps, self.strides, strict=True))
        return replace(self, box=Box(low, tuple(b - a for a, b in zip(low, high, strict=True))), offset=offset)

    def outside(self, box: Box) -> Iterator[Piece]:
        """Yield the parts outside a box, disjoint."""
        inner = self.within(box)
        if inner is None:
            yield self
            return
        rest = self
        for dim, (start, size) in enumerate(zip(inner.box.offsets, inner.box.sizes, strict=True)):
            own_start, own_size = rest.box.offsets[dim], rest.box.sizes[dim]
            for low, high in ((own_start, start), (start + size, own_start + own_size)):
                part = rest.within(_with(rest.box, dim, low, high - low)) if high > low else None
                if part is not None:
                    yield part
            kept = rest.within(_with(rest.box, dim, start, size))
            assert kept is not None
            rest = kept


class Contents:
    """A tensor of some storage and where its elements came from; what no piece covers was never written.

    Pieces are disjoint. Those that are one index deep in the first dimension (an expert of a fused tensor) are kept by it,
    so that writing one of hundreds does not look at the others.

    Attributes:
        view: Where it lies in its storage; dense, in any order of dimensions.
    """

    __slots__ = ("_count", "_places", "view")

    def __init__(self, view: Strided, pieces: Iterable[Piece] = ()) -> None:
        """Start with given pieces, disjoint."""
        self.view = view
        self._places: dict[int, list[Piece]] = {}
        self._count = 0
        for piece in pieces:
            self._add(piece)

    @classmethod
    def of_checkpoint(cls, fqn: str, shape: tuple[int, ...]) -> Contents:
        """Return the contents of a checkpoint tensor: all its own."""
        strides = row_major(shape)
        view = Strided(0, shape, strides)
        return cls(view, [Piece(Box.whole(shape), fqn, 0, strides)] if prod(shape) else [])

    @property
    def pieces(self) -> list[Piece]:
        """Every piece."""
        return [piece for held in self._places.values() for piece in held]

    def holds(self, offset: int) -> bool:
        """Return whether an element of the storage lies in this tensor's extent."""
        return self.view.offset <= offset < self.view.offset + max(1, prod(self.view.sizes))

    def read(self, view: Strided) -> list[Piece]:
        """Return the pieces of a view of the storage, in the view's dimensions.

        Raises:
            UnfollowedError: The view has no form here.
        """
        found: list[Piece] = []
        for block in blocks_of(view, self.view):
            for piece in self._near(block.parent_box):
                inner = piece.within(block.parent_box)
                if inner is None:
                    continue
                offsets, sizes, strides = list(block.origin), list(block.sizes), [0] * len(block.sizes)
                for dim, axis in enumerate(block.axes):
                    if axis is not None:
                        offsets[dim] += inner.box.offsets[axis] - block.parent_origin[axis]
                        sizes[dim] = inner.box.sizes[axis]
                        strides[dim] = inner.strides[axis]
                found.append(Piece(Box(tuple(offsets), tuple(sizes)), piece.source, inner.offset, tuple(strides)))
            _bounded(len(found))
        return found

    def write(self, view: Strided, pieces: Iterable[Piece]) -> None:
        """Put pieces, given in a view's dimensions, over what is there; the rest of the view becomes unwritten.

        Raises:
            UnfollowedError: The view has no form here, or writes one element twice.
        """
        if any(stride == 0 and size > 1 for size, stride in zip(view.sizes, view.strides, strict=True)):
            msg = "a write through a repeated view"
            raise UnfollowedError(msg)
        given = list(pieces)
        for block in blocks_of(view, self.view):
            self._clear(block.parent_box)
            for piece in given:
                inner = piece.within(Box(block.origin, block.sizes))
                if inner is None:
                    continue
                offsets, sizes = list(block.parent_origin), [1] * len(block.parent_origin)
                strides = [0] * len(sizes)
                for dim, axis in enumerate(block.axes):
                    if axis is not None:
                        offsets[axis] += inner.box.offsets[dim] - block.origin[dim]
                        sizes[axis] = inner.box.sizes[dim]
                        strides[axis] = inner.strides[dim]
                self._add(Piece(Box(tuple(offsets), tuple(sizes)), piece.source, inner.offset, tuple(strides)))
            _bounded(self._count)

    def _add(self, piece: Piece) -> None:
        self._places.setdefault(_place(piece.box), []).append(piece)
        self._count += 1

    def _near(self, box: Box) -> list[Piece]:
        place = _place(box)
        if place == _DEEP:
            return self.pieces
        return [*self._places.get(place, ()), *self._places.get(_DEEP, ())]

    def _clear(self, box: Box) -> None:
        place = _place(box)
        for key in list(self._places) if place == _DEEP else (place, _DEEP):
            before = self._places.pop(key, None)
            if before is None:
                continue
            self._count -= len(before)
            for piece in before:
                for part in piece.outside(box):
                    self._add(part)


_DEEP: Final = -1
"""Key of pieces that are more than one index deep in the first dimension."""


def _place(box: Box) -> int:
    return box.offsets[0] if box.sizes and box.sizes[0] == 1 else _DEEP


@dataclass(frozen=True, slots=True)
class Block:
    """A part of a view that is a box of its parent.

    Attributes:
        origin: First index in the view.
        sizes: Sizes in the view's dimensions.
        parent_origin: First index in the parent.
        axes: The parent's dimension that each of the view's walks, None where it does not move.
    """

    origin: tuple[int, ...]
    sizes: tuple[int, ...]
    parent_origin: tuple[int, ...]
    axes: tuple[int | None, ...]

    @property
    def parent_box(self) -> Box:
        """The box of the parent."""
        sizes = [1] * len(self.parent_origin)
        for size, axis in zip(self.sizes, self.axes, strict=True):
            if axis is not None:
                sizes[axis] = size
        return Box(self.parent_origin, tuple(sizes))


def blocks_of(view: Strided, parent: Strided) -> Iterator[Block]:
    """Yield boxes of a dense parent that together are a view of it.

    A dimension of the view that steps over whole runs of the parent is taken index by index, one that runs on into the
    next row of the parent is cut there.

    Raises:
        UnfollowedError: The view leaves the parent, or falls into more than `PIECES_MAX` boxes.
    """
    if not prod(view.sizes):
        return
    order = sorted((d for d, n in enumerate(parent.sizes) if n > 1), key=lambda d: -parent.strides[d])
    walked: list[int | None] = []
    stepped: list[int] = []
    for dim, (size, stride) in enumerate(zip(view.sizes, view.strides, strict=True)):
        axis = next((d for d in order if parent.strides[d] == stride), None) if size > 1 and stride else None
        if axis is not None and axis in walked:
            msg = "two dimensions of a view walk the same one of its tensor"
            raise UnfollowedError(msg)
        walked.append(axis)
        if axis is None and size > 1 and stride:
            stepped.append(dim)
    if prod(view.sizes[dim] for dim in stepped) > PIECES_MAX:
        msg = f"a view in more than {PIECES_MAX} parts"
        raise UnfollowedError(msg)
    for fixed in product(*(range(view.sizes[dim]) for dim in stepped)):
        at = dict(zip(stepped, fixed, strict=True))
        base = view.offset - parent.offset + sum(n * view.strides[dim] for dim, n in at.items())
        digits = _digits(base, parent, order)
        runs = [
            _runs(size, parent.sizes[axis], digits[axis]) if axis is not None else [(at.get(dim, 0), size)]
            for dim, (size, axis) in enumerate(zip(view.sizes, walked, strict=True))
        ]
        runs = [[(at[dim], 1)] if dim in at else own for dim, own in enumerate(runs)]
        if prod(len(own) for own in runs) > PIECES_MAX:
            msg = f"a view in more than {PIECES_MAX} parts"
            raise UnfollowedError(msg)
        for chosen in product(*runs):
            start = base + sum(
                first * view.strides[dim] for dim, (first, _) in enumerate(chosen) if walked[dim] is not None
            )
            origin = _digits(start, parent, order)
            block = Block(tuple(f for f, _ in chosen), tuple(n for _, n in chosen), origin, tuple(walked))
            if not block.parent_box.inside(parent.sizes):
                msg = f"a view {view} that is no box of {parent}"
                raise UnfollowedError(msg)
            yield block


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor, in elements."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(1, size)
    return tuple(reversed(strides))


def _with(box: Box, dim: int, start: int, size: int) -> Box:
    offsets, sizes = list(box.offsets), list(box.sizes)
    offsets[dim], sizes[dim] = start, size
    return Box(tuple(offsets), tuple(sizes))


def _digits(base: int, parent: Strided, order: Sequence[int]) -> tuple[int, ...]:
    digits = [0] * len(parent.sizes)
    rest = base
    for dim in order:
        digits[dim], rest = divmod(rest, parent.strides[dim])
    if rest or base < 0:
        msg = f"element {base} is none of {parent}"
        raise UnfollowedError(msg)
    return tuple(digits)


def _runs(size: int, extent: int, start: int) -> list[tuple[int, int]]:
    """Cut `[0, size)` where it passes the end of a row of `extent`, having begun at `start`."""
    runs, at = [], 0
    while at < size:
        length = min(size - at, extent - (start + at) % extent)
        runs.append((at, length))
        at += length
        if len(runs) > PIECES_MAX:
            msg = f"a view in more than {PIECES_MAX} parts"
            raise UnfollowedError(msg)
    return runs


def _bounded(count: int) -> None:
    if count > PIECES_MAX:
        msg = f"a tensor in more than {PIECES_MAX} pieces"
        raise UnfollowedError(msg)
