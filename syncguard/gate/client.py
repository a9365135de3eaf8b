"""A typed client of one agent: values in and out, and the error tree instead of status codes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import grpc

from syncguard.errors import IncompleteError, SpecVersionError, SyncguardError
from syncguard.gate.request import EncodedVerify
from syncguard.manifest.observed import TARGET
from syncguard.manifest.verdict import Finding, FindingCode, Readiness, ReadinessState, Severity, Verdict, VerdictStatus
from syncguard.manifest.wire import chunks_to_proto, header_to_proto, observation_from_proto, version_to_proto
from syncguard.manifest.wire_verdict import readiness_from_proto, verdict_from_proto
from syncguard.rpc.credentials import ChannelCredentials
from syncguard.rpc.failures import from_rpc_error
from syncguard.rpc.limits import CHANNEL_OPTIONS
from syncguard.rpc.records import RecordCollector, record_chunks
from syncguard.rpc.replay_report import report_from_proto
from syncguard.spec import SPEC_VERSION, Box, WeightVersion
from syncguard.v1 import agent_service_pb2 as pb
from syncguard.v1 import agent_service_pb2_grpc as rpc

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from syncguard.manifest.model import Manifest, RankObservation
    from syncguard.replay import ReplayPolicy, ReplayRecord, ReplayVerdict

    Progress = Callable[[str, float], None]


_SERVICE = "syncguard.v1.AgentService"


@dataclass(frozen=True, slots=True)
class AgentStatus:
    """What an agent says of itself and its engine.

    Attributes:
        worker: Name of the worker.
        engine: Engine name and version.
        model: Model path or name.
        weight_version_label: The engine's own label.
        expected_ranks: Ranks that the engine says it has.
        phase: UNKNOWN, UPDATING, INSTALLED, VERIFYING, READY or BLOCKED.
        readiness: Readiness.
        epoch: Finished updates since the engine started.
        incarnation: Identity of the engine's processes.
        agent_version: Version of syncguard in the agent.
        last_verdict: Verdict of the last verification, if any.
        last_replay: Its replay, if any.
        poll_interval_s: An unannounced update is seen within this time.
        lease_s: READY ends this long after the engine's last answer.
        vocab_size: Vocabulary of the engine, 0 when it does not say.
        engine_age_s: Age of what is told of the engine, in seconds; 0 when it was asked for this answer.
        scrub_cycle_s: Scrubs read all resident bytes once in this many seconds; 0 before the first.
    """

    worker: str
    engine: str
    model: str
    weight_version_label: str
    expected_ranks: int
    phase: str
    readiness: Readiness
    epoch: int
    incarnation: str
    agent_version: str
    last_verdict: Verdict | None
    last_replay: ReplayVerdict | None
    poll_interval_s: float
    lease_s: float
    vocab_size: int
    engine_age_s: float = 0.0
    scrub_cycle_s: float = 0.0


@dataclass(frozen=True, slots=True)
class WorkerVerdict:
    """One worker's verdict after a push.

    Attributes:
        worker: Name of the worker.
        address: Address of its agent.
        verdict: Digests, coverage, replay, flush and label together.
        replay: The replay's own figures, None when none was made.
        readiness: What followed.
        records: The saved responses with this worker's B scores.
        seconds: Seconds by step.
    """

    worker: str
    address: str
    verdict: Verdict
    replay: ReplayVerdict | None
    readiness: Readiness
    records: tuple[ReplayRecord, ...] = ()
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def record(self) -> ReplayRecord | None:
        """The first record, None when none came back."""
        return self.records[0] if self.records else None


def unanswered(worker: str, address: str, error: SyncguardError, now_s: float) -> WorkerVerdict:
    """Return the verdict of a verification that gave none: INCOMPLETE, and never ready."""
    finding = Finding(FindingCode.ENGINE_UNREACHABLE, Severity.INCOMPLETE, error.text(), worker=worker)
    return WorkerVerdict(
        worker,
        address,
        Verdict(VerdictStatus.INCOMPLETE, error.text(), (finding,)),
        None,
        Readiness(ReadinessState.PENDING, error.code.lower(), error.text(), since_s=now_s),
    )


class AgentClient:
    """A connection to one agent; calls may be made from several threads.

    Args:
        address: `HOST:PORT`.
        credentials: TLS files and token; None is a plain connection, on loopback only.
        timeout_s: Longest time for calls that only ask.
        verify_timeout_s: Longest time for calls that read weights or generate.

    Raises:
        UsageError: Plain connection off loopback, or a credentials file that cannot be read.
    """

    def __init__(
        self,
        address: str,
        *,
        credentials: ChannelCredentials | None = None,
        timeout_s: float = 10.0,
        verify_timeout_s: float = 600.0,
    ) -> None:
        """Open the channel; nothing is sent yet."""
        self.address = address
        self._credentials = credentials if credentials is not None else ChannelCredentials()
        self._timeout_s = timeout_s
        self._verify_timeout_s = verify_timeout_s
        self._channel = self._credentials.channel(address, CHANNEL_OPTIONS)
        self._stub: Any = rpc.AgentServiceStub(self._channel)
        # Take messages that are serialized already: a manifest is encoded once, not once a worker. A request of one
        # message is the same on the wire, and needs no thread to feed it.
        method, read = f"/{_SERVICE}/Verify", pb.VerifyResponse.FromString
        self._verify_stream: Any = self._channel.stream_stream(method, response_deserializer=read)
        self._verify_whole: Any = self._channel.unary_stream(method, response_deserializer=read)

    def __enter__(self) -> AgentClient:  # noqa: PYI034 - no subclasses are meant
        """Return the client."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the channel."""
        self.close()

    def close(self) -> None:
        """Close the channel; running calls end."""
        self._channel.close()

    def status(self, *, brief: bool = False, timeout_s: float = float("inf")) -> AgentStatus:
        """Ask what the agent and its engine are doing.

        Args:
            brief: Take what the agent saw last: the engine is not asked, and no verdict is sent.
            timeout_s: Longest time for it, where that is shorter than the client's own.

        Raises:
            UnreachableError: No answer.
            SpecVersionError: The agent speaks another version of the specification.
        """
        request = pb.GetStatusRequest(detail=pb.STATUS_DETAIL_BRIEF if brief else pb.STATUS_DETAIL_UNSPECIFIED)
        limit_s = min(timeout_s, self._timeout_s)
        answer = self._call(lambda: self._stub.GetStatus(request, **self._options(limit_s)))
        if answer.spec_version != SPEC_VERSION:
            raise SpecVersionError(
                "specification version of an agent",
                expected=SPEC_VERSION,
                found=answer.spec_version,
                where=self.address,
                todo="install one version of syncguard on both sides",
            )
        return AgentStatus(
            worker=answer.worker,
            engine=answer.engine,
            model=answer.model,
            weight_version_label=answer.weight_version_label,
            expected_ranks=answer.expected_ranks,
            phase=answer.state,
            readiness=readiness_from_proto(answer.readiness),
            epoch=answer.epoch,
            incarnation=answer.incarnation,
            agent_version=answer.agent_version,
            last_verdict=verdict_from_proto(answer.last_verdict) if answer.HasField("last_verdict") else None,
            last_replay=report_from_proto(answer.last_replay),
            poll_interval_s=answer.poll_interval_s,
            lease_s=answer.lease_s,
            vocab_size=answer.vocab_size,
            engine_age_s=answer.engine_age_s,
            scrub_cycle_s=answer.scrub_cycle_s,
        )

    def layouts(self) -> tuple[Any, ...]:
        """Return the layout messages (`syncguard.v1.RankLayout`) of all ranks."""
        return tuple(
            self._call(
                lambda: [
                    answer.layout
                    for answer in self._stub.DescribeLayout(
                        pb.DescribeLayoutRequest(), **self._options(self._verify_timeout_s)
                    )
                ]
            )
        )

    def boxes(self) -> dict[str, tuple[Box, ...]]:
        """Return the boxes of every logical tensor that the worker's ranks hold, each once."""
        found: dict[str, set[Box]] = {}
        for layout in self._served():
            for binding in layout.bindings:
                box = Box(tuple(binding.box.offsets), tuple(binding.box.sizes))
                found.setdefault(binding.tensor.fqn, set()).add(box)
        return {fqn: tuple(sorted(boxes)) for fqn, boxes in found.items()}

    def forms(self) -> dict[str, str]:
        """Return the dtype of every logical tensor that the worker's ranks hold, by its name, for `ManifestBuilder`."""
        return {binding.tensor.fqn: binding.tensor.dtype for layout in self._served() for binding in layout.bindings}

    def _served(self) -> list[Any]:
        """Return the layouts of the served model: a draft model has other tensors under the same names."""
        return [layout for layout in self.layouts() if layout.rank.role in ("", TARGET)]

    def observe(self, key_seed: bytes) -> tuple[RankObservation, ...]:
        """Digest every rank once under a key seed."""
        request = pb.ObserveRequest(key_seed=key_seed)
        return tuple(
            self._call(
                lambda: [
                    observation_from_proto(answer.observation)
                    for answer in self._stub.Observe(request, **self._options(self._verify_timeout_s))
                ]
            )
        )

    def announce(
        self, version: WeightVersion, records: Sequence[ReplayRecord] = (), *, rollback_because: str = ""
    ) -> tuple[str, Readiness]:
        """Tell that a push is about to begin; the worker leaves READY before this returns.

        Returns:
            Name of the worker, and its readiness.

        Raises:
            VersionOrderError: The version goes back without a named rollback.
        """
        header = pb.AnnounceUpdateRequest.Header(
            next=version_to_proto(version), spec_version=SPEC_VERSION, rollback_because=rollback_because
        )

        def parts() -> Iterator[Any]:
            yield pb.AnnounceUpdateRequest(header=header)
            for chunk in record_chunks(records):
                yield pb.AnnounceUpdateRequest(record=chunk)

        answer = self._call(lambda: self._stub.AnnounceUpdate(parts(), **self._options(self._verify_timeout_s)))
        return answer.worker, readiness_from_proto(answer.readiness)

    def verify(
        self,
        manifest: Manifest,
        records: Sequence[ReplayRecord] = (),
        *,
        policy: ReplayPolicy | None = None,
        replay_waived_because: str = "",
        progress: Progress | None = None,
    ) -> WorkerVerdict:
        """Verify the worker after a push.

        Raises:
            UnreachableError: The agent did not answer; whether it verified is unknown, so ask again.
            IncompleteError: The stream ended without an outcome.
        """
        return self.send(EncodedVerify.of(manifest, records, policy, replay_waived_because), progress)

    def send(self, message: EncodedVerify, progress: Progress | None = None) -> WorkerVerdict:
        """Verify with a request that was encoded before; as `verify`."""
        collector = RecordCollector()
        outcomes: list[Any] = []

        def read() -> None:
            options = self._options(self._verify_timeout_s)
            if len(message.parts) == 1:
                answers = self._verify_whole(message.parts[0], **options)
            else:
                answers = self._verify_stream(iter(message.parts), **options)
            for answer in answers:
                kind = answer.WhichOneof("event")
                if kind == "progress" and progress is not None:
                    progress(answer.progress.step, answer.progress.fraction)
                elif kind == "record":
                    collector.add(answer.record)
                elif kind == "outcome":
                    outcomes.append(answer.outcome)

        self._call(read)
        if len(outcomes) != 1:
            raise IncompleteError("a verification without an outcome", where=self.address, todo="verify again")
        (outcome,) = outcomes
        return WorkerVerdict(
            worker=outcome.worker,
            address=self.address,
            verdict=verdict_from_proto(outcome.verdict),
            replay=report_from_proto(outcome.replay),
            readiness=readiness_from_proto(outcome.readiness),
            records=collector.records(),
            seconds=dict(outcome.seconds),
        )

    def audit(self, manifest: Manifest, progress: Progress | None = None) -> Verdict:
        """Compare the worker with a manifest from outside the loop; never makes it ready."""

        def parts() -> Iterator[Any]:
            yield pb.AuditRequest(header=header_to_proto(manifest))
            for chunk in chunks_to_proto(manifest):
                yield pb.AuditRequest(entries=chunk)

        verdict: Verdict | None = None

        def read() -> None:
            nonlocal verdict
            for answer in self._stub.Audit(parts(), **self._options(self._verify_timeout_s)):
                kind = answer.WhichOneof("event")
                if kind == "progress" and progress is not None:
                    progress(answer.progress.step, answer.progress.fraction)
                elif kind == "verdict":
                    verdict = verdict_from_proto(answer.verdict)

        self._call(read)
        if verdict is None:
            raise IncompleteError("an audit without a verdict", where=self.address, todo="audit again")
        return verdict

    def capture(self, prompt_ids: Sequence[int], *, max_new_tokens: int, seed: int = 0) -> ReplayRecord:
        """Generate one response on the worker and return its record with A."""
        request = pb.CaptureRequest(prompt_ids=list(prompt_ids), max_new_tokens=max_new_tokens, seed=seed)
        collector = RecordCollector()

        def read() -> None:
            for answer in self._stub.Capture(request, **self._options(self._verify_timeout_s)):
                collector.add(answer.record)

        self._call(read)
        records = collector.records()
        if len(records) != 1:
            raise IncompleteError("captured records", expected=1, found=len(records), where=self.address)
        return records[0]

    def watch(self) -> Iterator[Readiness]:
        """Yield the current readiness, then each change, until the caller stops or the connection breaks.

        Raises:
            UnreachableError: The connection broke; the last readiness must be forgotten.
        """
        stream = self._stub.WatchReadiness(pb.WatchReadinessRequest(), metadata=self._credentials.metadata)
        try:
            for answer in stream:
                yield readiness_from_proto(answer.readiness)
        except grpc.RpcError as error:
            raise from_rpc_error(error, self.address) from error
        finally:
            stream.cancel()

    def _options(self, timeout_s: float) -> dict[str, Any]:
        return {"timeout": timeout_s, "metadata": self._credentials.metadata}

    def _call(self, work: Callable[[], Any]) -> Any:
        try:
            return work()
        except grpc.RpcError as error:
            raise from_rpc_error(error, self.address) from error
