"""Conformance vectors: tensors given by rule, with the integers that every implementation must give.

The file format is that of `tests/conformance/*.json`: inputs are the bytes of SHAKE-256, so no data is stored.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from syncguard.digest.coverage import expected_coverage, finalize
from syncguard.digest.keys import key_tables
from syncguard.digest.localize import window
from syncguard.digest.partial import ALGORITHM, DigestJob, PartialDigest
from syncguard.errors import BadInputError
from syncguard.spec import Box, dtype_named

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from syncguard.digest.partial import DigestEngine


class BoxVector(msgspec.Struct, frozen=True):
    """Expected sums of one box; integers in hex."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    count: int
    coverage: str
    data: str


class CaseVector(msgspec.Struct, frozen=True):
    """One tensor by rule, its expected sums and digest, and those of the boxes of a partition (maybe none)."""

    i: int
    name: str
    dtype: str
    shape: tuple[int, ...]
    count: int
    coverage: str
    data: str
    digest: str
    boxes: tuple[BoxVector, ...] = ()


class VectorFile(msgspec.Struct, frozen=True):
    """A file of vectors under one key seed."""

    algorithm: str
    key_seed: str
    fill: str
    keys: dict[str, str]
    cases: tuple[CaseVector, ...]
    tables_sha256: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """One comparison: `problem` is empty when both sides agreed."""

    name: str
    problem: str


def read_vectors(path: Path) -> VectorFile:
    """Read a file of vectors.

    Raises:
        BadInputError: Not such a file, or another algorithm.
    """
    try:
        vectors = msgspec.json.decode(path.read_bytes(), type=VectorFile)
    except (OSError, msgspec.MsgspecError) as error:
        raise BadInputError("not a file of vectors", found=error, where=path, todo="pass a JSON file") from error
    if vectors.algorithm != ALGORITHM:
        raise BadInputError("vectors of another algorithm", expected=ALGORITHM, found=vectors.algorithm, where=path)
    if not vectors.cases:
        raise BadInputError("vectors without cases", expected="at least one case", where=path, todo="pass a whole file")
    return vectors


def fill(case: CaseVector) -> np.ndarray[Any, Any]:
    """Return the tensor of a case as unsigned integers of its item size."""
    itemsize = dtype_named(case.dtype).itemsize_bytes
    size = Box.whole(case.shape).count * itemsize
    raw = hashlib.shake_256(b"syncguard/vector\0" + f"v1/{case.i}".encode()).digest(size)
    return np.frombuffer(raw, dtype=f"<u{itemsize}").reshape(case.shape)


def check_tables(vectors: VectorFile) -> Iterator[Outcome]:
    """Yield the comparison of the expanded tables and of single keys."""
    tables = key_tables(bytes.fromhex(vectors.key_seed))
    found = hashlib.sha256(tables.tables.astype("<u8").tobytes()).hexdigest()
    yield _same("tables_sha256", vectors.tables_sha256, found)
    for label, expected in vectors.keys.items():
        if label.startswith("column key of word "):
            value = tables.word_keys(np.array([int(label.split()[-1])], np.uint64))[0]
        elif label.startswith("row key of row "):
            value = tables.row_keys(np.array([int(label.split()[-1])], np.uint64))[0]
        else:
            value = tables.tables[int(label[1]), int(label[3:-1])]
        yield _same(label, expected, f"{int(value):016x}")


def check_engine(engine: DigestEngine, vectors: VectorFile) -> Iterator[Outcome]:
    """Yield one comparison per case and box, and one per sum of boxes, for an engine."""
    key_seed = bytes.fromhex(vectors.key_seed)
    for case in vectors.cases:
        dtype, tensor = dtype_named(case.dtype), fill(case)
        whole = Box.whole(case.shape)
        boxes = [Box(box.offsets, box.sizes) for box in case.boxes]
        jobs = [
            DigestJob(tensor[window(box, whole)] if box.sizes else tensor, dtype, case.shape, box, case.name)
            for box in (whole, *boxes)
        ]
        first, *rest = engine.partials(jobs, key_seed=key_seed)
        label = f"{engine.name} {case.i} {case.dtype} {case.shape}"
        yield _same(f"{label} sums", (case.count, case.coverage, case.data), _hex(first))
        closed = expected_coverage(dtype, case.shape, key_seed=key_seed)
        yield _same(f"{label} closed form", (case.count, case.coverage), _hex(closed)[:2])
        digest = finalize(first, fqn=case.name, dtype=dtype, shape=case.shape, key_seed=key_seed)
        yield _same(f"{label} digest", case.digest, digest)
        for box, expected, found in zip(boxes, case.boxes, rest, strict=True):
            yield _same(f"{label} {box}", (expected.count, expected.coverage, expected.data), _hex(found))
        if boxes:
            yield _same(f"{label} sum of boxes", _hex(first), _hex(sum(rest, PartialDigest.zero())))


def check_vectors(vectors: VectorFile, engines: Sequence[DigestEngine]) -> list[Outcome]:
    """Return every comparison of a file with every engine."""
    outcomes = list(check_tables(vectors))
    for engine in engines:
        outcomes += check_engine(engine, vectors)
    return outcomes


def _hex(partial: PartialDigest) -> tuple[int, str, str]:
    return partial.count, f"{partial.coverage:016x}", f"{partial.data:016x}"


def _same(name: str, expected: object, found: object) -> Outcome:
    return Outcome(name, "" if expected == found else f"expected {expected}, found {found}")
