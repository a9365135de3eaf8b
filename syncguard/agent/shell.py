"""The shell around the state machine: one lock, one journal, one order in which others hear of a change.

Order of every transition: step, journal, then everyone else. A transition to READY that cannot be journaled does not
happen; one away from READY happens even then. No call here asks the engine anything.
"""

from __future__ import annotations

import json
import logging
import sqlite3
import threading
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from syncguard.agent.core import AgentState, CoreConfig, Phase, Step, step
from syncguard.agent.events import EngineSeen, Event, Fence, Tick
from syncguard.agent.journal import Journal, Transition
from syncguard.agent.subscription import Subscription

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from syncguard.agent.settings import AgentConfig
    from syncguard.engines.base import EngineStatus
    from syncguard.manifest.verdict import Readiness

log = logging.getLogger("syncguard.agent")


class Shell:
    """State, journal and subscribers of one worker's agent.

    Args:
        worker: Name of the worker.
        journal: Journal.
        config: Times and bounds.
        clock: Seconds that never go back, for leases and for the order of answers.
        wall: Seconds since the Unix epoch, for what people read.
    """

    def __init__(
        self,
        *,
        worker: str,
        journal: Journal,
        config: AgentConfig,
        clock: Callable[[], float],
        wall: Callable[[], float],
    ) -> None:
        """Restore the accepted versions; the state starts UNKNOWN, whatever the journal says."""
        self.worker = worker
        self.config = config
        self.journal = journal
        self._clock = clock
        self._wall = wall
        self._rules = CoreConfig(config.lease_s, config.scrub_lease_s if config.scrub_interval_s else 0.0)
        self._state_lock = threading.RLock()
        self._subscriptions: list[Subscription] = []
        self._listeners: list[Callable[[Readiness], None]] = []
        self._sampled_s = float("-inf")
        self._transition_counts: Counter[tuple[str, str]] = Counter()
        self.engine: EngineStatus | None = None
        restarted = bool(self.journal.transitions(1))
        self.state = AgentState(accepted=self.journal.accepted(), since_s=self._wall())
        if restarted:
            self.state = replace(
                self.state, reason="agent_restarted", message="the agent restarted; nothing was verified since"
            )
        self._journal(self.state, "started", {})

    @property
    def readiness(self) -> Readiness:
        """Current readiness. Looking at it ends a lease that is over, whatever the watcher is busy with."""
        self.end_lease()
        return self.state.readiness

    def now_s(self) -> float:
        """Return the agent's time, in seconds that never go back."""
        return self._clock()

    def wall_s(self) -> float:
        """Return the time that people read, in seconds since the Unix epoch."""
        return self._wall()

    def end_lease(self) -> None:
        """Leave READY when the lease is over; asks nobody, so that nothing can delay it."""
        state = self.state
        if state.phase is Phase.READY and self._clock() >= self._rules.over_s(state):
            self.apply(Tick())

    def lease_left_s(self) -> float:
        """Return the seconds after which READY ends unless the engine answers and a scrub finds nothing."""
        return self._rules.over_s(self.state) - self._clock()

    def transition_counts(self) -> dict[tuple[str, str], int]:
        """Return how often each (phase, reason) was entered since the start."""
        with self._state_lock:
            return dict(self._transition_counts)

    def listen(self, listener: Callable[[Readiness], None]) -> None:
        """Call `listener` now and at each change, in order, after it was journaled."""
        with self._state_lock:
            self._listeners.append(listener)
            listener(self.readiness)

    @contextmanager
    def subscribe(self) -> Iterator[Subscription]:
        """Yield a subscription that starts with the current readiness."""
        subscription = Subscription()
        with self._state_lock:
            subscription.put(self.readiness)
            self._subscriptions.append(subscription)
        try:
            yield subscription
        finally:
            with self._state_lock:
                self._subscriptions.remove(subscription)

    def apply(self, event: Event, evidence: dict[str, object] | None = None) -> Step:
        """Feed one event: step, journal, then tell everyone."""
        with self._state_lock:
            now_s = self._clock()
            done = step(self.state, event, now_s, self._rules)
            if done.transition:
                done = replace(done, state=replace(done.state, since_s=self._wall()))
                try:
                    self._journal(done.state, type(event).__name__, evidence or {})
                except sqlite3.Error as error:
                    done = self._unjournaled(done, error)
            self.state = done.state
            if done.transition:
                self._transition_counts[done.state.phase.value, done.state.reason] += 1
                log.info(
                    "%s is %s (%s): %s", self.worker, done.state.phase.value, done.state.reason, done.state.message
                )
                for subscription in self._subscriptions:
                    subscription.put(done.state.readiness)
                for listener in self._listeners:
                    listener(done.state.readiness)
            return done

    def _unjournaled(self, done: Step, error: sqlite3.Error) -> Step:
        log.error("%s: the journal cannot be written: %s", self.worker, error)
        if done.state.phase is not Phase.READY:
            return done
        blocked = replace(
            done.state,
            phase=Phase.BLOCKED,
            reason="journal_failed",
            message=f"verified, but the journal cannot be written: {error}",
            held=None,
        )
        return replace(done, state=blocked, reason="journal_failed")

    def _journal(self, state: AgentState, event: str, evidence: dict[str, object]) -> None:
        transition = Transition(
            at_s=state.since_s,
            phase=state.phase.value,
            reason=state.reason,
            message=state.message,
            version=str(state.version) if state.version is not None else "",
            fence=str(state.seen) if state.seen is not None else "",
            event=event,
            evidence=json.dumps(evidence),
        )
        self.journal.append(transition, state.accepted)

    def seen_ago_s(self) -> float:
        """Return how long ago the engine answered last, in seconds; infinite before its first answer."""
        return self._clock() - self._sampled_s

    def feed(self, status: EngineStatus, began_s: float) -> None:
        """Feed a status that was asked for at `began_s`."""
        with self._state_lock:
            if began_s < self._sampled_s:
                return  # an answer that was asked for before a newer one came may be older than it
            self._sampled_s = self._clock()
            self.engine = status
            updating = any(rank.updating for rank in status.ranks)
            self.apply(EngineSeen(Fence.of(status), updating, status.weight_version_label, began_s))

    def seen_now(self) -> Callable[[EngineStatus], None]:
        """Return a callback that feeds a status as one that was asked for now."""
        return lambda status: self.feed(status, self._clock())
