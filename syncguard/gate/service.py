"""GateService: the gate as a daemon, for trainers that are not Python, or that come and go.

One publication is verified at a time, in the background; a newer one waits for it. Between publications a loop asks
the agents for their readiness, so that a worker that falls out of READY changes the decision.
"""

from __future__ import annotations

import logging
import queue
import threading
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import grpc
from grpc_health.v1 import health_pb2

from syncguard.errors import IncompleteError, UsageError
from syncguard.gate.readiness import Action, Decision
from syncguard.gate.wire import decision_to_proto
from syncguard.manifest.codec import check_spec_version
from syncguard.manifest.wire import manifest_from_proto, version_from_proto
from syncguard.manifest.wire_verdict import readiness_to_proto
from syncguard.replay import ReplayPolicy
from syncguard.rpc.credentials import Access, Role, TlsFiles
from syncguard.rpc.failures import guarded
from syncguard.rpc.replay_report import policy_from_proto
from syncguard.rpc.server import bind, make_server
from syncguard.rpc.streams import read_parts
from syncguard.v1 import gate_service_pb2 as pb
from syncguard.v1 import gate_service_pb2_grpc as rpc

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from syncguard.gate.controller import Gate
    from syncguard.manifest.model import Manifest
    from syncguard.replay import ReplayRecord

log = logging.getLogger("syncguard.gate")
SERVICE: Final = "syncguard.v1.GateService"
_NEEDED: Final = {
    f"/{SERVICE}/AnnouncePush": Role.VERIFY,
    f"/{SERVICE}/PublishManifest": Role.VERIFY,
    f"/{SERVICE}/GetDecision": Role.OBSERVE,
    f"/{SERVICE}/WatchDecision": Role.OBSERVE,
}
_WATCHERS_MAX: Final = 16


@dataclass(frozen=True, slots=True)
class Publication:
    """A manifest to verify, with what goes with it."""

    manifest: Manifest
    records: tuple[ReplayRecord, ...] = ()
    policy: ReplayPolicy | None = None
    replay_waived_because: str = ""
    workers: tuple[str, ...] = ()


