"""What scrubs of a READY worker have shown: whether one turn speaks against what was proven, and how far a cycle is. Pure.

A turn digests a bounded part of each rank. A binding that is read at once is compared with its proven partial digest. One
that takes several turns is added up, and the sum compared; each of its runs of rows is then known, so that from the next
cycle on a changed byte shows in the turn that reads it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, TypeAlias

from syncguard.digest import PartialDigest
from syncguard.manifest.verdict import FindingCode
from syncguard.spec import Box

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from syncguard.agent.events import Fence
    from syncguard.engines.base import RankScrub, ScrubSlice
    from syncguard.layout.model import Binding, RankIdentity, RankLayout
    from syncguard.manifest.model import RankObservation, WorkerObservation

_Run: TypeAlias = tuple[str, int, int, int]
"""Rank, binding, first row, one past the last row."""


class ScrubOutcome(Enum):
    """What a turn showed."""

    SAME = "same"
    """All that was read is as it was proven."""
    DIFFERENT = "different"
    """Bytes changed, and no update changed them."""
    RACED = "raced"
    """Read at another state than the proven one, or in an update: it says nothing."""
    OTHER_LAYOUT = "other_layout"
    """The same epoch, but other layers, tensors or places of experts; only a whole observation can tell."""
    UNREAD = "unread"
    """A whole cycle ended, and a binding that was proven was in none of its turns; only a whole observation can tell."""


@dataclass(frozen=True, slots=True)
class ScrubBook:
    """What the scrubs of one proven state have shown so far.

    Attributes:
        turn: The next turn to ask for; only grows.
        turns: Turns of a cycle, of the rank that needs most; 0 before the first.
        sums: Bindings that are being read, by rank and index: the runs so far.
        known: Partial digest of each run of a binding that once added up to what was proven.
        seen: Rows of each binding that were read in this cycle, by rank and index.
    """

    turn: int = 0
    turns: int = 0
    sums: Mapping[tuple[str, int], tuple[ScrubSlice, ...]] = field(default_factory=dict)
    known: Mapping[_Run, PartialDigest] = field(default_factory=dict)
    seen: Mapping[tuple[str, int], int] = field(default_factory=dict)

    @property
    def cycles(self) -> int:
        """Whole cycles that found nothing."""
        return self.turn // self.turns if self.turns else 0


@dataclass(frozen=True, slots=True)
class ScrubJudgement:
    """The outcome of a turn.

    Attributes:
        outcome: What it showed.
        book: The book after it; unchanged where it showed nothing.
        reason: Stable word, where something differs.
        words: What differs and where.
    """

    outcome: ScrubOutcome
    book: ScrubBook
    reason: str = ""
    words: str = ""


def cycle_s(book: ScrubBook, interval_s: float) -> float:
    """Return within how many seconds every resident byte is read; 0 while that is not known.

    A byte that changes is found at the latest this long after, while scrubs are made in time.
    """
    return book.turns * interval_s


def judge_scrub(
    proven: WorkerObservation,
    fence: Fence,
    book: ScrubBook,
    answers: Sequence[RankScrub],
    *,
    graphs: Collection[RankIdentity] = (),
) -> ScrubJudgement:
    """Judge one turn.

    Args:
        proven: What was observed when the worker was proven.
        fence: The fence of that proof.
        book: The book of that proof.
        answers: One answer a rank.
        graphs: Ranks that replay captured graphs.
    """
    read = tuple(sorted((str(answer.rank), answer.incarnation, answer.epoch) for answer in answers))
    if read != fence.ranks or any(answer.updating for answer in answers):
        return ScrubJudgement(ScrubOutcome.RACED, book)
    before = {rank.rank: rank for rank in proven.ranks}
    if any(
        answer.rank not in before or before[answer.rank].layout_fingerprint != answer.layout_fingerprint
        for answer in answers
    ):
        return ScrubJudgement(ScrubOutcome.OTHER_LAYOUT, book)
    layouts = {layout.fingerprint: layout for layout in proven.layouts}
    whole = True
    after = replace(book, turn=book.turn + 1, turns=max(answer.turns for answer in answers))
    for answer in answers:
        where = f"of rank {answer.rank}"
        if answer.wrong:
            words = f"{', '.join(answer.wrong)} {where}"
            return ScrubJudgement(ScrubOutcome.DIFFERENT, book, FindingCode.UNKNOWN_CONTENT.value, words)
        if answer.moved and answer.rank in graphs:
            words = f"{answer.moved[0]} {where} moved, and a captured graph reads its old place"
            return ScrubJudgement(ScrubOutcome.DIFFERENT, book, FindingCode.STORAGE_MOVED.value, words)
        layout = layouts[answer.layout_fingerprint]
        after, different = _read(after, answer, before[answer.rank], layout.bindings)
        if different:
            return ScrubJudgement(ScrubOutcome.DIFFERENT, book, FindingCode.UNKNOWN_CONTENT.value, different)
        if after.turn % max(1, answer.turns) == 0:  # a cycle of this rank ended
            rank = str(answer.rank)
            whole = whole and not _unread(layout, {at: n for (of, at), n in after.seen.items() if of == rank})
            after = replace(after, seen={place: n for place, n in after.seen.items() if place[0] != rank})
    return ScrubJudgement(ScrubOutcome.SAME if whole else ScrubOutcome.UNREAD, after)


def _unread(layout: RankLayout, seen: Mapping[int, int]) -> bool:
    """Return whether a binding was not read; one that claims the same view of the same memory as another is read with it."""
    root = {resident.name: resident.alias_of or resident.name for resident in layout.residents}
    views = [
        (root.get(binding.resident, binding.resident), binding.ops, binding.shard.box) for binding in layout.bindings
    ]
    read = {views[index] for index, rows in seen.items() if rows >= _rows(layout.bindings[index])}
    return any(
        view not in read and not binding.alias and binding.shard.box.count
        for view, binding in zip(views, layout.bindings, strict=True)
    )


def _read(
    book: ScrubBook, answer: RankScrub, proven: RankObservation, bindings: Sequence[Binding]
) -> tuple[ScrubBook, str]:
    """Enter one rank's slices; return the book, and what differs in words."""
    sums, known, seen = dict(book.sums), dict(book.known), dict(book.seen)
    rank = str(answer.rank)
    for part in answer.slices:
        if part.binding >= len(bindings):
            return book, f"binding {part.binding}, which was not proven, of rank {rank}"
        binding, expected = bindings[part.binding], proven.partials[part.binding]
        place, run = (rank, part.binding), (rank, part.binding, part.low, part.high)
        whole = (part.low, part.high) == (0, part.rows)
        seen[place] = seen.get(place, 0) + (_rows(binding) if whole else part.high - part.low)
        if run in known or whole:
            if part.partial != known.get(run, expected):
                return book, _words(binding, part.low, part.high, part.rows, rank)
            continue
        runs = (*sums.pop(place, ()), part) if part.low else (part,)
        if part.low and (len(runs) == 1 or runs[-2].high != part.low):
            continue  # the runs before it were not read in this cycle
        if part.high < part.rows:
            sums[place] = runs
            continue
        if PartialDigest.total(r.partial for r in runs) != expected:
            return book, _words(binding, 0, part.rows, part.rows, rank)
        known.update({(rank, r.binding, r.low, r.high): r.partial for r in runs})
    return replace(book, sums=sums, known=known, seen=seen), ""


def _rows(binding: Binding) -> int:
    return binding.shard.box.sizes[0] if binding.shard.box.sizes else 1


def _words(binding: Binding, low: int, high: int, rows: int, rank: str) -> str:
    box = binding.shard.box
    if (low, high) != (0, rows):
        box = Box((box.offsets[0] + low, *box.offsets[1:]), (high - low, *box.sizes[1:]))
    return f"{binding.shard.tensor.fqn} {box} in {binding.resident} of rank {rank}"
