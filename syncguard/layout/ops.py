"""The closed set of operations that lead from a resident tensor to a box of a logical tensor.

Those of this module are views (no copy) of numpy arrays and torch tensors alike; `repack` has the few that move bytes and
stand before them. Each knows the shape it gives. An operation outside this set is not expressible, hence UNSUPPORTED.
"""

from __future__ import annotations

from typing import Any, Union

import msgspec

from syncguard.layout.repack import Rearrange, Recode


class Narrow(msgspec.Struct, frozen=True, tag="narrow"):
    """Keep `[start, start + length)` of one dimension."""

    dim: int
    start: int
    length: int

    def apply(self, view: Any) -> Any:
        """Return the narrowed view."""
        index = (slice(None),) * self.dim + (slice(self.start, self.start + self.length),)
        return view[index]

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape after the operation.

        Raises:
            ValueError: The range is outside the dimension.
        """
        if not 0 <= self.dim < len(shape) or self.start < 0 or self.start + self.length > shape[self.dim]:
            msg = f"narrow {self.dim} [{self.start}:{self.start + self.length}) is outside {shape}"
            raise ValueError(msg)
        return (*shape[: self.dim], self.length, *shape[self.dim + 1 :])


class Select(msgspec.Struct, frozen=True, tag="select"):
    """Keep one index of a dimension and drop the dimension (an expert of a fused tensor)."""

    dim: int
    index: int

    def apply(self, view: Any) -> Any:
        """Return the selected view."""
        return view[(slice(None),) * self.dim + (self.index,)]

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape after the operation.

        Raises:
            ValueError: The index is outside the dimension.
        """
        if not 0 <= self.dim < len(shape) or not 0 <= self.index < shape[self.dim]:
            msg = f"select {self.dim} [{self.index}] is outside {shape}"
            raise ValueError(msg)
        return (*shape[: self.dim], *shape[self.dim + 1 :])


class Transpose(msgspec.Struct, frozen=True, tag="transpose"):
    """Swap two dimensions (a weight stored as `[in, out]`)."""

    dim0: int
    dim1: int

    def apply(self, view: Any) -> Any:
        """Return the transposed view."""
        return view.swapaxes(self.dim0, self.dim1)

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape after the operation."""
        swapped = list(shape)
        swapped[self.dim0], swapped[self.dim1] = swapped[self.dim1], swapped[self.dim0]
        return tuple(swapped)


class Unflatten(msgspec.Struct, frozen=True, tag="unflatten"):
    """Split one dimension into several, row-major; always a view."""

    dim: int
    sizes: tuple[int, ...]

    def apply(self, view: Any) -> Any:
        """Return the reshaped view."""
        shape = tuple(view.shape)
        return view.reshape((*shape[: self.dim], *self.sizes, *shape[self.dim + 1 :]))

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape after the operation.

        Raises:
            ValueError: The sizes do not multiply to the dimension.
        """
        product = 1
        for size in self.sizes:
            product *= size
        if product != shape[self.dim]:
            msg = f"unflatten {self.dim} into {self.sizes} does not fit {shape}"
            raise ValueError(msg)
        return (*shape[: self.dim], *self.sizes, *shape[self.dim + 1 :])


ViewOp = Union[Narrow, Select, Transpose, Unflatten, Rearrange, Recode]  # noqa: UP007 - msgspec resolves it at run time on 3.10


def apply_ops(view: Any, ops: tuple[ViewOp, ...]) -> Any:
    """Return what all operations give: a view, unless one of them moves bytes."""
    for op in ops:
        view = op.apply(view)
    return view


def shape_after(shape: tuple[int, ...], ops: tuple[ViewOp, ...]) -> tuple[int, ...]:
    """Return the shape after all operations.

    Raises:
        ValueError: An operation does not fit.
    """
    for op in ops:
        shape = op.shape(shape)
    return shape
