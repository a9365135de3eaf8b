"""The watcher: looks at the engine at a stated interval, scrubs resident memory, and proves again after a silence.

A poll asks for identity and update epoch only. Three threads, so that none can hold up another: one polls, one scrubs
and proves again, and one ends a lease that is over, which asks nobody. A scrub digests a part of what a READY worker
holds, the next part each time, and compares it with what was proven (`agent.scrub`), so that bytes that change without an
update are found. After a silence of the engine that outlasted the lease, a full comparison at the very same fence gives
READY back without a new push.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from syncguard.agent.events import EngineLost, EvidenceAgainst, Fence, Reproved, Scrubbed, Tick
from syncguard.agent.scrub import ScrubBook, ScrubOutcome, cycle_s, judge_scrub
from syncguard.agent.verification import gravest_code
from syncguard.agent.verify import Verifier
from syncguard.errors import SyncguardError
from syncguard.manifest.verdict import FindingCode, VerdictStatus

if TYPE_CHECKING:
    from collections.abc import Callable

    from syncguard.agent.core import Held
    from syncguard.agent.host import Agent
    from syncguard.engines.base import EngineAdapter
    from syncguard.manifest.model import Manifest, WorkerObservation

log = logging.getLogger("syncguard.agent")
_STUCK_S = 60.0


@dataclass(frozen=True, slots=True)
class Proven:
    """What the last verification to READY rested on, for scrubs and for proving again."""

    manifest: Manifest
    observation: WorkerObservation


class Watcher:
    """The watching thread of one agent.

    Args:
        agent: The agent.
        adapter: A second connection for polls, so that a long call does not hide the engine; None shares the agent's,
            and polls then wait for it.
    """

    def __init__(self, agent: Agent, adapter: EngineAdapter | None) -> None:
        """Prepare; `start` begins."""
        self._agent = agent
        self._adapter = adapter
        self._stop = threading.Event()
        self._threads: tuple[threading.Thread, ...] = ()
        self._tick_s = 0.0
        self._looked_s = agent.now_s()
        self._scrubbed_s = agent.now_s()
        self._book = ScrubBook()
        self._book_of: Proven | None = None

    def start(self) -> None:
        """Begin."""
        config, worker = self._agent.config, self._agent.worker
        lease_s = min(config.poll_interval_s, config.lease_s / 4)
        self._tick_s = min(config.poll_interval_s, config.scrub_interval_s or config.poll_interval_s)
        self._threads = tuple(
            threading.Thread(target=self._run, args=(every_s, work), name=f"{name}-{worker}", daemon=True)
            for name, every_s, work in (
                ("watch", config.poll_interval_s, self.poll),
                ("scrub", self._tick_s, self._compare),
                ("lease", lease_s, self._agent.end_lease),
            )
        )
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End, after a poll that is under way."""
        self._stop.set()
        for thread in self._threads:
            thread.join(timeout=10)
        if self._adapter is not None:
            self._adapter.close()

    def live(self) -> tuple[bool, str]:
        """Return whether the watcher does its work, and in words what it did last."""
        idle_s = self._agent.now_s() - self._looked_s
        if not self._stop.is_set() and not all(thread.is_alive() for thread in self._threads):
            return False, "the watcher has ended"
        limit_s = 10 * self._agent.config.poll_interval_s + _STUCK_S
        return idle_s <= limit_s, f"looked at the engine {idle_s:.1f} s ago"

    def _run(self, every_s: float, work: Callable[[], None]) -> None:
        while not self._stop.wait(every_s):
            self._guarded(work)

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception:
            log.exception("%s: watching failed", self._agent.worker)

    def _compare(self) -> None:
        every_s = self._agent.config.scrub_interval_s
        self.reprove()
        if every_s and self._agent.now_s() - self._scrubbed_s + self._tick_s / 2 >= every_s:
            self.scrub()

    def poll(self) -> None:
        """Look at the engine once and feed what was seen."""
        agent = self._agent
        self._looked_s = agent.now_s()
        if self._adapter is not None:
            self._poll(self._adapter)
        elif agent.engine_lock.acquire(timeout=agent.config.poll_interval_s):
            try:
                self._poll(agent.adapter)
            finally:
                agent.engine_lock.release()
        # else: a call holds the only connection; it feeds the status readings that it makes itself.
        agent.apply(Tick())

    def _poll(self, adapter: EngineAdapter) -> None:
        agent = self._agent
        began_s = agent.now_s()
        try:
            status = adapter.status()
        except Exception as error:  # noqa: BLE001 - whatever an engine does, the watcher goes on
            agent.apply(EngineLost(error.text() if isinstance(error, SyncguardError) else repr(error)))
        else:
            agent.feed(status, began_s)

    def scrub(self) -> None:
        """Digest the next part of what a READY worker holds, and block it when anything differs from what was proven.

        Skipped while another call has the engine, so that it never falls into a verification.
        """
        agent = self._agent
        ready = agent.state.held is not None
        if not ready or not agent.engine_lock.acquire(blocking=False):
            return
        try:
            # Read together while no verification runs: one that ends between the two would leave halves of two proofs.
            held, proven = agent.state.held, agent.proven
            if held is not None and proven is not None and proven.manifest.manifest_id == held.manifest_id:
                self._scrub(held, proven)
        except SyncguardError as error:
            log.warning("%s: no scrub: %s", agent.worker, error)
        finally:
            agent.engine_lock.release()

    def _scrub(self, held: Held, proven: Proven) -> None:
        agent = self._agent
        if self._book_of is not proven:  # by identity: a second proof at one fence may rest on storage elsewhere
            self._book, self._book_of = ScrubBook(), proven
        began_s = self._scrubbed_s = agent.now_s()
        # Each answer carries the fence that it was read at, so that no other question is needed.
        answers = agent.adapter.scrub(
            proven.manifest.key_seed, turn=self._book.turn, budget_bytes=agent.config.scrub_bytes
        )
        graphs = {rank.rank for rank in agent.engine.ranks if rank.graphs} if agent.engine is not None else set()
        found = judge_scrub(proven.observation, held.fence, self._book, answers, graphs=graphs)
        self._book = found.book
        if found.outcome is ScrubOutcome.SAME:
            agent.apply(Scrubbed(held.fence, held.manifest_id, began_s))
        elif found.outcome is ScrubOutcome.DIFFERENT:
            self._against(held.fence, held, found.reason, found.words)
        elif found.outcome in (ScrubOutcome.OTHER_LAYOUT, ScrubOutcome.UNREAD):
            self._look_at_all(held, proven)

    def _look_at_all(self, held: Held, proven: Proven) -> None:
        """Observe in full: experts that changed places are told from anything else, and nothing stays unread."""
        agent = self._agent
        began_s = agent.now_s()
        status = agent.status_now()
        observed = Verifier(agent.adapter, agent.worker).observe(status, proven.manifest.key_seed)
        if rebalanced(proven.observation, observed):
            words = "experts changed places since they were proven, and no update was seen; verify again"
            agent.apply(EvidenceAgainst(Fence.of(status), held.manifest_id, "rebalance", words, doubt=True))
            return
        different = difference(proven.observation, observed)
        if different:
            self._against(Fence.of(status), held, FindingCode.UNKNOWN_CONTENT.value, different)
        else:
            agent.apply(Scrubbed(Fence.of(status), held.manifest_id, began_s))

    def _against(self, fence: Fence, held: Held, reason: str, different: str) -> None:
        words = f"a scrub found bytes that no update wrote: {different}"
        self._agent.apply(EvidenceAgainst(fence, held.manifest_id, reason, words), {"scrub": different})

    def scrub_progress(self) -> dict[str, float]:
        """Return how scrubs of the proven state stand: turns and seconds of a cycle, and whole cycles."""
        config, book = self._agent.config, self._book
        return {
            "turns": book.turns,
            "turn_bytes": config.scrub_bytes,
            "interval_s": config.scrub_interval_s,
            "cycle_s": cycle_s(book, config.scrub_interval_s),
            "cycles": book.cycles,
        }

    def reprove(self) -> None:
        """After a silence that outlasted the lease, compare in full; the same fence and a MATCH give READY back."""
        agent = self._agent
        lapsed, proven = agent.state.lapsed, agent.proven
        if lapsed is None or proven is None or proven.manifest.manifest_id != lapsed.manifest_id:
            return
        if agent.state.seen != lapsed.fence or agent.state.updating:
            return
        found = agent.compare_again(proven.manifest)
        if found is None:
            return
        if found.verdict.status is VerdictStatus.MATCH and found.fence is not None:
            agent.apply(
                Reproved(found.fence, lapsed.manifest_id, f"silent for a while; {found.verdict.reason}"),
                dict(found.verdict.evidence),
            )
        elif found.verdict.status is VerdictStatus.MISMATCH and found.fence is not None:
            reason = gravest_code(found.verdict)
            agent.apply(EvidenceAgainst(found.fence, lapsed.manifest_id, reason, found.verdict.reason))


