from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class VerdictStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    VERDICT_STATUS_UNSPECIFIED: _ClassVar[VerdictStatus]
    VERDICT_STATUS_MATCH: _ClassVar[VerdictStatus]
    VERDICT_STATUS_MISMATCH: _ClassVar[VerdictStatus]
    VERDICT_STATUS_INCOMPLETE: _ClassVar[VerdictStatus]
    VERDICT_STATUS_UNSUPPORTED: _ClassVar[VerdictStatus]

class Severity(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SEVERITY_UNSPECIFIED: _ClassVar[Severity]
    SEVERITY_MISMATCH: _ClassVar[Severity]
    SEVERITY_UNSUPPORTED: _ClassVar[Severity]
    SEVERITY_INCOMPLETE: _ClassVar[Severity]
    SEVERITY_WARNING: _ClassVar[Severity]

class ReadinessState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    READINESS_STATE_UNSPECIFIED: _ClassVar[ReadinessState]
    READINESS_STATE_PENDING: _ClassVar[ReadinessState]
    READINESS_STATE_READY: _ClassVar[ReadinessState]
    READINESS_STATE_BLOCKED: _ClassVar[ReadinessState]
VERDICT_STATUS_UNSPECIFIED: VerdictStatus
VERDICT_STATUS_MATCH: VerdictStatus
VERDICT_STATUS_MISMATCH: VerdictStatus
VERDICT_STATUS_INCOMPLETE: VerdictStatus
VERDICT_STATUS_UNSUPPORTED: VerdictStatus
SEVERITY_UNSPECIFIED: Severity
SEVERITY_MISMATCH: Severity
SEVERITY_UNSUPPORTED: Severity
SEVERITY_INCOMPLETE: Severity
SEVERITY_WARNING: Severity
READINESS_STATE_UNSPECIFIED: ReadinessState
READINESS_STATE_PENDING: ReadinessState
READINESS_STATE_READY: ReadinessState
READINESS_STATE_BLOCKED: ReadinessState

class Finding(_message.Message):
    __slots__ = ("code", "severity", "text", "fqn", "box", "worker", "rank", "resident", "expected", "observed")
    CODE_FIELD_NUMBER: _ClassVar[int]
    SEVERITY_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    FQN_FIELD_NUMBER: _ClassVar[int]
    BOX_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_FIELD_NUMBER: _ClassVar[int]
    OBSERVED_FIELD_NUMBER: _ClassVar[int]
    code: str
    severity: Severity
    text: str
    fqn: str
    box: str
    worker: str
    rank: str
    resident: str
    expected: str
    observed: str
    def __init__(self, code: _Optional[str] = ..., severity: _Optional[_Union[Severity, str]] = ..., text: _Optional[str] = ..., fqn: _Optional[str] = ..., box: _Optional[str] = ..., worker: _Optional[str] = ..., rank: _Optional[str] = ..., resident: _Optional[str] = ..., expected: _Optional[str] = ..., observed: _Optional[str] = ...) -> None: ...

class Coverage(_message.Message):
    __slots__ = ("manifest_tensors", "proven_tensors", "exempt_tensors", "resident_tensors", "bound_residents", "derived_residents", "exempt_residents", "unbound_residents", "replicas", "padding_elements", "read_bytes", "uncovered")
    MANIFEST_TENSORS_FIELD_NUMBER: _ClassVar[int]
    PROVEN_TENSORS_FIELD_NUMBER: _ClassVar[int]
    EXEMPT_TENSORS_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_TENSORS_FIELD_NUMBER: _ClassVar[int]
    BOUND_RESIDENTS_FIELD_NUMBER: _ClassVar[int]
    DERIVED_RESIDENTS_FIELD_NUMBER: _ClassVar[int]
    EXEMPT_RESIDENTS_FIELD_NUMBER: _ClassVar[int]
    UNBOUND_RESIDENTS_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    PADDING_ELEMENTS_FIELD_NUMBER: _ClassVar[int]
    READ_BYTES_FIELD_NUMBER: _ClassVar[int]
    UNCOVERED_FIELD_NUMBER: _ClassVar[int]
    manifest_tensors: int
    proven_tensors: int
    exempt_tensors: int
    resident_tensors: int
    bound_residents: int
    derived_residents: int
    exempt_residents: int
    unbound_residents: int
    replicas: int
    padding_elements: int
    read_bytes: int
    uncovered: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, manifest_tensors: _Optional[int] = ..., proven_tensors: _Optional[int] = ..., exempt_tensors: _Optional[int] = ..., resident_tensors: _Optional[int] = ..., bound_residents: _Optional[int] = ..., derived_residents: _Optional[int] = ..., exempt_residents: _Optional[int] = ..., unbound_residents: _Optional[int] = ..., replicas: _Optional[int] = ..., padding_elements: _Optional[int] = ..., read_bytes: _Optional[int] = ..., uncovered: _Optional[_Iterable[str]] = ...) -> None: ...

class Verdict(_message.Message):
    __slots__ = ("status", "reason", "findings", "coverage", "evidence")
    class EvidenceEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    STATUS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    FINDINGS_FIELD_NUMBER: _ClassVar[int]
    COVERAGE_FIELD_NUMBER: _ClassVar[int]
    EVIDENCE_FIELD_NUMBER: _ClassVar[int]
    status: VerdictStatus
    reason: str
    findings: _containers.RepeatedCompositeFieldContainer[Finding]
    coverage: Coverage
    evidence: _containers.ScalarMap[str, str]
    def __init__(self, status: _Optional[_Union[VerdictStatus, str]] = ..., reason: _Optional[str] = ..., findings: _Optional[_Iterable[_Union[Finding, _Mapping]]] = ..., coverage: _Optional[_Union[Coverage, _Mapping]] = ..., evidence: _Optional[_Mapping[str, str]] = ...) -> None: ...

class Readiness(_message.Message):
    __slots__ = ("state", "reason", "message", "weight_version", "since_s")
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    SINCE_S_FIELD_NUMBER: _ClassVar[int]
    state: ReadinessState
    reason: str
    message: str
    weight_version: str
    since_s: float
    def __init__(self, state: _Optional[_Union[ReadinessState, str]] = ..., reason: _Optional[str] = ..., message: _Optional[str] = ..., weight_version: _Optional[str] = ..., since_s: _Optional[float] = ...) -> None: ...
