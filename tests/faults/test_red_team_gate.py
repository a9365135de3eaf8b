"""Ways for a gate to say PROCEED, or to route, without a worker that is READY now."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from simulated_engine import SimulatedEngine, manifest_of, record_of, weights_of

from syncguard.agent.host import Agent
from syncguard.agent.service import AgentServer, ListenOptions
from syncguard.agent.settings import AgentConfig
from syncguard.errors import UnreachableError, UsageError, VersionOrderError
from syncguard.gate.controller import Gate
from syncguard.gate.readiness import Action, FleetState, GatePolicy, Mode, WorkerState, decide
from syncguard.gate.service import GateDaemon
from syncguard.gate.wire import decision_from_proto, decision_to_proto
from syncguard.manifest.verdict import Readiness, ReadinessState

T0, T1, T2 = weights_of(0), weights_of(1), weights_of(2)


class Rig:
    """A worker with its agent."""

    def __init__(self, name: str) -> None:
        self.engine = SimulatedEngine(T0, tp=1)
        self.agent = Agent(self.engine, worker=name, config=AgentConfig(scrub_interval_s=0, race_wait_s=0.0))
        self.server = AgentServer(self.agent, ListenOptions("127.0.0.1:0"))
        self.server.start()
        self.address = self.server.address

    def close(self) -> None:
        self.server.stop(0)
        self.agent.close()


@pytest.fixture
def rig():
    made: list[Rig] = []

    def make(name: str) -> Rig:
        made.append(Rig(name))
        return made[-1]

    yield make
    for one in made:
        one.close()


class Pool:
    """A router that keeps who is admitted."""

    def __init__(self) -> None:
        self.admitted: set[str] = set()
        self.removed = threading.Event()

    def admit(self, worker: str) -> None:
        self.admitted.add(worker)

    def remove(self, worker: str, because: str) -> None:
        assert because
        self.admitted.discard(worker)
        self.removed.set()


class Clock:
    """Time that tests move."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def ready(name: str, version: str = "run@1") -> WorkerState:
    return WorkerState(name, Readiness(ReadinessState.READY, "verified", "ok", version), seen_s=0.0)


def once(gate: Gate, address: str, meanwhile: Callable[[], object]) -> None:
    """Let something happen between the next answer of an agent's status and its use."""
    client = gate._clients[address]
    real = client.status

    def status(**options):
        answer = real(**options)
        client.status = real
        meanwhile()
        return answer

    client.status = status


def test_one_worker_under_two_addresses_is_not_a_quorum_of_two() -> None:
    state = FleetState("run@1", 0.0, (ready("10.0.0.1:30000"), ready("10.0.0.1:30000")))
    decision = decide(10.0, state, GatePolicy(mode=Mode.QUORUM, quorum=2))
    assert decision.action is Action.WAIT
    assert {worker.readiness.reason for worker in decision.workers} == {"duplicate_name"}


def test_one_agent_under_two_addresses_is_not_a_quorum_of_two(rig) -> None:
    one = rig("w")
    one.engine.push(T1, "run@1")
    port = one.address.rpartition(":")[2]
    with Gate([one.address, f"localhost:{port}"], policy=GatePolicy(mode=Mode.QUORUM, quorum=2)) as gate:
        decision = gate.after_push(manifest_of(T1, "run@1"), record_of(T0, T1))
        assert decision.action is not Action.PROCEED


def test_two_workers_of_one_name_are_not_routed_for_each_other(rig) -> None:
    good, stale = rig("127.0.0.1:30000"), rig("127.0.0.1:30000")
    good.engine.push(T1, "run@1")
    stale.engine.push(T0, "run@1")
    pool = Pool()
    with Gate([good.address, stale.address], routers=[pool]) as gate:
        gate.before_push("run@1")
        decision = gate.after_push(manifest_of(T1, "run@1"), record_of(T0, T1))
        assert decision.ready == ()
        assert pool.admitted == set()
        with pytest.raises(UsageError, match="a name of several agents"):
            gate.quarantine("127.0.0.1:30000", "which one?")
        shown = decision_to_proto(decision, gate.workers())
        assert [worker.verdict.status for worker in shown.workers] == [1, 2], "each its own verdict"
        assert decision_from_proto(shown).workers == decision.workers


def test_a_namesake_that_answers_later_takes_an_admitted_worker_out_again(rig) -> None:
    good, late = rig("w"), rig("w")
    good.engine.push(T1, "run@1")
    pool = Pool()
    with Gate([good.address, late.address], routers=[pool], watch_interval_s=0) as gate:
        gate.after_push(manifest_of(T1, "run@1"), record_of(T0, T1), workers=[good.address])
        assert pool.admitted == set()


def test_a_worker_that_fell_out_of_ready_while_another_was_verified_is_not_ready_in_the_decision(rig) -> None:
    quick, slow = rig("quick"), rig("slow")
    for one in (quick, slow):
        one.engine.push(T1, "run@1")
    verified, done = threading.Event(), threading.Event()
    quick.agent.listen(lambda readiness: verified.set() if readiness.state is ReadinessState.READY else None)
    slow.engine.before = lambda name: done.wait(20) if name == "observe" else None
    with Gate([quick.address, slow.address]) as gate:
        decisions = []
        thread = threading.Thread(
            target=lambda: decisions.append(gate.after_push(manifest_of(T1, "run@1"), record_of(T0, T1)))
        )
        thread.start()
        assert verified.wait(10)
        quick.engine.push(T2, "run@1")  # an unannounced update of the one that is READY
        quick.agent.watcher.poll()
        done.set()
        thread.join()
        (decision,) = decisions
        assert decision.ready == ("slow",)
        assert decision.action is not Action.PROCEED


