"""Ways for an agent to be READY without proof: clocks, leases, caches, locks. Each test states what must hold."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from simulated_engine import SimulatedEngine, manifest_of, record_of, weights_of
from tiny_models import save_tiny_checkpoint

from syncguard.agent.host import Agent
from syncguard.agent.service import AgentServer, ListenOptions
from syncguard.agent.settings import AgentConfig
from syncguard.agent.verify import VerifyRequest
from syncguard.cli.agent import default_worker_name
from syncguard.engines.local import LocalEngine, LocalWorker
from syncguard.export.checkpoint import export_checkpoint
from syncguard.gate.client import AgentClient
from syncguard.layout.model import RankLayout
from syncguard.manifest.verdict import FindingCode, ReadinessState
from syncguard.spec import WeightVersion

T0, T1, T2 = weights_of(0), weights_of(1), weights_of(2)
CONFIG = AgentConfig(scrub_interval_s=0, race_wait_s=0.0)


class Clock:
    """Time that tests move."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def ready_agent(clock: Clock, **options) -> tuple[Agent, SimulatedEngine]:
    engine = SimulatedEngine(T0, tp=2)
    engine.push(T1, "run@1")
    agent = Agent(engine, worker="w", clock=clock, config=CONFIG, **options)
    outcome = agent.verify(VerifyRequest(manifest_of(T1, "run@1"), (record_of(T0, T1),)))
    assert outcome.readiness.state is ReadinessState.READY
    return agent, engine


@dataclass
class Hold:
    """A call of the engine that hangs: `entered` is set by it, `leave` lets it go on."""

    entered: threading.Event
    leave: threading.Event


@contextmanager
def held(engine: SimulatedEngine, call: str) -> Iterator[Hold]:
    """Let the engine's calls of one name hang until the block ends."""
    hold = Hold(threading.Event(), threading.Event())

    def enter(name: str) -> None:
        if name == call:
            hold.entered.set()
            hold.leave.wait(20)

    engine.before = enter
    try:
        yield hold
    finally:
        hold.leave.set()


def test_a_wall_clock_that_goes_back_does_not_hide_an_unannounced_update():
    clock, wall = Clock(), Clock()
    agent, engine = ready_agent(clock, wall=wall)
    clock.now_s += 1
    agent.watcher.poll()
    wall.now_s -= 3600  # a step of NTP, or a virtual machine that was restored
    engine.push(T2, "run@1")
    clock.now_s += 1
    agent.watcher.poll()
    assert agent.readiness.state is not ReadinessState.READY


def test_a_wall_clock_that_goes_back_does_not_lengthen_the_lease():
    clock, wall = Clock(), Clock()
    agent, engine = ready_agent(clock, wall=wall)
    wall.now_s -= 3600
    engine.alive = False
    clock.now_s += 6
    agent.watcher.poll()
    assert agent.readiness.state is not ReadinessState.READY
    assert agent.readiness.since_s == wall.now_s, "people read the wall clock"


def test_the_clock_of_leases_never_goes_back_by_default():
    agent = Agent(SimulatedEngine(T0), worker="w", config=CONFIG)
    assert agent.now_s.__self__._clock.__name__ == "monotonic"


def test_the_lease_ends_while_a_call_hangs_on_the_only_connection():
    clock = Clock()
    agent, engine = ready_agent(
        clock,
    )
    told = []
    agent.listen(lambda readiness: told.append(readiness.state))
    with held(engine, "layouts") as hold, ThreadPoolExecutor(1) as pool:
        pool.submit(agent.layouts)
        assert hold.entered.wait(5)
        clock.now_s += 100
        agent.watcher.poll()  # cannot get the connection
        assert told[-1] is not ReadinessState.READY, "subscribers hear of it, though nobody asks"
        assert agent.readiness.state is not ReadinessState.READY
        hold.leave.set()


def test_the_lease_ends_while_a_scrub_hangs():
    clock = Clock()
    agent, engine = ready_agent(clock)
    with held(engine, "scrub") as hold, ThreadPoolExecutor(1) as pool:
        pool.submit(agent.watcher.scrub)
        assert hold.entered.wait(5)
        clock.now_s += 100
        assert agent.readiness.state is not ReadinessState.READY
        hold.leave.set()


