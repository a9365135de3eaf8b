"""MLP61v1 on the CPU in compiled loops: numpy arrays and torch CPU tensors, any strides, several threads.

The kernels (`cpu_kernels`) are compiled by numba, which SGLang installs anyway; they release the interpreter lock, so
plain threads of one call do the work and nothing is left behind that a fork could break.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from itertools import pairwise, product
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from syncguard.digest import cpu_kernels, cpu_keys, cpu_loops
from syncguard.digest.keys import key_tables
from syncguard.digest.partial import DEFAULT_KEY_SEED, PRIME, DigestJob, KeySeed, PartialDigest, as_array, with_rows

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from syncguard.digest.keys import U64Array

_PIECE_BYTES: Final = 4 << 20
_THREADED_BYTES: Final = 4 << 20


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
    if not job.box.count:
        return []
    itemsize = job.dtype.itemsize_bytes
    shape, offsets = with_rows(job.shape, job.box)
    sizes = job.box.sizes
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


@lru_cache(maxsize=4)
def _expanded(key_seed: KeySeed) -> U64Array:
    keys = np.zeros(cpu_keys.KEYS_LENGTH, np.uint64)
    cpu_keys.expand(key_tables(key_seed).tables, keys)
    return keys


class NumbaEngine:
    """MLP61v1 in compiled loops on the CPU.

    Args:
        threads: Threads of one call; `OMP_NUM_THREADS` or the CPUs of this process when None.
    """

    name = "numba"

    def __init__(self, *, threads: int | None = None) -> None:
        """Keep the number of threads; compiles nothing yet."""
        self.threads = threads or _default_threads()

    def partials(self, jobs: Sequence[DigestJob], *, key_seed: KeySeed = DEFAULT_KEY_SEED) -> list[PartialDigest]:
        """Return one partial digest per job; see `DigestEngine.partials`."""
        keys = _expanded(key_seed)
        panels: list[Panel] = []
        owners: list[int] = []
        keep = []
        for index, job in enumerate(jobs):
            array = as_array(job)
            keep.append(array)
            found = panels_of(array.__array_interface__["data"][0], array.strides, job)
            panels += found
            owners += [index] * len(found)
        data, coverage = self._run(np.array(panels, np.int64).reshape(-1, len(Panel._fields)), keys)
        sums = [(0, 0)] * len(jobs)
        for owner, c, d in zip(owners, coverage.tolist(), data.tolist(), strict=True):
            sums[owner] = (sums[owner][0] + c, sums[owner][1] + d)
        return [PartialDigest(job.box.count, c % PRIME, d % PRIME) for job, (c, d) in zip(jobs, sums, strict=True)]

    def _run(self, panels: np.ndarray[Any, Any], keys: U64Array) -> tuple[U64Array, U64Array]:
        loops = cpu_loops.inner_loops()
        data, coverage = np.zeros(len(panels), np.uint64), np.zeros(len(panels), np.uint64)
        cpu_keys.cover(panels, keys, coverage)
        sizes = np.cumsum(panels[:, 1] * panels[:, 2] * panels[:, 8])
        if self.threads == 1 or len(panels) <= 1 or sizes[-1] < _THREADED_BYTES:
            cpu_kernels.run(panels, 0, len(panels), keys, loops, data)
            return data, coverage
        shares = min(8 * self.threads, len(panels))
        edges = np.searchsorted(sizes, np.arange(1, shares) * (sizes[-1] // shares)).tolist()
        edges = [0, *edges, len(panels)]
        with ThreadPoolExecutor(self.threads, thread_name_prefix="syncguard-digest") as pool:
            tasks = [
                pool.submit(cpu_kernels.run, panels, first, stop, keys, loops, data)
                for first, stop in pairwise(edges)
                if first < stop
            ]
            for task in tasks:
                task.result()
        return data, coverage


def _default_threads() -> int:
    asked = os.environ.get("OMP_NUM_THREADS", "")
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(int(asked), cpus) if asked.isdigit() else cpus)
