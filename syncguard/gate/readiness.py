"""The gate's decision: what the fleet is, what to do, and why. Pure, `now_s` is an argument.

Order: an error of the trainer stops everything (HALT); faulty workers are retried by name, then quarantined; then the
policy says whether enough are READY (PROCEED), whether to wait, or whether the deadline has passed.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from syncguard.gate.fleet import fleet_findings, is_trainer_fault
from syncguard.manifest.verdict import Finding, Readiness, ReadinessState, Verdict, VerdictStatus

if TYPE_CHECKING:
    from collections.abc import Sequence


class Action(str, Enum):
    """What the trainer should do."""

    WAIT = "WAIT"
    PROCEED = "PROCEED"
    RETRY_SYNC = "RETRY_SYNC"
    QUARANTINE = "QUARANTINE"
    HALT = "HALT"


class Mode(str, Enum):
    """How many workers must be READY."""

    ALL = "all"
    QUORUM = "quorum"
    BEST_EFFORT = "best-effort"


@dataclass(frozen=True, slots=True)
class GatePolicy:
    """Policy as data.

    Attributes:
        mode: ALL: every worker that is not quarantined; QUORUM: `quorum` of them; BEST_EFFORT: at least one when the
            deadline is over.
        quorum: Workers needed in mode QUORUM, at least 1.
        deadline_s: Seconds from the publication after which waiting ends.
        straggler_s: Seconds after which, once the needed number is READY, the others are not waited for (modes other
            than ALL).
        retries: Times that the sync is retried for a worker at one version.
        quarantine_after: Faulty versions in a row after which a worker is quarantined.
        max_quarantined_share: Share of the fleet that may be quarantined before the gate halts instead.
        canary: Worker that must be READY before the others are pushed; empty for none.
    """

    mode: Mode = Mode.ALL
    quorum: int = 1
    deadline_s: float = 600.0
    straggler_s: float = 5.0
    retries: int = 1
    quarantine_after: int = 3
    max_quarantined_share: float = 0.5
    canary: str = ""


@dataclass(frozen=True, slots=True)
class WorkerState:
    """What the gate knows of one worker.

    Attributes:
        worker: Name.
        readiness: Last readiness that the agent told, None when it was never reached.
        verdict: Verdict at the wanted version, None before one came.
        seen_s: When the agent last answered.
        attempts: Verifications at the wanted version so far.
        faults_in_row: Versions in a row at which the worker was faulty.
        quarantined: Why it takes no part; empty when it does.
        unreachable: Why the agent did not answer the last call; empty when it did.
        lease_s: An answer of this agent older than this is no answer.
    """

    worker: str
    readiness: Readiness | None = None
    verdict: Verdict | None = None
    seen_s: float = 0.0
    attempts: int = 0
    faults_in_row: int = 0
    quarantined: str = ""
    unreachable: str = ""
    lease_s: float = float("inf")

    @property
    def readiness_state(self) -> ReadinessState:
        """The state last told; PENDING before the first answer."""
        return self.readiness.state if self.readiness is not None else ReadinessState.PENDING


@dataclass(frozen=True, slots=True)
class FleetState:
    """All workers and what is wanted of them.

    Attributes:
        wanted: Weight version label that workers must reach; empty before anything was published.
        published_s: When it was published.
        workers: The workers, in a fixed order.
        lease_s: An answer older than this is no answer; an agent's own lease may be shorter.
    """

    wanted: str = ""
    published_s: float = 0.0
    workers: tuple[WorkerState, ...] = ()
    lease_s: float = float("inf")


@dataclass(frozen=True, slots=True)
class WorkerDecision:
    """What to do with one worker, and why.

    Attributes:
        worker: Name.
        readiness: As the gate may use it: READY only at the wanted version and with a fresh answer.
        action: PROCEED, WAIT, RETRY_SYNC or QUARANTINE.
        reason: One sentence.
    """

    worker: str
    readiness: Readiness
    action: Action
    reason: str


@dataclass(frozen=True, slots=True)
class Decision:
    """What the trainer should do.

    Attributes:
        action: The action.
        reason: One sentence.
        weight_version: Version label it is about.
        workers: One decision a worker.
        findings: Findings about the fleet as a whole.
    """

    action: Action
    reason: str
    weight_version: str = ""
    workers: tuple[WorkerDecision, ...] = ()
    findings: tuple[Finding, ...] = field(default=())

    def __bool__(self) -> bool:
        """Refuse: compare `action` instead."""
        raise TypeError("a decision has no truth value; compare decision.action with Action.PROCEED")

    def named(self, action: Action) -> tuple[str, ...]:
        """Return the workers with this action."""
        return tuple(worker.worker for worker in self.workers if worker.action is action)

    @property
    def ready(self) -> tuple[str, ...]:
        """Workers that may serve the wanted version."""
        return self.named(Action.PROCEED)


def decide(now_s: float, state: FleetState, policy: GatePolicy) -> Decision:
    """Decide for the fleet.

    Args:
        now_s: Time, in seconds of the clock of `state`.
        state: The fleet.
        policy: The policy.
    """
    if not state.wanted:
        return Decision(Action.WAIT, "no version was published yet")
    names = Counter(worker.worker for worker in state.workers)
    workers = tuple(_worker(now_s, worker, state, policy, shared=names[worker.worker] > 1) for worker in state.workers)
    findings = fleet_findings(state.wanted, [(w.worker, w.verdict) for w in state.workers if not w.quarantined])
    action, reason = _Fleet(state, policy, workers, findings, now_s - state.published_s).decide()
    return Decision(action, reason, state.wanted, workers, findings)


def _worker(
    now_s: float, worker: WorkerState, state: FleetState, policy: GatePolicy, *, shared: bool
) -> WorkerDecision:
    readiness = _usable(now_s, worker, state, shared=shared)
    if worker.quarantined:
        return WorkerDecision(worker.worker, readiness, Action.QUARANTINE, worker.quarantined)
    if readiness.state is ReadinessState.READY:
        return WorkerDecision(worker.worker, readiness, Action.PROCEED, readiness.message)
    # With a shared name a push cannot help, and whom a quarantine would meet is unknown.
    if shared or worker.verdict is None or worker.verdict.status is VerdictStatus.MATCH:
        return WorkerDecision(worker.worker, readiness, Action.WAIT, readiness.message)
    said = f"{worker.verdict.status.value.lower()}: {worker.verdict.reason}"
    if worker.faults_in_row >= policy.quarantine_after:
        return WorkerDecision(
            worker.worker, readiness, Action.QUARANTINE, f"faulty at {worker.faults_in_row} versions in a row; {said}"
        )
    if worker.attempts <= policy.retries:
        return WorkerDecision(worker.worker, readiness, Action.RETRY_SYNC, said)
    return WorkerDecision(
        worker.worker, readiness, Action.QUARANTINE, f"faulty after {worker.attempts} pushes of {state.wanted}; {said}"
    )


def _usable(now_s: float, worker: WorkerState, state: FleetState, *, shared: bool) -> Readiness:
    """Return the readiness as the gate may use it: any doubt is PENDING."""
    told = worker.readiness
    if told is None or worker.unreachable:
        why = worker.unreachable or "the agent has not answered yet"
        return Readiness(ReadinessState.PENDING, "unreachable", why, since_s=told.since_s if told is not None else 0.0)
    if shared:
        why = f"several agents have the name {worker.worker}; start each with a --worker of its own"
        return Readiness(ReadinessState.PENDING, "duplicate_name", why, told.weight_version, told.since_s)
    if told.state is not ReadinessState.READY:
        return told
    if now_s - worker.seen_s > min(state.lease_s, worker.lease_s):
        why = f"no answer for {now_s - worker.seen_s:.1f} s"
        return Readiness(ReadinessState.PENDING, "unreachable", why, since_s=told.since_s)
    if told.weight_version != state.wanted:
        return Readiness(
            ReadinessState.PENDING,
            "other_version",
            f"ready at {told.weight_version}, wanted is {state.wanted}",
            told.weight_version,
            told.since_s,
        )
    return told


@dataclass(frozen=True, slots=True)
class _Fleet:
    """The fleet sorted by action, and the rules in their order."""

    state: FleetState
    policy: GatePolicy
    workers: tuple[WorkerDecision, ...]
    findings: tuple[Finding, ...]
    elapsed_s: float

    def of(self, *actions: Action) -> list[WorkerDecision]:
        return [worker for worker in self.workers if worker.action in actions]

    @property
    def ready(self) -> list[WorkerDecision]:
        return self.of(Action.PROCEED)

    @property
    def missing(self) -> list[WorkerDecision]:
        return self.of(Action.WAIT, Action.RETRY_SYNC)

    @property
    def needed(self) -> int:
        active = len(self.workers) - len(self.of(Action.QUARANTINE))
        return max(1, self.policy.quorum if self.policy.mode is Mode.QUORUM else active)

    def decide(self) -> tuple[Action, str]:
        for rule in (self.trainer_fault, self.too_many_faulty, self.enough, self.deadline):
            outcome = rule()
            if outcome is not None:
                return outcome
        retried = self.of(Action.RETRY_SYNC)
        if retried:
            return Action.RETRY_SYNC, f"push again to {_names(retried)}: {retried[0].reason}"
        waiting = _names(self.of(Action.WAIT))
        return Action.WAIT, f"{len(self.ready)} of {self.needed} needed workers are ready; waiting for {waiting}"

    def trainer_fault(self) -> tuple[Action, str] | None:
        fault = next((finding for finding in self.findings if is_trainer_fault(finding)), None)
        if fault is None or self.ready:
            return None
        attempts = max(worker.attempts for worker in self.state.workers)
        return (Action.RETRY_SYNC if attempts <= self.policy.retries else Action.HALT), fault.text

    def too_many_faulty(self) -> tuple[Action, str] | None:
        faulty = self.of(Action.QUARANTINE)
        if not self.workers:
            return Action.HALT, "the gate has no workers"
        if len(faulty) == len(self.workers) or len(faulty) > self.policy.max_quarantined_share * len(self.workers):
            return Action.HALT, f"{len(faulty)} of {len(self.workers)} workers are faulty: {_names(faulty)}"
        return None

    def enough(self) -> tuple[Action, str] | None:
        ready, total = len(self.ready), len(self.workers)
        if ready < self.needed:
            return None
        if not self.missing:
            return Action.PROCEED, f"{ready} of {total} workers are ready at {self.state.wanted}"
        if self.policy.mode is not Mode.ALL and self.elapsed_s >= self.policy.straggler_s:
            return Action.PROCEED, f"{ready} ready, {self.needed} needed; not waiting for {_names(self.missing)}"
        return None

    def deadline(self) -> tuple[Action, str] | None:
        if self.elapsed_s < self.policy.deadline_s:
            return None
        ready, late = len(self.ready), _names(self.missing)
        if self.policy.mode is Mode.BEST_EFFORT and ready:
            return Action.PROCEED, f"deadline: {ready} of {len(self.workers)} ready; without {late}"
        said = f"deadline of {self.policy.deadline_s:g} s passed: {ready} ready, {self.needed} needed"
        return Action.HALT, f"{said}; not ready: {late}"


def _names(workers: Sequence[WorkerDecision], shown: int = 8) -> str:
    names = [worker.worker for worker in workers]
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more
