"""A manifest from a safetensors folder: mapped memory and raw bits, no torch, no copy of a tensor."""

from __future__ import annotations

from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Final

from msgspec import structs

from syncguard.digest import ALGORITHM, DEFAULT_KEY_SEED, engine_for
from syncguard.errors import CheckpointError, VersionOrderError
from syncguard.export.config_shapes import check_shapes
from syncguard.export.entry import digest_jobs, entry_of, refuse_unknown_names, stated_changes
from syncguard.export.forms import ResidentForms
from syncguard.export.safetensors_file import MappedFile, StoredTensor, read_header, strict_json
from syncguard.manifest.codec import seal
from syncguard.manifest.model import Manifest
from syncguard.spec import dtype_named

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
    from pathlib import Path

    from syncguard.export.forms import Formed
    from syncguard.manifest.model import ExemptPolicy, ManifestEntry
    from syncguard.spec import Box, WeightVersion

CONFIG: Final = "config.json"
_BATCH_BYTES: Final = 256 << 20
_BATCH_TENSORS: Final = 4096


def export_checkpoint(
    folder: Path,
    *,
    version: WeightVersion,
    key_seed: bytes = DEFAULT_KEY_SEED,
    boxes: Mapping[str, Sequence[Box]] | None = None,
    changed: Collection[str] | None = None,
    previous: Manifest | None = None,
    progress: Callable[[float], None] | None = None,
    forms: Mapping[str, str] | None = None,
    exempt: Sequence[ExemptPolicy] = (),
) -> Manifest:
    """Digest every tensor of a checkpoint folder.

    Args:
        folder: Holds `*.safetensors`, with an index where there are several files, and `config.json`; without the latter,
            shapes are not checked, and the manifest's source says so.
        version: Weight version of the checkpoint.
        key_seed: Key seed of the digests.
        boxes: Name → boxes that tile the tensor: the entry then has parts, so that a difference is blamed on a box.
        changed: Names that the trainer's optimizer changed; None when it does not say.
        previous: Manifest of the previous version, to order this one and to note what certainly changed.
        progress: Called with the fraction of bytes done, 0 to 1.
        forms: Logical name → dtype of what the workers hold: tensors are cast and quantized as the engine does, with torch,
            before they are digested.
        exempt: Tensors that workers are not expected to hold, each by name and with a reason.

    Returns:
        The sealed manifest.

    Raises:
        CheckpointError: The folder is damaged or disagrees with its config.
        ManifestError: Boxes that do not tile, or names that the checkpoint lacks.
        VersionOrderError: `previous` is not older.
        DigestInputError: The key seed cannot be used.
    """
    check_order(version, previous)
    tensors, ignored = stored_tensors(folder)
    parts = boxes or {}
    refuse_unknown_names(parts, tensors, "boxes")
    entries: dict[str, ManifestEntry] = {}
    formed = ResidentForms(forms or {})
    total = sum(tensor.size_bytes for tensor in tensors.values()) or 1
    done = 0
    for batch in _batches(tensors.values()):
        own: list[StoredTensor] = []
        rest: list[StoredTensor] = []
        for tensor in batch:
            (own if formed.concerns(tensor.fqn, tensor.dtype.name) else rest).append(tensor)
        for entry in (*_digest(rest, parts, key_seed), *_digest_formed(own, formed, key_seed)):
            entries[entry.fqn] = entry
        done += sum(tensor.size_bytes for tensor in batch)
        if progress is not None:
            progress(done / total)
    entries.update((left.name, _entry_of_form(left, key_seed=key_seed)) for left in formed.rest())
    told = stated_changes(
        entries, changed=changed, previous=previous, key_seed=key_seed, exported=tensors, lossy=formed.lossy
    )
    source = f"safetensors folder {folder.name}"
    source += "" if (folder / CONFIG).exists() else f", without {CONFIG}: shapes not checked"
    source += f"; {made}" if (made := formed.describe()) else ""
    return seal(
        Manifest(
            version=version,
            algorithm=ALGORITHM,
            key_seed_hex=key_seed.hex(),
            entries=tuple(structs.replace(entries[fqn], changed=told[fqn]) for fqn in sorted(entries)),
            exempt=tuple(exempt),
            source=source + (f", not in its index: {' '.join(ignored)}" if ignored else ""),
        )
    )


def check_order(version: WeightVersion, previous: Manifest | None) -> None:
    """Refuse a version that does not follow the previous one of its run.

    Raises:
        VersionOrderError: Same run, but not a later step.
    """
    if previous is not None and previous.version.run_id == version.run_id and not previous.version.older_than(version):
        raise VersionOrderError(
            "weight version does not follow the previous one",
            expected=f"a step after {previous.version}",
            found=version,
            todo="pass the manifest of the step before",
        )


