"""AgentService over real gRPC on loopback: streams, health, roles, TLS, and messages that nobody should send."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading

import grpc
import pytest
from certificates import Authority
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_engine import SimulatedEngine, manifest_of, record_of, weights_of

from syncguard.agent.host import Agent
from syncguard.agent.service import AgentServer, ListenOptions
from syncguard.agent.settings import AgentConfig
from syncguard.agent.verify import VerifyRequest
from syncguard.errors import (
    BadInputError,
    IncompleteError,
    ManifestError,
    RecordError,
    SpecVersionError,
    SyncguardError,
    UnreachableError,
    UsageError,
    VersionOrderError,
)
from syncguard.gate import request
from syncguard.gate.client import AgentClient
from syncguard.manifest.verdict import FindingCode, ReadinessState, VerdictStatus
from syncguard.manifest.wire import chunks_to_proto, header_to_proto
from syncguard.replay import A, ReplayPolicy, ReplayStatus
from syncguard.rpc.credentials import Access, ChannelCredentials, Role
from syncguard.rpc.records import RECORD_LIMIT_BYTES, encode_records
from syncguard.rpc.streams import read_parts
from syncguard.spec import WeightVersion
from syncguard.v1 import agent_service_pb2 as pb
from syncguard.v1 import agent_service_pb2_grpc as rpc
from syncguard.v1 import manifest_pb2, replay_pb2

T0, T1 = weights_of(0), weights_of(1)
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


@contextlib.contextmanager
def served(engine: SimulatedEngine, options: ListenOptions | None = None):
    agent = Agent(engine, worker="w0", config=AgentConfig(poll_interval_s=0.05, race_wait_s=0.0))
    server = AgentServer(agent, options or ListenOptions("127.0.0.1:0"))
    server.start()
    try:
        yield agent, server
    finally:
        server.stop(0)
        agent.close()


@pytest.fixture(scope="module")
def engine():
    return SimulatedEngine(T0, tp=2, label="run@0")


@pytest.fixture(scope="module")
def shared(engine):
    with served(engine) as (agent, server):
        yield agent, server


@pytest.fixture
def client(shared):
    with AgentClient(shared[1].address, timeout_s=5.0) as made:
        yield made


@pytest.mark.parametrize("limit_bytes", [request.WHOLE_LIMIT_BYTES, 0], ids=["one message", "a stream"])
def test_an_update_from_capture_to_ready_over_the_wire(monkeypatch, limit_bytes: int) -> None:
    monkeypatch.setattr(request, "WHOLE_LIMIT_BYTES", limit_bytes)
    engine = SimulatedEngine(T0, tp=2, label="run@0")
    with served(engine) as (_, server), AgentClient(server.address) as client:
        captured = client.capture([7, 8, 9], max_new_tokens=6, seed=3)
        assert set(captured.scores) == {A}
        assert client.verify(manifest_of(T0, "run@0"), [record_of(T0, T0)]).readiness.state is ReadinessState.READY
        name, readiness = client.announce(WeightVersion("run", 1), [record_of(T0)])
        assert (name, readiness.state) == ("w0", ReadinessState.PENDING)
        engine.push(T1, "run@1")
        steps = []
        found = client.verify(
            manifest_of(T1, "run@1"), [record_of(T0, T1)], progress=lambda step, _done: steps.append(step)
        )
        assert found.verdict.status is VerdictStatus.MATCH
        assert found.replay.status is ReplayStatus.PASS
        assert found.replay.figure("B_new-C_new").mae == 0
        assert found.record is not None
        assert {"observe", "compare", "replay", "status"} <= set(found.seconds)
        assert steps == ["observe", "compare", "replay", "fence"]
        status = client.status()
        assert status.phase == "READY"
        assert status.last_verdict.status is VerdictStatus.MATCH
        assert status.last_replay == found.replay
        assert client.status(brief=True).last_verdict is None
        assert client.audit(manifest_of(T1, "run@1")).status is VerdictStatus.MATCH


def test_layouts_boxes_and_observations_come_over_the_wire(client: AgentClient, engine: SimulatedEngine) -> None:
    assert [str(layout.rank.tp_rank) for layout in client.layouts()] == ["0", "1"]
    assert {str(box) for box in client.boxes()["layers.0.weight"]} == {"[0:2, 0:6]", "[2:4, 0:6]"}
    assert client.observe(bytes(32)) == tuple(engine.observe(bytes(32)))


def test_the_policy_of_the_trainer_is_the_one_that_judges(client: AgentClient, engine: SimulatedEngine) -> None:
    engine.push(T0, "pol@1")
    strict = ReplayPolicy(mae_limit_nats=0.01, min_tokens=1000)
    found = client.verify(manifest_of(T0, "pol@1"), [record_of(T0, T0)], policy=strict)
    assert found.replay.status is ReplayStatus.INCOMPLETE
    assert found.verdict.status is VerdictStatus.INCOMPLETE


def test_a_version_that_goes_back_is_the_same_error_on_the_other_side(client: AgentClient) -> None:
    client.verify(manifest_of(T0, "back@5"), replay_waived_because="test")
    with pytest.raises(VersionOrderError) as raised:
        client.announce(WeightVersion("back", 3))
    assert raised.value.expected == "back@5 or newer"
    found = client.verify(manifest_of(T0, "back@3"), replay_waived_because="test")
    assert found.verdict.findings[0].code is FindingCode.VERSION_ORDER
    client.announce(WeightVersion("back", 3), rollback_because="restored from a checkpoint")


def test_health_follows_readiness_overall_and_by_name() -> None:
    engine = SimulatedEngine(T0, label="run@0")
    with served(engine) as (agent, server), grpc.insecure_channel(server.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        names = ["", "syncguard.rollout/w0"]

        def states():
            return [stub.Check(health_pb2.HealthCheckRequest(service=name)).status for name in names]

        assert states() == [NOT_SERVING] * 2
        watch = stub.Watch(health_pb2.HealthCheckRequest(service=names[1]), timeout=20)
        assert next(watch).status == NOT_SERVING
        with AgentClient(server.address) as client:
            client.verify(manifest_of(T0, "run@0"), replay_waived_because="test")
        assert states() == [SERVING] * 2
        assert next(watch).status == SERVING
        engine.push(T1, "run@1")
        agent.watcher.poll()
        assert states() == [NOT_SERVING] * 2
        assert next(watch).status == NOT_SERVING
        with pytest.raises(grpc.RpcError) as raised:
            stub.Check(health_pb2.HealthCheckRequest(service="syncguard.rollout/other"))
        assert raised.value.code() is grpc.StatusCode.NOT_FOUND


def test_watching_gives_the_current_readiness_and_each_change() -> None:
    engine = SimulatedEngine(T0, label="run@0")
    with served(engine) as (_, server), AgentClient(server.address) as client:
        stream = client.watch()
        assert next(stream).reason == "unverified"
        client.verify(manifest_of(T0, "run@0"), replay_waived_because="test")
        assert [next(stream).reason for _ in range(2)] == ["verifying", "verified_with_warnings"]
        stream.close()


def test_a_watcher_learns_that_the_agent_is_gone() -> None:
    with served(SimulatedEngine(T0)) as (_, server):
        client = AgentClient(server.address)
        stream = client.watch()
        next(stream)
        server.stop(0)
        with pytest.raises(UnreachableError):
            next(stream)


def test_reflection_names_the_services(shared) -> None:
    with grpc.insecure_channel(shared[1].address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        (answer,) = stub.ServerReflectionInfo(iter([request]))
    names = {service.name for service in answer.list_services_response.service}
    assert {"syncguard.v1.AgentService", "grpc.health.v1.Health"} <= names


# --- what nobody should send ----------------------------------------------------------------------------------------


def send(shared, parts, method: str = "Verify"):
    """Send raw parts and return the outcome, or raise the error as a client would."""
    with AgentClient(shared[1].address, timeout_s=10) as client:
        stub = rpc.AgentServiceStub(client._channel)
        return client._call(lambda: list(getattr(stub, method)(iter(parts), timeout=10)))


def header(manifest=None, **changes):
    message = header_to_proto(manifest or manifest_of(T0, "raw@1"))
    for name, value in changes.items():
        setattr(message, name, value)
    return pb.VerifyRequest(header=message)


def entries(manifest=None):
    return [pb.VerifyRequest(entries=chunk) for chunk in chunks_to_proto(manifest or manifest_of(T0, "raw@1"))]


def whole(**changes):
    chunks = [part.entries for part in entries()]
    return pb.VerifyRequest(whole=pb.VerifyRequest.Whole(**{"header": header().header, "entries": chunks} | changes))


@pytest.mark.parametrize(
    ("parts", "error", "text"),
    [
        (list, IncompleteError, "without a manifest"),
        (entries, BadInputError, "out of order"),
        (lambda: [header(), header()], BadInputError, "two headers"),
        (lambda: [header(), whole()], BadInputError, "two headers"),
        (lambda: [whole(entries=()), pb.VerifyRequest()], ManifestError, "entries of a manifest"),
        (lambda: [pb.VerifyRequest(whole=pb.VerifyRequest.Whole())], IncompleteError, "without a manifest"),
        (lambda: [header()], ManifestError, "entries of a manifest"),
        (lambda: [header(), *entries(), *entries()], ManifestError, "entries of a manifest"),
        (lambda: [header(entry_count=10**12), *entries()], ManifestError, "entries of a manifest"),
        (lambda: [header(spec_version=99), *entries()], SpecVersionError, "specification version"),
        (lambda: [header(manifest_id=bytes(16)), *entries()], ManifestError, "manifest id"),
        (lambda: [header(source="edited"), *entries()], ManifestError, "manifest id"),
        (lambda: [pb.VerifyRequest()], BadInputError, "out of order"),
        (
            lambda: [header(), *entries(), pb.VerifyRequest(record=replay_pb2.RecordChunk(data=b"not a record"))],
            RecordError,
            "not a replay record",
        ),
        (
            lambda: [
                header(),
                *entries(),
                pb.VerifyRequest(policy=pb.VerifyRequest.Policy(limits={"unheard_of": 1.0})),
            ],
            UsageError,
            "limit of the replay policy",
        ),
        (
            lambda: [
                header(),
                *entries(),
                pb.VerifyRequest(policy=pb.VerifyRequest.Policy(mae_limit_nats=float("nan"))),
            ],
            UsageError,
            "limit of the replay policy",
        ),
    ],
)
def test_a_wrong_stream_is_one_clear_error_and_changes_nothing(shared, parts, error, text: str) -> None:
    before = shared[0].state
    with pytest.raises(error, match=text):
        send(shared, parts())
    assert shared[0].state.ticket_count == before.ticket_count
    assert shared[0].state.phase == before.phase


@pytest.mark.parametrize("records", [0, 3])
def test_one_message_says_the_same_as_a_stream(monkeypatch, records: int) -> None:
    asked = (manifest_of(T1, "run@1"), [record_of(T0, T1)] * records, ReplayPolicy(mae_limit_nats=0.5), "a reason")
    (whole,) = request.EncodedVerify.of(*asked).parts
    monkeypatch.setattr(request, "WHOLE_LIMIT_BYTES", 0)
    stream = request.EncodedVerify.of(*asked).parts
    assert len(stream) == 3 + (records > 0)
    one, other = (read_parts(map(pb.VerifyRequest.FromString, parts)) for parts in ((whole,), stream))
    assert (one.header, one.chunks, one.entries, one.policy) == (
        other.header,
        other.chunks,
        other.entries,
        other.policy,
    )
    kept, also_kept = one.records.records(), other.records.records()
    assert len(kept) == len(also_kept) == records
    assert [encode_records([record]) for record in kept] == [encode_records([record]) for record in also_kept]


def test_records_that_are_too_large_are_refused_before_they_are_kept(shared) -> None:
    chunk = pb.VerifyRequest(record=replay_pb2.RecordChunk(data=bytes(8 << 20)))
    count = RECORD_LIMIT_BYTES // (8 << 20) + 1
    with pytest.raises(RecordError, match="records on the wire"):
        send(shared, [header(), *entries(), *[chunk] * count])


def test_too_many_entries_are_refused_while_they_come(shared) -> None:
    chunk = manifest_pb2.ManifestChunk(fqn=[""] * 50_000)
    with pytest.raises(ManifestError, match="at most 200000"):
        send(shared, [header(), *[pb.VerifyRequest(entries=chunk)] * 5])


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_mutated_real_streams_never_crash_the_agent_and_never_make_it_ready(shared, data) -> None:
    agent, server = shared
    parts = [part.SerializeToString() for part in (header(), *entries())]
    if data.draw(st.booleans()):
        parts = list(request.EncodedVerify.of(manifest_of(T0, "raw@1")).parts)
    index = data.draw(st.integers(0, len(parts) - 1))
    mutated = bytearray(parts[index])
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(mutated) - 1))
        mutated[place] ^= data.draw(st.integers(1, 255))
    parts[index] = bytes(mutated)
    before = agent.state.phase
    with grpc.insecure_channel(server.address) as channel:
        call = channel.stream_stream("/syncguard.v1.AgentService/Verify")
        with contextlib.suppress(grpc.RpcError):
            list(call(iter(parts), timeout=20))
    assert agent.state.phase.value != "READY" or before.value == "READY"
    with AgentClient(server.address) as client:
        assert client.status().worker == "w0"


@settings(max_examples=60, deadline=None)
@given(
    blob=st.binary(max_size=300), method=st.sampled_from(["Verify", "Audit", "AnnounceUpdate", "Capture", "Observe"])
)
def test_random_bytes_never_crash_the_agent(shared, blob: bytes, method: str) -> None:
    with grpc.insecure_channel(shared[1].address) as channel:
        call = channel.stream_stream(f"/syncguard.v1.AgentService/{method}")
        with contextlib.suppress(grpc.RpcError):
            list(call(iter([blob]), timeout=20))
    with AgentClient(shared[1].address) as client:
        assert client.status().worker == "w0"


def test_a_key_seed_without_meaning_is_refused(client: AgentClient) -> None:
    with pytest.raises(SyncguardError):
        client.observe(b"short")


def test_only_so_many_may_watch_at_once(shared) -> None:
    clients = [AgentClient(shared[1].address) for _ in range(16)]
    streams = [client.watch() for client in clients]
    for stream in streams:
        next(stream)
    with AgentClient(shared[1].address) as late, pytest.raises(UsageError, match="watch already"):
        next(late.watch())
    for stream, client in zip(streams, clients, strict=True):
        stream.close()
        client.close()


# --- who may speak --------------------------------------------------------------------------------------------------


def test_listening_off_loopback_without_credentials_is_refused() -> None:
    agent = Agent(SimulatedEngine(T0), worker="w0")
    for address in ("0.0.0.0:0", "[::]:0", "192.0.2.1:50051"):
        with pytest.raises(UsageError, match="off loopback without credentials"):
            AgentServer(agent, ListenOptions(address))


def test_a_plain_connection_off_loopback_is_refused() -> None:
    with pytest.raises(UsageError, match="plain connection off loopback"):
        AgentClient("192.0.2.1:50051")


def test_an_address_in_use_is_one_clear_error(shared) -> None:
    agent = Agent(SimulatedEngine(T0), worker="w1")
    with pytest.raises(UsageError, match="cannot listen"):
        AgentServer(agent, ListenOptions(shared[1].address))


def allowed(client: AgentClient) -> dict[str, bool]:
    """Which calls go through."""
    calls = {
        "status": client.status,
        "audit": lambda: client.audit(manifest_of(T0, "run@0")),
        "announce": lambda: client.announce(WeightVersion("run", 1)),
        "verify": lambda: client.verify(manifest_of(T0, "run@1"), replay_waived_because="test"),
        "rollback": lambda: client.announce(WeightVersion("run", 0), rollback_because="test"),
    }
    found = {}
    for name, call in calls.items():
        try:
            call()
        except UsageError as error:
            refusal = error.text()
            found[name] = "credentials" not in refusal
        else:
            found[name] = True
    return found


ROLES = {
    "nobody": [],
    "observe": ["status", "audit"],
    "verify": ["status", "audit", "announce", "verify"],
    "admin": ["status", "audit", "announce", "verify", "rollback"],
}


@pytest.mark.parametrize("role", ROLES)
def test_a_token_gives_its_role_and_no_more(role: str) -> None:
    tokens = {f"token-of-{name}-0123456789": Role.named(name) for name in ROLES if name != "nobody"}
    options = ListenOptions("127.0.0.1:0", access=Access.of(tokens=tokens))
    credentials = ChannelCredentials(token=f"token-of-{role}-0123456789")
    with (
        served(SimulatedEngine(T0, label="run@0"), options) as (_, server),
        AgentClient(server.address, credentials=credentials) as client,
    ):
        assert [name for name, ok in allowed(client).items() if ok] == ROLES[role]


@pytest.fixture(scope="module")
def authority(tmp_path_factory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.mark.parametrize("role", ROLES)
def test_a_certificate_name_gives_its_role_and_no_more(authority: Authority, role: str) -> None:
    access = Access.of(names=[f"{name}-client={name}" for name in ROLES if name != "nobody"])
    options = ListenOptions("127.0.0.1:0", tls=authority.issue("agent"), access=access)
    credentials = ChannelCredentials(tls=authority.issue(f"{role}-client"))
    with (
        served(SimulatedEngine(T0, label="run@0"), options) as (_, server),
        AgentClient(server.address, credentials=credentials) as client,
    ):
        assert [name for name, ok in allowed(client).items() if ok] == ROLES[role]


def test_a_client_without_or_with_a_foreign_certificate_is_not_let_in(authority: Authority, tmp_path) -> None:
    options = ListenOptions("127.0.0.1:0", tls=authority.issue("agent"), access=Access(anyone=Role.ADMIN))
    other = Authority(tmp_path, "someone")
    foreign = other.issue("admin-client")
    mixed = type(foreign)(foreign.certificate, foreign.key, authority.certificate)
    with served(SimulatedEngine(T0), options) as (_, server):
        for credentials in (ChannelCredentials(), ChannelCredentials(tls=mixed), ChannelCredentials(tls=foreign)):
            with (
                AgentClient(server.address, credentials=credentials, timeout_s=3) as client,
                pytest.raises(UnreachableError),
            ):
                client.status()


def test_with_tls_and_no_roles_named_nobody_may_do_anything(authority: Authority) -> None:
    options = ListenOptions("127.0.0.1:0", tls=authority.issue("agent"))
    with served(SimulatedEngine(T0), options) as (_, server):
        credentials = ChannelCredentials(tls=authority.issue("client"))
        with AgentClient(server.address, credentials=credentials) as client, pytest.raises(UsageError):
            client.status()


def test_secrets_do_not_show_in_texts() -> None:
    credentials = ChannelCredentials(token="very-secret-token-0123")
    access = Access.of(tokens={"very-secret-token-0123": Role.ADMIN})
    assert "very-secret" not in repr(credentials)
    assert "very-secret" not in repr(access)


def test_neither_agent_nor_gate_imports_torch() -> None:
    code = (
        "import sys, syncguard.agent.service, syncguard.agent.web, syncguard.gate.service, syncguard.engines.sglang;"
        "from syncguard.digest import selftest; print(selftest());"
        "bad = {'torch', 'sglang', 'transformers'} & set(sys.modules); sys.exit(str(bad) if bad else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 0


def test_many_clients_at_once_get_whole_answers(shared) -> None:
    failures = []

    def ask() -> None:
        try:
            with AgentClient(shared[1].address, timeout_s=30) as client:
                for _ in range(5):
                    assert client.status().worker == "w0"
        except Exception as error:  # noqa: BLE001 - collected
            failures.append(error)

    threads = [threading.Thread(target=ask) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_the_plain_health_port_answers_health_and_nothing_else(authority: Authority) -> None:
    options = ListenOptions("127.0.0.1:0", tls=authority.issue("agent"), health_address="127.0.0.1:0")
    with (
        served(SimulatedEngine(T0, label="run@0"), options) as (agent, server),
        grpc.insecure_channel(f"127.0.0.1:{server.health_port}") as channel,
    ):
        stub = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service="syncguard.rollout/w0")
        assert stub.Check(request).status == NOT_SERVING
        agent.verify(VerifyRequest(manifest_of(T0, "run@0"), replay_waived_because="test"))
        assert stub.Check(request).status == SERVING
        with pytest.raises(grpc.RpcError) as raised:
            rpc.AgentServiceStub(channel).GetStatus(pb.GetStatusRequest())
        assert raised.value.code() is grpc.StatusCode.UNIMPLEMENTED
