"""The record file: one safetensors file, whole or not at all, checked down to its last byte.

Tensors of record i: `i/input_ids`, `i/positions`, `i/segment_ids` (int64), `i/mask` (uint8), `i/scores/<key>` (float64).
The metadata entry `syncguard` is JSON: the specification version, the rest of each record, and an xxh3_128 over that and
all tensor bytes (safetensors itself would not notice a flipped bit). A file holds one record or more: a batch, or the
calls of a conversation. It is written beside its place and renamed.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import xxhash
from safetensors import SafetensorError
from safetensors.numpy import load as load_tensors
from safetensors.numpy import save as save_tensors

from syncguard.errors import RecordError, ScoreError, SpecVersionError
from syncguard.replay.record import FREE_FIELDS, ReplayRecord, ScoreKey
from syncguard.replay.scores import ScoreDefinition
from syncguard.spec import SPEC_VERSION

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

_MAX_FILE_BYTES: Final = 1 << 30


def _described(record: ReplayRecord) -> dict[str, Any]:
    return {
        "prompt_length": record.prompt_length,
        "scores": [str(key) for key in record.scores],
        "definition": record.definition.as_dict(),
        "definitions": {path: value.as_dict() for path, value in record.definitions.items()},
        "worker": record.worker,
        "model_revision": record.model_revision,
        "tokenizer_revision": record.tokenizer_revision,
        "record_id": record.record_id,
        "batch": list(record.batch),
        **{name: dict(getattr(record, name)) for name in FREE_FIELDS},
    }


def _fingerprint(description: str, tensors: Mapping[str, npt.NDArray[Any]]) -> str:
    state = xxhash.xxh3_128(description.encode())
    for name in sorted(tensors):
        state.update(f"{name}:{tensors[name].dtype}:{tensors[name].shape};".encode())
        state.update(np.ascontiguousarray(tensors[name]).tobytes())
    return str(state.hexdigest())


def save_many(path: str | os.PathLike[str], records: Sequence[ReplayRecord]) -> None:
    """Write records to one safetensors file, whole or not at all.

    Raises:
        RecordError: No records, or a free field that is not JSON.
    """
    if not records:
        raise RecordError("nothing to save", expected="one record or more", found=0, where=path)
    tensors: dict[str, npt.NDArray[Any]] = {}
    for index, record in enumerate(records):
        tensors[f"{index}/input_ids"] = record.input_ids
        tensors[f"{index}/mask"] = record.loss_mask.astype(np.uint8)
        tensors[f"{index}/positions"] = np.asarray(record.positions)
        tensors[f"{index}/segment_ids"] = np.asarray(record.segment_ids)
        for key, values in record.scores.items():
            tensors[f"{index}/scores/{key}"] = values
    try:
        body = json.dumps([_described(record) for record in records], sort_keys=True, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise RecordError(
            "a field of the record is not JSON", found=error, where=path, todo="keep plain values"
        ) from error
    head = json.dumps({"spec_version": SPEC_VERSION, "xxh3_128": _fingerprint(body, tensors), "records": body})
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, beside = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(save_tensors(tensors, {"syncguard": head}))
            file.flush()
            os.fsync(file.fileno())
        Path(beside).replace(target)
    except BaseException:
        Path(beside).unlink(missing_ok=True)
        raise


def _opened(path: Path) -> tuple[dict[str, npt.NDArray[Any]], str]:
    try:
        size = path.stat().st_size
        if size > _MAX_FILE_BYTES:
            raise RecordError(
                "record file too large", expected=f"at most {_MAX_FILE_BYTES} bytes", found=size, where=path
            )
        raw = path.read_bytes()
    except OSError as error:
        raise RecordError("cannot read a record", found=error.strerror or error, where=path) from error
    try:
        tensors = load_tensors(raw)
        header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
        text = header["__metadata__"]["syncguard"]
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise RecordError(
            "not a replay record",
            expected="a safetensors file with syncguard metadata",
            found=f"{type(error).__name__}: {error}",
            where=path,
            todo="capture it again; a truncated copy cannot be repaired",
        ) from error
    return tensors, str(text)


def load_many(path: str | os.PathLike[str]) -> list[ReplayRecord]:
    """Read all records of a file, checked down to the last byte.

    Raises:
        RecordError: Truncated, corrupt, with missing or surplus tensors.
        SpecVersionError: Written by another version of the specification.
    """
    where = Path(path)
    tensors, text = _opened(where)
    try:
        head = json.loads(text)
        version, stated, body = head["spec_version"], head["xxh3_128"], head["records"]
    except (ValueError, KeyError, TypeError) as error:
        raise RecordError("damaged record metadata", found=repr(error), where=where) from error
    if version != SPEC_VERSION:
        raise SpecVersionError(
            "a record of another specification",
            expected=SPEC_VERSION,
            found=version,
            where=where,
            todo="read it with the release that wrote it",
        )
    actual = _fingerprint(str(body), tensors)
    if actual != stated:
        raise RecordError(
            "the record's content changed after it was written", expected=stated, found=actual, where=where
        )
    try:
        described = json.loads(body)
        records = [_rebuilt(index, item, tensors) for index, item in enumerate(described)]
    except (KeyError, TypeError, ValueError, AttributeError, ScoreError) as error:
        raise RecordError("incomplete record", found=f"{type(error).__name__}: {error}", where=where) from error
    expected = sum(4 + len(item["scores"]) for item in described)
    if not records or len(tensors) != expected:
        raise RecordError("surplus tensors in a record", expected=expected, found=len(tensors), where=where)
    return records


def _rebuilt(index: int, item: Mapping[str, Any], tensors: Mapping[str, npt.NDArray[Any]]) -> ReplayRecord:
    return ReplayRecord(
        input_ids=tensors[f"{index}/input_ids"],
        prompt_length=int(item["prompt_length"]),
        mask=tensors[f"{index}/mask"].astype(np.int64),
        positions=tensors[f"{index}/positions"],
        segment_ids=tensors[f"{index}/segment_ids"],
        scores={ScoreKey.parse(key): tensors[f"{index}/scores/{key}"] for key in item["scores"]},
        definition=ScoreDefinition.from_dict(item["definition"]),
        definitions={path: ScoreDefinition.from_dict(value) for path, value in item["definitions"].items()},
        worker=str(item["worker"]),
        model_revision=str(item["model_revision"]),
        tokenizer_revision=str(item["tokenizer_revision"]),
        record_id=str(item["record_id"]),
        batch=tuple(map(str, item["batch"])),
        **{name: item[name] for name in FREE_FIELDS},
    )
