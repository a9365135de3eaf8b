from syncguard.v1 import agent_service_pb2 as _agent_service_pb2
from syncguard.v1 import manifest_pb2 as _manifest_pb2
from syncguard.v1 import replay_pb2 as _replay_pb2
from syncguard.v1 import verdict_pb2 as _verdict_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GateAction(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    GATE_ACTION_UNSPECIFIED: _ClassVar[GateAction]
    GATE_ACTION_WAIT: _ClassVar[GateAction]
    GATE_ACTION_PROCEED: _ClassVar[GateAction]
    GATE_ACTION_RETRY_SYNC: _ClassVar[GateAction]
    GATE_ACTION_QUARANTINE: _ClassVar[GateAction]
    GATE_ACTION_HALT: _ClassVar[GateAction]
GATE_ACTION_UNSPECIFIED: GateAction
GATE_ACTION_WAIT: GateAction
GATE_ACTION_PROCEED: GateAction
GATE_ACTION_RETRY_SYNC: GateAction
GATE_ACTION_QUARANTINE: GateAction
GATE_ACTION_HALT: GateAction

class WorkerDecision(_message.Message):
    __slots__ = ("worker", "readiness", "action", "reason", "verdict")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    READINESS_FIELD_NUMBER: _ClassVar[int]
    ACTION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    worker: str
    readiness: _verdict_pb2.Readiness
    action: GateAction
    reason: str
    verdict: _verdict_pb2.Verdict
    def __init__(self, worker: _Optional[str] = ..., readiness: _Optional[_Union[_verdict_pb2.Readiness, _Mapping]] = ..., action: _Optional[_Union[GateAction, str]] = ..., reason: _Optional[str] = ..., verdict: _Optional[_Union[_verdict_pb2.Verdict, _Mapping]] = ...) -> None: ...

class Decision(_message.Message):
    __slots__ = ("action", "reason", "weight_version", "workers", "findings")
    ACTION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    FINDINGS_FIELD_NUMBER: _ClassVar[int]
    action: GateAction
    reason: str
    weight_version: str
    workers: _containers.RepeatedCompositeFieldContainer[WorkerDecision]
    findings: _containers.RepeatedCompositeFieldContainer[_verdict_pb2.Finding]
    def __init__(self, action: _Optional[_Union[GateAction, str]] = ..., reason: _Optional[str] = ..., weight_version: _Optional[str] = ..., workers: _Optional[_Iterable[_Union[WorkerDecision, _Mapping]]] = ..., findings: _Optional[_Iterable[_Union[_verdict_pb2.Finding, _Mapping]]] = ...) -> None: ...

class AnnouncePushRequest(_message.Message):
    __slots__ = ("header", "record")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    RECORD_FIELD_NUMBER: _ClassVar[int]
    header: _agent_service_pb2.AnnounceUpdateRequest.Header
    record: _replay_pb2.RecordChunk
    def __init__(self, header: _Optional[_Union[_agent_service_pb2.AnnounceUpdateRequest.Header, _Mapping]] = ..., record: _Optional[_Union[_replay_pb2.RecordChunk, _Mapping]] = ...) -> None: ...

class WorkerReadiness(_message.Message):
    __slots__ = ("worker", "readiness")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    READINESS_FIELD_NUMBER: _ClassVar[int]
    worker: str
    readiness: _verdict_pb2.Readiness
    def __init__(self, worker: _Optional[str] = ..., readiness: _Optional[_Union[_verdict_pb2.Readiness, _Mapping]] = ...) -> None: ...

class AnnouncePushResponse(_message.Message):
    __slots__ = ("workers",)
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[WorkerReadiness]
    def __init__(self, workers: _Optional[_Iterable[_Union[WorkerReadiness, _Mapping]]] = ...) -> None: ...

class PublishManifestRequest(_message.Message):
    __slots__ = ("header", "entries", "record", "policy", "selection")
    class Selection(_message.Message):
        __slots__ = ("workers",)
        WORKERS_FIELD_NUMBER: _ClassVar[int]
        workers: _containers.RepeatedScalarFieldContainer[str]
        def __init__(self, workers: _Optional[_Iterable[str]] = ...) -> None: ...
    HEADER_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    RECORD_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    SELECTION_FIELD_NUMBER: _ClassVar[int]
    header: _manifest_pb2.ManifestHeader
    entries: _manifest_pb2.ManifestChunk
    record: _replay_pb2.RecordChunk
    policy: _agent_service_pb2.VerifyRequest.Policy
    selection: PublishManifestRequest.Selection
    def __init__(self, header: _Optional[_Union[_manifest_pb2.ManifestHeader, _Mapping]] = ..., entries: _Optional[_Union[_manifest_pb2.ManifestChunk, _Mapping]] = ..., record: _Optional[_Union[_replay_pb2.RecordChunk, _Mapping]] = ..., policy: _Optional[_Union[_agent_service_pb2.VerifyRequest.Policy, _Mapping]] = ..., selection: _Optional[_Union[PublishManifestRequest.Selection, _Mapping]] = ...) -> None: ...

class PublishManifestResponse(_message.Message):
    __slots__ = ("weight_version",)
    WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    weight_version: str
    def __init__(self, weight_version: _Optional[str] = ...) -> None: ...

class GetDecisionRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetDecisionResponse(_message.Message):
    __slots__ = ("decision",)
    DECISION_FIELD_NUMBER: _ClassVar[int]
    decision: Decision
    def __init__(self, decision: _Optional[_Union[Decision, _Mapping]] = ...) -> None: ...

class WatchDecisionRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchDecisionResponse(_message.Message):
    __slots__ = ("decision",)
    DECISION_FIELD_NUMBER: _ClassVar[int]
    decision: Decision
    def __init__(self, decision: _Optional[_Union[Decision, _Mapping]] = ...) -> None: ...
