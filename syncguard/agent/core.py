"""The agent's state machine: events in; new state, effects and a reason out. Pure, `now_s` is an argument.

    UNKNOWN ──► UPDATING ──► INSTALLED ──► VERIFYING ──► READY / BLOCKED

READY is granted by `VerifyFinished` with a MATCH, and only when its ticket is the running one and its fence (engine
incarnation and update epoch of every rank) is the fence last seen. A lease that lapsed in a silence of the engine is
given back by `Reproved` under the very same fence. Everything else can only take READY away. A late verdict, of an older
ticket or another fence, changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, TypeAlias

from syncguard.agent.events import (
    Begin,
    Cancel,
    Effect,
    EngineLost,
    EngineSeen,
    Event,
    EvidenceAgainst,
    Fence,
    Refuse,
    Reproved,
    Scrubbed,
    Ticket,
    UpdateAnnounced,
    VerifyFinished,
    VerifyRequested,
)
from syncguard.manifest.verdict import Readiness, ReadinessState, VerdictStatus

if TYPE_CHECKING:
    from syncguard.spec import WeightVersion

_RUNS_REMEMBERED = 16


class Phase(str, Enum):
    """Where a worker is between two updates."""

    UNKNOWN = "UNKNOWN"
    UPDATING = "UPDATING"
    INSTALLED = "INSTALLED"
    VERIFYING = "VERIFYING"
    READY = "READY"
    BLOCKED = "BLOCKED"

    @property
    def readiness(self) -> ReadinessState:
        """What a router may make of it."""
        if self is Phase.READY:
            return ReadinessState.READY
        return ReadinessState.BLOCKED if self is Phase.BLOCKED else ReadinessState.PENDING


@dataclass(frozen=True, slots=True)
class Held:
    """What a READY worker was proven to hold."""

    fence: Fence
    version: WeightVersion
    manifest_id: str


@dataclass(frozen=True, slots=True)
class AgentState:
    """All that the agent remembers.

    Attributes:
        phase: Where the worker is.
        reason: Stable word.
        message: One sentence.
        since_s: Time of the last transition, in seconds of the caller's clock.
        seen: Fence last seen, None before the first answer.
        updating: An update session was open when last seen.
        label: The engine's label when last seen.
        announced: Version that a running update goes to.
        accepted: Newest version of each run whose manifest was accepted, with the manifest's id; newest run last.
        ticket_count: Tickets issued so far.
        running: The running verification.
        held: What was proven, while READY.
        lease_until_s: When READY ends unless the engine answers before.
        scrubbed_s: When the resident bytes were last looked at, while READY.
        lapsed: What was proven before a silence outlasted the lease, until anything else happens.
    """

    phase: Phase = Phase.UNKNOWN
    reason: str = "unverified"
    message: str = "nothing was verified since the agent started"
    since_s: float = 0.0
    seen: Fence | None = None
    updating: bool = False
    label: str = ""
    announced: WeightVersion | None = None
    accepted: tuple[tuple[WeightVersion, str], ...] = ()
    ticket_count: int = 0
    running: Ticket | None = None
    held: Held | None = None
    lease_until_s: float = 0.0
    scrubbed_s: float = 0.0
    lapsed: Held | None = None

    @property
    def version(self) -> WeightVersion | None:
        """Version that the phase speaks of."""
        if self.held is not None:
            return self.held.version
        if self.running is not None:
            return self.running.version
        if self.lapsed is not None:
            return self.lapsed.version
        return self.announced or (self.accepted[-1][0] if self.accepted else None)

    @property
    def readiness(self) -> Readiness:
        """The phase as others see it."""
        version = self.version
        return Readiness(
            self.phase.readiness, self.reason, self.message, str(version) if version is not None else "", self.since_s
        )


@dataclass(frozen=True, slots=True)
class CoreConfig:
    """Times of the state machine.

    Attributes:
        lease_s: READY ends this long after the last answer of the engine.
        scrub_lease_s: READY ends this long after the last look at the resident bytes; 0 for never.
    """

    lease_s: float = 5.0
    scrub_lease_s: float = 0.0

    def over_s(self, state: AgentState) -> float:
        """Return when READY ends, in seconds, unless the lease is renewed before."""
        if not self.scrub_lease_s:
            return state.lease_until_s
        return min(state.lease_until_s, state.scrubbed_s + self.scrub_lease_s)


@dataclass(frozen=True, slots=True)
class Step:
    """Outcome of one event.

    Attributes:
        state: The new state.
        effects: What the caller must do, in order, after journaling.
        reason: Why, also when nothing changed.
        transition: Phase, reason or spoken version changed, so that it must be journaled and announced.
    """

    state: AgentState
    effects: tuple[Effect, ...]
    reason: str
    transition: bool


def step(state: AgentState, event: Event, now_s: float, config: CoreConfig | None = None) -> Step:
    """Apply one event.

    Args:
        state: State before it.
        event: What happened.
        now_s: Time, in seconds; never goes back for one state.
        config: Times.
    """
    rules = config if config is not None else CoreConfig()
    after: AgentState
    effects: tuple[Effect, ...]
    if isinstance(event, EngineSeen):
        after, effects, why = _seen(state, event, now_s, rules)
    elif isinstance(event, EngineLost):
        after, effects, why = _lost(state, event, now_s, rules)
    elif isinstance(event, UpdateAnnounced):
        after, effects, why = _announced(state, event)
    elif isinstance(event, VerifyRequested):
        after, effects, why = _requested(state, event)
    elif isinstance(event, VerifyFinished):
        after, effects, why = _finished(state, event, now_s, rules)
    elif isinstance(event, EvidenceAgainst):
        after, effects, why = _against(state, event)
    elif isinstance(event, Reproved):
        after, effects, why = _reproved(state, event, now_s, rules)
    elif isinstance(event, Scrubbed):
        after, effects, why = _scrubbed(state, event, now_s, rules)
    else:
        after, effects, why = _expired(state, now_s, rules)
    moved = (after.phase, after.reason, after.version) != (state.phase, state.reason, state.version)
    # A refusal names its state in the journal too, but a state that did not move keeps its time.
    if moved:
        after = replace(after, since_s=now_s)
    return Step(after, effects, why, moved)


_Outcome: TypeAlias = "tuple[AgentState, tuple[Effect, ...], str]"


def _to(state: AgentState, phase: Phase, reason: str, message: str) -> _Outcome:
    """Leave for a phase in which nothing is proven and nothing runs."""
    cancelled: tuple[Effect, ...] = (Cancel(state.running.number, reason),) if state.running is not None else ()
    after = replace(state, phase=phase, reason=reason, message=message, running=None, held=None, lapsed=None)
    return after, cancelled, reason


def _seen(state: AgentState, event: EngineSeen, now_s: float, rules: CoreConfig) -> _Outcome:
    before = state.held.fence if state.held is not None else state.seen
    change = before.difference(event.fence) if before is not None else ""
    state = replace(state, seen=event.fence, updating=event.updating, label=event.label)
    if change in ("engine_restarted", "ranks_changed"):
        words = {"engine_restarted": "the engine restarted", "ranks_changed": "the set of ranks changed"}[change]
        return _to(state, Phase.UNKNOWN, change, f"{words}: now {event.fence}; verify again")
    if event.updating and state.phase is not Phase.UPDATING:
        return _to(
            state, Phase.UPDATING, "update_unannounced", "the engine is in an update session that nobody announced"
        )
    if event.updating:
        return state, (), state.reason
    if change:
        return _updated(state, event)
    if state.phase is Phase.UPDATING and state.reason == "update_unannounced":
        # The session closed without a finished update; bytes may have been written all the same.
        return _to(state, Phase.INSTALLED, "update_unannounced", "an unannounced update session closed; not verified")
    asked_s = now_s if event.asked_s is None else min(event.asked_s, now_s)
    return (state, (), state.reason) if state.held is None else _renewed(state, state.held, now_s, asked_s, rules)


def _updated(state: AgentState, event: EngineSeen) -> _Outcome:
    if state.phase is Phase.UPDATING and state.reason == "update_announced":
        return _to(state, Phase.INSTALLED, "installed", f"an update finished ({event.fence}); not verified yet")
    reason = state.reason if state.phase is Phase.INSTALLED else "update_unannounced"
    return _to(state, Phase.INSTALLED, reason, f"an update finished ({event.fence}) that was not verified")


def _renewed(state: AgentState, held: Held, now_s: float, asked_s: float, rules: CoreConfig) -> _Outcome:
    """Renew the lease of a READY worker whose fence did not change.

    The lease counts from the question: a slow answer may show what the engine held when it was asked.
    """
    if state.label != str(held.version):
        return _to(
            state,
            Phase.BLOCKED,
            "version_label",
            f"the engine's label changed to {state.label!r}, but it was proven to hold {held.version}",
        )
    if now_s >= rules.over_s(state):
        return _lease_over(state)
    return replace(state, lease_until_s=max(state.lease_until_s, asked_s + rules.lease_s)), (), state.reason


def _lost(state: AgentState, event: EngineLost, now_s: float, rules: CoreConfig) -> _Outcome:
    if state.phase is Phase.READY:
        # One slow answer is no proof of a loss; the lease bounds how long it is tolerated.
        return _expired(state, now_s, rules) if now_s >= rules.over_s(state) else (state, (), "engine_silent")
    if state.phase is Phase.VERIFYING:
        return state, (), "engine_silent"  # the verification meets the same silence and reports it as its finding
    if state.reason == "engine_lost" or state.lapsed is not None or state.phase is Phase.BLOCKED:
        return state, (), state.reason
    return _to(state, Phase.UNKNOWN, "engine_lost", f"the engine does not answer: {event.why}")


def _expired(state: AgentState, now_s: float, rules: CoreConfig) -> _Outcome:
    if state.phase is Phase.READY and now_s >= rules.over_s(state):
        return _lease_over(state)
    return state, (), state.reason


def _scrubbed(state: AgentState, event: Scrubbed, now_s: float, rules: CoreConfig) -> _Outcome:
    """Renew the lease on the resident bytes; like an answer of the engine, only from when it was asked, and not later."""
    held = state.held
    if held is None or (held.fence, held.manifest_id) != (event.fence, event.manifest_id):
        return state, (), "late_evidence"
    if now_s >= rules.over_s(state):
        return _lease_over(state)
    return replace(state, scrubbed_s=max(state.scrubbed_s, min(event.asked_s, now_s))), (), state.reason


def _lease_over(state: AgentState) -> _Outcome:
    words = "the engine did not answer, or no scrub was made, within the lease; to be compared again when it does"
    after, effects, why = _to(state, Phase.UNKNOWN, "lease_expired", words)
    return replace(after, lapsed=state.held), effects, why


def _reproved(state: AgentState, event: Reproved, now_s: float, rules: CoreConfig) -> _Outcome:
    """Give READY back: same processes, same epoch, same bytes as when digest and replay were proven."""
    lapsed = state.lapsed
    if lapsed is None or (lapsed.fence, lapsed.manifest_id) != (event.fence, event.manifest_id):
        return state, (), "late_evidence"
    if state.seen != lapsed.fence or state.updating or state.label != str(lapsed.version):
        return state, (), "late_evidence"
    ready = replace(
        state,
        phase=Phase.READY,
        reason="reproved",
        message=event.message,
        held=lapsed,
        lapsed=None,
        lease_until_s=now_s + rules.lease_s,
        scrubbed_s=now_s,
    )
    return ready, (), "reproved"


def _announced(state: AgentState, event: UpdateAnnounced) -> _Outcome:
    newest = _newest(state, event.version)
    if newest is not None and event.version.older_than(newest[0]):
        if not event.rollback_because:
            return state, (_goes_back(event.version, newest[0]),), "version_order"
        # The version rolled back to is the new floor; its manifest is not known yet.
        kept = tuple(a for a in state.accepted if a[0].run_id != event.version.run_id)
        state = replace(state, accepted=(*kept, (event.version, "")))
    after, effects, why = _to(
        state, Phase.UPDATING, "update_announced", f"the trainer is about to push {event.version}"
    )
    return replace(after, announced=event.version), effects, why


def _requested(state: AgentState, event: VerifyRequested) -> _Outcome:
    newest = _newest(state, event.version)
    floor = newest[0] if newest is not None else None
    if state.announced is not None and (floor is None or floor.older_than(state.announced)):
        floor = state.announced if state.announced.run_id == event.version.run_id else floor
    if floor is not None and event.version.older_than(floor):
        refusal = _goes_back(event.version, floor)
        if state.phase in (Phase.UNKNOWN, Phase.INSTALLED):
            after, effects, why = _to(state, Phase.BLOCKED, "version_order", f"{refusal.what}: {refusal.found}")
            return after, (*effects, refusal), why
        return state, (refusal,), "version_order"
    if newest is not None and newest[0] == event.version and newest[1] not in ("", event.manifest_id):
        contradiction = Refuse(
            "a second manifest of one weight version with other content",
            expected=f"{event.version} as manifest {newest[1]}",
            found=f"manifest {event.manifest_id}",
            todo="send the first manifest again, or export under a new step",
        )
        # Nobody can say which of the two the worker should hold.
        after, effects, why = _to(state, Phase.BLOCKED, "version_order", f"{contradiction.what} ({event.version})")
        return after, (*effects, contradiction), why
    ticket = Ticket(state.ticket_count + 1, event.version, event.manifest_id)
    after, effects, _ = _to(state, Phase.VERIFYING, "verifying", f"{event.version} is being verified")
    others = tuple(a for a in state.accepted if a[0].run_id != event.version.run_id)[-(_RUNS_REMEMBERED - 1) :]
    after = replace(
        after,
        running=ticket,
        ticket_count=ticket.number,
        announced=None,
        accepted=(*others, (event.version, event.manifest_id)),
    )
    return after, (*effects, Begin(ticket)), "verifying"


def _finished(state: AgentState, event: VerifyFinished, now_s: float, rules: CoreConfig) -> _Outcome:
    running = state.running
    if running is None or running.number != event.ticket:
        return state, (), "late_verdict"
    after = replace(state, running=None)
    if event.status is not VerdictStatus.MATCH:
        if event.fence is None and state.updating:
            return _to(after, Phase.UPDATING, "update_unannounced", event.message)
        return _to(after, Phase.BLOCKED, event.reason, event.message)
    if event.fence is None or event.fence != state.seen or state.updating:
        phase = Phase.UPDATING if state.updating else Phase.INSTALLED
        return _to(after, phase, "observation_raced", "the engine changed while it was verified; nothing was concluded")
    held = Held(event.fence, running.version, running.manifest_id)
    ready = replace(
        after,
        phase=Phase.READY,
        reason=event.reason,
        message=event.message,
        held=held,
        lease_until_s=now_s + rules.lease_s,
        scrubbed_s=now_s,
    )
    return ready, (), event.reason


def _against(state: AgentState, event: EvidenceAgainst) -> _Outcome:
    held = state.held if state.held is not None else state.lapsed
    if held is None or held.fence != event.fence or held.manifest_id != event.manifest_id:
        return state, (), "late_evidence"
    return _to(state, Phase.INSTALLED if event.doubt else Phase.BLOCKED, event.reason, event.message)


def _newest(state: AgentState, version: WeightVersion) -> tuple[WeightVersion, str] | None:
    return next((a for a in state.accepted if a[0].run_id == version.run_id), None)


def _goes_back(version: WeightVersion, newest: WeightVersion) -> Refuse:
    return Refuse(
        "a weight version that goes back",
        expected=f"{newest} or newer",
        found=str(version),
        todo="after a restart of the trainer use a new run id, or announce the update with a named rollback",
    )
