"""AgentService over gRPC: strict streams in, one verification at a time, standard health and reflection beside it."""

from __future__ import annotations

import contextlib
import queue
import threading
from concurrent import futures
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Any, Final

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from syncguard.agent.verification import Verification, VerifyRequest, bounded
from syncguard.engines.base import EngineStatus
from syncguard.errors import IncompleteError, SyncguardError, UsageError
from syncguard.manifest.codec import check_spec_version
from syncguard.manifest.verdict import Readiness, ReadinessState
from syncguard.manifest.wire import layout_to_proto, manifest_from_proto, observation_to_proto, version_from_proto
from syncguard.manifest.wire_verdict import readiness_to_proto, verdict_to_proto
from syncguard.replay import ReplayPolicy
from syncguard.rpc.credentials import Access, Role, TlsFiles
from syncguard.rpc.failures import abort, guarded
from syncguard.rpc.limits import FINDINGS_LIMIT, PROMPT_TOKENS_LIMIT, SERVER_OPTIONS
from syncguard.rpc.records import record_chunks
from syncguard.rpc.replay_report import policy_from_proto, report_to_proto
from syncguard.rpc.server import bind, make_server
from syncguard.rpc.streams import StreamParts, read_parts
from syncguard.spec import SPEC_VERSION
from syncguard.v1 import agent_service_pb2 as pb
from syncguard.v1 import agent_service_pb2_grpc as rpc

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from syncguard.agent.host import Agent
    from syncguard.manifest.model import Manifest

SERVICE: Final = "syncguard.v1.AgentService"
_NEEDED: Final = {
    f"/{SERVICE}/{method}": role
    for method, role in {
        "GetStatus": Role.OBSERVE,
        "DescribeLayout": Role.OBSERVE,
        "Observe": Role.OBSERVE,
        "WatchReadiness": Role.OBSERVE,
        "Audit": Role.OBSERVE,
        "AnnounceUpdate": Role.VERIFY,
        "Verify": Role.VERIFY,
        "Capture": Role.VERIFY,
    }.items()
}
_WATCHERS_MAX: Final = 16
_LONG_MAX: Final = 10
_PROBE_THREADS: Final = 4
_STATUS_WAIT_S: Final = 0.1
"""A status waits no longer for a verification: callers that poll would take every thread of the server."""


def health_name(worker: str) -> str:
    """Return the name under which grpc.health.v1 answers for a worker."""
    return f"syncguard.rollout/{worker}"


@dataclass(frozen=True, slots=True)
class ListenOptions:
    """How the server listens.

    Attributes:
        address: `HOST:PORT` or `unix:PATH`; port 0 picks a free one.
        tls: Own files for mutual TLS; needed off loopback.
        access: Roles; None gives everyone ADMIN on loopback without TLS, and certificates nothing.
        health_address: A second, plain port with grpc.health.v1 alone, which can change nothing; for probes that speak
            no TLS, such as the kubelet's. Empty for none.
    """

    address: str = "127.0.0.1:50051"
    tls: TlsFiles | None = None
    access: Access | None = None
    health_address: str = ""

    def effective_access(self) -> Access:
        """Return the roles in force."""
        if self.access is not None:
            return self.access
        return Access(anyone=Role.ADMIN if self.tls is None else Role.NONE)


