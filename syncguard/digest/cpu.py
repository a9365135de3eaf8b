"""MLP61v1 on the CPU in compiled loops: numpy arrays and torch CPU tensors, any strides, several threads.

The kernels (`cpu_kernels`) are compiled by numba, which SGLang installs anyway; they release the interpreter lock, so
plain threads of one call do the work and nothing is left behind that a fork could break.
"""

from __future__ import annotations

import os
from array import array
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from syncguard.digest import cpu_kernels, cpu_keys, cpu_loops
from syncguard.digest.keys import key_tables
from syncguard.digest.panels import Panel, panels_of
from syncguard.digest.partial import (
    DEFAULT_KEY_SEED,
    DigestJob,
    KeySeed,
    PartialDigest,
    as_array,
    check_seed,
)
from syncguard.errors import DigestInputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from syncguard.digest.keys import U64Array

_THREADED_BYTES: Final = 4 << 20


@lru_cache(maxsize=2)  # 6 MB each
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
        panels, owners = array("q"), array("q")  # not lists of tuples, which the garbage collector would walk
        views = []
        for index, job in enumerate(jobs):
            view, address, strides = _memory_of(job)
            views.append(view)
            found = panels_of(address, strides, job)
            for panel in found:
                panels.extend(panel)
                owners.append(index)
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
        view = as_array(job)
        return view, view.__array_interface__["data"][0], view.strides
    from syncguard.digest.torch_path import host_memory

    return (job.view, *host_memory(job))


def _addresses(views: Sequence[Any]) -> tuple[int, ...]:
    """Return the addresses of the torch tensors among the views; arrays cannot be pointed elsewhere."""
    return tuple(view.data_ptr() for view in views if not isinstance(view, np.ndarray))


def _default_threads() -> int:
    asked = os.environ.get("OMP_NUM_THREADS", "")
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(int(asked), cpus) if asked.isdigit() else cpus)
