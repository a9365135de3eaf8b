from syncguard.v1 import manifest_pb2 as _manifest_pb2
from syncguard.v1 import replay_pb2 as _replay_pb2
from syncguard.v1 import tensor_pb2 as _tensor_pb2
from syncguard.v1 import verdict_pb2 as _verdict_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class StatusDetail(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STATUS_DETAIL_UNSPECIFIED: _ClassVar[StatusDetail]
    STATUS_DETAIL_BRIEF: _ClassVar[StatusDetail]
STATUS_DETAIL_UNSPECIFIED: StatusDetail
STATUS_DETAIL_BRIEF: StatusDetail

class GetStatusRequest(_message.Message):
    __slots__ = ("detail",)
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    detail: StatusDetail
    def __init__(self, detail: _Optional[_Union[StatusDetail, str]] = ...) -> None: ...

class GetStatusResponse(_message.Message):
    __slots__ = ("worker", "engine", "model", "weight_version_label", "expected_ranks", "state", "readiness", "epoch", "incarnation", "spec_version", "agent_version", "last_verdict", "last_replay", "poll_interval_s", "lease_s", "vocab_size", "engine_age_s", "scrub_cycle_s")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_VERSION_LABEL_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_RANKS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    READINESS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SPEC_VERSION_FIELD_NUMBER: _ClassVar[int]
    AGENT_VERSION_FIELD_NUMBER: _ClassVar[int]
    LAST_VERDICT_FIELD_NUMBER: _ClassVar[int]
    LAST_REPLAY_FIELD_NUMBER: _ClassVar[int]
    POLL_INTERVAL_S_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    ENGINE_AGE_S_FIELD_NUMBER: _ClassVar[int]
    SCRUB_CYCLE_S_FIELD_NUMBER: _ClassVar[int]
    worker: str
    engine: str
    model: str
    weight_version_label: str
    expected_ranks: int
    state: str
    readiness: _verdict_pb2.Readiness
    epoch: int
    incarnation: str
    spec_version: int
    agent_version: str
    last_verdict: _verdict_pb2.Verdict
    last_replay: _replay_pb2.ReplayReport
    poll_interval_s: float
    lease_s: float
    vocab_size: int
    engine_age_s: float
    scrub_cycle_s: float
    def __init__(self, worker: _Optional[str] = ..., engine: _Optional[str] = ..., model: _Optional[str] = ..., weight_version_label: _Optional[str] = ..., expected_ranks: _Optional[int] = ..., state: _Optional[str] = ..., readiness: _Optional[_Union[_verdict_pb2.Readiness, _Mapping]] = ..., epoch: _Optional[int] = ..., incarnation: _Optional[str] = ..., spec_version: _Optional[int] = ..., agent_version: _Optional[str] = ..., last_verdict: _Optional[_Union[_verdict_pb2.Verdict, _Mapping]] = ..., last_replay: _Optional[_Union[_replay_pb2.ReplayReport, _Mapping]] = ..., poll_interval_s: _Optional[float] = ..., lease_s: _Optional[float] = ..., vocab_size: _Optional[int] = ..., engine_age_s: _Optional[float] = ..., scrub_cycle_s: _Optional[float] = ...) -> None: ...

class DescribeLayoutRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribeLayoutResponse(_message.Message):
    __slots__ = ("layout",)
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    layout: _tensor_pb2.RankLayout
    def __init__(self, layout: _Optional[_Union[_tensor_pb2.RankLayout, _Mapping]] = ...) -> None: ...

class ObserveRequest(_message.Message):
    __slots__ = ("key_seed",)
    KEY_SEED_FIELD_NUMBER: _ClassVar[int]
    key_seed: bytes
    def __init__(self, key_seed: _Optional[bytes] = ...) -> None: ...

class ObserveResponse(_message.Message):
    __slots__ = ("observation",)
    OBSERVATION_FIELD_NUMBER: _ClassVar[int]
    observation: _manifest_pb2.RankObservation
    def __init__(self, observation: _Optional[_Union[_manifest_pb2.RankObservation, _Mapping]] = ...) -> None: ...

class AnnounceUpdateRequest(_message.Message):
    __slots__ = ("header", "record")
    class Header(_message.Message):
        __slots__ = ("next", "spec_version", "rollback_because")
        NEXT_FIELD_NUMBER: _ClassVar[int]
        SPEC_VERSION_FIELD_NUMBER: _ClassVar[int]
        ROLLBACK_BECAUSE_FIELD_NUMBER: _ClassVar[int]
        next: _manifest_pb2.WeightVersion
        spec_version: int
        rollback_because: str
        def __init__(self, next: _Optional[_Union[_manifest_pb2.WeightVersion, _Mapping]] = ..., spec_version: _Optional[int] = ..., rollback_because: _Optional[str] = ...) -> None: ...
    HEADER_FIELD_NUMBER: _ClassVar[int]
    RECORD_FIELD_NUMBER: _ClassVar[int]
    header: AnnounceUpdateRequest.Header
    record: _replay_pb2.RecordChunk
    def __init__(self, header: _Optional[_Union[AnnounceUpdateRequest.Header, _Mapping]] = ..., record: _Optional[_Union[_replay_pb2.RecordChunk, _Mapping]] = ...) -> None: ...

class AnnounceUpdateResponse(_message.Message):
    __slots__ = ("readiness", "old_scores", "worker")
    READINESS_FIELD_NUMBER: _ClassVar[int]
    OLD_SCORES_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    readiness: _verdict_pb2.Readiness
    old_scores: str
    worker: str
    def __init__(self, readiness: _Optional[_Union[_verdict_pb2.Readiness, _Mapping]] = ..., old_scores: _Optional[str] = ..., worker: _Optional[str] = ...) -> None: ...

class VerifyRequest(_message.Message):
    __slots__ = ("header", "entries", "record", "policy", "whole")
    class Policy(_message.Message):
        __slots__ = ("mae_limit_nats", "noise_factor", "replay_waived_because", "limits", "warm_waived_because")
        class LimitsEntry(_message.Message):
            __slots__ = ("key", "value")
            KEY_FIELD_NUMBER: _ClassVar[int]
            VALUE_FIELD_NUMBER: _ClassVar[int]
            key: str
            value: float
            def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
        MAE_LIMIT_NATS_FIELD_NUMBER: _ClassVar[int]
        NOISE_FACTOR_FIELD_NUMBER: _ClassVar[int]
        REPLAY_WAIVED_BECAUSE_FIELD_NUMBER: _ClassVar[int]
        LIMITS_FIELD_NUMBER: _ClassVar[int]
        WARM_WAIVED_BECAUSE_FIELD_NUMBER: _ClassVar[int]
        mae_limit_nats: float
        noise_factor: float
        replay_waived_because: str
        limits: _containers.ScalarMap[str, float]
        warm_waived_because: str
        def __init__(self, mae_limit_nats: _Optional[float] = ..., noise_factor: _Optional[float] = ..., replay_waived_because: _Optional[str] = ..., limits: _Optional[_Mapping[str, float]] = ..., warm_waived_because: _Optional[str] = ...) -> None: ...
    class Whole(_message.Message):
        __slots__ = ("header", "entries", "records", "policy")
        HEADER_FIELD_NUMBER: _ClassVar[int]
        ENTRIES_FIELD_NUMBER: _ClassVar[int]
        RECORDS_FIELD_NUMBER: _ClassVar[int]
        POLICY_FIELD_NUMBER: _ClassVar[int]
        header: _manifest_pb2.ManifestHeader
        entries: _containers.RepeatedCompositeFieldContainer[_manifest_pb2.ManifestChunk]
        records: _containers.RepeatedCompositeFieldContainer[_replay_pb2.RecordChunk]
        policy: VerifyRequest.Policy
        def __init__(self, header: _Optional[_Union[_manifest_pb2.ManifestHeader, _Mapping]] = ..., entries: _Optional[_Iterable[_Union[_manifest_pb2.ManifestChunk, _Mapping]]] = ..., records: _Optional[_Iterable[_Union[_replay_pb2.RecordChunk, _Mapping]]] = ..., policy: _Optional[_Union[VerifyRequest.Policy, _Mapping]] = ...) -> None: ...
    HEADER_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    RECORD_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    WHOLE_FIELD_NUMBER: _ClassVar[int]
    header: _manifest_pb2.ManifestHeader
    entries: _manifest_pb2.ManifestChunk
    record: _replay_pb2.RecordChunk
    policy: VerifyRequest.Policy
    whole: VerifyRequest.Whole
    def __init__(self, header: _Optional[_Union[_manifest_pb2.ManifestHeader, _Mapping]] = ..., entries: _Optional[_Union[_manifest_pb2.ManifestChunk, _Mapping]] = ..., record: _Optional[_Union[_replay_pb2.RecordChunk, _Mapping]] = ..., policy: _Optional[_Union[VerifyRequest.Policy, _Mapping]] = ..., whole: _Optional[_Union[VerifyRequest.Whole, _Mapping]] = ...) -> None: ...

class Progress(_message.Message):
    __slots__ = ("step", "fraction")
    STEP_FIELD_NUMBER: _ClassVar[int]
    FRACTION_FIELD_NUMBER: _ClassVar[int]
    step: str
    fraction: float
    def __init__(self, step: _Optional[str] = ..., fraction: _Optional[float] = ...) -> None: ...

class VerifyResponse(_message.Message):
    __slots__ = ("progress", "record", "outcome")
    class Outcome(_message.Message):
        __slots__ = ("worker", "verdict", "replay", "readiness", "seconds")
        class SecondsEntry(_message.Message):
            __slots__ = ("key", "value")
            KEY_FIELD_NUMBER: _ClassVar[int]
            VALUE_FIELD_NUMBER: _ClassVar[int]
            key: str
            value: float
            def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
        WORKER_FIELD_NUMBER: _ClassVar[int]
        VERDICT_FIELD_NUMBER: _ClassVar[int]
        REPLAY_FIELD_NUMBER: _ClassVar[int]
        READINESS_FIELD_NUMBER: _ClassVar[int]
        SECONDS_FIELD_NUMBER: _ClassVar[int]
        worker: str
        verdict: _verdict_pb2.Verdict
        replay: _replay_pb2.ReplayReport
        readiness: _verdict_pb2.Readiness
        seconds: _containers.ScalarMap[str, float]
        def __init__(self, worker: _Optional[str] = ..., verdict: _Optional[_Union[_verdict_pb2.Verdict, _Mapping]] = ..., replay: _Optional[_Union[_replay_pb2.ReplayReport, _Mapping]] = ..., readiness: _Optional[_Union[_verdict_pb2.Readiness, _Mapping]] = ..., seconds: _Optional[_Mapping[str, float]] = ...) -> None: ...
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    RECORD_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    progress: Progress
    record: _replay_pb2.RecordChunk
    outcome: VerifyResponse.Outcome
    def __init__(self, progress: _Optional[_Union[Progress, _Mapping]] = ..., record: _Optional[_Union[_replay_pb2.RecordChunk, _Mapping]] = ..., outcome: _Optional[_Union[VerifyResponse.Outcome, _Mapping]] = ...) -> None: ...

class AuditRequest(_message.Message):
    __slots__ = ("header", "entries")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    header: _manifest_pb2.ManifestHeader
    entries: _manifest_pb2.ManifestChunk
    def __init__(self, header: _Optional[_Union[_manifest_pb2.ManifestHeader, _Mapping]] = ..., entries: _Optional[_Union[_manifest_pb2.ManifestChunk, _Mapping]] = ...) -> None: ...

class AuditResponse(_message.Message):
    __slots__ = ("progress", "verdict")
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    progress: Progress
    verdict: _verdict_pb2.Verdict
    def __init__(self, progress: _Optional[_Union[Progress, _Mapping]] = ..., verdict: _Optional[_Union[_verdict_pb2.Verdict, _Mapping]] = ...) -> None: ...

class CaptureRequest(_message.Message):
    __slots__ = ("prompt_ids", "max_new_tokens", "seed")
    PROMPT_IDS_FIELD_NUMBER: _ClassVar[int]
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    prompt_ids: _containers.RepeatedScalarFieldContainer[int]
    max_new_tokens: int
    seed: int
    def __init__(self, prompt_ids: _Optional[_Iterable[int]] = ..., max_new_tokens: _Optional[int] = ..., seed: _Optional[int] = ...) -> None: ...

class CaptureResponse(_message.Message):
    __slots__ = ("record",)
    RECORD_FIELD_NUMBER: _ClassVar[int]
    record: _replay_pb2.RecordChunk
    def __init__(self, record: _Optional[_Union[_replay_pb2.RecordChunk, _Mapping]] = ...) -> None: ...

class WatchReadinessRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchReadinessResponse(_message.Message):
    __slots__ = ("worker", "readiness")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    READINESS_FIELD_NUMBER: _ClassVar[int]
    worker: str
    readiness: _verdict_pb2.Readiness
    def __init__(self, worker: _Optional[str] = ..., readiness: _Optional[_Union[_verdict_pb2.Readiness, _Mapping]] = ...) -> None: ...