class AgentServicer(rpc.AgentServiceServicer):  # type: ignore[misc] # generated code is untyped
    """The calls, each a thin translation around `Agent`."""

    def __init__(self, agent: Agent, access: Access) -> None:
        """Serve one agent."""
        self._agent = agent
        self._access = access
        self._watchers = threading.BoundedSemaphore(_WATCHERS_MAX)
        self._long = threading.BoundedSemaphore(_LONG_MAX)

    def GetStatus(self, request: Any, _context: Any) -> Any:  # noqa: N802
        """Answer from the live engine; in brief, or when it is silent or busy, from what was last seen."""
        agent = self._agent
        brief = request.detail == pb.STATUS_DETAIL_BRIEF
        asked = None
        if not brief:
            with contextlib.suppress(SyncguardError):
                asked = agent.status(_STATUS_WAIT_S)
        status = asked if asked is not None else agent.engine
        age_s = 0.0 if asked is not None or status is None else agent.seen_ago_s()
        readiness = agent.readiness
        if status is None:
            status = EngineStatus(engine="", model="", weight_version_label="", expected_ranks=0, ranks=())
        last = None if brief else agent.last
        incarnations = sorted({rank.incarnation for rank in status.ranks})
        return pb.GetStatusResponse(
            worker=agent.worker,
            engine=status.engine,
            model=status.model,
            weight_version_label=status.weight_version_label,
            expected_ranks=status.expected_ranks,
            state=agent.state.phase.value,
            readiness=readiness_to_proto(readiness),
            epoch=max((rank.epoch for rank in status.ranks), default=0),
            incarnation=",".join(incarnations),
            spec_version=SPEC_VERSION,
            agent_version=metadata.version("syncguard"),
            last_verdict=verdict_to_proto(bounded(last.verdict, FINDINGS_LIMIT)) if last is not None else None,
            last_replay=report_to_proto(last.replay) if last is not None and last.replay is not None else None,
            poll_interval_s=agent.config.poll_interval_s,
            lease_s=agent.config.lease_s,
            vocab_size=status.vocab_size,
            engine_age_s=age_s,
            scrub_cycle_s=agent.watcher.scrub_progress()["cycle_s"],
        )

    def DescribeLayout(self, _request: Any, context: Any) -> Iterator[Any]:  # noqa: N802
        """Stream one layout a rank."""
        for layout in self._held(context, self._agent.layouts):
            yield pb.DescribeLayoutResponse(layout=layout_to_proto(layout))

    def Observe(self, request: Any, context: Any) -> Iterator[Any]:  # noqa: N802
        """Stream one observation a rank."""
        for observation in self._held(context, lambda: self._agent.observe(request.key_seed)):
            yield pb.ObserveResponse(observation=observation_to_proto(observation))

    def AnnounceUpdate(self, requests: Iterable[Any], context: Any) -> Any:  # noqa: N802
        """Leave READY; take old scores."""

        def announce() -> Any:
            parts = read_parts(requests)
            if parts.header is None:
                raise UsageError("an announcement without its header", todo="send the header first")
            check_spec_version(parts.header.spec_version, "announcement")
            if parts.header.rollback_because and self._access.role(context) < Role.ADMIN:
                context.abort(grpc.StatusCode.PERMISSION_DENIED, "a rollback needs the role admin")
            readiness, said = self._agent.announce(
                version_from_proto(parts.header.next),
                parts.records.records(),
                rollback_because=parts.header.rollback_because,
            )
            return pb.AnnounceUpdateResponse(
                readiness=readiness_to_proto(readiness), old_scores=said, worker=self._agent.worker
            )

        return guarded(context, announce)

    def Verify(self, requests: Iterable[Any], context: Any) -> Iterator[Any]:  # noqa: N802
        """Verify; progress as it goes, then records, then the outcome."""

        def read() -> VerifyRequest:
            parts = read_parts(requests)
            policy = parts.policy
            return VerifyRequest(
                self._manifest(parts),
                parts.records.records(),
                policy_from_proto(policy) if policy is not None else ReplayPolicy(),
                policy.replay_waived_because if policy is not None else "",
            )

        request = guarded(context, read)
        outcome: Any = None
        with self._slot(context):
            for event in self._with_progress(context, lambda progress: self._agent.verify(request, progress)):
                if isinstance(event, tuple):
                    yield pb.VerifyResponse(progress=pb.Progress(step=event[0], fraction=event[1]))
                else:
                    outcome = event
        found: Verification = outcome.verification
        for chunk in guarded(context, lambda: list(record_chunks(found.records))):
            yield pb.VerifyResponse(record=chunk)
        yield pb.VerifyResponse(
            outcome=pb.VerifyResponse.Outcome(
                worker=self._agent.worker,
                verdict=verdict_to_proto(bounded(found.verdict, FINDINGS_LIMIT)),
                replay=None if found.replay is None else report_to_proto(found.replay),
                readiness=readiness_to_proto(outcome.readiness),
                seconds=found.seconds,
            )
        )

    def Audit(self, requests: Iterable[Any], context: Any) -> Iterator[Any]:  # noqa: N802
        """Compare with a manifest; progress as it goes, then the verdict."""
        manifest = guarded(context, lambda: self._manifest(read_parts(requests)))
        with self._slot(context):
            for event in self._with_progress(context, lambda progress: self._agent.audit(manifest, progress)):
                if isinstance(event, tuple):
                    yield pb.AuditResponse(progress=pb.Progress(step=event[0], fraction=event[1]))
                else:
                    yield pb.AuditResponse(verdict=verdict_to_proto(bounded(event.verdict, FINDINGS_LIMIT)))

    def Capture(self, request: Any, context: Any) -> Iterator[Any]:  # noqa: N802
        """Generate one response and stream its record."""

        def capture() -> list[Any]:
            if not 1 <= len(request.prompt_ids) <= PROMPT_TOKENS_LIMIT or not request.max_new_tokens >= 1:
                raise UsageError(
                    "nothing to generate", expected="a prompt and one new token or more", found=len(request.prompt_ids)
                )
            record = self._agent.capture(
                list(request.prompt_ids), max_new_tokens=request.max_new_tokens, seed=request.seed
            )
            return list(record_chunks([record]))

        for chunk in self._held(context, capture):
            yield pb.CaptureResponse(record=chunk)

    def WatchReadiness(self, _request: Any, context: Any) -> Iterator[Any]:  # noqa: N802
        """Stream the current readiness, then each change, until the caller leaves."""
        if not self._watchers.acquire(blocking=False):
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{_WATCHERS_MAX} callers watch already")
        try:
            with self._agent.subscribe() as subscription:
                while context.is_active():
                    try:
                        readiness = subscription.changes.get(timeout=0.5)
                    except queue.Empty:
                        continue
                    yield pb.WatchReadinessResponse(worker=self._agent.worker, readiness=readiness_to_proto(readiness))
        finally:
            self._watchers.release()

    @contextlib.contextmanager
    def _slot(self, context: Any) -> Iterator[None]:
        """Take one of the places of calls that wait for the engine; refuse when all are taken."""
        if not self._long.acquire(blocking=False):
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"busy: {_LONG_MAX} calls wait for the engine already")
        try:
            yield
        finally:
            self._long.release()

    def _held(self, context: Any, work: Callable[[], Any]) -> Any:
        with self._slot(context):
            return guarded(context, work)

    def _manifest(self, parts: StreamParts) -> Manifest:
        if parts.header is None:
            raise IncompleteError("a stream without a manifest", expected="a header and entries", found="nothing")
        return manifest_from_proto(parts.header, parts.chunks)

    def _with_progress(self, context: Any, work: Callable[[Callable[[str, float], None]], Any]) -> Iterator[Any]:
        """Yield (step, fraction) while `work` runs in a thread of its own, then its result.

        The work goes on when the caller leaves: a half verification would leave the worker undecided.
        """
        events: queue.SimpleQueue[Any] = queue.SimpleQueue()

        def run() -> None:
            try:
                events.put(("done", work(lambda step, fraction: events.put((step, fraction)))))
            except SyncguardError as error:
                events.put(("done", error))
            except Exception as error:  # noqa: BLE001 - reported to the caller, and the daemon goes on
                events.put(("done", IncompleteError("internal error", found=f"{type(error).__name__}: {error}")))

        threading.Thread(target=run, name="verify", daemon=True).start()
        while True:
            step, value = events.get()
            if step != "done":
                yield step, value
                continue
            if isinstance(value, SyncguardError):
                abort(context, value)
            yield value
            return


