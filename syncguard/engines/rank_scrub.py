"""The scrub of one rank: its resident bytes in turns of bounded size, so that all are read once in a cycle.

What is due in which turn follows from the layout and the budget alone, so that a turn can be asked for again. Bindings are
digested in runs of rows, under the key of the manifest that was proven: their partial digests add up to those of the proof,
which only the agent knows. Padding, derived and exempt state is judged here, as in a whole observation.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any, TypeAlias

from syncguard.digest import DEFAULT_KEY_SEED, DigestJob, PartialDigest
from syncguard.engines.base import ScrubSlice
from syncguard.engines.rank_scratch import ScratchReader
from syncguard.layout.derived import check_derived
from syncguard.layout.padding import wrong_padding
from syncguard.spec import Box

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from syncguard.layout.model import RankLayout

    Digest: TypeAlias = Callable[[Sequence[DigestJob], bytes], list[PartialDigest]]


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows `low` to `high` of a job; `binding` is one of those that it answers."""

    nbytes: int
    binding: int
    job: int
    low: int
    high: int
    rows: int


@dataclass(frozen=True, slots=True)
class _Padding:
    nbytes: int
    padding: int
    job: int


@dataclass(frozen=True, slots=True)
class _Scratch:
    """All claims on one resident tensor whose bytes a kernel keeps in another order; read as a whole."""

    nbytes: int
    reader: ScratchReader
    bindings: tuple[int, ...]
    paddings: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Derived:
    nbytes: int
    derived: int


@dataclass(frozen=True, slots=True)
class _Exempt:
    nbytes: int
    job: int


_Unit: TypeAlias = "_Rows | _Padding | _Scratch | _Derived | _Exempt"


class RankScrubber:
    """The turns of one layout.

    Args:
        bound: Layout, live tensors and digest jobs of the rank.
        budget_bytes: Bytes of a turn; a tensor that is no binding, or whose bytes must be put back in order, is not divided.
        digest: Digests jobs under a key seed.
        first_exempt: Partial digest of each exempt tensor when it was first seen, by name, dtype and shape.
    """

    def __init__(
        self,
        bound: Any,
        *,
        budget_bytes: int,
        digest: Digest,
        first_exempt: Mapping[tuple[Any, ...], PartialDigest],
    ) -> None:
        """Divide all that is resident into turns."""
        self.bound = bound
        self.budget_bytes = budget_bytes
        self._digest = digest
        self._first_exempt = first_exempt
        self._turns: list[list[_Unit]] = [[]]
        held = 0
        for unit in _units(bound, budget_bytes):
            if held and held + unit.nbytes > budget_bytes:
                self._turns.append([])
                held = 0
            self._turns[-1].append(unit)
            held += unit.nbytes

    @property
    def turns(self) -> int:
        """Turns of a whole cycle."""
        return len(self._turns)

    def read(self, turn: int, key_seed: bytes) -> tuple[tuple[ScrubSlice, ...], tuple[str, ...], int]:
        """Read one turn.

        Returns:
            The slices of bindings, what else is wrong in words, and the bytes read.
        """
        units = self._turns[turn % self.turns]
        rows = [unit for unit in units if isinstance(unit, _Rows)]
        partials = self._digest([self._job(unit) for unit in rows], key_seed)
        slices = [
            ScrubSlice(unit.binding, unit.low, unit.high, unit.rows, partial)
            for unit, partial in zip(rows, partials, strict=True)
        ]
        wrong: list[str] = []
        for unit in units:
            if isinstance(unit, _Scratch):
                reading = unit.reader.read(key_seed)
                whole = zip(unit.bindings, reading.partials, strict=True)
                slices += [ScrubSlice(binding, 0, 1, 1, partial) for binding, partial in whole]
                bad = zip(unit.paddings, reading.paddings, strict=True)
                wrong += [f"padding of {self._layout.paddings[at].resident}" for at, check in bad if not check.ok]
            elif not isinstance(unit, _Rows):
                wrong += self._judged(unit)
        return tuple(slices), tuple(wrong), sum(unit.nbytes for unit in units)

    @property
    def _layout(self) -> RankLayout:
        layout: RankLayout = self.bound.layout
        return layout

    def _job(self, unit: _Rows) -> DigestJob:
        job: DigestJob = self.bound.jobs[unit.job]
        if (unit.low, unit.high) == (0, unit.rows):
            return job
        box = Box((job.box.offsets[0] + unit.low, *job.box.offsets[1:]), (unit.high - unit.low, *job.box.sizes[1:]))
        return replace(job, view=job.view[unit.low : unit.high], box=box)

    def _judged(self, unit: _Padding | _Derived | _Exempt) -> Iterator[str]:
        if isinstance(unit, _Padding):
            claim = self._layout.paddings[unit.padding]
            count, first = wrong_padding(self.bound.jobs[unit.job].view, claim.value_byte)
            if count:
                yield f"padding of {claim.resident} at {first}"
        elif isinstance(unit, _Derived):
            derived = self._layout.derived[unit.derived]
            result = check_derived(derived, self.bound.tensors)
            if not result.ok:
                yield f"derived state {derived.resident} {result.detail}".rstrip()
        else:
            job = self.bound.exempt_jobs[unit.job]
            (partial,) = self._digest([job], DEFAULT_KEY_SEED)
            if self._first_exempt.get((job.fqn, job.dtype.name, job.shape), partial) != partial:
                yield f"exempt state {job.fqn}"


