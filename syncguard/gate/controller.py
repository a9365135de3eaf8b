"""The gate in an RL loop: one object, three calls.

    gate = Gate(["127.0.0.1:50051"])
    gate.before_push(version, record)      # workers leave READY; B_old is taken while T0 is resident
    ...                                    # push T1
    gate.after_push(manifest, record)      # digests, replay, flush and label of every worker, in parallel
    gate.verdicts(), gate.decision()       # one verdict per worker, and what to do

It owns the clock, the connections and the threads, and decides nothing: `gate.readiness.decide` does.
"""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from syncguard.errors import SyncguardError, UnreachableError, UsageError, VersionOrderError
from syncguard.gate.admission import Admission
from syncguard.gate.client import AgentClient, WorkerVerdict, unanswered
from syncguard.gate.readiness import Action, Decision, FleetState, GatePolicy, WorkerState, decide
from syncguard.gate.request import EncodedVerify
from syncguard.layout.published import agreed_forms
from syncguard.manifest.verdict import Readiness, ReadinessState, VerdictStatus
from syncguard.replay import ReplayPolicy, ReplayRecord
from syncguard.spec import WeightVersion

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from syncguard.gate.admission import Router
    from syncguard.manifest.model import Manifest
    from syncguard.rpc.credentials import ChannelCredentials
    from syncguard.spec import Box

log = logging.getLogger("syncguard.gate")
Records: TypeAlias = "ReplayRecord | Sequence[ReplayRecord] | None"
_T = TypeVar("_T")
_PARALLEL_MAX = 64
_WATCH_INTERVAL_S = 1.0


@dataclass(frozen=True, slots=True)
class Progress:
    """A step of one worker's verification.

    Attributes:
        worker: Name of the worker, or its address before the name is known.
        step: Name of the step.
        fraction: Finished part, 0 to 1.
    """

    worker: str
    step: str
    fraction: float


