"""GateService over real gRPC: publications in the background, decisions as they change, health per worker."""

from __future__ import annotations

import contextlib

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from simulated_engine import SimulatedEngine, manifest_of, record_of, weights_of

from syncguard.agent.host import Agent
from syncguard.agent.service import AgentServer, ListenOptions
from syncguard.errors import UsageError
from syncguard.gate.controller import Gate
from syncguard.gate.readiness import Action
from syncguard.gate.service import GateDaemon, GateListenOptions, GateServer
from syncguard.gate.wire import decision_from_proto
from syncguard.manifest.wire import chunks_to_proto, header_to_proto, version_to_proto
from syncguard.rpc.failures import from_rpc_error
from syncguard.rpc.records import record_chunks
from syncguard.spec import SPEC_VERSION, WeightVersion
from syncguard.v1 import agent_service_pb2, gate_service_pb2_grpc
from syncguard.v1 import gate_service_pb2 as pb

T = [weights_of(seed) for seed in range(3)]


@pytest.fixture
def served():
    with contextlib.ExitStack() as closing:
        engines = [SimulatedEngine(T[0], label="run@0") for _ in range(2)]
        agents = [Agent(engine, worker=f"r{i}") for i, engine in enumerate(engines)]
        servers = [AgentServer(agent, ListenOptions("127.0.0.1:0")) for agent in agents]
        for server, agent in zip(servers, agents, strict=True):
            server.start()
            closing.callback(agent.close)
            closing.callback(server.stop, 0)
        gate = closing.enter_context(Gate([server.address for server in servers]))
        daemon = GateDaemon(gate, interval_s=0.1)
        server = GateServer(daemon, GateListenOptions("127.0.0.1:0"))
        daemon.start()
        server.start()
        closing.callback(daemon.stop)
        closing.callback(server.stop, 0)
        channel = closing.enter_context(grpc.insecure_channel(server.address))
        yield engines, agents, gate_service_pb2_grpc.GateServiceStub(channel), channel


def publication(step: int, old: int):
    manifest = manifest_of(T[step], f"run@{step}")
    yield pb.PublishManifestRequest(header=header_to_proto(manifest))
    for chunk in chunks_to_proto(manifest):
        yield pb.PublishManifestRequest(entries=chunk)
    for chunk in record_chunks([record_of(T[old], T[step])]):
        yield pb.PublishManifestRequest(record=chunk)


def announcement(step: int):
    header = agent_service_pb2.AnnounceUpdateRequest.Header(
        next=version_to_proto(WeightVersion("run", step)), spec_version=SPEC_VERSION
    )
    yield pb.AnnouncePushRequest(header=header)


def until(stream, action: Action, label: str):
    for answer in stream:
        decision = decision_from_proto(answer.decision)
        if decision.action is action and decision.weight_version == label:
            return decision
    raise AssertionError("the stream ended")


def test_a_publication_leads_to_a_decision_and_health_follows(served) -> None:
    engines, agents, stub, channel = served
    health = health_pb2_grpc.HealthStub(channel)

    def serving(name: str) -> bool:
        answer = health.Check(health_pb2.HealthCheckRequest(service=name))
        return answer.status == health_pb2.HealthCheckResponse.SERVING

    assert not serving("")
    stream = stub.WatchDecision(pb.WatchDecisionRequest(), timeout=30)
    assert stub.PublishManifest(publication(0, 0)).weight_version == "run@0"
    assert until(stream, Action.PROCEED, "run@0").ready == ("r0", "r1")
    assert serving("")
    assert serving("syncguard.rollout/r1")
    told = stub.AnnouncePush(announcement(1))
    assert [w.worker for w in told.workers] == ["r0", "r1"]
    assert until(stream, Action.WAIT, "run@0").ready == ()
    engines[0].push(T[1], "run@1")
    engines[1].label = "run@1"
    stub.PublishManifest(publication(1, 0))
    decision = until(stream, Action.RETRY_SYNC, "run@1")
    assert decision.named(Action.RETRY_SYNC) == ("r1",)
    assert serving("syncguard.rollout/r0")
    assert not serving("syncguard.rollout/r1")
    engines[1].push(T[1], "run@1")
    stub.PublishManifest(publication(1, 0))
    assert until(stream, Action.PROCEED, "run@1").ready == ("r0", "r1")
    engines[0].restart()
    agents[0].watcher.poll()
    assert until(stream, Action.WAIT, "run@1").ready == ("r1",)
    assert decision_from_proto(stub.GetDecision(pb.GetDecisionRequest()).decision).ready == ("r1",)


@pytest.mark.parametrize(
    ("method", "parts", "text"),
    [
        ("PublishManifest", [], "without a manifest"),
        ("PublishManifest", [pb.PublishManifestRequest()], "out of order"),
        ("AnnouncePush", [], "without its header"),
        ("AnnouncePush", [pb.AnnouncePushRequest(header=agent_service_pb2.AnnounceUpdateRequest.Header())], "version"),
    ],
)
def test_a_wrong_stream_is_one_clear_error(served, method: str, parts, text: str) -> None:
    with pytest.raises(grpc.RpcError) as raised:
        getattr(served[2], method)(iter(parts))
    assert text in from_rpc_error(raised.value, "gate").text()


def test_listening_off_loopback_without_credentials_is_refused() -> None:
    with Gate(["127.0.0.1:1"]) as gate, pytest.raises(UsageError, match="off loopback"):
        GateServer(GateDaemon(gate), GateListenOptions("0.0.0.0:0"))
