"""The three calls of the gate, over real gRPC, on fleets of simulated workers."""

from __future__ import annotations

import contextlib
import threading

import pytest
from simulated_engine import SimulatedEngine, manifest_of, record_of, weights_of

from syncguard.agent.host import Agent
from syncguard.agent.service import AgentServer, ListenOptions
from syncguard.agent.settings import AgentConfig
from syncguard.errors import UnreachableError, UsageError, VersionOrderError
from syncguard.gate.controller import Gate
from syncguard.gate.fleet import ALL_STALE, ONE_RANK, ONE_STALE
from syncguard.gate.readiness import Action, GatePolicy, Mode
from syncguard.manifest.verdict import ReadinessState, VerdictStatus
from syncguard.replay import A, ReplayStatus

T = [weights_of(seed) for seed in range(8)]


class Fleet:
    """Workers with their agents."""

    def __init__(self, count: int, tp: int = 2) -> None:
        self.engines = [SimulatedEngine(T[0], tp=tp, label="run@0") for _ in range(count)]
        config = AgentConfig(race_wait_s=0.0)
        self.agents = [Agent(engine, worker=f"r{i}", config=config) for i, engine in enumerate(self.engines)]
        self.servers = [AgentServer(agent, ListenOptions("127.0.0.1:0")) for agent in self.agents]
        for server in self.servers:
            server.start()
        self.addresses = [server.address for server in self.servers]

    def close(self) -> None:
        for server, agent in zip(self.servers, self.agents, strict=True):
            server.stop(0)
            agent.close()

    def push(self, step: int, *, skip: tuple[int, ...] = (), **options) -> None:
        for index, engine in enumerate(self.engines):
            if index in skip:
                engine.label = f"run@{step}"
            else:
                engine.push(T[step], f"run@{step}", **options)


@pytest.fixture
def fleet():
    made = Fleet(3)
    yield made
    made.close()


def update(gate: Gate, fleet: Fleet, step: int, **options):
    gate.before_push(f"run@{step}", record_of(T[step - 1]))
    fleet.push(step, **options)
    return gate.after_push(manifest_of(T[step], f"run@{step}"), record_of(T[step - 1], T[step]))


def test_three_calls_and_everyone_is_ready(fleet: Fleet) -> None:
    with Gate(fleet.addresses) as gate:
        assert gate.after_push(manifest_of(T[0], "run@0"), record_of(T[0], T[0])).action is Action.PROCEED
        for step in (1, 2, 3):
            decision = update(gate, fleet, step)
            assert decision.action is Action.PROCEED
            assert decision.ready == ("r0", "r1", "r2")
            assert [v.worker for v in gate.verdicts()] == ["r0", "r1", "r2"]
            assert {v.replay.status for v in gate.verdicts()} == {ReplayStatus.PASS}
            assert all(v.readiness.weight_version == f"run@{step}" for v in gate.verdicts())
            assert all(v.record is not None and v.seconds for v in gate.verdicts())


def test_a_worker_can_be_named_before_any_call_was_made(fleet: Fleet) -> None:
    with Gate(fleet.addresses) as gate:
        gate.before_push("run@0", workers=["r2"])
    assert [agent.state.phase.value for agent in fleet.agents] == ["UNKNOWN", "UNKNOWN", "UPDATING"]
    with Gate(fleet.addresses) as gate, pytest.raises(UsageError, match="no such worker"):
        gate.before_push("run@0", workers=["r9"])


def test_before_the_push_nobody_is_ready(fleet: Fleet) -> None:
    with Gate(fleet.addresses) as gate:
        gate.after_push(manifest_of(T[0], "run@0"), record_of(T[0], T[0]))
        told = gate.before_push("run@1")
        assert [r.state for r in told] == [ReadinessState.PENDING] * 3
        assert all(agent.readiness.state is ReadinessState.PENDING for agent in fleet.agents)
        assert gate.decision().action is not Action.PROCEED


