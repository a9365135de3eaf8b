"""Manifests as files, and the identity of a manifest.

A file is one JSON object, readable and diffable; its `manifest_id` covers every other field, so a truncated, edited or
merged file is refused. Files are written beside and renamed: never half a manifest.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import replace
from hashlib import blake2b
from math import prod
from pathlib import Path
from typing import Final

import msgspec

from syncguard.digest import ALGORITHM, PartialDigest, expected_coverage
from syncguard.errors import ManifestError, SpecVersionError
from syncguard.layout.coverage import partition_problems
from syncguard.manifest.model import Manifest, ManifestEntry
from syncguard.spec import DTYPES, SPEC_VERSION, dtype_named

FILE_LIMIT_BYTES: Final = 1 << 30
ENTRY_LIMIT: Final = 1_000_000


class _Version(msgspec.Struct):
    """The only field that every version of the format has."""

    spec_version: int


def manifest_id(manifest: Manifest) -> str:
    """Return the 128-bit BLAKE2b over the canonical bytes (msgpack of all fields but the id), in hex."""
    bare = replace(manifest, manifest_id="")
    return blake2b(msgspec.msgpack.encode(bare), digest_size=16, person=b"syncguard/man/1").hexdigest()


def seal(manifest: Manifest) -> Manifest:
    """Return the manifest with its entries sorted, checked, and its id set.

    Raises:
        ManifestError: A name occurs twice, or an entry contradicts itself.
    """
    ordered = replace(manifest, entries=tuple(sorted(manifest.entries, key=lambda entry: entry.fqn)))
    check(ordered)
    return replace(ordered, manifest_id=manifest_id(ordered))


def check(manifest: Manifest, where: str = "manifest") -> None:
    """Check what must hold inside a manifest, before anything is compared with it.

    Raises:
        SpecVersionError: Written by another version of the specification.
        ManifestError: Unsorted or repeated names, an unknown dtype, sums or parts that contradict the shape or each
            other, or an exemption without a reason or a tensor.
        DigestInputError: The key seed is none.
    """
    check_spec_version(manifest.spec_version, where)
    _check_exemptions(manifest, where)
    previous = ""
    due: dict[tuple[str, tuple[int, ...]], PartialDigest] = {}  # experts by the thousand have one shape
    for entry in manifest.entries:
        at = f"{where}: {entry.fqn}"
        if entry.fqn <= previous:
            raise ManifestError(
                "names of a manifest",
                expected="sorted, each once",
                found=f"{entry.fqn!r} after {previous!r}",
                where=where,
                todo="export again; a tensor was added twice",
            )
        previous = entry.fqn
        if entry.dtype not in DTYPES:
            raise ManifestError("dtype of a manifest entry", expected=" ".join(DTYPES), found=entry.dtype, where=at)
        if entry.partial.count != prod(entry.shape):
            raise ManifestError(
                "element count of a manifest entry",
                expected=prod(entry.shape),
                found=entry.partial.count,
                where=at,
                todo="export again; a shard was missing or counted twice",
            )
        if manifest.algorithm == ALGORITHM:
            form = (entry.dtype, entry.shape)
            if form not in due:
                due[form] = expected_coverage(dtype_named(entry.dtype), entry.shape, key_seed=_seed(manifest, where))
            if entry.partial.coverage != due[form].coverage:
                raise ManifestError(
                    "coverage of a manifest entry",
                    expected="each element once",
                    found="as many elements, but not each once",
                    where=at,
                    todo="export again; a shard was missing and another counted twice",
                )
        if entry.parts:
            _check_parts(entry, at)


def _check_parts(entry: ManifestEntry, at: str) -> None:
    """Refuse parts that do not tile their tensor, or do not add up to it: a verdict could follow either of the two."""
    problems = partition_problems(entry.shape, tuple(part.box for part in entry.parts))
    if problems:
        raise ManifestError("parts of a manifest entry", expected="a partition", found=problems[0], where=at)
    total = PartialDigest.total(part.partial for part in entry.parts)
    wrong = next((part.box for part in entry.parts if part.partial.count != part.box.count), None)
    if total != entry.partial or wrong is not None:
        raise ManifestError(
            "parts of a manifest entry",
            expected="the sum of the whole tensor",
            found=f"another number of elements in {wrong}" if wrong is not None else "another sum",
            where=at,
            todo="export again; parts and whole were made from different bytes",
        )


def _check_exemptions(manifest: Manifest, where: str) -> None:
    names = {entry.fqn for entry in manifest.entries} if manifest.exempt else set()
    for policy in manifest.exempt:
        if policy.fqn not in names or not policy.reason.strip():
            raise ManifestError(
                "an exemption",
                expected="the name of one exported tensor, once, with a reason",
                found=f"{policy.fqn!r} because {policy.reason!r}",
                where=where,
                todo="name each exempt tensor and say why workers need not hold it",
            )
        names.discard(policy.fqn)


def _seed(manifest: Manifest, where: str) -> bytes:
    try:
        return manifest.key_seed
    except ValueError as error:
        raise ManifestError("key seed of a manifest", expected="hex digits", found=error, where=where) from error


def check_spec_version(found: int, where: str) -> None:
    """Refuse another version of the specification.

    Raises:
        SpecVersionError: It is not ours.
    """
    if found != SPEC_VERSION:
        raise SpecVersionError(
            "specification version",
            expected=SPEC_VERSION,
            found=found,
            where=where,
            todo="install one version of syncguard on both sides, or export again",
        )


def encode(manifest: Manifest) -> bytes:
    """Return the bytes of a manifest file."""
    return msgspec.json.format(msgspec.json.encode(manifest), indent=1) + b"\n"


def decode(data: bytes, where: str = "manifest") -> Manifest:
    """Read the bytes of a manifest file.

    Raises:
        SpecVersionError: Written by another version of the specification.
        ManifestError: Not a manifest, damaged, or contradicting itself.
    """
    todo = "export the manifest again"
    try:
        check_spec_version(msgspec.json.decode(data, type=_Version).spec_version, where)
        manifest = msgspec.json.decode(data, type=Manifest)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ManifestError(
            "manifest file", expected="JSON of a syncguard manifest", found=error, where=where, todo=todo
        ) from error
    except SpecVersionError:
        raise
    except Exception as error:  # a field that a constructor refuses, such as a negative size
        raise ManifestError("manifest file", found=error, where=where, todo=todo) from error
    if len(manifest.entries) > ENTRY_LIMIT:
        raise ManifestError("entries of a manifest", expected=f"at most {ENTRY_LIMIT}", found=len(manifest.entries))
    check(manifest, where)
    actual = manifest_id(manifest)
    if actual != manifest.manifest_id:
        raise ManifestError(
            "manifest id", expected=manifest.manifest_id or "an id", found=actual, where=where, todo=todo
        )
    return manifest


def save(manifest: Manifest, path: Path) -> None:
    """Write a sealed manifest: beside the target, then renamed over it."""
    write_atomically(path, encode(manifest))


def load(path: Path) -> Manifest:
    """Read a manifest file.

    Raises:
        ManifestError: Missing, too large, or as `decode`.
        SpecVersionError: As `decode`.
    """
    try:
        size = path.stat().st_size
        if size > FILE_LIMIT_BYTES:
            raise ManifestError(
                "size of a manifest file", expected=f"at most {FILE_LIMIT_BYTES} bytes", found=size, where=path
            )
        data = path.read_bytes()
    except OSError as error:
        raise ManifestError(
            "manifest file", found=error.strerror or error, where=path, todo="make one with `syncguard export`"
        ) from error
    return decode(data, str(path))


def write_atomically(path: Path, data: bytes) -> None:
    """Write bytes so that a reader sees the old file or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        Path(name).chmod(0o644)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
