"""The words of the layout map: what a rank holds, and which logical elements each part of it must equal.

Everything here is data: frozen, comparable, encodable with msgspec. Nothing touches a tensor; `ops` name views from a
closed set (`layout.ops`) that the in-rank probe applies to the live storage.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from hashlib import blake2b
from typing import TYPE_CHECKING

import msgspec

from syncguard.layout.ops import Narrow, Select, Transpose, Unflatten, ViewOp
from syncguard.spec import Box

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = [
    "Binding",
    "BindingSource",
    "CanonicalForm",
    "Derived",
    "Dropped",
    "Exempt",
    "LogicalTensor",
    "Narrow",
    "Padding",
    "RankIdentity",
    "RankLayout",
    "ResidentTensor",
    "Role",
    "Select",
    "Shard",
    "Transpose",
    "Unbound",
    "Unflatten",
    "ViewOp",
]


class Role(str, Enum):
    """Where a resident tensor hangs in the live model."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    ATTRIBUTE = "attribute"


class CanonicalForm(str, Enum):
    """How resident bytes are made comparable with the exported ones; two forms are two different claims."""

    BITWISE = "bitwise"
    """The exported bytes themselves, through views and bijections of bytes only (`layout.ops`, `layout.repack`)."""
    QUANTIZED = "quantized"
    """The exported values after the published quantization that the tensor's name spells out (`layout.published`).

    Of lossy forms this is all that memory can show. A digest of dequantized values would be a weaker claim, since other
    (value, scale) pairs give the same; it is not offered.
    """


class BindingSource(str, Enum):
    """Who says that the binding is right."""

    RULE = "rule"
    RECORDED = "recorded"
    """Recorded from the engine's own loader: it trusts that loader, so the replay is its only check."""


@dataclass(frozen=True, slots=True, order=True)
class LogicalTensor:
    """A tensor under its checkpoint name, unsharded and unfused.

    Attributes:
        fqn: Checkpoint name, such as `model.layers.0.self_attn.q_proj.weight`.
        dtype: Canonical dtype name (`spec.DTYPES`).
        shape: Full row-major shape in elements.
    """

    fqn: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, order=True)
class Shard:
    """A box of a logical tensor."""

    tensor: LogicalTensor
    box: Box


@dataclass(frozen=True, slots=True)
class ResidentTensor:
    """A tensor that a rank holds.

    Attributes:
        name: Name in the live model, `model.layers.0.self_attn.qkv_proj.weight`.
        dtype: Canonical dtype name.
        shape: Resident shape in elements.
        strides: Strides in elements.
        role: Parameter, buffer or plain attribute.
        layer_class: Class name of the module that holds it.
        alias_of: Name of the resident tensor with the same storage and view, empty when it has its own.
        storage_bytes: Bytes of its elements.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    role: Role
    layer_class: str
    alias_of: str = ""
    storage_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Binding:
    """A resident view that must equal a box of a logical tensor.

    Attributes:
        shard: The logical tensor and the box of it that is held here.
        resident: Name of the resident tensor.
        ops: Views that lead from the resident tensor to an array of `shard.box.sizes`.
        form: Which claim an equal digest makes.
        source: Rule or recording.
        alias: The same resident elements are bound under another name too (tied head); counted once.
    """

    shard: Shard
    resident: str
    ops: tuple[ViewOp, ...] = ()
    form: CanonicalForm = CanonicalForm.BITWISE
    source: BindingSource = BindingSource.RULE
    alias: bool = False


@dataclass(frozen=True, slots=True)
class Padding:
    """Resident elements that belong to no logical tensor and must be zero (`value_byte` in every byte)."""

    resident: str
    ops: tuple[ViewOp, ...] = ()
    value_byte: int = 0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Derived:
    """A view of a resident tensor that must follow from others by a named rule, checked in the rank."""

    resident: str
    rule: str
    sources: tuple[str, ...] = ()
    ops: tuple[ViewOp, ...] = ()


@dataclass(frozen=True, slots=True)
class Exempt:
    """A resident tensor that no update writes and no export holds, with the reason why that is safe."""

    resident: str
    reason: str


@dataclass(frozen=True, slots=True)
class Unbound:
    """A resident tensor, or a whole layer, without a rule: the verdict is UNSUPPORTED and names it."""

    resident: str
    layer_class: str
    reason: str


@dataclass(frozen=True, slots=True)
class Dropped:
    """A checkpoint tensor that the engine throws away on loading, since nothing reads it: no rank can hold it."""

    fqn: str
    reason: str


@dataclass(frozen=True, slots=True, order=True)
class RankIdentity:
    """Which rank of the worker speaks; sizes are what its own process groups say.

    `role` tells the target model from a draft model.
    """

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    dp_rank: int = 0
    dp_size: int = 1
    role: str = "target"

    def __str__(self) -> str:
        """Return `tp1/2`, with the other axes only where they are split."""
        parts = [f"tp{self.tp_rank}/{self.tp_size}"]
        if self.pp_size > 1:
            parts.append(f"pp{self.pp_rank}/{self.pp_size}")
        if self.dp_size > 1:
            parts.append(f"dp{self.dp_rank}/{self.dp_size}")
        if self.role != "target":
            parts.append(self.role)
        return " ".join(parts)


@dataclass(frozen=True, slots=True)
class RankLayout:
    """All that one rank holds, each element claimed once or named as unclaimed.

    Attributes:
        rank: The rank.
        architecture: Name of the live model class.
        residents: Every tensor reachable from the model, aliases marked.
        bindings: Claims on logical tensors; observations list their partial digests in this order.
        paddings: Must-be-constant claims; observations answer in this order.
        derived: Derived-state claims; observations answer in this order.
        exempt: Named exemptions.
        unbound: What has no rule.
        dropped: Checkpoint tensors that loading drops, by name and with the reason of the rule.
        uncovered: State that the walk knows it cannot see (LoRA slots, graph copies), by name.
    """

    rank: RankIdentity
    architecture: str
    residents: tuple[ResidentTensor, ...]
    bindings: tuple[Binding, ...]
    paddings: tuple[Padding, ...] = ()
    derived: tuple[Derived, ...] = ()
    exempt: tuple[Exempt, ...] = ()
    unbound: tuple[Unbound, ...] = ()
    uncovered: tuple[str, ...] = ()
    dropped: tuple[Dropped, ...] = ()
    fingerprint: str = field(default="", compare=False)

    def sealed(self) -> RankLayout:
        """Return the layout with its fingerprint: 128-bit BLAKE2b of its canonical msgpack bytes, in hex."""
        bare = replace(self, fingerprint="")
        return replace(self, fingerprint=blake2b(msgspec.msgpack.encode(bare), digest_size=16).hexdigest())

    def shards(self) -> Iterator[Shard]:
        """Yield the bound shards in binding order."""
        for binding in self.bindings:
            yield binding.shard
