"""MLP61v1 on the CPU in compiled loops: numpy arrays and torch CPU tensors, any strides, several threads.

The kernels (`cpu_kernels`) are compiled by numba, which SGLang installs anyway; they release the interpreter lock, so
plain threads of one call do the work and nothing is left behind that a fork could break.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise, product
from math import prod
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from syncguard.digest import cpu_kernels, cpu_keys, cpu_loops
from syncguard.digest.keys import key_tables
from syncguard.digest.partial import (
    DEFAULT_KEY_SEED,
    DigestJob,
    KeySeed,
    PartialDigest,
    as_array,
    check_seed,
    with_rows,
)
from syncguard.errors import DigestInputError

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
        check_seed(key_seed)
        return self.plan(jobs).partials(key_seed=key_seed)

    def plan(self, jobs: Sequence[DigestJob]) -> DigestPlan:
        """Check the jobs once, for many runs over memory that stays in place.

        Raises:
            DigestInputError: See `DigestEngine.partials`.
        """
        panels: list[Panel] = []
        owners: list[int] = []
        views = []
        for index, job in enumerate(jobs):
            view, address, strides = _memory_of(job)
            views.append(view)
            found = panels_of(address, strides, job)
            panels += found
            owners += [index] * len(found)
        table = np.array(panels, np.int64).reshape(-1, len(Panel._fields))
        counts = tuple(job.box.count for job in jobs)
        return DigestPlan(table, np.array(owners, np.int64), counts, tuple(views), _addresses(views), self.threads)


@dataclass(frozen=True, slots=True, eq=False)
class DigestPlan:
    """Checked jobs over memory that stays in place, ready to be read again and again.

    It keeps the views alive. A view that was pointed elsewhere, or freed, since the plan was made is noticed at each
    run; a *parameter* that was replaced is not, when the plan holds the tensor that was there before. Make a new plan
    after anything that may replace parameters.
    """

    panels: np.ndarray[Any, np.dtype[np.int64]]
    owners: np.ndarray[Any, np.dtype[np.int64]]
    counts: tuple[int, ...]
    views: tuple[Any, ...]
    addresses: tuple[int, ...]
    threads: int

    def partials(self, *, key_seed: KeySeed = DEFAULT_KEY_SEED) -> list[PartialDigest]:
        """Read the memory; return one partial digest per job.

        Raises:
            DigestInputError: The seed is not a key seed, or a view has moved since the plan was made.
        """
        coverage, data = self.sums(key_seed=key_seed)
        return [PartialDigest(*sums) for sums in zip(self.counts, coverage.tolist(), data.tolist(), strict=True)]

    def sums(self, *, key_seed: KeySeed = DEFAULT_KEY_SEED) -> tuple[U64Array, U64Array]:
        """Read the memory; return coverage and data sums as arrays, u64[number of jobs] each.

        Raises:
            DigestInputError: See `partials`.
        """
        keys = _expanded(check_seed(key_seed))
        if _addresses(self.views) != self.addresses:
            raise DigestInputError(
                "memory moved since the plan was made",
                expected="views at their old addresses",
                found="another address",
                todo="make a new plan",
            )
        loops = cpu_loops.inner_loops()
        coverage, data = np.zeros(len(self.counts), np.uint64), np.zeros(len(self.counts), np.uint64)
        per_panel = np.zeros(len(self.panels), np.uint64)
        cpu_keys.cover(self.panels, keys, per_panel)
        cpu_keys.gather(self.owners, per_panel, coverage)
        self._read(keys, loops, per_panel)
        cpu_keys.gather(self.owners, per_panel, data)
        return coverage, data

    def _read(self, keys: U64Array, loops: int, data: U64Array) -> None:
        """Fill the data sums of the panels, with several threads when there is enough to read."""
        sizes = np.cumsum(self.panels[:, 1] * self.panels[:, 2] * self.panels[:, 8])
        if self.threads == 1 or len(self.panels) <= 1 or sizes[-1] < _THREADED_BYTES:
            cpu_kernels.run(self.panels, 0, len(self.panels), keys, loops, data)
            return
        shares = min(8 * self.threads, len(self.panels))
        edges = np.searchsorted(sizes, np.arange(1, shares) * (sizes[-1] // shares)).tolist()
        edges = [0, *edges, len(self.panels)]
        with ThreadPoolExecutor(self.threads, thread_name_prefix="syncguard-digest") as pool:
            tasks = [
                pool.submit(cpu_kernels.run, self.panels, first, stop, keys, loops, data)
                for first, stop in pairwise(edges)
                if first < stop
            ]
            for task in tasks:
                task.result()


def _memory_of(job: DigestJob) -> tuple[Any, int, tuple[int, ...]]:
    """Return what holds the memory of a checked view, its address, and its strides in bytes."""
    if isinstance(job.view, np.ndarray | np.generic):
        array = as_array(job)
        return array, array.__array_interface__["data"][0], array.strides
    from syncguard.digest.torch_path import host_memory

    return (job.view, *host_memory(job))


def _addresses(views: Sequence[Any]) -> tuple[int, ...]:
    """Return the addresses of the torch tensors among the views; arrays cannot be pointed elsewhere."""
    return tuple(view.data_ptr() for view in views if not isinstance(view, np.ndarray))


def _default_threads() -> int:
    asked = os.environ.get("OMP_NUM_THREADS", "")
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(int(asked), cpus) if asked.isdigit() else cpus)