def rebalanced(proven: WorkerObservation, observed: WorkerObservation) -> bool:
    """Return whether the same resident views hold other parts of the model than before, as after EPLB."""

    def views(observation: WorkerObservation, *, parts: bool) -> list[object]:
        return [
            (
                layout.rank,
                layout.residents,
                [(binding.resident, binding.ops, binding.shard if parts else None) for binding in layout.bindings],
            )
            for layout in sorted(observation.layouts, key=lambda layout: layout.rank)
        ]

    moved = views(proven, parts=True) != views(observed, parts=True)
    return moved and views(proven, parts=False) == views(observed, parts=False)


def difference(proven: WorkerObservation, observed: WorkerObservation) -> str:
    """Return in words where two observations at one fence differ; empty when they are equal."""
    layouts = {layout.fingerprint: layout for layout in observed.layouts}
    before = {rank.rank: rank for rank in proven.ranks}
    for rank in observed.ranks:
        was = before.get(rank.rank)
        if was is None or was.layout_fingerprint != rank.layout_fingerprint:
            return f"rank {rank.rank} has another layout"
        bindings = layouts[rank.layout_fingerprint].bindings if rank.layout_fingerprint in layouts else ()
        for binding, old, new in zip(bindings, was.partials, rank.partials, strict=False):
            if old != new:
                return f"{binding.shard.tensor.fqn} {binding.shard.box} in {binding.resident} of rank {rank.rank}"
        if (was.partials, was.paddings, was.derived) != (rank.partials, rank.paddings, rank.derived):
            return f"padding or derived state of rank {rank.rank}"
        if was.altered != rank.altered:
            return f"exempt state of rank {rank.rank}: {', '.join(rank.altered) or 'as it was at first'}"
    return "" if len(observed.ranks) == len(proven.ranks) else "another number of ranks"