class AgentServer:
    """The server of one agent.

    Args:
        agent: The agent.
        listen: Where and how to listen.

    Raises:
        UsageError: Off loopback without TLS, or the address cannot be bound.
    """

    def __init__(self, agent: Agent, listen: ListenOptions | None = None) -> None:
        """Bind; `start` serves."""
        options = listen if listen is not None else ListenOptions()
        access = options.effective_access()
        self._agent = agent
        self._told: int | None = None
        self._server, self._health = make_server(SERVICE, access, _NEEDED)
        rpc.add_AgentServiceServicer_to_server(AgentServicer(agent, access), self._server)
        self.port, self.address = bind(self._server, options.address, options.tls)
        self.health_port = 0
        self._probed = None
        if options.health_address:
            self._probed = grpc.server(futures.ThreadPoolExecutor(_PROBE_THREADS), options=SERVER_OPTIONS)
            health_pb2_grpc.add_HealthServicer_to_server(self._health, self._probed)
            try:
                self.health_port = self._probed.add_insecure_port(options.health_address)
            except RuntimeError as error:
                raise UsageError("cannot listen", found=error, where=options.health_address) from error
        agent.listen(self._announce)

    def _announce(self, readiness: Readiness) -> None:
        response = health_pb2.HealthCheckResponse
        status = response.SERVING if readiness.state is ReadinessState.READY else response.NOT_SERVING
        if status == self._told:
            return  # watchers are told of changes only
        self._told = status
        self._health.set("", status)
        self._health.set(health_name(self._agent.worker), status)

    def start(self) -> None:
        """Serve."""
        self._server.start()
        if self._probed is not None:
            self._probed.start()

    def stop(self, grace_s: float = 5.0) -> None:
        """Say NOT_SERVING, let running calls finish for `grace_s` seconds, then end them."""
        self._health.enter_graceful_shutdown()
        stopping = [server.stop(grace_s) for server in (self._server, self._probed) if server is not None]
        for stopped in stopping:
            stopped.wait()
