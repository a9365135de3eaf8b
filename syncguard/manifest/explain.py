"""Why a box differs: the cheapest explanation that the evidence supports, and honest ignorance otherwise.

Pure. Explanations compare partial digests with those of other versions, other tensors and other replicas; since a
partial digest binds positions but not names, equal content under two names is seen to be equal.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from syncguard.digest import PartialDigest
from syncguard.errors import UsageError
from syncguard.manifest.verdict import FindingCode
from syncguard.spec import Box, WeightVersion

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from syncguard.manifest.model import KnownVersion, Manifest, ManifestEntry


@dataclass(frozen=True, slots=True)
class Explanation:
    """A code with its sentence.

    Attributes:
        code: STALE, SWAPPED or UNKNOWN_CONTENT.
        text: What is there instead, and what to look at next.
        version: Label of the version that the content equals, when stale.
    """

    code: FindingCode
    text: str
    version: str = ""


@dataclass(frozen=True)
class Explainer:
    """One manifest and earlier versions; indexes by content are built when the first difference asks for them.

    Attributes:
        manifest: The manifest that a worker was compared with.
        history: Earlier versions, the newest first.
        precedents: Those of them that the trainer may have changed something against: not those of later steps, which a
            worker knows after a rollback.
    """

    manifest: Manifest
    history: Sequence[KnownVersion]
    precedents: Sequence[KnownVersion] = ()

    @classmethod
    def of(cls, manifest: Manifest, history: Sequence[KnownVersion]) -> Explainer:
        """Return the explainer of a manifest, `history` newest first."""
        later = {known.label for known in history if _later(known.label, manifest.version)}
        return cls(manifest, history, [known for known in history if known.label not in later])

    @cached_property
    def _whole_names(self) -> Mapping[tuple[str, tuple[int, ...], PartialDigest], str]:
        return {(e.dtype, e.shape, e.partial): e.fqn for e in self.manifest.entries}

    @cached_property
    def _part_names(self) -> Mapping[tuple[str, Box, PartialDigest], str]:
        return {(e.dtype, part.box, part.partial): e.fqn for e in self.manifest.entries for part in e.parts}

    def stale_version(self, fqn: str, box: Box, shape: tuple[int, ...], partial: PartialDigest) -> str:
        """Return the label of the newest earlier version with this content in this box, or an empty string."""
        whole = box == Box.whole(shape)
        for known in self.history:
            if known.shards.get((fqn, box)) == partial or (whole and known.wholes.get(fqn) == partial):
                return known.label
        return ""

    def differs_from(self, entry: ManifestEntry) -> bool:
        """Return whether the newest earlier version knows this tensor with other content."""
        for known in self.history:
            before = known.wholes.get(entry.fqn)
            if before is not None:
                return before != entry.partial
        return False

    def explain(self, entry: ManifestEntry, box: Box, partial: PartialDigest) -> Explanation:
        """Return the best explanation of a box that is not what the manifest says."""
        version = self.stale_version(entry.fqn, box, entry.shape, partial)
        if version:
            return Explanation(
                FindingCode.STALE,
                f"holds the content of {version}: this update did not reach it; look at the push of this tensor",
                version,
            )
        other = self._whole_names.get((entry.dtype, entry.shape, partial)) if box == Box.whole(entry.shape) else None
        other = other or self._part_names.get((entry.dtype, box, partial))
        if other is not None and other != entry.fqn:
            return Explanation(
                FindingCode.SWAPPED,
                f"holds the content of {other}: two tensors of one shape were exchanged; look at the name mapping",
            )
        if partial.count and partial.data == 0:
            return Explanation(
                FindingCode.UNKNOWN_CONTENT, "every byte is zero: it was never written; look at the loader's name table"
            )
        return Explanation(
            FindingCode.UNKNOWN_CONTENT,
            "content equals no version and no tensor that is known here; look at the layout, the cast and the transfer",
        )


def _later(label: str, version: WeightVersion) -> bool:
    try:
        return version.older_than(WeightVersion.parse(label))
    except UsageError:  # a label that is no weight version has no order
        return False


def expected_of_box(entry: ManifestEntry, box: Box) -> PartialDigest | None:
    """Return what the manifest says of one box: the whole, or the sum of the parts that tile it; else None.

    `None` means that the manifest makes no statement about this box alone, not that anything is fine.
    """
    if box == Box.whole(entry.shape):
        return entry.partial
    total = PartialDigest.zero()
    for part in entry.parts:
        if part.box == box:
            return part.partial
        common = part.box.intersect(box)
        if common.count == 0:
            continue
        if common != part.box:
            return None
        total = total + part.partial
    return total if entry.parts and total.count == box.count else None
