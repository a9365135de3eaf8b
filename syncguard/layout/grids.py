"""Matrices that lie in a larger resident one: runs of rows, a span of columns, and everything else claimed as padding.

Where a kernel wants another order of bytes, the operation that undoes it stands at the front of every claim (`front`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from syncguard.layout.ops import Narrow, Select, shape_after
from syncguard.layout.rules import LayerView, Span, join
from syncguard.spec import Box

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from syncguard.layout.model import ResidentTensor
    from syncguard.layout.ops import ViewOp

PADDED_FOR_KERNEL = "padded to the tile of a kernel"


@dataclass(frozen=True, slots=True)
class Run:
    """Rows of a resident matrix that belong to one logical tensor.

    Attributes:
        fqn: Logical tensor.
        at: First resident row.
        rows: Which of its rows these are; its padding is claimed with all other padding.
    """

    fqn: str
    at: int
    rows: Span


@dataclass(frozen=True, slots=True)
class Stored:
    """A resident tensor and how a matrix is had from it.

    Attributes:
        resident: The tensor.
        front: Operations that undo the order that a kernel wants.
        select: Views after them that leave two dimensions (the expert).
        rows_dim: Which dimension the runs are of; 1 for `[in, out]`.
        dtype: Dtype of the logical tensor, that of the resident one when empty.
        value_byte: What padding holds in every byte.
    """

    resident: ResidentTensor
    front: tuple[ViewOp, ...] = ()
    select: tuple[ViewOp, ...] = ()
    rows_dim: int = 0
    dtype: str = ""
    value_byte: int = 0

    def expert(self, index: int) -> Stored:
        """Return the same for one expert."""
        return Stored(self.resident, self.front, (Select(0, index),), self.rows_dim, self.dtype, self.value_byte)


def bind_grid(view: LayerView, stored: Stored, runs: Iterable[Run], columns: Span) -> None:
    """Claim the runs over the span of columns that starts at 0, and all else as padding.

    Raises:
        ValueError: The runs overlap, or do not fit.
    """
    ops = (*stored.front, *stored.select)
    shape = shape_after(stored.resident.shape, ops)
    rows_dim, columns_dim = stored.rows_dim, 1 - stored.rows_dim
    if len(shape) != 2 or columns.length > shape[columns_dim]:  # noqa: PLR2004 - a matrix
        msg = f"{stored.resident.name} gives {shape}, its layer says {columns.length} columns"
        raise ValueError(msg)
    across = _narrow(columns_dim, 0, columns.length, shape[columns_dim])

    def pad(start: int, stop: int) -> None:
        if start < stop:
            view.pad(
                stored.resident,
                (*ops, *_narrow(rows_dim, start, stop - start, shape[rows_dim]), *across),
                PADDED_FOR_KERNEL,
                value_byte=stored.value_byte,
            )

    end = 0
    for run in sorted(runs, key=lambda run: run.at):
        stop = run.at + run.rows.length
        if run.at < end or stop > shape[rows_dim]:
            msg = f"{run.fqn} at rows [{run.at}:{stop}) of {shape} does not fit"
            raise ValueError(msg)
        pad(end, run.at)
        spans = (run.rows, columns) if rows_dim == 0 else (columns, run.rows)
        box = Box(tuple(span.start for span in spans), tuple(span.length for span in spans))
        chain = (*ops, *_narrow(rows_dim, run.at, run.rows.length, shape[rows_dim]), *across)
        view.bind(stored.resident, run.fqn, tuple(span.total for span in spans), box, chain, dtype=stored.dtype)
        end = stop
    pad(end, shape[rows_dim])
    if columns.length < shape[columns_dim]:
        tail = Narrow(columns_dim, columns.length, shape[columns_dim] - columns.length)
        view.pad(stored.resident, (*ops, tail), PADDED_FOR_KERNEL, value_byte=stored.value_byte)


def bind_scalars(view: LayerView, resident: ResidentTensor, names: Sequence[str], *lead: ViewOp) -> None:
    """Claim each element of a vector as a scalar of its own.

    Raises:
        ValueError: There are not as many elements as names.
    """
    shape = shape_after(resident.shape, lead)
    if shape != (len(names),):
        msg = f"{resident.name} is {shape}, expected {len(names)} scalars"
        raise ValueError(msg)
    for index, name in enumerate(names):
        view.bind(resident, name, (), Box((), ()), (*lead, Select(0, index)))


def needed(view: LayerView, local: str) -> ResidentTensor:
    """Return a tensor of the layer.

    Raises:
        ValueError: It is not there.
    """
    found = view.tensor(local)
    if found is None:
        msg = f"no {local}"
        raise ValueError(msg)
    return found


def same_memory(view: LayerView, one: str, other: str) -> bool:
    """Return whether two names of a layer's tensors are one tensor."""
    first, second = (view.resident.get(join(view.fqn, local)) for local in (one, other))
    return (
        first is not None and second is not None and (first.alias_of or first.name) == (second.alias_of or second.name)
    )


def resident_of(view: LayerView, local: str) -> ResidentTensor | None:
    """Return a tensor of the layer, following an alias to the tensor that holds the memory."""
    found = view.resident.get(join(view.fqn, local))
    if found is None:
        return None
    return view.resident.get(found.alias_of, found) if found.alias_of else found


def _narrow(dim: int, start: int, length: int, size: int) -> tuple[Narrow, ...]:
    return () if (start, length) == (0, size) else (Narrow(dim, start, length),)
