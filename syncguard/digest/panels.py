"""How a strided view becomes a few matrices in memory, for the paths that read it in place.

Internal; pure arithmetic on addresses, sizes and strides.
"""

from __future__ import annotations

from itertools import product
from math import prod
from typing import TYPE_CHECKING, Final, NamedTuple

from syncguard.digest.partial import with_rows

if TYPE_CHECKING:
    from collections.abc import Iterator

    from syncguard.digest.partial import DigestJob

_PIECE_BYTES: Final = 4 << 20


class Panel(NamedTuple):
    """A matrix in memory whose rows and columns are equally spaced, also in the logical tensor; strides in bytes."""

    address: int
    rows: int
    columns: int
    row_stride: int
    column_stride: int
    row: int
    row_step: int
    column: int
    itemsize_bytes: int


def panels_of(address: int, strides: tuple[int, ...], job: DigestJob) -> list[Panel]:
    """Return the panels of a checked job, in pieces of about 4 MiB.

    The rows of a panel are the leading dimension that is contiguous when the columns are not, or else the longest;
    leading dimensions that continue each other in memory and in the logical tensor count as one; those that remain
    are a loop.

    Args:
        address: Address of the first element of the view.
        strides: Bytes per step, one per dimension of the view.
        job: The job, for sizes, shape and box.
    """
    itemsize, sizes = job.dtype.itemsize_bytes, job.box.sizes
    count = prod(sizes)
    if not count:
        return []
    if len(sizes) == 1 and count * itemsize <= _PIECE_BYTES:  # the short way for the many small ones
        return [Panel(address, 1, count, 0, strides[0], 0, 1, job.box.offsets[0], itemsize)]
    shape, offsets = with_rows(job.shape, job.box)
    columns, column_stride = (sizes[-1], strides[-1]) if sizes else (1, itemsize)
    row, step = 0, 1
    leading: list[tuple[int, int, int]] = []  # (size, stride, row step), innermost first
    for dimension in range(len(sizes) - 2, -1, -1):
        size, stride = sizes[dimension], strides[dimension]
        row += offsets[dimension] * step
        if leading and leading[-1][0] * leading[-1][1] == stride and leading[-1][0] * leading[-1][2] == step:
            leading[-1] = (leading[-1][0] * size, *leading[-1][1:])
        elif size > 1:
            leading.append((size, stride, step))
        step *= shape[dimension]
    rows, row_stride, row_step = max(
        leading, key=lambda d: (column_stride != itemsize and d[1:] == (itemsize, 1), d[0]), default=(1, 0, 1)
    )
    if len(leading) <= 1:
        return list(
            _pieces(Panel(address, rows, columns, row_stride, column_stride, row, row_step, offsets[-1], itemsize))
        )
    loops = [d for d in leading if d != (rows, row_stride, row_step)]
    panels: list[Panel] = []
    for index in product(*(range(size) for size, _, _ in loops)):
        at = address + sum(n * d[1] for n, d in zip(index, loops, strict=True))
        first = row + sum(n * d[2] for n, d in zip(index, loops, strict=True))
        panels += _pieces(Panel(at, rows, columns, row_stride, column_stride, first, row_step, offsets[-1], itemsize))
    return panels


def _pieces(panel: Panel) -> Iterator[Panel]:
    """Yield a panel cut into pieces of about 4 MiB, along its rows unless these are what is contiguous, or few."""
    count = -(-panel.rows * panel.columns * panel.itemsize_bytes // _PIECE_BYTES)
    if count <= 1:
        yield panel
    elif panel.rows >= 4 * count and not (panel.row_stride == panel.itemsize_bytes != panel.column_stride):
        height = -(-panel.rows // (4 * count)) * 4
        for first in range(0, panel.rows, height):
            yield panel._replace(
                address=panel.address + first * panel.row_stride,
                rows=min(height, panel.rows - first),
                row=panel.row + first * panel.row_step,
            )
    else:
        width = -(-panel.columns // (64 * count)) * 64
        for first in range(0, panel.columns, width):
            yield panel._replace(
                address=panel.address + first * panel.column_stride,
                columns=min(width, panel.columns - first),
                column=panel.column + first,
            )