class GateDaemon:
    """The background work of a gate: one publication after the other, and looking at the agents in between.

    Args:
        gate: The gate.
        interval_s: Seconds between two looks at all agents.
    """

    def __init__(self, gate: Gate, *, interval_s: float = 1.0) -> None:
        """Prepare; `start` begins."""
        self.gate = gate
        self._interval_s = interval_s
        self._publications: queue.Queue[Publication] = queue.Queue(maxsize=4)
        self._changed = threading.Condition()
        self._serial = 0
        self._decision = gate.decision()
        self._listeners: list[Callable[[Decision], None]] = []
        self._asking = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gate-daemon", daemon=True)

    @property
    def decision(self) -> Decision:
        """The last decision."""
        return self._decision

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End after the running verification."""
        self._stop.set()
        self._thread.join()

    def listen(self, listener: Callable[[Decision], None]) -> None:
        """Call `listener` now and at each change of the decision."""
        with self._changed:
            self._listeners.append(listener)
            listener(self._decision)

    def publish(self, publication: Publication) -> None:
        """Take a publication over.

        Raises:
            UsageError: Four are waiting already.
        """
        self.gate.expect(str(publication.manifest.version))
        try:
            self._publications.put_nowait(publication)
        except queue.Full:
            raise UsageError(
                "publications waiting", expected="fewer than 4", found=4, todo="wait for the decision before the next"
            ) from None
        self._update(self.gate.decision())

    def next_decision(self, after: int, timeout_s: float) -> tuple[int, Decision]:
        """Return the decision and its serial number, waiting until it is newer than `after`."""
        with self._changed:
            self._changed.wait_for(lambda: self._serial > after, timeout_s)
            return self._serial, self._decision

    def fresh(self) -> Decision:
        """Ask the agents, unless somebody does so already, and return the decision."""
        if self._asking.acquire(blocking=False):
            try:
                self._look()
            finally:
                self._asking.release()
        return self.gate.decision()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                publication = self._publications.get(timeout=self._interval_s)
            except queue.Empty:
                self._look()
                continue
            try:
                self.gate.replay_policy = publication.policy
                self._update(
                    self.gate.after_push(
                        publication.manifest,
                        publication.records,
                        workers=publication.workers or None,
                        replay_waived_because=publication.replay_waived_because,
                    )
                )
            except Exception:
                log.exception("verification of %s failed", publication.manifest.version)

    def _look(self) -> None:
        try:
            self._update(self.gate.decision(refresh=True))
        except Exception:
            log.exception("looking at the agents failed")

    def _update(self, decision: Decision) -> None:
        with self._changed:
            if _same(decision, self._decision) and self._serial:
                return
            self._decision = decision
            self._serial += 1
            self._changed.notify_all()
            for listener in self._listeners:
                listener(decision)


def _same(left: Decision, right: Decision) -> bool:
    def bare(decision: Decision) -> tuple[Any, ...]:
        workers = [(w.worker, w.action, w.readiness.state, w.readiness.reason) for w in decision.workers]
        return decision.action, decision.weight_version, workers, decision.findings

    return bare(left) == bare(right)


class GateServicer(rpc.GateServiceServicer):  # type: ignore[misc] # generated code is untyped
    """The calls, each a thin translation around `GateDaemon`."""

    def __init__(self, daemon: GateDaemon, access: Access) -> None:
        """Serve one gate."""
        self._daemon = daemon
        self._access = access
        self._watchers = threading.BoundedSemaphore(_WATCHERS_MAX)

    def AnnouncePush(self, requests: Iterable[Any], context: Any) -> Any:  # noqa: N802
        """Take every worker out of READY."""

        def announce() -> Any:
            parts = read_parts(requests)
            if parts.header is None:
                raise UsageError("an announcement without its header", todo="send the header first")
            check_spec_version(parts.header.spec_version, "announcement")
            if parts.header.rollback_because and self._access.role(context) < Role.ADMIN:
                context.abort(grpc.StatusCode.PERMISSION_DENIED, "a rollback needs the role admin")
            gate = self._daemon.gate
            told = gate.before_push(
                version_from_proto(parts.header.next),
                parts.records.records(),
                rollback_because=parts.header.rollback_because,
            )
            return pb.AnnouncePushResponse(
                workers=[
                    pb.WorkerReadiness(worker=state.worker, readiness=readiness_to_proto(readiness))
                    for state, readiness in zip(gate.workers(), told, strict=True)
                ]
            )

        return guarded(context, announce)

    def PublishManifest(self, requests: Iterable[Any], context: Any) -> Any:  # noqa: N802
        """Take a publication over; its verification goes on in the background."""

        def publish() -> Any:
            parts = read_parts(requests)
            if parts.header is None:
                raise IncompleteError("a stream without a manifest", expected="a header and entries", found="nothing")
            manifest = manifest_from_proto(parts.header, parts.chunks)
            policy = parts.policy
            self._daemon.publish(
                Publication(
                    manifest,
                    parts.records.records(),
                    policy_from_proto(policy) if policy is not None else None,
                    policy.replay_waived_because if policy is not None else "",
                    parts.workers,
                )
            )
            return pb.PublishManifestResponse(weight_version=str(manifest.version))

        return guarded(context, publish)

    def GetDecision(self, _request: Any, _context: Any) -> Any:  # noqa: N802
        """Return the decision as of now: the agents are asked for it."""
        decision = self._daemon.fresh()
        return pb.GetDecisionResponse(decision=decision_to_proto(decision, self._daemon.gate.workers()))

    def WatchDecision(self, _request: Any, context: Any) -> Iterator[Any]:  # noqa: N802
        """Stream the decision, then each change, until the caller leaves."""
        if not self._watchers.acquire(blocking=False):
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{_WATCHERS_MAX} callers watch already")
        try:
            serial = -1
            while context.is_active():
                latest, decision = self._daemon.next_decision(serial, 0.5)
                if latest > serial:
                    serial = latest
                    workers = self._daemon.gate.workers()
                    yield pb.WatchDecisionResponse(decision=decision_to_proto(decision, workers))
        finally:
            self._watchers.release()


@dataclass(frozen=True, slots=True)
class GateListenOptions:
    """How the gate listens; as for an agent.

    Attributes:
        address: `HOST:PORT` or `unix:PATH`; port 0 picks a free one.
        tls: Own files for mutual TLS; needed off loopback.
        access: Roles; None gives everyone ADMIN on loopback without TLS, and certificates nothing.
    """

    address: str = "127.0.0.1:50050"
    tls: TlsFiles | None = None
    access: Access | None = None


class GateServer:
    """The server of one gate daemon.

    Raises:
        UsageError: Off loopback without TLS, or the address cannot be bound.
    """

    def __init__(self, daemon: GateDaemon, listen: GateListenOptions | None = None) -> None:
        """Bind; `start` serves."""
        options = listen if listen is not None else GateListenOptions()
        if options.access is None:
            options = replace(options, access=Access(anyone=Role.ADMIN if options.tls is None else Role.NONE))
        access = options.access
        assert access is not None
        self._told: dict[str, bool] = {}
        self._server, self._health = make_server(SERVICE, access, _NEEDED)
        rpc.add_GateServiceServicer_to_server(GateServicer(daemon, access), self._server)
        self.port, self.address = bind(self._server, options.address, options.tls)
        daemon.listen(self._announce)

    def _announce(self, decision: Decision) -> None:
        ready = decision.ready
        self._tell("", serving=decision.action is Action.PROCEED)
        for worker in decision.workers:
            self._tell(f"syncguard.rollout/{worker.worker}", serving=worker.worker in ready)

    def _tell(self, name: str, *, serving: bool) -> None:
        if self._told.get(name) is serving:
            return  # watchers are told of changes only
        self._told[name] = serving
        response = health_pb2.HealthCheckResponse
        self._health.set(name, response.SERVING if serving else response.NOT_SERVING)

    def start(self) -> None:
        """Serve."""
        self._server.start()

    def stop(self, grace_s: float = 5.0) -> None:
        """Say NOT_SERVING, let running calls finish for `grace_s` seconds, then end them."""
        self._health.enter_graceful_shutdown()
        self._server.stop(grace_s).wait()
