"""One safetensors file, read strictly: header checked to the last byte, tensors as views of mapped memory.

The library's numpy reader has no bf16 and no fp8, and keeps the last of two equal JSON keys; here every tensor is its
raw bits as unsigned integers, and a file that could be read in two ways is refused.
Format: 8 bytes little-endian header length, JSON header, then the bytes of all tensors without gaps.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from syncguard.errors import CheckpointError
from syncguard.spec import DTYPES

if TYPE_CHECKING:
    from pathlib import Path

    import numpy.typing as npt

    from syncguard.spec import DType

HEADER_BYTES_MAX: Final = 100_000_000
"""Limit of the safetensors library."""

_LENGTH_BYTES: Final = 8
_DIMENSIONS_MAX: Final = 16
_BY_CODE: Final = {dtype.safetensors: dtype for dtype in DTYPES.values()}
_RAW: Final[dict[int, np.dtype[Any]]] = {1: np.dtype("u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4"), 8: np.dtype("<u8")}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor lies.

    Attributes:
        fqn: Checkpoint name.
        dtype: Element type.
        shape: Shape in elements.
        path: Its file.
        offset_bytes: First byte in the file.
        size_bytes: Length in bytes.
    """

    fqn: str
    dtype: DType
    shape: tuple[int, ...]
    path: Path
    offset_bytes: int
    size_bytes: int


def read_header(path: Path) -> list[StoredTensor]:
    """Return the tensors of a file, in file order.

    Raises:
        CheckpointError: Missing, truncated, trailing bytes, a header that is damaged, too large, or names a tensor
            twice, gaps or overlaps, or a dtype without a rule.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            if size < _LENGTH_BYTES or length > min(HEADER_BYTES_MAX, size - _LENGTH_BYTES):
                raise CheckpointError(
                    "safetensors header does not fit its file",
                    expected=f"at most {max(0, min(HEADER_BYTES_MAX, size - _LENGTH_BYTES))} bytes",
                    found=f"{length} bytes announced in a file of {size}",
                    where=path.name,
                    todo="the file is truncated or not safetensors; copy it again",
                )
            raw = file.read(length)
    except OSError as error:
        raise CheckpointError(
            "safetensors file cannot be read", found=error, where=path.name, todo="check the path and permissions"
        ) from error
    header = strict_json(raw, path.name)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _damaged(path, "__metadata__ of strings", type(metadata).__name__)
    start = _LENGTH_BYTES + length
    tensors = sorted(
        (_stored(path, fqn, entry, start) for fqn, entry in header.items()),
        key=lambda tensor: (tensor.offset_bytes, tensor.size_bytes),
    )
    _check_contiguous(path, tensors, start, size)
    return tensors


def strict_json(raw: bytes, where: str) -> dict[str, Any]:
    """Read a JSON object, refusing one that names a key twice.

    Raises:
        CheckpointError: Not UTF-8, not JSON, not an object, nested without end, or a key twice.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
            raise CheckpointError(
                "a name twice", expected="each name once", found=twice, where=where, todo="write the checkpoint again"
            )
        return found

    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            "JSON cannot be read", expected="a JSON object", found=error, where=where, todo="write the checkpoint again"
        ) from error
    if not isinstance(value, dict):
        raise CheckpointError("JSON of another kind", expected="an object", found=type(value).__name__, where=where)
    return value


def _stored(path: Path, fqn: str, entry: Any, start: int) -> StoredTensor:
    fields = entry if isinstance(entry, dict) else {}
    code, shape, offsets = fields.get("dtype"), _naturals(fields.get("shape")), _naturals(fields.get("data_offsets"))
    if set(fields) != {"dtype", "shape", "data_offsets"} or shape is None or offsets is None:
        raise _damaged(path, f"dtype, shape and data_offsets of {fqn}", entry)
    dtype = _BY_CODE.get(code) if isinstance(code, str) else None
    if dtype is None:
        raise CheckpointError(
            "dtype without a rule",
            expected=" ".join(_BY_CODE),
            found=code,
            where=f"{path.name}: {fqn}",
            todo="export in a supported dtype",
        )
    if len(offsets) != 2 or len(shape) > _DIMENSIONS_MAX:  # noqa: PLR2004 - begin and end
        raise _damaged(path, f"two offsets and at most {_DIMENSIONS_MAX} dimensions for {fqn}", entry)
    begin, end = offsets
    if end - begin != prod(shape) * dtype.itemsize_bytes:
        raise CheckpointError(
            "tensor size contradicts its shape",
            expected=f"{prod(shape) * dtype.itemsize_bytes} bytes for {dtype.name} {tuple(shape)}",
            found=f"{end - begin} bytes",
            where=f"{path.name}: {fqn}",
            todo="write the checkpoint again",
        )
    return StoredTensor(fqn, dtype, tuple(shape), path, start + begin, end - begin)


def _naturals(value: Any) -> list[int] | None:
    """Return the value if it is a list of integers of 0 and more."""
    return value if isinstance(value, list) and all(type(item) is int and item >= 0 for item in value) else None


def _check_contiguous(path: Path, tensors: list[StoredTensor], start: int, size: int) -> None:
    at = start
    for tensor in tensors:
        if tensor.offset_bytes != at:
            raise _damaged(path, f"{tensor.fqn} at byte {at}", f"byte {tensor.offset_bytes} (gap or overlap)")
        at += tensor.size_bytes
    if at != size:
        raise CheckpointError(
            "safetensors file is truncated" if at > size else "safetensors file has trailing bytes",
            expected=f"{at} bytes",
            found=f"{size} bytes",
            where=path.name,
            todo="copy or write the file again",
        )


def _damaged(path: Path, expected: object, found: object) -> CheckpointError:
    text = str(found)
    return CheckpointError(
        "safetensors header is damaged",
        expected=expected,
        found=text[:200],
        where=path.name,
        todo="write the checkpoint again",
    )


class MappedFile:
    """A safetensors file in mapped memory; views stay valid as long as the object lives."""

    def __init__(self, path: Path) -> None:
        """Map the whole file read-only.

        Raises:
            CheckpointError: It cannot be mapped.
        """
        try:
            self._bytes = np.memmap(path, dtype=np.uint8, mode="r")
        except (OSError, ValueError) as error:
            raise CheckpointError("safetensors file cannot be mapped", found=error, where=path.name) from error

    def raw(self, tensor: StoredTensor) -> npt.NDArray[Any]:
        """Return the bits of a tensor as little-endian unsigned integers of its item size, in its shape.

        A view, except where the file places the tensor at an odd address: then a copy.
        """
        flat = np.asarray(self._bytes[tensor.offset_bytes : tensor.offset_bytes + tensor.size_bytes])
        dtype = _RAW[tensor.dtype.itemsize_bytes]
        if flat.size and flat.ctypes.data % dtype.itemsize:
            flat = flat.copy()
        return flat.view(dtype).reshape(tensor.shape)