def test_a_scrub_that_hangs_does_not_keep_the_watcher_from_looking():
    engine, watched = SimulatedEngine(T0, tp=2), SimulatedEngine(T0, tp=2)
    engine.push(T1, "run@1")
    watched.incarnations, watched.epoch, watched.label = engine.incarnations, engine.epoch, engine.label
    config = replace(CONFIG, poll_interval_s=0.01, scrub_interval_s=0.01)
    agent = Agent(engine, worker="w", config=config, watch_adapter=watched)
    agent.verify(VerifyRequest(manifest_of(T1, "run@1"), (record_of(T0, T1),)))
    looked, left = threading.Event(), threading.Event()
    agent.listen(lambda readiness: left.set() if readiness.reason == "update_unannounced" else None)
    with held(engine, "scrub") as hold:
        agent.start()
        assert hold.entered.wait(5)
        watched.after = lambda _name: looked.set()
        looked.clear()
        assert looked.wait(5)
        watched.epoch += 1  # an update that nobody announced
        assert left.wait(5)
        hold.leave.set()
    agent.close()


def test_a_slow_answer_renews_the_lease_from_the_question():
    clock = Clock()
    agent, engine = ready_agent(clock)

    def slow(name: str) -> None:
        clock.now_s += 4.0 if name == "status" else 0.0

    engine.after = slow  # what is told is 4 s old when it arrives
    clock.now_s += 0.5
    agent.watcher.poll()
    assert agent.readiness.state is ReadinessState.READY
    engine.alive = False
    clock.now_s += 1.5  # 6 s after the question, 1.5 s after the answer
    assert agent.readiness.state is not ReadinessState.READY


def test_a_waived_replay_still_needs_an_empty_prefix_cache():
    engine = SimulatedEngine(T0, tp=2)
    engine.score([7, 8, 9, 1, 2], prompt_length=3)  # the prefix cache now holds keys and values of T0
    engine.push(T1, "run@1")
    agent = Agent(engine, worker="w", config=CONFIG)
    outcome = agent.verify(VerifyRequest(manifest_of(T1, "run@1"), replay_waived_because="no scores in this run"))
    assert outcome.readiness.state is ReadinessState.READY
    assert not engine.cached_by


def test_a_waived_replay_with_a_refused_flush_is_not_ready(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("syncguard.agent.replay_pass.FLUSH_WAIT_S", 0.0)
    engine = SimulatedEngine(T0, tp=2)
    engine.push(T1, "run@1")
    engine.flush_confirms = itertools.repeat(False)
    agent = Agent(engine, worker="w", config=CONFIG)
    outcome = agent.verify(VerifyRequest(manifest_of(T1, "run@1"), replay_waived_because="no scores in this run"))
    assert outcome.readiness.state is ReadinessState.BLOCKED
    assert outcome.verification.verdict.findings[0].code is FindingCode.FLUSH_NOT_CONFIRMED


def test_an_audit_flushes_nothing():
    engine = SimulatedEngine(T0, tp=2)
    engine.push(T1, "run@1")
    Agent(engine, worker="w", config=CONFIG).audit(manifest_of(T1, "run@1"))
    assert "flush" not in engine.calls


def test_status_calls_during_a_long_verification_do_not_starve_the_health_service():
    engine = SimulatedEngine(T0, tp=2)
    engine.push(T1, "run@1")
    agent = Agent(engine, worker="w", config=CONFIG)
    server = AgentServer(agent, ListenOptions("127.0.0.1:0"))
    server.start()
    client = AgentClient(server.address, timeout_s=5.0)
    with held(engine, "observe") as hold, ThreadPoolExecutor(50) as pool:
        running = pool.submit(client.verify, manifest_of(T1, "run@1"), (record_of(T0, T1),))
        assert hold.entered.wait(10)
        asked = [pool.submit(client.status) for _ in range(40)]
        with grpc.insecure_channel(server.address) as channel:
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5.0)
        assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING
        told = [one.result() for one in asked]
        assert all(one.phase == "VERIFYING" and one.engine_age_s > 0 for one in told), "and they say how old it is"
        hold.leave.set()
        assert running.result().readiness.state is ReadinessState.READY
    assert client.status().engine_age_s == 0
    client.close()
    server.stop(0)