def test_an_answer_older_than_the_agents_lease_is_no_answer(rig) -> None:
    one = rig("w")
    one.engine.push(T1, "run@1")
    clock = Clock()
    with Gate([one.address], clock=clock) as gate:
        assert gate.after_push(manifest_of(T1, "run@1"), record_of(T0, T1)).action is Action.PROCEED
        clock.now_s += one.agent.config.lease_s + 0.1
        (worker,) = gate.decision().workers
        assert (worker.readiness.state, worker.readiness.reason) == (ReadinessState.PENDING, "unreachable")
        assert gate.decision(refresh=True).action is Action.PROCEED


def test_who_asks_the_daemon_gets_a_decision_of_now(rig) -> None:
    one = rig("w")
    one.engine.push(T1, "run@1")
    with Gate([one.address]) as gate:
        daemon = GateDaemon(gate)  # not started: nothing looks by itself
        assert gate.after_push(manifest_of(T1, "run@1"), record_of(T0, T1)).action is Action.PROCEED
        one.engine.restart()
        one.agent.watcher.poll()
        assert daemon.fresh().action is not Action.PROCEED


def test_a_look_that_began_before_an_announcement_does_not_admit_a_worker_during_the_push(rig) -> None:
    one, other = rig("w"), rig("other")
    for each in (one, other):
        each.engine.push(T1, "run@1")
    pool = Pool()
    with Gate([one.address, other.address], routers=[pool], watch_interval_s=0) as gate:
        gate.after_push(manifest_of(T1, "run@1"), record_of(T0, T1))
        assert pool.admitted == {"w", "other"}
        once(gate, one.address, lambda: gate.before_push("run@2", workers=["w"]))
        decision = gate.decision(refresh=True)
        assert pool.admitted == {"other"}, "no request may reach a worker that is being updated"
        assert decision.ready == ("other",)


def test_a_look_between_the_removal_and_the_agents_answer_does_not_admit_a_worker(rig) -> None:
    one = rig("w")
    one.engine.push(T1, "run@1")
    pool = Pool()
    with Gate([one.address], routers=[pool], watch_interval_s=0) as gate:
        gate.after_push(manifest_of(T1, "run@1"), record_of(T0, T1))
        client = gate._clients[one.address]
        real = client.announce

        def announce(*arguments, **options):
            gate._look(one.address)  # the agent was not told yet, and says READY
            assert pool.admitted == set()
            return real(*arguments, **options)

        client.announce = announce
        gate.before_push("run@2")
        assert pool.admitted == set()


def test_a_worker_that_could_not_be_told_of_a_push_stays_out_until_it_is_verified(rig) -> None:
    one = rig("w")
    one.engine.push(T1, "run@1")
    pool = Pool()
    with Gate([one.address], routers=[pool], watch_interval_s=0, timeout_s=5.0) as gate:
        gate.after_push(manifest_of(T1, "run@1"), record_of(T0, T1))
        client = gate._clients[one.address]
        real = client.announce

        def lost(*_arguments, **_options):
            raise UnreachableError("the request was lost on its way")

        client.announce = lost
        (told,) = gate.before_push("run@2")
        assert told.reason == "unreachable"
        client.announce = real
        gate.decision(refresh=True)  # it may say READY, but it is pushed to
        assert pool.admitted == set()
        one.engine.push(T2, "run@2")
        assert gate.after_push(manifest_of(T2, "run@2"), record_of(T1, T2)).action is Action.PROCEED
        assert pool.admitted == {"w"}


def test_a_refused_announcement_leaves_a_worker_as_it_was(rig) -> None:
    one = rig("w")
    one.engine.push(T2, "run@2")
    pool = Pool()
    with Gate([one.address], routers=[pool], watch_interval_s=0) as gate:
        gate.after_push(manifest_of(T2, "run@2"), record_of(T0, T2))
        with pytest.raises(VersionOrderError):
            gate.before_push("run@1")
        gate.decision(refresh=True)
        assert pool.admitted == {"w"}


def test_routers_follow_between_calls_too(rig) -> None:
    one = rig("w")
    one.engine.push(T1, "run@1")
    pool = Pool()
    with Gate([one.address], routers=[pool], watch_interval_s=0.02) as gate:
        gate.after_push(manifest_of(T1, "run@1"), record_of(T0, T1))
        assert pool.admitted == {"w"}
        pool.removed.clear()
        one.engine.restart()
        one.agent.watcher.poll()
        assert pool.removed.wait(5), "nobody calls the gate, and yet it looks"
    assert not gate._watcher.is_alive()


def test_a_gate_with_routers_watches_by_default_and_one_without_does_not(rig) -> None:
    one = rig("w")
    with Gate([one.address], routers=[Pool()]) as gate:
        assert gate._watcher.is_alive()
    with Gate([one.address]) as gate:
        assert not gate._watcher.is_alive()


def test_one_agent_that_is_gone_does_not_keep_the_trainer_from_exporting_for_the_others(rig):
    alive, gone = rig("alive"), rig("gone")
    gone.server.stop(0)
    with Gate([gone.address, alive.address], timeout_s=2.0, verify_timeout_s=2.0) as gate:
        assert set(gate.forms()) == set(T0)
        assert gate.boxes().keys() == T0.keys()
        alive.server.stop(0)
        with pytest.raises(UnreachableError):
            gate.forms()
