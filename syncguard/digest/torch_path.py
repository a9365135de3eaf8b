"""MLP61v1 in torch operations: any device, no compiler. The only module here, beside the Triton path, with torch.

Words are split into 16-bit halves and keys into three pieces of at most 21 bits, so that float64 matrix products of
up to 2^15 terms are exact (16 + 21 + 15 = 52 bits < 53); the pieces are put together modulo p at the end.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from syncguard.digest.coverage import expected_coverage
from syncguard.digest.keys import KeyTables, key_tables
from syncguard.digest.partial import (
    DEFAULT_KEY_SEED,
    PRIME,
    DigestJob,
    KeySeed,
    PartialDigest,
    as_array,
    check_job,
    place_of,
    with_rows,
)
from syncguard.errors import DigestInputError

if TYPE_CHECKING:
    from collections.abc import Sequence

_RAW_DTYPES: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_BLOCK_UNITS: Final = 1 << 15
_SCRATCH_BYTES: Final = 32 << 20
_HOST_SCRATCH_BYTES: Final = 1 << 20  # stays in the cache: three times faster
_PIECE_BITS: Final = (0, 21, 42)
_MASK_21: Final = np.uint64((1 << 21) - 1)
_MASK_30: Final = (1 << 30) - 1
_MASK_31: Final = (1 << 31) - 1


def raw_view(job: DigestJob) -> torch.Tensor:
    """Return the checked tensor of a job, viewed as integers of the same size; no copy, any device.

    Raises:
        DigestInputError: Not a torch tensor, on the meta device, freed, not strided, or it does not fit its place.
    """
    check_tensor(job)
    tensor = job.view.detach()
    raw: torch.Tensor = tensor.view(_RAW_DTYPES[tensor.element_size()])
    return raw


def check_tensor(job: DigestJob) -> None:
    """Refuse a job whose tensor has no bits in memory, or does not fit its place.

    Raises:
        DigestInputError: See `raw_view`.
    """
    tensor = job.view
    if not isinstance(tensor, torch.Tensor):
        raise DigestInputError(
            "not a view of memory",
            expected="a numpy array or a torch tensor",
            found=type(tensor).__name__,
            where=place_of(job.fqn, job.box),
            todo="bind the resident tensor itself",
        )
    problem = _problem(tensor)
    if problem:
        raise DigestInputError(
            "tensor without readable bits",
            expected="a strided tensor with its storage",
            found=problem,
            where=place_of(job.fqn, job.box),
            todo="digest while the weights are resident",
        )
    check_job(job, tuple(tensor.shape), tensor.element_size())


def _problem(tensor: torch.Tensor) -> str:  # noqa: PLR0911 - one line per reason
    """Return why the bits of a tensor cannot be read in place; empty when they can."""
    if tensor.layout != torch.strided:
        return f"layout {tensor.layout}"
    if tensor.is_meta:
        return "meta device"
    if tensor.is_quantized:
        return "torch quantized tensor"
    itemsize = tensor.element_size()
    if itemsize not in _RAW_DTYPES:
        return f"dtype {tensor.dtype}"
    if tensor.is_neg() or tensor.is_conj():
        return "lazy negation or conjugation"
    if tensor.numel() == 0:
        return ""
    try:
        address, held = tensor.data_ptr(), tensor.untyped_storage().nbytes()
    except RuntimeError as error:  # fake tensors and functional wrappers have no storage
        return str(error)
    last = tensor.storage_offset()
    for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
        last += (length - 1) * stride
    if address == 0 or held < (last + 1) * itemsize:
        return f"storage of {held} bytes (freed)"
    return ""


def host_memory(job: DigestJob) -> tuple[int, tuple[int, ...]]:
    """Return the address and the strides in bytes of a job's checked CPU tensor.

    Raises:
        DigestInputError: See `raw_view`; or the tensor is on another device.
    """
    check_tensor(job)
    tensor: torch.Tensor = job.view
    if tensor.device.type != "cpu":
        raise DigestInputError(
            "tensor is not in host memory",
            expected="device cpu",
            found=f"device {tensor.device}",
            where=place_of(job.fqn, job.box),
            todo="use engine_for(device)",
        )
    itemsize = tensor.element_size()
    return tensor.data_ptr(), tuple(stride * itemsize for stride in tensor.stride())


def host_array(job: DigestJob) -> np.ndarray[Any, Any]:
    """Return the memory of a job's CPU tensor as a numpy array of integers, with no copy.

    Raises:
        DigestInputError: See `host_memory`.
    """
    host_memory(job)
    array: np.ndarray[Any, Any] = raw_view(job).numpy()
    return array


class TorchEngine:
    """MLP61v1 as torch operations on the device of each tensor; one copy to the host per device and call."""

    name = "torch"

    def partials(self, jobs: Sequence[DigestJob], *, key_seed: KeySeed = DEFAULT_KEY_SEED) -> list[PartialDigest]:
        """Return one partial digest per job; see `DigestEngine.partials`. Scratch is below 64 MB."""
        tables = key_tables(key_seed)
        views = [_from_numpy(job) if isinstance(job.view, np.ndarray | np.generic) else raw_view(job) for job in jobs]
        places = [expected_coverage(job.dtype, job.shape, job.box, key_seed=key_seed) for job in jobs]
        sums: dict[torch.device, list[tuple[int, torch.Tensor]]] = {}
        for index, (job, view) in enumerate(zip(jobs, views, strict=True)):
            if job.box.count:
                sums.setdefault(view.device, []).append((index, _data_sum(view, job, tables)))
        data = [0] * len(jobs)
        for found in sums.values():
            values = torch.stack([value for _, value in found]).cpu().tolist()
            for (index, _), value in zip(found, values, strict=True):
                data[index] = value % PRIME
        return [PartialDigest(place.count, place.coverage, value) for place, value in zip(places, data, strict=True)]


def _from_numpy(job: DigestJob) -> torch.Tensor:
    array = as_array(job)
    raw = array.view(f"i{array.itemsize}" if array.itemsize > 1 else "u1")
    with warnings.catch_warnings():  # read-only arrays are welcome: nothing here writes
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(raw)


def _data_sum(view: torch.Tensor, job: DigestJob, tables: KeyTables) -> torch.Tensor:
    """Return the data sum of a job as an int64 scalar below p, on the device of `view`."""
    view = view if view.ndim > 1 else view.reshape(1, -1)
    shape, offsets = with_rows(job.shape, job.box)
    itemsize, columns = job.dtype.itemsize_bytes, view.shape[-1]
    even = offsets[-1] * itemsize % 2 == 0 and columns * itemsize % 2 == 0
    unit, unit_dtype = (2, torch.uint16) if even else (1, torch.uint8)
    column_block = min(columns, _BLOCK_UNITS * unit // itemsize)
    scratch = _HOST_SCRATCH_BYTES if view.device.type == "cpu" else _SCRATCH_BYTES
    row_block = max(1, scratch // 8 * unit // (column_block * itemsize))
    lead = view.shape[:-1]
    row_count = view.numel() // columns
    total = torch.zeros((), dtype=torch.int64, device=view.device)
    for column in range(0, columns, column_block):
        part = view[..., column : column + column_block]
        first = (offsets[-1] + column) * itemsize
        positions = np.arange(first, first + part.shape[-1] * itemsize, unit, dtype=np.uint64)
        pieces = _pieces(tables.byte_keys(positions), view.device)
        for row in range(0, row_count, row_block):
            local = np.unravel_index(np.arange(row, min(row + row_block, row_count)), tuple(lead))
            rows = np.zeros(len(local[0]), np.uint64)
            for index, offset, length in zip(local, offsets[:-1], shape[:-1], strict=True):
                rows = rows * np.uint64(length) + (index + offset).astype(np.uint64)
            if len(local) == 1:
                block = part[row : row + len(rows)].clone(memory_format=torch.contiguous_format)
            else:
                block = part[tuple(torch.from_numpy(index).to(view.device) for index in local)]
            sums = _row_sums(block.view(torch.uint8).view(unit_dtype), pieces)
            total = _reduce(total + _sum(_mul(_to_device(tables.row_keys(rows), view.device), sums)))
    return total


def _to_device(keys: np.ndarray[Any, np.dtype[np.uint64]], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(keys.astype(np.int64)).to(device)


def _pieces(keys: np.ndarray[Any, np.dtype[np.uint64]], device: torch.device) -> torch.Tensor:
    """Return keys as a matrix of three pieces of at most 21 bits."""
    pieces = np.stack([(keys >> np.uint64(bits)) & _MASK_21 for bits in _PIECE_BITS], axis=1).astype(np.float64)
    return torch.from_numpy(pieces).to(device)


def _row_sums(units: torch.Tensor, pieces: torch.Tensor) -> torch.Tensor:
    """Return, for each row of 8- or 16-bit units, the sum of key * unit modulo p, as int64."""
    low, middle, high = (units.to(torch.float64) @ pieces).to(torch.int64).unbind(1)
    shifted = [_mul(piece, torch.full_like(piece, 1 << bits)) for piece, bits in ((middle, 21), (high, 42))]
    return _reduce(low + shifted[0] + shifted[1])


def _reduce(x: torch.Tensor) -> torch.Tensor:
    """Return `x mod p` for non-negative int64 values."""
    y = (x & PRIME) + (x >> 61)
    return torch.where(y >= PRIME, y - PRIME, y)


def _mul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return `a * b mod p` for values below 2^61; no intermediate exceeds 2^63."""
    a_high, a_low, b_high, b_low = a >> 31, a & _MASK_31, b >> 31, b & _MASK_31
    middle = a_high * b_low + a_low * b_high
    folded = (middle >> 30) + ((middle & _MASK_30) << 31)
    return _reduce(_reduce(2 * a_high * b_high + folded) + _reduce(a_low * b_low))


def _sum(x: torch.Tensor) -> torch.Tensor:
    """Return the sum of values below 2^61, modulo p."""
    low, high = (x & _MASK_31).sum(), (x >> 31).sum()
    return _reduce(low + _mul(_reduce(high), torch.full_like(high, 1 << 31)))
