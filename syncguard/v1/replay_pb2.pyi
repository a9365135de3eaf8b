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
    __slots__ = ("label", "count", "signed_mean_nats", "mae_nats", "p95_nats", "p99_nats", "max_nats", "median_nats", "first_mae_nats", "rest_mae_nats", "worst")
    LABEL_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    SIGNED_MEAN_NATS_FIELD_NUMBER: _ClassVar[int]
    MAE_NATS_FIELD_NUMBER: _ClassVar[int]
    P95_NATS_FIELD_NUMBER: _ClassVar[int]
    P99_NATS_FIELD_NUMBER: _ClassVar[int]
    MAX_NATS_FIELD_NUMBER: _ClassVar[int]
    MEDIAN_NATS_FIELD_NUMBER: _ClassVar[int]
    FIRST_MAE_NATS_FIELD_NUMBER: _ClassVar[int]
    REST_MAE_NATS_FIELD_NUMBER: _ClassVar[int]
    WORST_FIELD_NUMBER: _ClassVar[int]
    label: str
    count: int
    signed_mean_nats: float
    mae_nats: float
    p95_nats: float
    p99_nats: float
    max_nats: float
    median_nats: float
    first_mae_nats: float
    rest_mae_nats: float
    worst: _containers.RepeatedCompositeFieldContainer[WorstToken]
    def __init__(self, label: _Optional[str] = ..., count: _Optional[int] = ..., signed_mean_nats: _Optional[float] = ..., mae_nats: _Optional[float] = ..., p95_nats: _Optional[float] = ..., p99_nats: _Optional[float] = ..., max_nats: _Optional[float] = ..., median_nats: _Optional[float] = ..., first_mae_nats: _Optional[float] = ..., rest_mae_nats: _Optional[float] = ..., worst: _Optional[_Iterable[_Union[WorstToken, _Mapping]]] = ...) -> None: ...

class WorstToken(_message.Message):
    __slots__ = ("position", "difference_nats")
    POSITION_FIELD_NUMBER: _ClassVar[int]
    DIFFERENCE_NATS_FIELD_NUMBER: _ClassVar[int]
    position: int
    difference_nats: float
    def __init__(self, position: _Optional[int] = ..., difference_nats: _Optional[float] = ...) -> None: ...

class RepeatNoise(_message.Message):
    __slots__ = ("label", "passes", "mae_nats", "worst_pair_mae_nats", "p99_nats", "max_nats")
    LABEL_FIELD_NUMBER: _ClassVar[int]
    PASSES_FIELD_NUMBER: _ClassVar[int]
    MAE_NATS_FIELD_NUMBER: _ClassVar[int]
    WORST_PAIR_MAE_NATS_FIELD_NUMBER: _ClassVar[int]
    P99_NATS_FIELD_NUMBER: _ClassVar[int]
    MAX_NATS_FIELD_NUMBER: _ClassVar[int]
    label: str
    passes: int
    mae_nats: float
    worst_pair_mae_nats: float
    p99_nats: float
    max_nats: float
    def __init__(self, label: _Optional[str] = ..., passes: _Optional[int] = ..., mae_nats: _Optional[float] = ..., worst_pair_mae_nats: _Optional[float] = ..., p99_nats: _Optional[float] = ..., max_nats: _Optional[float] = ...) -> None: ...

class ReplayPower(_message.Message):
    __slots__ = ("sight", "change_mae_nats", "needed_nats", "followed")
    class Sight(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        SIGHT_UNSPECIFIED: _ClassVar[ReplayPower.Sight]
        SIGHT_SEES: _ClassVar[ReplayPower.Sight]
        SIGHT_BLIND: _ClassVar[ReplayPower.Sight]
    SIGHT_UNSPECIFIED: ReplayPower.Sight
    SIGHT_SEES: ReplayPower.Sight
    SIGHT_BLIND: ReplayPower.Sight
    SIGHT_FIELD_NUMBER: _ClassVar[int]
    CHANGE_MAE_NATS_FIELD_NUMBER: _ClassVar[int]
    NEEDED_NATS_FIELD_NUMBER: _ClassVar[int]
    FOLLOWED_FIELD_NUMBER: _ClassVar[int]
    sight: ReplayPower.Sight
    change_mae_nats: float
    needed_nats: float
    followed: float
    def __init__(self, sight: _Optional[_Union[ReplayPower.Sight, str]] = ..., change_mae_nats: _Optional[float] = ..., needed_nats: _Optional[float] = ..., followed: _Optional[float] = ...) -> None: ...

class ReplayReport(_message.Message):
    __slots__ = ("status", "reason", "limit_nats", "limit_source", "differences", "fingerprint", "fixed_limit_nats", "relative_limit_nats", "measured_noise_nats", "repeats", "power")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    LIMIT_NATS_FIELD_NUMBER: _ClassVar[int]
    LIMIT_SOURCE_FIELD_NUMBER: _ClassVar[int]
    DIFFERENCES_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    FIXED_LIMIT_NATS_FIELD_NUMBER: _ClassVar[int]
    RELATIVE_LIMIT_NATS_FIELD_NUMBER: _ClassVar[int]
    MEASURED_NOISE_NATS_FIELD_NUMBER: _ClassVar[int]
    REPEATS_FIELD_NUMBER: _ClassVar[int]
    POWER_FIELD_NUMBER: _ClassVar[int]
    status: ReplayStatus
    reason: str
    limit_nats: float
    limit_source: str
    differences: _containers.RepeatedCompositeFieldContainer[Difference]
    fingerprint: str
    fixed_limit_nats: float
    relative_limit_nats: float
    measured_noise_nats: float
    repeats: _containers.RepeatedCompositeFieldContainer[RepeatNoise]
    power: ReplayPower
    def __init__(self, status: _Optional[_Union[ReplayStatus, str]] = ..., reason: _Optional[str] = ..., limit_nats: _Optional[float] = ..., limit_source: _Optional[str] = ..., differences: _Optional[_Iterable[_Union[Difference, _Mapping]]] = ..., fingerprint: _Optional[str] = ..., fixed_limit_nats: _Optional[float] = ..., relative_limit_nats: _Optional[float] = ..., measured_noise_nats: _Optional[float] = ..., repeats: _Optional[_Iterable[_Union[RepeatNoise, _Mapping]]] = ..., power: _Optional[_Union[ReplayPower, _Mapping]] = ...) -> None: ...