def stored_tensors(folder: Path) -> tuple[dict[str, StoredTensor], tuple[str, ...]]:
    """Return the tensors of a checkpoint folder by name, and the weight files that its index does not list.

    Raises:
        CheckpointError: Missing folder or files, a damaged file or config, a name twice, an index that disagrees with
            the files, or shapes that disagree with the config.
    """
    if not folder.is_dir():
        raise CheckpointError(
            "checkpoint folder", expected="a folder with *.safetensors and config.json", found="none", where=folder
        )
    config = _read_json(folder, CONFIG) if (folder / CONFIG).exists() else {}
    index = _index(folder)
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    named = sorted(set(index.values())) if index else files
    if not named:
        raise CheckpointError(
            "checkpoint without weights", expected="*.safetensors", found="none", where=folder, todo="save it again"
        )
    tensors: dict[str, StoredTensor] = {}
    for name in named:
        for tensor in read_header(folder / name):
            if tensor.fqn in tensors:
                raise CheckpointError(
                    "a name twice",
                    expected="each tensor in one file",
                    found=f"{tensor.fqn} in {tensors[tensor.fqn].path.name} and {name}",
                    where=folder.name,
                    todo="remove the file that is not of this checkpoint",
                )
            tensors[tensor.fqn] = tensor
    if index:
        _check_index(index, tensors, folder.name)
    check_shapes({fqn: tensor.shape for fqn, tensor in tensors.items()}, config, folder.name)
    return tensors, tuple(name for name in files if name not in named)


def _read_json(folder: Path, name: str) -> dict[str, Any]:
    try:
        raw = (folder / name).read_bytes()
    except OSError as error:
        raise CheckpointError(
            f"{name} cannot be read", expected="a JSON file", found=error.strerror or error, where=folder / name
        ) from error
    return strict_json(raw, name)


def _index(folder: Path) -> dict[str, str]:
    """Return name → file of the folder's index, empty when it has none."""
    found = sorted(path.name for path in folder.glob("*.safetensors.index.json"))
    if not found:
        return {}
    if len(found) > 1:
        raise CheckpointError("several indexes", expected="one index", found=" ".join(found), where=folder.name)
    weight_map = _read_json(folder, found[0]).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError("index without weight_map", expected="name to file", where=found[0])
    for fqn, name in weight_map.items():
        if not isinstance(name, str) or PurePath(name).name != name or not (folder / name).is_file():
            raise CheckpointError(
                "index names a file that is not there",
                expected="a file in the folder",
                found=name,
                where=f"{found[0]}: {fqn}",
                todo="copy the missing shard, or write the checkpoint again",
            )
    return weight_map


def _check_index(index: Mapping[str, str], tensors: Mapping[str, StoredTensor], where: str) -> None:
    for fqn, name in index.items():
        if fqn not in tensors or tensors[fqn].path.name != name:
            raise CheckpointError(
                "index disagrees with its files",
                expected=f"{fqn} in {name}",
                found=f"it is in {tensors[fqn].path.name}" if fqn in tensors else "it is in no file",
                where=where,
                todo="write the checkpoint again",
            )
    extra = sorted(set(tensors) - set(index))
    if extra:
        raise CheckpointError(
            "tensors that the index does not list",
            expected=f"{len(index)} names",
            found=f"{len(extra)} more, first {extra[0]} in {tensors[extra[0]].path.name}",
            where=where,
            todo="write the checkpoint again",
        )


def _batches(tensors: Collection[StoredTensor]) -> Iterator[list[StoredTensor]]:
    batch: list[StoredTensor] = []
    size = 0
    for tensor in tensors:
        batch.append(tensor)
        size += tensor.size_bytes
        if size >= _BATCH_BYTES or len(batch) >= _BATCH_TENSORS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _digest_formed(batch: Sequence[StoredTensor], formed: ResidentForms, key_seed: bytes) -> Iterator[ManifestEntry]:
    """Yield the entries of the forms that workers hold of some tensors."""
    files = {path: MappedFile(path) for path in {tensor.path for tensor in batch}}
    for tensor in batch:
        for made in formed.offer(tensor.fqn, files[tensor.path].raw(tensor), tensor.dtype.name):
            yield _entry_of_form(made, key_seed=key_seed)


def _entry_of_form(made: Formed, *, key_seed: bytes) -> ManifestEntry:
    dtype, shape = dtype_named(made.dtype), tuple(int(n) for n in made.tensor.shape)
    jobs = digest_jobs(made.name, made.tensor, dtype, shape, ())
    partials = engine_for("cpu").partials(jobs, key_seed=key_seed)
    return entry_of(made.name, dtype, shape, (), partials, key_seed=key_seed)


def _digest(
    batch: Sequence[StoredTensor], parts: Mapping[str, Sequence[Box]], key_seed: bytes
) -> Iterator[ManifestEntry]:
    """Yield the entries of some tensors; each file is mapped while they are read."""
    files = {path: MappedFile(path) for path in {tensor.path for tensor in batch}}
    jobs = [digest_jobs(t.fqn, files[t.path].raw(t), t.dtype, t.shape, tuple(parts.get(t.fqn, ()))) for t in batch]
    partials = iter(engine_for("cpu").partials([job for group in jobs for job in group], key_seed=key_seed))
    for tensor, group in zip(batch, jobs, strict=True):
        boxes = tuple(parts.get(tensor.fqn, ()))
        found = [next(partials) for _ in group]
        yield entry_of(tensor.fqn, tensor.dtype, tensor.shape, boxes, found, key_seed=key_seed)