def _units(bound: Any, budget_bytes: int) -> Iterator[_Unit]:
    """Yield all that is resident, in the order of the layout."""
    layout = bound.layout
    nbytes = {resident.name: resident.storage_bytes for resident in layout.residents}
    seen: set[int] = set()
    for binding, job in enumerate(bound.binding_job):
        if job is not None and job not in seen:  # claims on the same memory share a job
            seen.add(job)
            yield from _rows(bound.jobs[job], binding, job, budget_bytes)
    for padding, job in enumerate(bound.padding_job):
        if job is not None:
            yield _Padding(_bytes_of(bound.jobs[job]), padding, job)
    yield from _scratch(bound, nbytes)
    for derived, claim in enumerate(layout.derived):
        yield _Derived(nbytes.get(claim.resident, 0), derived)
    for job, exempt in enumerate(bound.exempt_jobs):
        yield _Exempt(_bytes_of(exempt), job)


def _bytes_of(job: DigestJob) -> int:
    return prod(job.box.sizes) * job.dtype.itemsize_bytes


def _rows(job: DigestJob, binding: int, number: int, budget_bytes: int) -> Iterator[_Rows]:
    total = _bytes_of(job)
    rows = job.box.sizes[0] if job.box.sizes else 1
    if total <= budget_bytes or rows <= 1:
        yield _Rows(total, binding, number, 0, rows, rows)
        return
    step = max(1, budget_bytes * rows // total)
    for low in range(0, rows, step):
        high = min(rows, low + step)
        yield _Rows(total * (high - low) // rows, binding, number, low, high, rows)


def _scratch(bound: Any, nbytes: Mapping[str, int]) -> Iterator[_Scratch]:
    claims: dict[str, tuple[list[int], list[int]]] = {}
    for index, job in enumerate(bound.binding_job):
        if job is None:
            claims.setdefault(bound.layout.bindings[index].resident, ([], []))[0].append(index)
    for index, job in enumerate(bound.padding_job):
        if job is None:
            claims.setdefault(bound.layout.paddings[index].resident, ([], []))[1].append(index)
    for resident, (bindings, paddings) in claims.items():
        reader = ScratchReader(
            [bound.layout.bindings[i] for i in bindings], [bound.layout.paddings[i] for i in paddings], bound.tensors
        )
        yield _Scratch(nbytes.get(resident, 0), reader, tuple(bindings), tuple(paddings))
