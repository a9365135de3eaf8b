from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ReplayStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REPLAY_STATUS_UNSPECIFIED: _ClassVar[ReplayStatus]
    REPLAY_STATUS_PASS: _ClassVar[ReplayStatus]
    REPLAY_STATUS_FAIL: _ClassVar[ReplayStatus]
    REPLAY_STATUS_NO_POWER: _ClassVar[ReplayStatus]
    REPLAY_STATUS_UNSTABLE: _ClassVar[ReplayStatus]
    REPLAY_STATUS_INCOMPLETE: _ClassVar[ReplayStatus]
REPLAY_STATUS_UNSPECIFIED: ReplayStatus
REPLAY_STATUS_PASS: ReplayStatus
REPLAY_STATUS_FAIL: ReplayStatus
REPLAY_STATUS_NO_POWER: ReplayStatus
REPLAY_STATUS_UNSTABLE: ReplayStatus
REPLAY_STATUS_INCOMPLETE: ReplayStatus

class RecordChunk(_message.Message):
    __slots__ = ("data",)
    DATA_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    def __init__(self, data: _Optional[bytes] = ...) -> None: ...

class Difference(_message.Message):
    __slots__ = ("label", "count", "signed_mean_nats", "mae_nats", "p95_nats", "p99_nats", "max_nats")
    LABEL_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    SIGNED_MEAN_NATS_FIELD_NUMBER: _ClassVar[int]
    MAE_NATS_FIELD_NUMBER: _ClassVar[int]
    P95_NATS_FIELD_NUMBER: _ClassVar[int]
    P99_NATS_FIELD_NUMBER: _ClassVar[int]
    MAX_NATS_FIELD_NUMBER: _ClassVar[int]
    label: str
    count: int
    signed_mean_nats: float
    mae_nats: float
    p95_nats: float
    p99_nats: float
    max_nats: float
    def __init__(self, label: _Optional[str] = ..., count: _Optional[int] = ..., signed_mean_nats: _Optional[float] = ..., mae_nats: _Optional[float] = ..., p95_nats: _Optional[float] = ..., p99_nats: _Optional[float] = ..., max_nats: _Optional[float] = ...) -> None: ...

class ReplayReport(_message.Message):
    __slots__ = ("status", "reason", "limit_nats", "limit_source", "differences", "fingerprint")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    LIMIT_NATS_FIELD_NUMBER: _ClassVar[int]
    LIMIT_SOURCE_FIELD_NUMBER: _ClassVar[int]
    DIFFERENCES_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    status: ReplayStatus
    reason: str
    limit_nats: float
    limit_source: str
    differences: _containers.RepeatedCompositeFieldContainer[Difference]
    fingerprint: str
    def __init__(self, status: _Optional[_Union[ReplayStatus, str]] = ..., reason: _Optional[str] = ..., limit_nats: _Optional[float] = ..., limit_source: _Optional[str] = ..., differences: _Optional[_Iterable[_Union[Difference, _Mapping]]] = ..., fingerprint: _Optional[str] = ...) -> None: ...
