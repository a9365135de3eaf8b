"""MLP61v1 in numpy: short, obviously right, slow. The other implementations are tested against it.

Runs wherever numpy does. Each block of at most 1 MiB is copied, taken apart into bytes, and multiplied by the keys
of its bytes as SPEC.md writes the sum.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from syncguard.digest.coverage import expected_coverage
from syncguard.digest.keys import KeyTables, key_tables, mul_mod_p, reduce_mod_p, sum_mod_p
from syncguard.digest.partial import DEFAULT_KEY_SEED, PRIME, DigestJob, KeySeed, PartialDigest, as_array, with_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from syncguard.digest.keys import U64Array

_BLOCK_BYTES: Final = 1 << 20
_MASK_32: Final = np.uint64(0xFFFFFFFF)
_32: Final = np.uint64(32)


class NumpyEngine:
    """The reference behind the protocol of all engines."""

    name = "numpy"

    def partials(self, jobs: Sequence[DigestJob], *, key_seed: KeySeed = DEFAULT_KEY_SEED) -> list[PartialDigest]:
        """Return one partial digest per job; see `DigestEngine.partials`."""
        tables = key_tables(key_seed)
        results = []
        for job in jobs:
            array = as_array(job)
            place = expected_coverage(job.dtype, job.shape, job.box, key_seed=key_seed)
            results.append(PartialDigest(place.count, place.coverage, _data_sum(array, job, tables)))
        return results


def _data_sum(array: np.ndarray[Any, Any], job: DigestJob, tables: KeyTables) -> int:
    """Return sum over rows r and bytes q of rowkey(r) * bytekey(q) * byte[r, q], modulo p."""
    if array.size == 0:
        return 0
    array = array.reshape(array.shape if array.ndim > 1 else (1, array.size))
    shape, offsets = with_rows(job.shape, job.box)
    itemsize = job.dtype.itemsize_bytes
    columns = array.shape[-1]
    column_block = min(columns, _BLOCK_BYTES // itemsize)
    row_block = max(1, _BLOCK_BYTES // (column_block * itemsize))
    total = 0
    for row in range(0, array.size // columns, row_block):
        local = np.unravel_index(np.arange(row, min(row + row_block, array.size // columns)), array.shape[:-1])
        rows = np.zeros(len(local[0]), np.uint64)
        for index, offset, length in zip(local, offsets[:-1], shape[:-1], strict=True):
            rows = rows * np.uint64(length) + (index + offset).astype(np.uint64)
        row_sums = np.zeros(len(rows), np.uint64)
        picked: tuple[Any, ...] = local
        for column in range(0, columns, column_block):
            block = np.ascontiguousarray(array[(*picked, slice(column, column + column_block))])
            first = (offsets[-1] + column) * itemsize
            positions = np.arange(first, first + block.shape[1] * itemsize, dtype=np.uint64)
            row_sums = reduce_mod_p(row_sums + _row_sums(block.view(np.uint8), tables.byte_keys(positions)))
        total += sum_mod_p(mul_mod_p(tables.row_keys(rows), row_sums))
    return total % PRIME


def _row_sums(raw: np.ndarray[Any, np.dtype[np.uint8]], keys: U64Array) -> U64Array:
    """Return, for each row of bytes, the sum of key * byte modulo p.

    Keys are split in 32 low and 29 high bits, so a sum of 2^20 products with a byte stays below 2^60.
    """
    wide = raw.astype(np.uint64)
    low, high = reduce_mod_p(wide @ (keys & _MASK_32)), reduce_mod_p(wide @ (keys >> _32))
    return reduce_mod_p(low + mul_mod_p(high, np.full_like(high, 1 << 32)))