def test_a_push_that_reached_nobody_is_the_trainers_fault(fleet: Fleet) -> None:
    with Gate(fleet.addresses) as gate:
        gate.after_push(manifest_of(T[0], "run@0"), record_of(T[0], T[0]))
        decision = update(gate, fleet, 1, skip=(0, 1, 2))
        assert decision.action is Action.RETRY_SYNC
        assert [f.resident for f in decision.findings] == [ALL_STALE]
        decision = update(gate, fleet, 1, skip=(0, 1, 2))
        assert decision.action is Action.HALT


def test_one_stale_worker_is_named_retried_and_ready(fleet: Fleet) -> None:
    with Gate(fleet.addresses) as gate:
        gate.after_push(manifest_of(T[0], "run@0"), record_of(T[0], T[0]))
        decision = update(gate, fleet, 1, skip=(1,))
        assert decision.action is Action.RETRY_SYNC
        assert decision.named(Action.RETRY_SYNC) == ("r1",)
        assert [(f.resident, f.worker) for f in decision.findings] == [(ONE_STALE, "r1")]
        gate.before_push("run@1", workers=["r1"])
        fleet.engines[1].push(T[1], "run@1")
        decision = gate.after_push(manifest_of(T[1], "run@1"), record_of(T[0], T[1]), workers=["r1"])
        assert decision.action is Action.PROCEED
        assert decision.ready == ("r0", "r1", "r2")


def test_one_stale_rank_of_every_worker_is_named(fleet: Fleet) -> None:
    with Gate(fleet.addresses) as gate:
        gate.after_push(manifest_of(T[0], "run@0"), record_of(T[0], T[0]))
        decision = update(gate, fleet, 1, ranks=[0])
        assert {(f.resident, f.rank) for f in decision.findings} == {(ONE_RANK, "tp1/2")}


def test_a_worker_that_fails_again_and_again_is_quarantined_until_it_is_released(fleet: Fleet) -> None:
    with Gate(fleet.addresses, policy=GatePolicy(quarantine_after=2, retries=9)) as gate:
        gate.after_push(manifest_of(T[0], "run@0"), record_of(T[0], T[0]))
        for step in (1, 2, 3):
            decision = update(gate, fleet, step, skip=(2,))
        assert decision.action is Action.PROCEED
        assert decision.named(Action.QUARANTINE) == ("r2",)
        update(gate, fleet, 4)
        assert [v.worker for v in gate.verdicts()] == ["r0", "r1"], "a quarantined worker is not asked"
        gate.release("r2")
        assert update(gate, fleet, 5).ready == ("r0", "r1", "r2")


def test_the_canary_is_verified_first_and_alone_when_it_fails(fleet: Fleet) -> None:
    with Gate(fleet.addresses, policy=GatePolicy(canary="r1")) as gate:
        assert gate.after_push(manifest_of(T[0], "run@0"), record_of(T[0], T[0])).action is Action.PROCEED
        update(gate, fleet, 1, skip=(1,))
        assert [v.worker for v in gate.verdicts()] == ["r1"]
        assert [agent.state.phase.value for agent in fleet.agents] == ["UPDATING", "BLOCKED", "UPDATING"]


def test_an_agent_that_is_gone_is_named_and_the_others_are_verified(fleet: Fleet) -> None:
    fleet.servers[0].stop(0)
    with Gate(
        fleet.addresses, timeout_s=1.0, verify_timeout_s=5.0, policy=GatePolicy(Mode.QUORUM, 2, straggler_s=0.0)
    ) as gate:
        decision = gate.after_push(manifest_of(T[0], "run@0"), record_of(T[0], T[0]))
        assert decision.action is Action.PROCEED
        assert decision.ready == ("r1", "r2")
        gone = gate.verdicts()[0]
        assert gone.verdict.status is VerdictStatus.INCOMPLETE
        assert "no answer" in gone.verdict.reason


