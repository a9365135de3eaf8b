"""Manifests, observations, layouts and verdicts to and from `syncguard.v1`; streams in bounded chunks.

Strict in both directions: an unspecified enum, a box of two lengths or a stream whose id does not fit is an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
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
_DIGEST_BYTES: Final = 16

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
        yield _chunk_to_proto(manifest.entries[start : start + ENTRIES_PER_CHUNK])


def _chunk_to_proto(entries: Sequence[ManifestEntry]) -> Any:
    forms: dict[tuple[str, tuple[int, ...]], int] = {}
    form = [forms.setdefault((entry.dtype, entry.shape), len(forms)) for entry in entries]
    return manifest_pb2.ManifestChunk(
        forms=[manifest_pb2.TensorForm(dtype=dtype, shape=shape) for dtype, shape in forms],
        fqn=[entry.fqn for entry in entries],
        form=form,
        count=[entry.partial.count for entry in entries],
        coverage=[entry.partial.coverage for entry in entries],
        data=[entry.partial.data for entry in entries],
        digests=bytes.fromhex("".join([entry.digest for entry in entries])),
        changed=[_CHANGED[entry.changed] for entry in entries],
        parts=[
            manifest_pb2.EntryParts(entry=index, parts=[_part_to_proto(part) for part in entry.parts])
            for index, entry in enumerate(entries)
            if entry.parts
        ],
    )


def _part_to_proto(part: Part) -> Any:
    return manifest_pb2.Part(box=box_to_proto(part.box), partial=partial_to_proto(part.partial))


def _entries_from_proto(chunk: Any, where: str) -> list[ManifestEntry]:
    """Read the columns of a chunk back.

    Raises:
        ManifestError: Columns of different lengths, or an index past their end.
    """
    names = list(chunk.fqn)
    columns = (chunk.form, chunk.count, chunk.coverage, chunk.data, chunk.changed)
    lengths = {len(column) for column in columns} | {len(chunk.digests) / _DIGEST_BYTES}
    if lengths - {len(names)}:
        raise _bad_chunk("columns of one length", f"{len(names)} names and columns of {sorted(lengths)}", where)
    forms = [(form.dtype, tuple(form.shape)) for form in chunk.forms]
    parts: dict[int, tuple[Part, ...]] = {}
    for listed in chunk.parts:
        if listed.entry >= len(names) or listed.entry in parts or not listed.parts:
            raise _bad_chunk("the parts of each entry once", f"parts of entry {listed.entry} of {len(names)}", where)
        parts[listed.entry] = tuple(
            Part(box_from_proto(part.box), partial_from_proto(part.partial)) for part in listed.parts
        )
    if max(chunk.form, default=-1) >= len(forms):
        raise _bad_chunk("a form of the chunk", f"form {max(chunk.form)} of {len(forms)}", where)
    digests = chunk.digests.hex()
    width = 2 * _DIGEST_BYTES
    rows = zip(names, chunk.form, chunk.count, chunk.coverage, chunk.data, chunk.changed, strict=True)
    return [
        ManifestEntry(
            name,
            forms[form][0],
            forms[form][1],
            PartialDigest(count, coverage, data),
            digests[width * index : width * (index + 1)],
            parts.get(index, ()) if parts else (),
            _CHANGED_BACK.get(changed, Changed.UNKNOWN),
        )
        for index, (name, form, count, coverage, data, changed) in enumerate(rows)
    ]


def _bad_chunk(expected: str, found: str, where: str) -> ManifestError:
    return ManifestError("chunk of a manifest", expected=expected, found=found, where=where, todo="send it again")


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
        entries += _entries_from_proto(chunk, where)
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
    actual = manifest_id(manifest)
    if actual != manifest.manifest_id:
        raise ManifestError(
            "manifest id",
            expected=manifest.manifest_id or "an id",
            found=actual,
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
        altered=observation.altered,
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
        altered=tuple(message.altered),
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
        dropped=[f"{d.fqn}: {d.reason}" for d in layout.dropped],
    )
