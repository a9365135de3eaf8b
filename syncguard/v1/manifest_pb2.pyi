from syncguard.v1 import tensor_pb2 as _tensor_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ChangeClaim(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CHANGE_CLAIM_UNSPECIFIED: _ClassVar[ChangeClaim]
    CHANGE_CLAIM_CHANGED: _ClassVar[ChangeClaim]
    CHANGE_CLAIM_UNCHANGED: _ClassVar[ChangeClaim]
CHANGE_CLAIM_UNSPECIFIED: ChangeClaim
CHANGE_CLAIM_CHANGED: ChangeClaim
CHANGE_CLAIM_UNCHANGED: ChangeClaim

class WeightVersion(_message.Message):
    __slots__ = ("run_id", "step")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    step: int
    def __init__(self, run_id: _Optional[str] = ..., step: _Optional[int] = ...) -> None: ...

class Part(_message.Message):
    __slots__ = ("box", "partial")
    BOX_FIELD_NUMBER: _ClassVar[int]
    PARTIAL_FIELD_NUMBER: _ClassVar[int]
    box: _tensor_pb2.Box
    partial: _tensor_pb2.PartialDigest
    def __init__(self, box: _Optional[_Union[_tensor_pb2.Box, _Mapping]] = ..., partial: _Optional[_Union[_tensor_pb2.PartialDigest, _Mapping]] = ...) -> None: ...

class TensorForm(_message.Message):
    __slots__ = ("dtype", "shape")
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ...) -> None: ...

class EntryParts(_message.Message):
    __slots__ = ("entry", "parts")
    ENTRY_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    entry: int
    parts: _containers.RepeatedCompositeFieldContainer[Part]
    def __init__(self, entry: _Optional[int] = ..., parts: _Optional[_Iterable[_Union[Part, _Mapping]]] = ...) -> None: ...

class ExemptPolicy(_message.Message):
    __slots__ = ("fqn", "reason")
    FQN_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    fqn: str
    reason: str
    def __init__(self, fqn: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class ManifestHeader(_message.Message):
    __slots__ = ("spec_version", "version", "algorithm", "key_seed", "source", "exempt", "entry_count", "manifest_id")
    SPEC_VERSION_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ALGORITHM_FIELD_NUMBER: _ClassVar[int]
    KEY_SEED_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    EXEMPT_FIELD_NUMBER: _ClassVar[int]
    ENTRY_COUNT_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_ID_FIELD_NUMBER: _ClassVar[int]
    spec_version: int
    version: WeightVersion
    algorithm: str
    key_seed: bytes
    source: str
    exempt: _containers.RepeatedCompositeFieldContainer[ExemptPolicy]
    entry_count: int
    manifest_id: bytes
    def __init__(self, spec_version: _Optional[int] = ..., version: _Optional[_Union[WeightVersion, _Mapping]] = ..., algorithm: _Optional[str] = ..., key_seed: _Optional[bytes] = ..., source: _Optional[str] = ..., exempt: _Optional[_Iterable[_Union[ExemptPolicy, _Mapping]]] = ..., entry_count: _Optional[int] = ..., manifest_id: _Optional[bytes] = ...) -> None: ...

class ManifestChunk(_message.Message):
    __slots__ = ("forms", "fqn", "form", "count", "coverage", "data", "digests", "changed", "parts")
    FORMS_FIELD_NUMBER: _ClassVar[int]
    FQN_FIELD_NUMBER: _ClassVar[int]
    FORM_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    COVERAGE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    CHANGED_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    forms: _containers.RepeatedCompositeFieldContainer[TensorForm]
    fqn: _containers.RepeatedScalarFieldContainer[str]
    form: _containers.RepeatedScalarFieldContainer[int]
    count: _containers.RepeatedScalarFieldContainer[int]
    coverage: _containers.RepeatedScalarFieldContainer[int]
    data: _containers.RepeatedScalarFieldContainer[int]
    digests: bytes
    changed: _containers.RepeatedScalarFieldContainer[ChangeClaim]
    parts: _containers.RepeatedCompositeFieldContainer[EntryParts]
    def __init__(self, forms: _Optional[_Iterable[_Union[TensorForm, _Mapping]]] = ..., fqn: _Optional[_Iterable[str]] = ..., form: _Optional[_Iterable[int]] = ..., count: _Optional[_Iterable[int]] = ..., coverage: _Optional[_Iterable[int]] = ..., data: _Optional[_Iterable[int]] = ..., digests: _Optional[bytes] = ..., changed: _Optional[_Iterable[_Union[ChangeClaim, str]]] = ..., parts: _Optional[_Iterable[_Union[EntryParts, _Mapping]]] = ...) -> None: ...

class CheckResult(_message.Message):
    __slots__ = ("outcome", "wrong_count", "detail")
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    WRONG_COUNT_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    outcome: int
    wrong_count: int
    detail: str
    def __init__(self, outcome: _Optional[int] = ..., wrong_count: _Optional[int] = ..., detail: _Optional[str] = ...) -> None: ...

class RankObservation(_message.Message):
    __slots__ = ("rank", "incarnation", "epoch", "updating", "layout_fingerprint", "algorithm", "key_seed", "partials", "paddings", "derived", "moved", "read_bytes", "duration_s", "probe_version", "altered")
    RANK_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    UPDATING_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    ALGORITHM_FIELD_NUMBER: _ClassVar[int]
    KEY_SEED_FIELD_NUMBER: _ClassVar[int]
    PARTIALS_FIELD_NUMBER: _ClassVar[int]
    PADDINGS_FIELD_NUMBER: _ClassVar[int]
    DERIVED_FIELD_NUMBER: _ClassVar[int]
    MOVED_FIELD_NUMBER: _ClassVar[int]
    READ_BYTES_FIELD_NUMBER: _ClassVar[int]
    DURATION_S_FIELD_NUMBER: _ClassVar[int]
    PROBE_VERSION_FIELD_NUMBER: _ClassVar[int]
    ALTERED_FIELD_NUMBER: _ClassVar[int]
    rank: _tensor_pb2.RankIdentity
    incarnation: str
    epoch: int
    updating: bool
    layout_fingerprint: str
    algorithm: str
    key_seed: bytes
    partials: _containers.RepeatedCompositeFieldContainer[_tensor_pb2.PartialDigest]
    paddings: _containers.RepeatedCompositeFieldContainer[CheckResult]
    derived: _containers.RepeatedCompositeFieldContainer[CheckResult]
    moved: _containers.RepeatedScalarFieldContainer[str]
    read_bytes: int
    duration_s: float
    probe_version: str
    altered: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, rank: _Optional[_Union[_tensor_pb2.RankIdentity, _Mapping]] = ..., incarnation: _Optional[str] = ..., epoch: _Optional[int] = ..., updating: bool = ..., layout_fingerprint: _Optional[str] = ..., algorithm: _Optional[str] = ..., key_seed: _Optional[bytes] = ..., partials: _Optional[_Iterable[_Union[_tensor_pb2.PartialDigest, _Mapping]]] = ..., paddings: _Optional[_Iterable[_Union[CheckResult, _Mapping]]] = ..., derived: _Optional[_Iterable[_Union[CheckResult, _Mapping]]] = ..., moved: _Optional[_Iterable[str]] = ..., read_bytes: _Optional[int] = ..., duration_s: _Optional[float] = ..., probe_version: _Optional[str] = ..., altered: _Optional[_Iterable[str]] = ...) -> None: ...
