from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Box(_message.Message):
    __slots__ = ("offsets", "sizes")
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    SIZES_FIELD_NUMBER: _ClassVar[int]
    offsets: _containers.RepeatedScalarFieldContainer[int]
    sizes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, offsets: _Optional[_Iterable[int]] = ..., sizes: _Optional[_Iterable[int]] = ...) -> None: ...

class LogicalTensor(_message.Message):
    __slots__ = ("fqn", "dtype", "shape")
    FQN_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    fqn: str
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, fqn: _Optional[str] = ..., dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ...) -> None: ...

class PartialDigest(_message.Message):
    __slots__ = ("count", "coverage", "data")
    COUNT_FIELD_NUMBER: _ClassVar[int]
    COVERAGE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    count: int
    coverage: int
    data: int
    def __init__(self, count: _Optional[int] = ..., coverage: _Optional[int] = ..., data: _Optional[int] = ...) -> None: ...

class RankIdentity(_message.Message):
    __slots__ = ("tp_rank", "tp_size", "pp_rank", "pp_size", "dp_rank", "dp_size", "role")
    TP_RANK_FIELD_NUMBER: _ClassVar[int]
    TP_SIZE_FIELD_NUMBER: _ClassVar[int]
    PP_RANK_FIELD_NUMBER: _ClassVar[int]
    PP_SIZE_FIELD_NUMBER: _ClassVar[int]
    DP_RANK_FIELD_NUMBER: _ClassVar[int]
    DP_SIZE_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    dp_rank: int
    dp_size: int
    role: str
    def __init__(self, tp_rank: _Optional[int] = ..., tp_size: _Optional[int] = ..., pp_rank: _Optional[int] = ..., pp_size: _Optional[int] = ..., dp_rank: _Optional[int] = ..., dp_size: _Optional[int] = ..., role: _Optional[str] = ...) -> None: ...

class ResidentTensor(_message.Message):
    __slots__ = ("name", "dtype", "shape", "strides", "role", "layer_class", "alias_of")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    STRIDES_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    LAYER_CLASS_FIELD_NUMBER: _ClassVar[int]
    ALIAS_OF_FIELD_NUMBER: _ClassVar[int]
    name: str
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    strides: _containers.RepeatedScalarFieldContainer[int]
    role: str
    layer_class: str
    alias_of: str
    def __init__(self, name: _Optional[str] = ..., dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., strides: _Optional[_Iterable[int]] = ..., role: _Optional[str] = ..., layer_class: _Optional[str] = ..., alias_of: _Optional[str] = ...) -> None: ...

class Binding(_message.Message):
    __slots__ = ("tensor", "box", "resident", "ops", "form", "source", "alias")
    TENSOR_FIELD_NUMBER: _ClassVar[int]
    BOX_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_FIELD_NUMBER: _ClassVar[int]
    OPS_FIELD_NUMBER: _ClassVar[int]
    FORM_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    ALIAS_FIELD_NUMBER: _ClassVar[int]
    tensor: LogicalTensor
    box: Box
    resident: str
    ops: _containers.RepeatedScalarFieldContainer[str]
    form: str
    source: str
    alias: bool
    def __init__(self, tensor: _Optional[_Union[LogicalTensor, _Mapping]] = ..., box: _Optional[_Union[Box, _Mapping]] = ..., resident: _Optional[str] = ..., ops: _Optional[_Iterable[str]] = ..., form: _Optional[str] = ..., source: _Optional[str] = ..., alias: bool = ...) -> None: ...

class RankLayout(_message.Message):
    __slots__ = ("rank", "architecture", "fingerprint", "residents", "bindings", "derived", "exempt", "unbound", "uncovered", "dropped")
    RANK_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    RESIDENTS_FIELD_NUMBER: _ClassVar[int]
    BINDINGS_FIELD_NUMBER: _ClassVar[int]
    DERIVED_FIELD_NUMBER: _ClassVar[int]
    EXEMPT_FIELD_NUMBER: _ClassVar[int]
    UNBOUND_FIELD_NUMBER: _ClassVar[int]
    UNCOVERED_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    rank: RankIdentity
    architecture: str
    fingerprint: str
    residents: _containers.RepeatedCompositeFieldContainer[ResidentTensor]
    bindings: _containers.RepeatedCompositeFieldContainer[Binding]
    derived: _containers.RepeatedScalarFieldContainer[str]
    exempt: _containers.RepeatedScalarFieldContainer[str]
    unbound: _containers.RepeatedScalarFieldContainer[str]
    uncovered: _containers.RepeatedScalarFieldContainer[str]
    dropped: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, rank: _Optional[_Union[RankIdentity, _Mapping]] = ..., architecture: _Optional[str] = ..., fingerprint: _Optional[str] = ..., residents: _Optional[_Iterable[_Union[ResidentTensor, _Mapping]]] = ..., bindings: _Optional[_Iterable[_Union[Binding, _Mapping]]] = ..., derived: _Optional[_Iterable[str]] = ..., exempt: _Optional[_Iterable[str]] = ..., unbound: _Optional[_Iterable[str]] = ..., uncovered: _Optional[_Iterable[str]] = ..., dropped: _Optional[_Iterable[str]] = ...) -> None: ...
