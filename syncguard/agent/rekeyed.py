"""Earlier versions that were digested under another key, told under the key of now. Pure.

Sums under two keys are unrelated numbers. But a worker can be read once more under the old key: where it then shows what the
earlier version had, the bytes are those of that version, and what they sum to under the new key was just observed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncguard.digest import PartialDigest
from syncguard.manifest.model import Changed, KnownVersion
from syncguard.manifest.verdict import FindingCode
from syncguard.spec import Box

if TYPE_CHECKING:
    from syncguard.manifest.model import Manifest, WorkerObservation
    from syncguard.manifest.verdict import Verdict


def asks_for_earlier_versions(manifest: Manifest, verdict: Verdict) -> bool:
    """Return whether earlier versions could say more: of content that nobody knows, or of tensors said to have changed."""
    if any(finding.code is FindingCode.UNKNOWN_CONTENT for finding in verdict.findings):
        return True
    return any(entry.changed is Changed.CHANGED for entry in manifest.entries)


def told_under_new_key(known: KnownVersion, then: WorkerObservation, now: WorkerObservation) -> KnownVersion:
    """Return what of an earlier version the worker still holds, under the new key.

    Args:
        known: The version, under its own key.
        then: The worker read under that key.
        now: The worker read under the new key, at the same fence.

    Returns:
        Under the version's label, the boxes that hold its content, and the tensors that do so in every box.
    """
    bindings = {layout.fingerprint: layout.bindings for layout in now.layouts}
    again = {rank.rank: rank for rank in then.ranks}
    shards: dict[tuple[str, Box], PartialDigest] = {}
    other: set[str] = set()
    for rank in now.ranks:
        old = again.get(rank.rank)
        if old is None or old.layout_fingerprint != rank.layout_fingerprint:
            continue
        claims = bindings.get(rank.layout_fingerprint, ())
        for binding, before, after in zip(claims, old.partials, rank.partials, strict=True):
            tensor, box = binding.shard.tensor, binding.shard.box
            had = known.shards.get((tensor.fqn, box))
            if had is None and box == Box.whole(tensor.shape):
                had = known.wholes.get(tensor.fqn)
            if had == before:
                shards[tensor.fqn, box] = after
            else:
                other.add(tensor.fqn)
    wholes: dict[str, PartialDigest] = {}
    for (fqn, _), partial in shards.items():
        if fqn not in other:
            wholes[fqn] = wholes.get(fqn, PartialDigest.zero()) + partial
    # Distinct boxes that do not add up to the tensor, because ranks are missing or boxes overlap, say nothing of it.
    wholes = {
        fqn: whole for fqn, whole in wholes.items() if fqn in known.wholes and whole.count == known.wholes[fqn].count
    }
    return KnownVersion(known.label, wholes, shards)
