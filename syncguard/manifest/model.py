"""The trainer's claim for one weight version, and what one worker showed of what it holds.

Frozen values without IO; `manifest.codec` reads and writes them, `manifest.compare` judges them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

import msgspec

from syncguard.digest import PartialDigest
from syncguard.layout.model import RankIdentity, RankLayout
from syncguard.spec import Box, WeightVersion


class Changed(str, Enum):
    """What the trainer says of a tensor against the previous version, from its optimizer and not from the export."""

    UNKNOWN = "unknown"
    CHANGED = "changed"
    UNCHANGED = "unchanged"


class Part(msgspec.Struct, frozen=True, gc=False):
    """The partial digest of one box of a tensor, so that a difference can be blamed on the rank that holds it."""

    box: Box
    partial: PartialDigest


class ManifestEntry(msgspec.Struct, frozen=True, gc=False):
    """One exported tensor; a struct, changed with `msgspec.structs.replace`, since a manifest has many.

    Attributes:
        fqn: Checkpoint name.
        dtype: Canonical dtype name of the bytes as sent.
        shape: Full shape in elements.
        partial: Count, coverage and data sums of the whole tensor.
        digest: Final 128-bit digest in hex; binds name, dtype and shape.
        parts: Optional partition into boxes; empty, or the boxes tile the tensor.
        changed: The trainer's statement against the previous version.
    """

    fqn: str
    dtype: str
    shape: tuple[int, ...]
    partial: PartialDigest
    digest: str
    parts: tuple[Part, ...] = ()
    changed: Changed = Changed.UNKNOWN


@dataclass(frozen=True, slots=True)
class ExemptPolicy:
    """A manifest tensor that workers are not expected to hold, by exact name and with a reason; always counted."""

    fqn: str
    reason: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """Every tensor that a trainer exported for one weight version.

    Attributes:
        version: The weight version.
        algorithm: Digest algorithm with all its parameters.
        key_seed_hex: Key seed in hex; a secret one is given to workers only after installation.
        entries: Sorted by name; a name occurs once.
        exempt: Named policy, never a pattern.
        source: Where the tensors came from, for people.
        spec_version: Version of this format.
        manifest_id: 128-bit digest over the canonical bytes, in hex; empty until sealed by the codec.
    """

    version: WeightVersion
    algorithm: str
    key_seed_hex: str
    entries: tuple[ManifestEntry, ...]
    exempt: tuple[ExemptPolicy, ...] = ()
    source: str = ""
    spec_version: int = 1
    manifest_id: str = ""

    @property
    def key_seed(self) -> bytes:
        """Key seed as bytes."""
        return bytes.fromhex(self.key_seed_hex)

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors."""
        from syncguard.spec import dtype_named

        return sum(entry.partial.count * dtype_named(entry.dtype).itemsize_bytes for entry in self.entries)


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The in-rank answer to a padding or derived-state claim.

    Attributes:
        ok: Whether it held for every element.
        wrong_count: Elements that differ.
        detail: First differing index, or the error that prevented the check.
    """

    ok: bool
    wrong_count: int = 0
    detail: str = ""


@dataclass(frozen=True, slots=True)
class RankObservation:
    """What one rank showed in one pass over its resident memory.

    Attributes:
        rank: The rank.
        incarnation: Random identity of the engine process tree's rank; changes when the process restarts.
        epoch: Number of weight updates that this rank has finished since it started.
        updating: An update session was open, so nothing here may be compared.
        layout_fingerprint: Fingerprint of the `RankLayout` that orders the lists below.
        algorithm: Digest algorithm used.
        key_seed_hex: Key seed used.
        partials: One partial digest per binding.
        paddings: One answer per padding claim.
        derived: One answer per derived claim.
        moved: Resident tensors whose storage address differs from the first observation of this incarnation.
        read_bytes: Bytes digested.
        duration_s: Seconds spent in the rank.
        probe_version: Version of syncguard inside the rank.
        altered: Exempt resident tensors that hold other bytes than when this incarnation first showed them in that form.
    """

    rank: RankIdentity
    incarnation: str
    epoch: int
    updating: bool
    layout_fingerprint: str
    algorithm: str
    key_seed_hex: str
    partials: tuple[PartialDigest, ...]
    paddings: tuple[CheckResult, ...] = ()
    derived: tuple[CheckResult, ...] = ()
    moved: tuple[str, ...] = ()
    read_bytes: int = 0
    duration_s: float = 0.0
    probe_version: str = ""
    altered: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class WorkerObservation:
    """All ranks of one worker, with the layouts that their fingerprints refer to.

    Attributes:
        worker: Name of the worker.
        expected_ranks: Number of ranks that the engine says it has (all stages and replicas).
        layouts: One per rank that answered.
        ranks: One per rank that answered.
        weight_version_label: The label that the engine carries; a label, not evidence.
    """

    worker: str
    expected_ranks: int
    layouts: tuple[RankLayout, ...]
    ranks: tuple[RankObservation, ...]
    weight_version_label: str = ""


@dataclass(frozen=True, slots=True)
class KnownVersion:
    """An earlier weight version, kept to explain a difference: what its shards looked like.

    Attributes:
        label: Its weight version label.
        wholes: Partial digest of each whole tensor, by name.
        shards: Partial digest of each box that a verified worker or the manifest's parts showed.
    """

    label: str
    wholes: dict[str, PartialDigest] = field(default_factory=dict)
    shards: dict[tuple[str, Box], PartialDigest] = field(default_factory=dict)