class Gate:
    """The trainer's handle on its rollout workers.

    Args:
        agents: Addresses of the agents, `HOST:PORT`.
        policy: When to go on, retry or stop.
        replay_policy: Limits of the replay.
        credentials: TLS files and token.
        routers: Told to remove a worker before a push and to admit it when it is READY.
        progress: Called from worker threads with each step.
        timeout_s: Longest time for calls that only ask.
        verify_timeout_s: Longest time of one verification.
        watch_interval_s: Seconds between two looks at all agents in the background, so that routers follow between
            calls too; 0 for none, None for 1 where there are routers.
        clock: Seconds that never go back, for leases and deadlines.

    Raises:
        UsageError: No agents, one named twice, or credentials that cannot be used.
    """

    def __init__(
        self,
        agents: Sequence[str],
        *,
        policy: GatePolicy | None = None,
        replay_policy: ReplayPolicy | None = None,
        credentials: ChannelCredentials | None = None,
        routers: Sequence[Router] = (),
        progress: Callable[[Progress], None] | None = None,
        timeout_s: float = 10.0,
        verify_timeout_s: float = 600.0,
        watch_interval_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Open the channels, and begin to watch where that is wanted."""
        if not agents or len(set(agents)) != len(agents):
            raise UsageError("agents of a gate", expected="one address or more, each once", found=list(agents))
        self.policy = policy if policy is not None else GatePolicy()
        self.replay_policy = replay_policy
        self._progress = progress
        self._clock = clock
        self._lock = threading.Lock()
        self._clients = {
            address: AgentClient(
                address, credentials=credentials, timeout_s=timeout_s, verify_timeout_s=verify_timeout_s
            )
            for address in agents
        }
        self._names = {address: address for address in agents}
        self._states = {address: WorkerState(address) for address in agents}
        self._verdicts: dict[str, WorkerVerdict] = {}
        self._wanted = ""
        self._published_s = 0.0
        self._admission = Admission(routers, agents, self._name)
        # What was asked before a newer announcement or verification is older than what came of that.
        self._generations = dict.fromkeys(agents, 0)
        self._pushing: set[str] = set()
        self._pool = ThreadPoolExecutor(min(_PARALLEL_MAX, len(agents)), thread_name_prefix="gate")
        if watch_interval_s is None:
            watch_interval_s = _WATCH_INTERVAL_S if routers else 0.0
        self._stop = threading.Event()
        self._watcher = threading.Thread(target=self._watch, args=(watch_interval_s,), name="gate-watch", daemon=True)
        if watch_interval_s:
            self._watcher.start()

    def __enter__(self) -> Gate:  # noqa: PYI034 - no subclasses are meant
        """Return the gate."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the channels."""
        self.close()

    def close(self) -> None:
        """Close the channels and end the threads; workers keep their readiness."""
        self._stop.set()
        if self._watcher.is_alive():
            self._watcher.join()
        self._pool.shutdown(wait=True, cancel_futures=True)
        for client in self._clients.values():
            client.close()

    def before_push(
        self,
        version: WeightVersion | str,
        record: Records = None,
        *,
        workers: Sequence[str] | None = None,
        rollback_because: str = "",
    ) -> list[Readiness]:
        """Take workers out of READY before weights are pushed, and take their old scores.

        Args:
            version: Version that is about to be pushed.
            record: Responses that are carried across the update.
            workers: Names or addresses; all where None.
            rollback_because: Why the version may go back; needs the admin role.

        Returns:
            One readiness a worker, in order; an agent that does not answer is PENDING, `unreachable`.

        Raises:
            VersionOrderError: The version goes back without a named rollback.
            UnreachableError: A router could not be told; nothing must be pushed.
        """
        target = WeightVersion.parse(version) if isinstance(version, str) else version
        records = _sequence(record)
        chosen = self._chosen(workers)

        def announce(address: str) -> Readiness:
            with self._lock:
                self._generations[address] += 1
                self._pushing.add(address)
            told = False
            try:
                # Out of the routers first: a push must not begin while one of them may still send requests.
                self._admission.tell(address, ready=False, because=f"{target} is about to be pushed")
                told = True
                name, readiness = self._clients[address].announce(target, records, rollback_because=rollback_because)
            except SyncguardError as error:
                if not told or isinstance(error, VersionOrderError):
                    self._put(address, pushing=False)
                    raise
                # The push may go on without this one, so it stays out until it is announced again or verified.
                self._put(address, pushing=True, unreachable=error.text())
                return Readiness(ReadinessState.PENDING, "unreachable", error.text(), since_s=time.time())
            self._names[address] = name
            self._put(address, pushing=False, worker=name, readiness=readiness, unreachable="", seen_s=self._clock())
            return readiness

        return list(self._pool.map(announce, chosen))

    def after_push(
        self,
        manifest: Manifest,
        record: Records = None,
        *,
        workers: Sequence[str] | None = None,
        replay_waived_because: str = "",
    ) -> Decision:
        """Verify workers after weights were pushed, all in parallel, and decide.

        Args:
            manifest: Every exported tensor of the pushed version, sealed.
            record: The responses with C_new (and C_old).
            workers: Names or addresses, for a retry of some; all that are not quarantined where None.
            replay_waived_because: Why no replay is made; the verdicts then say so.

        Returns:
            The decision; `verdicts()` holds one verdict a worker.
        """
        records = _sequence(record)
        self._publish(str(manifest.version))
        chosen = self._chosen(workers, quarantined=workers is not None)
        canary = self.policy.canary
        first = [a for a in chosen if canary and canary in (a, self._names[a])]
        rest = [a for a in chosen if a not in first]

        message = EncodedVerify.of(manifest, records, self.replay_policy, replay_waived_because)

        def verify(address: str) -> None:
            self._verify(address, message)

        list(self._pool.map(verify, first))
        if all(self._states[address].readiness_state is ReadinessState.READY for address in first):
            list(self._pool.map(verify, rest))
        # Asked again: those that were quick may have changed while the others were verified.
        decision = self.decision(refresh=True)
        for address, worker in zip(self._clients, decision.workers, strict=True):
            faults = self._states[address].faults_in_row
            if worker.action is Action.QUARANTINE and faults >= self.policy.quarantine_after:
                self._quarantine(address, worker.reason)
        return decision

    def expect(self, version: str) -> None:
        """Say which version workers must reach, before its verification begins; nobody is READY at another one."""
        self._publish(version)

    def verdicts(self) -> tuple[WorkerVerdict, ...]:
        """Return the verdict of each worker at the wanted version, in the order of the agents."""
        with self._lock:
            return tuple(self._verdicts[address] for address in self._clients if address in self._verdicts)

    def decision(self, *, refresh: bool = False) -> Decision:
        """Return what to do now, by answers that are younger than their agents' leases.

        Args:
            refresh: Ask every agent for its readiness first; without it, what was READY is PENDING once its lease is
                over.
        """
        if refresh:
            list(self._pool.map(self._look, self._clients))
        with self._lock:
            state = FleetState(self._wanted, self._published_s, tuple(self._states.values()))
        return decide(self._clock(), state, self.policy)

    def quarantine(self, worker: str, because: str) -> None:
        """Take a worker out until it is released."""
        self._quarantine(self._address(worker), because)

    def _quarantine(self, address: str, because: str) -> None:
        self._put(address, quarantined=because)
        self._admission.tell(address, ready=False, because=because)

    def release(self, worker: str) -> None:
        """Let a quarantined worker take part again; it is verified before it serves."""
        self._put(self._address(worker), quarantined="", faults_in_row=0, attempts=0)

    def capture(
        self, prompt_ids: Sequence[int], max_new_tokens: int, seed: int = 0, *, worker: str | None = None
    ) -> ReplayRecord:
        """Generate one response on a worker (the first where None) and return its record with A."""
        address = self._address(worker) if worker is not None else next(iter(self._clients))
        return self._clients[address].capture(prompt_ids, max_new_tokens=max_new_tokens, seed=seed)

    def boxes(self) -> dict[str, tuple[Box, ...]]:
        """Return the boxes of every logical tensor that the workers hold, for a manifest with parts.

        Raises:
            UnreachableError: No worker answered.
        """
        merged: dict[str, set[Box]] = {}
        for found in self._answers(AgentClient.boxes):
            for fqn, boxes in found.items():
                merged.setdefault(fqn, set()).update(boxes)
        return {fqn: tuple(sorted(boxes)) for fqn, boxes in merged.items()}

    def forms(self) -> dict[str, str]:
        """Return the dtype of every logical tensor that the workers hold, by its name, for `ManifestBuilder(forms=...)`.

        An exporter casts and quantizes by it what the engines hold in another form than it exports. Workers that hold one
        tensor in two forms cannot both be right: what most hold is taken, and the others' verdicts say so.

        Raises:
            UnreachableError: No worker answered.
        """
        return agreed_forms(self._answers(AgentClient.forms))

    def workers(self) -> tuple[WorkerState, ...]:
        """Return what is known of each worker."""
        with self._lock:
            return tuple(self._states.values())

    def _answers(self, ask: Callable[[AgentClient], _T]) -> list[_T]:
        """Ask all agents; one that does not answer, or whose engine does not, is left out: it is not ready in any case.

        Raises:
            UnreachableError: None answered.
        """
        failed: list[UnreachableError] = []

        def answer(client: AgentClient) -> list[_T]:
            try:
                return [ask(client)]
            except UnreachableError as error:
                failed.append(error)
                return []

        found = [one for answers in self._pool.map(answer, self._clients.values()) for one in answers]
        if not found:
            raise failed[0]
        return found

    # --- one worker ------------------------------------------------------------------------------------------------

    def _verify(self, address: str, message: EncodedVerify) -> None:
        name = self._names[address]

        def progress(step: str, fraction: float) -> None:
            if self._progress is not None:
                self._progress(Progress(name, step, fraction))

        with self._lock:
            self._generations[address] += 1
        try:
            found = self._clients[address].send(message, progress)
            unreachable = ""
        except SyncguardError as error:
            found = unanswered(name, address, error, time.time())
            unreachable = error.text() if isinstance(error, UnreachableError) else ""
        with self._lock:
            self._generations[address] += 1
            generation = self._generations[address]
            if not unreachable:
                self._pushing.discard(address)
            self._verdicts[address] = found
            self._states[address] = replace(
                self._states[address],
                worker=found.worker,
                readiness=found.readiness,
                verdict=found.verdict,
                seen_s=self._clock(),
                attempts=self._states[address].attempts + 1,
                unreachable=unreachable,
            )
        self._names[address] = found.worker
        if self._admission.routers:
            self._follow(address, generation)

    def _refresh(self, address: str) -> int:
        """Ask an agent for its readiness; an answer that is older than what is known tells the name only.

        Returns:
            The generation that the answer is of.
        """
        with self._lock:
            generation, lease_s = self._generations[address], self._states[address].lease_s
        asked_s = self._clock()
        changes: dict[str, object]
        try:
            # Silence is noticed within the lease.
            status = self._clients[address].status(brief=True, timeout_s=max(lease_s, 1.0))
        except SyncguardError as error:
            name, changes = None, {"unreachable": error.text()}
        else:
            self._names[address] = name = status.worker
            changes = {"readiness": status.readiness, "lease_s": status.lease_s, "seen_s": asked_s, "unreachable": ""}
        with self._lock:
            state = self._states[address]
            current = self._generations[address] == generation and address not in self._pushing
            if not current or asked_s < state.seen_s:
                changes = {}
            self._states[address] = replace(state, worker=name or state.worker, **changes)  # type: ignore[arg-type]
        return generation

    def _look(self, address: str) -> None:
        generation = self._refresh(address)
        if self._admission.routers:
            self._follow(address, generation)

    def _watch(self, interval_s: float) -> None:
        """Look at all agents again and again; one that answers late does not hold up the others."""
        looks: dict[str, Future[None]] = {}
        with ThreadPoolExecutor(min(_PARALLEL_MAX, len(self._clients)), thread_name_prefix="gate-look") as pool:
            while not self._stop.wait(interval_s):
                for address in self._clients:
                    last = looks.get(address)
                    if last is not None and not last.done():
                        continue
                    if last is not None and (failed := last.exception()) is not None:
                        log.error("looking at %s failed: %r", address, failed)
                    try:
                        looks[address] = pool.submit(self._look, address)
                    except RuntimeError:  # the interpreter ends, and nobody closed the gate
                        return

    def _name(self, address: str) -> str:
        """Return the worker's name, asking for it while only the address is known."""
        if self._names[address] == address:
            self._refresh(address)
        return self._names[address]

    def _publish(self, wanted: str) -> None:
        with self._lock:
            if wanted == self._wanted:
                return
            for address, state in self._states.items():
                faulty = state.verdict is not None and state.verdict.status is not VerdictStatus.MATCH
                self._states[address] = replace(
                    state, verdict=None, attempts=0, faults_in_row=state.faults_in_row + 1 if faulty else 0
                )
            self._verdicts.clear()
            self._wanted = wanted
            self._published_s = self._clock()

    def _put(self, address: str, *, pushing: bool | None = None, **changes: object) -> None:
        with self._lock:
            self._generations[address] += 1
            if pushing is not None:
                (self._pushing.add if pushing else self._pushing.discard)(address)
            self._states[address] = replace(self._states[address], **changes)  # type: ignore[arg-type]

    def _follow(self, address: str, generation: int) -> None:
        """Let the routers follow what is known of a worker; a router that fails keeps the worker from READY.

        Nothing is done when something newer is under way: a worker must not be admitted while it is pushed to.
        """
        with self._admission.held(address):
            with self._lock:
                if self._generations[address] != generation or address in self._pushing:
                    return
                state = self._states[address]
            told = state.readiness
            # READY at its own version: a worker that waits for its turn in a rolling update goes on serving.
            ready = state.readiness_state is ReadinessState.READY and not state.quarantined and not state.unreachable
            because = told.message if told is not None else "never verified"
            try:
                self._admission.tell(address, ready=ready and not self._shares_name(address), because=because)
                if ready and self._shares_name(address):  # its namesake answered meanwhile
                    self._admission.tell(address, ready=False, because="several agents have its name")
            except SyncguardError as error:
                self._put(address, unreachable=f"router: {error.text()}")

    def _shares_name(self, address: str) -> bool:
        """Return whether another agent has the name: a router that knows names cannot tell the two apart."""
        return list(self._names.values()).count(self._names[address]) > 1

    def _address(self, worker: str) -> str:
        for attempt in range(2):
            found = [address for address, name in self._names.items() if worker in (name, address)]
            if len(found) > 1:
                raise UsageError(
                    "a name of several agents",
                    expected="one agent a name",
                    found=f"{worker}: {', '.join(found)}",
                    todo="start each agent with a --worker of its own, or name it by its address here",
                )
            if found:
                return found[0]
            if not attempt:  # names are known after the first answer of each agent
                list(self._pool.map(self._name, self._clients))
        raise UsageError("no such worker", expected=" ".join(self._names.values()), found=worker)

    def _chosen(self, workers: Sequence[str] | None, *, quarantined: bool = True) -> list[str]:
        if workers is not None:
            return [self._address(worker) for worker in workers]
        return [a for a in self._clients if quarantined or not self._states[a].quarantined]


def _sequence(record: Records) -> tuple[ReplayRecord, ...]:
    if record is None:
        return ()
    return (record,) if isinstance(record, ReplayRecord) else tuple(record)