def test_calls_that_hold_the_engine_leave_threads_for_health_and_announcements():
    engine = SimulatedEngine(T0, tp=2)
    agent = Agent(engine, worker="w", config=CONFIG)
    server = AgentServer(agent, ListenOptions("127.0.0.1:0"))
    server.start()
    client = AgentClient(server.address, timeout_s=5.0, verify_timeout_s=20.0)
    with held(engine, "layouts") as hold, ThreadPoolExecutor(50) as pool:
        asked = [pool.submit(client.layouts) for _ in range(40)]
        assert hold.entered.wait(10)
        with grpc.insecure_channel(server.address) as channel:
            health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5.0)
        _, readiness = client.announce(WeightVersion("run", 1))
        assert readiness.reason == "update_announced"
        hold.leave.set()
        failed = [one for one in asked if one.exception() is not None]
    assert 0 < len(failed) < 40
    assert all("busy" in str(one.exception()) for one in failed)
    client.close()
    server.stop(0)


def test_a_scrub_that_finds_lost_exempt_state_blocks(tmp_path):
    folder = save_tiny_checkpoint(tmp_path)
    worker = LocalWorker(folder)
    worker.set_label("run@1")
    agent = Agent(LocalEngine(worker), worker="w", config=CONFIG)
    manifest = export_checkpoint(folder, version=WeightVersion("run", 1))
    assert agent.verify(VerifyRequest(manifest, replay_waived_because="x")).readiness.state is ReadinessState.READY
    next(b for n, b in worker.ranks[0].named_buffers() if "cos_sin" in n)[-1] = 0
    agent.watcher.scrub()
    assert agent.readiness.state is ReadinessState.BLOCKED
    assert "exempt state" in agent.readiness.message


def test_the_default_name_of_a_worker_names_its_machine(monkeypatch: pytest.MonkeyPatch):
    names = set()
    for machine in ("node1", "node2"):
        monkeypatch.setattr("socket.gethostname", lambda machine=machine: machine)
        names.add(default_worker_name("http://127.0.0.1:30000/"))
    assert names == {"127.0.0.1:30000@node1", "127.0.0.1:30000@node2"}


def test_a_scrub_after_experts_changed_places_asks_for_a_new_verification():
    agent, engine = ready_agent(Clock())
    plain = engine._layout
    moved = {"layers.0.weight": "layers.1.weight", "layers.1.weight": "layers.0.weight"}
    for shard in engine.shards:
        shard["layers.0.weight"], shard["layers.1.weight"] = shard["layers.1.weight"], shard["layers.0.weight"]

    def swapped(rank: int) -> RankLayout:
        layout = plain(rank)
        bindings = tuple(
            replace(b, shard=replace(b.shard, tensor=replace(b.shard.tensor, fqn=moved.get(b.resident, b.resident))))
            for b in layout.bindings
        )
        return replace(layout, bindings=bindings).sealed()

    engine._layout = swapped
    agent.watcher.scrub()
    assert (agent.readiness.state, agent.readiness.reason) == (ReadinessState.PENDING, "rebalance")
    agent.watcher.poll()
    assert agent.readiness.state is ReadinessState.PENDING, "it does not come back by itself"
    outcome = agent.verify(VerifyRequest(manifest_of(T1, "run@1"), (record_of(T0, T1),)))
    assert outcome.readiness.state is ReadinessState.READY


def test_a_scrub_that_finds_other_resident_tensors_blocks():
    agent, engine = ready_agent(Clock())
    engine.shards[1]["layers.9.weight"] = engine.shards[1]["layers.0.weight"].copy()
    agent.watcher.scrub()
    assert agent.readiness.state is ReadinessState.BLOCKED
    assert "another layout" in agent.readiness.message