def test_a_version_that_goes_back_raises_in_the_trainer(fleet: Fleet) -> None:
    with Gate(fleet.addresses) as gate:
        gate.after_push(manifest_of(T[3], "run@3"), replay_waived_because="test")
        with pytest.raises(VersionOrderError):
            gate.before_push("run@1")
        gate.before_push("run@1", rollback_because="restored from a checkpoint")


def test_a_worker_that_falls_out_of_ready_changes_the_decision(fleet: Fleet) -> None:
    with Gate(fleet.addresses) as gate:
        gate.after_push(manifest_of(T[0], "run@0"), record_of(T[0], T[0]))
        fleet.engines[2].restart()
        fleet.agents[2].watcher.poll()
        decision = gate.decision(refresh=True)
        assert decision.action is Action.WAIT
        assert decision.ready == ("r0", "r1")


def test_progress_names_workers_and_steps(fleet: Fleet) -> None:
    steps = []
    lock = threading.Lock()

    def note(progress) -> None:
        with lock:
            steps.append((progress.worker, progress.step))

    with Gate(fleet.addresses, progress=note) as gate:
        gate.before_push("run@0")
        gate.after_push(manifest_of(T[0], "run@0"), record_of(T[0], T[0]))
    assert {worker for worker, _ in steps} == {"r0", "r1", "r2"}
    assert {"observe", "compare", "replay"} <= {step for _, step in steps}


def test_capture_and_boxes_come_from_the_workers(fleet: Fleet) -> None:
    with Gate(fleet.addresses) as gate:
        gate.decision(refresh=True)
        record = gate.capture([1, 2, 3], 4, worker="r1")
        assert record.worker == "r1"
        assert set(record.scores) == {A}
        assert {str(box) for box in gate.boxes()["layers.1.weight"]} == {"[0:2, 0:6]", "[2:4, 0:6]"}


def test_a_gate_without_agents_or_with_one_twice_is_refused() -> None:
    for agents in ([], ["127.0.0.1:1", "127.0.0.1:1"]):
        with pytest.raises(UsageError, match="agents of a gate"):
            Gate(agents)


class Pool:
    """A router that notes what it was told, and fails on demand."""

    def __init__(self) -> None:
        self.told: list[tuple[str, str]] = []
        self.broken = False
        self.inside: set[str] = set()

    def admit(self, worker: str) -> None:
        if self.broken:
            raise UnreachableError("gateway gone")
        self.told.append(("admit", worker))
        self.inside.add(worker)

    def remove(self, worker: str, because: str) -> None:
        if self.broken:
            raise UnreachableError("gateway gone")
        self.told.append(("remove", worker))
        self.inside.discard(worker)


def test_routers_hear_of_removals_before_the_push_and_of_admissions_after_ready(fleet: Fleet) -> None:
    pool = Pool()
    with Gate(fleet.addresses, routers=[pool]) as gate:
        gate.after_push(manifest_of(T[0], "run@0"), record_of(T[0], T[0]))
        assert pool.inside == {"r0", "r1", "r2"}
        gate.before_push("run@1", record_of(T[0]))
        assert pool.inside == set()
        fleet.push(1, skip=(1,))
        gate.after_push(manifest_of(T[1], "run@1"), record_of(T[0], T[1]))
        assert pool.inside == {"r0", "r2"}
        fleet.engines[0].restart()
        fleet.agents[0].watcher.poll()
        gate.decision(refresh=True)
        assert pool.inside == {"r2"}


def test_when_a_router_cannot_be_told_the_push_does_not_begin(fleet: Fleet) -> None:
    pool = Pool()
    with Gate(fleet.addresses, routers=[pool]) as gate:
        gate.after_push(manifest_of(T[0], "run@0"), record_of(T[0], T[0]))
        pool.broken = True
        with pytest.raises(UnreachableError, match="gateway gone"):
            gate.before_push("run@1")
        with contextlib.suppress(UnreachableError):
            gate.before_push("run@1")
        pool.broken = False
        gate.before_push("run@1")
        assert pool.inside == set()
