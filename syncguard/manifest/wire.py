"""Manifests, observations, layouts and verdicts to and from `syncguard.v1`; streams in bounded chunks.

Strict in both directions: an unspecified enum, a box of two lengths or a stream whose id does not fit is an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import fields
from typing import Any, Final

from syncguard.digest import PartialDigest
from syncguard.errors import ManifestError
from syncguard.layout.model import RankIdentity, RankLayout
from syncguard.manifest.codec import ENTRY_LIMIT, check, check_spec_version, manifest_id
from syncguard.manifest.model import (
    Changed,
    CheckResult,
    ExemptPolicy,
    Manifest,
    ManifestEntry,
    Part,
    RankObservation,
)
from syncguard.spec import Box, WeightVersion
from syncguard.v1 import manifest_pb2, tensor_pb2

ENTRIES_PER_CHUNK: Final = 2_000

_CHANGED: Final = {
    Changed.UNKNOWN: manifest_pb2.CHANGE_CLAIM_UNSPECIFIED,
    Changed.CHANGED: manifest_pb2.CHANGE_CLAIM_CHANGED,
    Changed.UNCHANGED: manifest_pb2.CHANGE_CLAIM_UNCHANGED,
}
_CHANGED_BACK: Final = {number: claim for claim, number in _CHANGED.items()}
_HELD: Final = 1
_NOT_HELD: Final = 2


def partial_to_proto(partial: PartialDigest) -> Any:
    """Return the message of a partial digest."""
    return tensor_pb2.PartialDigest(count=partial.count, coverage=partial.coverage, data=partial.data)


def partial_from_proto(message: Any) -> PartialDigest:
    """Return the partial digest of a message."""
    return PartialDigest(message.count, message.coverage, message.data)


def box_to_proto(box: Box) -> Any:
    """Return the message of a box."""
    return tensor_pb2.Box(offsets=box.offsets, sizes=box.sizes)


def box_from_proto(message: Any) -> Box:
    """Return the box of a message."""
    return Box(tuple(message.offsets), tuple(message.sizes))


def rank_to_proto(rank: RankIdentity) -> Any:
    """Return the message of a rank identity."""
    return tensor_pb2.RankIdentity(**{field.name: getattr(rank, field.name) for field in fields(rank)})


def rank_from_proto(message: Any) -> RankIdentity:
    """Return the rank identity of a message."""
    return RankIdentity(**{field.name: getattr(message, field.name) for field in fields(RankIdentity)})


def version_to_proto(version: WeightVersion) -> Any:
    """Return the message of a weight version."""
    return manifest_pb2.WeightVersion(run_id=version.run_id, step=version.step)


def version_from_proto(message: Any) -> WeightVersion:
    """Return the weight version of a message."""
    return WeightVersion(message.run_id, message.step)


def header_to_proto(manifest: Manifest) -> Any:
    """Return the first message of a manifest stream."""
    return manifest_pb2.ManifestHeader(
        spec_version=manifest.spec_version,
        version=version_to_proto(manifest.version),
        algorithm=manifest.algorithm,
        key_seed=manifest.key_seed,
        source=manifest.source,
        exempt=[manifest_pb2.ExemptPolicy(fqn=policy.fqn, reason=policy.reason) for policy in manifest.exempt],
        entry_count=len(manifest.entries),
        manifest_id=bytes.fromhex(manifest.manifest_id),
    )


def chunks_to_proto(manifest: Manifest) -> Iterator[Any]:
    """Yield the entries in chunks of `ENTRIES_PER_CHUNK`."""
    for start in range(0, len(manifest.entries), ENTRIES_PER_CHUNK):
        yield manifest_pb2.ManifestChunk(
            entries=[_entry_to_proto(entry) for entry in manifest.entries[start : start + ENTRIES_PER_CHUNK]]
        )


def _entry_to_proto(entry: ManifestEntry) -> Any:
    return manifest_pb2.ManifestEntry(
        tensor=tensor_pb2.LogicalTensor(fqn=entry.fqn, dtype=entry.dtype, shape=entry.shape),
        partial=partial_to_proto(entry.partial),
        digest=bytes.fromhex(entry.digest),
        parts=[
            manifest_pb2.Part(box=box_to_proto(part.box), partial=partial_to_proto(part.partial))
            for part in entry.parts
        ],
        changed=_CHANGED[entry.changed],
    )


def _entry_from_proto(message: Any) -> ManifestEntry:
    return ManifestEntry(
        fqn=message.tensor.fqn,
        dtype=message.tensor.dtype,
        shape=tuple(message.tensor.shape),
        partial=partial_from_proto(message.partial),
        digest=message.digest.hex(),
        parts=tuple(Part(box_from_proto(part.box), partial_from_proto(part.partial)) for part in message.parts),
        changed=_CHANGED_BACK.get(message.changed, Changed.UNKNOWN),
    )


def manifest_from_proto(header: Any, chunks: Iterable[Any]) -> Manifest:
    """Assemble a streamed manifest and check it whole.

    Raises:
        SpecVersionError: Of another specification.
        ManifestError: Too many or too few entries, a contradiction, or an id that does not fit.
    """
    where = "streamed manifest"
    check_spec_version(header.spec_version, where)
    if header.entry_count > ENTRY_LIMIT:
        raise ManifestError("entries of a manifest", expected=f"at most {ENTRY_LIMIT}", found=header.entry_count)
    entries: list[ManifestEntry] = []
    for chunk in chunks:
        entries.extend(_entry_from_proto(entry) for entry in chunk.entries)
        if len(entries) > header.entry_count:
            break
    if len(entries) != header.entry_count:
        raise ManifestError(
            "entries of a manifest",
            expected=header.entry_count,
            found=f"{len(entries)} or more",
            where=where,
            todo="send the manifest again",
        )
    manifest = Manifest(
        version=version_from_proto(header.version),
        algorithm=header.algorithm,
        key_seed_hex=header.key_seed.hex(),
        entries=tuple(entries),
        exempt=tuple(ExemptPolicy(policy.fqn, policy.reason) for policy in header.exempt),
        source=header.source,
        spec_version=header.spec_version,
        manifest_id=header.manifest_id.hex(),
    )
    check(manifest, where)
    if manifest_id(manifest) != manifest.manifest_id:
        raise ManifestError(
            "manifest id",
            expected=manifest.manifest_id or "an id",
            found=manifest_id(manifest),
            where=where,
            todo="send the manifest again; it changed on the way",
        )
    return manifest


def observation_to_proto(observation: RankObservation) -> Any:
    """Return the message of one rank's observation."""
    return manifest_pb2.RankObservation(
        rank=rank_to_proto(observation.rank),
        incarnation=observation.incarnation,
        epoch=observation.epoch,
        updating=observation.updating,
        layout_fingerprint=observation.layout_fingerprint,
        algorithm=observation.algorithm,
        key_seed=bytes.fromhex(observation.key_seed_hex),
        partials=[partial_to_proto(partial) for partial in observation.partials],
        paddings=[_check_to_proto(result) for result in observation.paddings],
        derived=[_check_to_proto(result) for result in observation.derived],
        moved=observation.moved,
        read_bytes=observation.read_bytes,
        duration_s=observation.duration_s,
        probe_version=observation.probe_version,
    )


