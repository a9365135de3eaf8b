"""From a tensor in memory to a manifest entry: digest jobs, and the parts that must tile it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from syncguard.digest import DigestJob, PartialDigest, expected_coverage, finalize
from syncguard.errors import ManifestError
from syncguard.manifest.model import Changed, ManifestEntry, Part
from syncguard.manifest.observed import TARGET
from syncguard.spec import Box

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from syncguard.layout.model import RankLayout
    from syncguard.manifest.model import Manifest
    from syncguard.spec import DType


def digest_jobs(fqn: str, view: Any, dtype: DType, shape: tuple[int, ...], boxes: Sequence[Box]) -> list[DigestJob]:
    """Return one job per box, or one for the whole tensor when no box is given.

    Args:
        fqn: Checkpoint name.
        view: The whole tensor, numpy or torch.
        dtype: Its element type.
        shape: Its shape.
        boxes: A partition of the tensor; empty for none.

    Raises:
        ManifestError: A box does not lie in the tensor.
    """
    for box in boxes:
        if not box.inside(shape):
            raise ManifestError(
                "part of a tensor", expected=f"a box inside {shape}", found=box, where=fqn, todo="fix the partition"
            )
    return [DigestJob(_cut(view, box), dtype, shape, box, fqn) for box in boxes or (Box.whole(shape),)]


def _cut(view: Any, box: Box) -> Any:
    return view[tuple(slice(start, start + size) for start, size in zip(box.offsets, box.sizes, strict=True))]


def boxes_of(layouts: Iterable[RankLayout]) -> dict[str, tuple[Box, ...]]:
    """Return name → the different boxes that ranks hold of it, for tensors that are split.

    Given to an exporter they become the parts of the manifest, so that a rank's shard can be recognized by its own
    digest (stale, swapped, of another rank), not only the whole. Replicas count once.
    """
    boxes: dict[str, set[Box]] = {}
    for layout in layouts:
        if layout.rank.role != TARGET:
            continue  # a draft model has other tensors under the same names
        for shard in layout.shards():
            boxes.setdefault(shard.tensor.fqn, set()).add(shard.box)
    return {fqn: tuple(sorted(found)) for fqn, found in boxes.items() if len(found) > 1}


def entry_of(
    fqn: str,
    dtype: DType,
    shape: tuple[int, ...],
    boxes: Sequence[Box],
    partials: Sequence[PartialDigest],
    *,
    key_seed: bytes,
) -> ManifestEntry:
    """Return the entry of a tensor from the partial digests of its jobs.

    Raises:
        ManifestError: The boxes leave a hole or overlap.
    """
    whole = PartialDigest.total(partials)
    due = expected_coverage(dtype, shape, key_seed=key_seed)
    if (whole.count, whole.coverage) != (due.count, due.coverage):
        raise ManifestError(
            "parts do not tile their tensor",
            expected=f"{due.count} elements of {shape}, each once",
            found=f"{whole.count} in {len(boxes)} boxes",
            where=fqn,
            todo="give boxes without hole and overlap",
        )
    return ManifestEntry(
        fqn=fqn,
        dtype=dtype.name,
        shape=shape,
        partial=whole,
        digest=finalize(whole, fqn=fqn, dtype=dtype, shape=shape, key_seed=key_seed),
        parts=tuple(Part(box, partial) for box, partial in zip(boxes, partials, strict=True)) if boxes else (),
    )


def refuse_unknown_names(given: Iterable[str], known: Collection[str], what: str) -> None:
    """Refuse names that no exported tensor has.

    Raises:
        ManifestError: Names the first of them.
    """
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise ManifestError(
            f"{what} of tensors that are not exported",
            expected=f"{len(known)} exported names",
            found=f"{len(unknown)}, first {unknown[0]}",
            todo="use checkpoint names",
        )


def stated_changes(
    entries: Mapping[str, ManifestEntry],
    *,
    changed: Collection[str] | None,
    previous: Manifest | None,
    key_seed: bytes,
    exported: Collection[str] = (),
    lossy: Collection[str] = (),
) -> dict[str, Changed]:
    """Return what can be said of each tensor against the previous version.

    The trainer's own statement (from its optimizer) wins. Without one, bits that differ from the previous export prove
    a change, while equal bits prove nothing: a forgotten export looks the same.

    Args:
        entries: The new entries by name.
        changed: Names that the optimizer changed, all others unchanged; None when it does not say.
        previous: Manifest of the previous version, None when unknown.
        key_seed: Key seed of `entries`; another one makes `previous` incomparable.
        exported: Names that were exported, though only a computed form of them has an entry.
        lossy: Entries whose bytes need not change with their tensor (rounded, quantized): nothing is said of them.

    Raises:
        ManifestError: `changed` names a tensor that is not exported.
    """
    if changed is not None:
        refuse_unknown_names(changed, {*entries, *exported}, "changes")
        told = set(changed)
        said = {fqn: Changed.CHANGED if fqn in told else Changed.UNCHANGED for fqn in entries}
        return {fqn: Changed.UNKNOWN if fqn in lossy else change for fqn, change in said.items()}
    if previous is None or previous.key_seed != key_seed:
        return dict.fromkeys(entries, Changed.UNKNOWN)
    before = {entry.fqn: entry.digest for entry in previous.entries}
    return {
        fqn: Changed.CHANGED if before.get(fqn, entry.digest) != entry.digest else Changed.UNKNOWN
        for fqn, entry in entries.items()
    }
