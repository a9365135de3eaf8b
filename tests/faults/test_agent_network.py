"""A gate and an agent with a bad network between them, through a real proxy."""

from __future__ import annotations

import time

import pytest
from agent_proxy import Proxy
from simulated_engine import SimulatedEngine, manifest_of, record_of, weights_of

from syncguard.agent.core import Phase
from syncguard.agent.host import Agent
from syncguard.agent.service import AgentServer, ListenOptions
from syncguard.agent.settings import AgentConfig
from syncguard.errors import SyncguardError, UnreachableError
from syncguard.gate import request
from syncguard.gate.client import AgentClient
from syncguard.gate.controller import Gate
from syncguard.gate.readiness import Action
from syncguard.manifest import wire
from syncguard.manifest.verdict import ReadinessState, VerdictStatus

T = [weights_of(seed, tensors=400) for seed in range(3)]


@pytest.fixture
def worker():
    engine = SimulatedEngine(T[0], label="run@0")
    agent = Agent(engine, worker="w0", config=AgentConfig(race_wait_s=0.0))
    server = AgentServer(agent, ListenOptions("127.0.0.1:0"))
    server.start()
    with Proxy(server.address) as proxy:
        yield engine, agent, proxy
    server.stop(0)
    agent.close()


def wait_until(condition, timeout_s: float = 20.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "did not come about in time"
        time.sleep(0.01)


def test_delays_only_delay(worker) -> None:
    engine, _, proxy = worker
    proxy.mode, proxy.delay_s = "delay", 0.02
    with Gate([proxy.address]) as gate:
        gate.before_push("run@1", record_of(T[0]))
        engine.push(T[1], "run@1")
        assert gate.after_push(manifest_of(T[1], "run@1"), record_of(T[0], T[1])).action is Action.PROCEED


def test_a_half_open_connection_ends_in_time_and_not_in_ready(worker) -> None:
    engine, agent, proxy = worker
    with Gate([proxy.address], timeout_s=1.0, verify_timeout_s=1.5) as gate:
        gate.before_push("run@1")
        engine.push(T[1], "run@1")
        proxy.mode = "half_open"
        began_s = time.monotonic()
        decision = gate.after_push(manifest_of(T[1], "run@1"), record_of(T[0], T[1]))
        assert time.monotonic() - began_s < 10
        assert decision.action is not Action.PROCEED
        (verdict,) = gate.verdicts()
        assert verdict.verdict.status is VerdictStatus.INCOMPLETE
        assert verdict.readiness.state is ReadinessState.PENDING
    assert agent.state.phase is not Phase.READY


@pytest.mark.parametrize("whole", [True, False], ids=["one message", "a stream"])
@pytest.mark.parametrize("share", [0.05, 0.3, 0.6, 0.95])
def test_a_manifest_that_is_cut_on_its_way_is_no_manifest(worker, monkeypatch, whole: bool, share: float) -> None:
    engine, agent, proxy = worker
    engine.push(T[1], "run@1")
    if not whole:
        monkeypatch.setattr(request, "WHOLE_LIMIT_BYTES", 0)
        monkeypatch.setattr(wire, "ENTRIES_PER_CHUNK", 1)
    sent = request.EncodedVerify.of(manifest_of(T[1], "run@1"), replay_waived_because="test").parts
    proxy.mode, proxy.limit_bytes = "cut_after", int(share * sum(map(len, sent)))
    with AgentClient(proxy.address, timeout_s=2, verify_timeout_s=5) as client, pytest.raises(SyncguardError):
        client.verify(manifest_of(T[1], "run@1"), replay_waived_because="test")
    assert agent.state.phase is not Phase.READY
    assert agent.state.ticket_count == 0, "no part of a manifest may begin a verification"


def test_a_verification_whose_caller_was_cut_off_still_decides(worker) -> None:
    engine, agent, proxy = worker
    engine.push(T[1], "run@1")

    def cut(name: str) -> None:
        if name == "observe":
            proxy.mode = "refuse"
            proxy.cut()

    engine.before = cut
    with AgentClient(proxy.address, timeout_s=2, verify_timeout_s=5) as client:
        with pytest.raises(UnreachableError):
            client.verify(manifest_of(T[1], "run@1"), replay_waived_because="test")
        wait_until(lambda: agent.state.phase is Phase.READY)
        # Asked again, it says so.
        engine.before = lambda _name: None
        proxy.mode = "pass"
        wait_until(lambda: _answers(client))
        assert client.status().readiness.weight_version == "run@1"


def _answers(client: AgentClient) -> bool:
    try:
        return client.status().phase == "READY"
    except UnreachableError:
        return False


def test_a_worker_that_is_cut_off_is_not_waited_for_and_not_counted(worker) -> None:
    engine, _, proxy = worker
    with Gate([proxy.address], timeout_s=1.0, verify_timeout_s=5) as gate:
        gate.before_push("run@1")
        engine.push(T[1], "run@1")
        decision = gate.after_push(manifest_of(T[1], "run@1"), replay_waived_because="test")
        assert decision.action is Action.PROCEED
        proxy.mode = "refuse"
        proxy.cut()
        lost = gate.decision(refresh=True)
        assert lost.action is not Action.PROCEED
        assert lost.workers[0].readiness.state is ReadinessState.PENDING


def test_an_agent_that_cannot_be_told_before_a_push_is_pending_and_named(worker) -> None:
    _, _, proxy = worker
    proxy.mode = "refuse"
    with Gate([proxy.address], timeout_s=1.0, verify_timeout_s=1.0) as gate:
        (readiness,) = gate.before_push("run@1")
    assert (readiness.state, readiness.reason) == (ReadinessState.PENDING, "unreachable")