def observation_from_proto(message: Any) -> RankObservation:
    """Return one rank's observation; a check without an outcome counts as not held."""
    return RankObservation(
        rank=rank_from_proto(message.rank),
        incarnation=message.incarnation,
        epoch=message.epoch,
        updating=message.updating,
        layout_fingerprint=message.layout_fingerprint,
        algorithm=message.algorithm,
        key_seed_hex=message.key_seed.hex(),
        partials=tuple(partial_from_proto(partial) for partial in message.partials),
        paddings=tuple(_check_from_proto(result) for result in message.paddings),
        derived=tuple(_check_from_proto(result) for result in message.derived),
        moved=tuple(message.moved),
        read_bytes=message.read_bytes,
        duration_s=message.duration_s,
        probe_version=message.probe_version,
    )


def _check_to_proto(result: CheckResult) -> Any:
    return manifest_pb2.CheckResult(
        outcome=_HELD if result.ok else _NOT_HELD, wrong_count=result.wrong_count, detail=result.detail
    )


def _check_from_proto(message: Any) -> CheckResult:
    return CheckResult(message.outcome == _HELD, message.wrong_count, message.detail)


def layout_to_proto(layout: RankLayout) -> Any:
    """Return the message of one rank's layout, views written as text."""
    return tensor_pb2.RankLayout(
        rank=rank_to_proto(layout.rank),
        architecture=layout.architecture,
        fingerprint=layout.fingerprint,
        residents=[
            tensor_pb2.ResidentTensor(
                name=resident.name,
                dtype=resident.dtype,
                shape=resident.shape,
                strides=resident.strides,
                role=resident.role.value,
                layer_class=resident.layer_class,
                alias_of=resident.alias_of,
            )
            for resident in layout.residents
        ],
        bindings=[
            tensor_pb2.Binding(
                tensor=tensor_pb2.LogicalTensor(
                    fqn=binding.shard.tensor.fqn, dtype=binding.shard.tensor.dtype, shape=binding.shard.tensor.shape
                ),
                box=box_to_proto(binding.shard.box),
                resident=binding.resident,
                ops=[repr(op) for op in binding.ops],
                form=binding.form.value,
                source=binding.source.value,
                alias=binding.alias,
            )
            for binding in layout.bindings
        ],
        derived=[f"{d.resident}: {d.rule} of {', '.join(d.sources)}" for d in layout.derived],
        exempt=[f"{e.resident}: {e.reason}" for e in layout.exempt],
        unbound=[f"{u.resident}: {u.layer_class}: {u.reason}" for u in layout.unbound],
        uncovered=layout.uncovered,
    )
