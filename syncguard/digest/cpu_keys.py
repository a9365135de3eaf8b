"""The key tables of the CPU path in the form its loops read, and the coverage sum of panels (numba).

Internal. One u64 array holds everything that depends on the key: the two low tables with even and odd entries apart
and each entry split 28 + 28 bits, the four plain tables, and prefix sums. A stale cache entry of numba (it watches one
file per function) could not do harm: `select` proves each engine against the reference before it is used.
"""

# ruff: noqa: PLR2004 - element sizes, bits and bytes

from __future__ import annotations

import logging
from typing import Any, Final

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

_log = logging.getLogger(__name__)

TABLE_PADDING: Final = 16
"""Zero entries behind each half table, read together with the zeroed end of a copied rest."""

_I64, _I128 = ir.IntType(64), ir.IntType(128)
_P: Final = (1 << 61) - 1
_PU: Final = np.uint64(_P)

# Places of the parts of the array.
HALF_TABLE: Final = 32768 + TABLE_PADDING
FULL: Final = 65536
EVEN: Final = (0, 2 * HALF_TABLE)  # of columns, of rows; packed as high << 32 | low; the odd half follows the even one
RAW: Final = 4 * HALF_TABLE  # T0 T1 T2 T3
_SUM: Final = RAW + 4 * FULL  # prefix sums, with a 0 in front: T0, T1, T2, T3, every second of T0
KEYS_LENGTH: Final = _SUM + 5 * (FULL + 1)
_EVEN_SUMS: Final = 4


def compiled(function: Any) -> Any:
    """Compile with a cache on disk, or without one where no folder for it can be written."""
    try:
        return numba.njit(nogil=True, cache=True)(function)
    except RuntimeError as error:
        _log.warning("digest kernels are compiled anew in each process, no cache folder: %s", error)
        return numba.njit(nogil=True)(function)


@intrinsic
def multiply(_context: Any, _a: Any, _b: Any) -> Any:
    """Return a * b mod p of values below 2^61, by one 128-bit product."""

    def generate(_ctx: Any, builder: Any, _sig: Any, args: Any) -> Any:
        wide = builder.mul(builder.zext(args[0], _I128), builder.zext(args[1], _I128))
        low = builder.and_(builder.trunc(wide, _I64), ir.Constant(_I64, _P))
        total = builder.add(low, builder.trunc(builder.lshr(wide, ir.Constant(_I128, 61)), _I64))
        less = builder.sub(total, ir.Constant(_I64, _P))
        return builder.select(builder.icmp_unsigned(">=", total, ir.Constant(_I64, _P)), less, total)

    return types.uint64(types.uint64, types.uint64), generate


@compiled
def add(a: Any, b: Any) -> Any:
    """Return a + b mod p of values below p."""
    total = a + b
    return total - _PU if total >= _PU else total


@compiled
def subtract(a: Any, b: Any) -> Any:
    """Return a - b mod p of values below p."""
    return a - b if a >= b else a + _PU - b


@compiled
def expand(tables: Any, keys: Any) -> None:
    """Fill the array of everything that depends on the key from the four tables of `KeyTables`."""
    mask = np.uint64((1 << 28) - 1)
    for pair in range(2):
        for n in range(FULL):
            value = tables[2 * pair, n]
            # 2^56 itself has a high half of 2^28, still below 2^32, and its products stay at 2^60.
            packed = ((value >> np.uint64(28)) << np.uint64(32)) | (value & mask)
            keys[EVEN[pair] + (n & 1) * HALF_TABLE + (n >> 1)] = packed
    for table in range(4):
        total = np.uint64(0)
        for n in range(FULL):
            keys[RAW + table * FULL + n] = tables[table, n]
            total = add(total, tables[table, n])
            keys[_SUM + table * (FULL + 1) + n + 1] = total
    total = np.uint64(0)
    for n in range(0, FULL, 2):
        total = add(total, tables[0, n])
        keys[_SUM + _EVEN_SUMS * (FULL + 1) + n // 2 + 1] = total


@compiled
def key_of(keys: Any, pair: Any, index: Any) -> Any:
    """Return the key of a word (pair 0) or row (pair 1)."""
    low = keys[RAW + 2 * pair * FULL + (index & 65535)]
    high = index >> 16
    return multiply(low, keys[RAW + (2 * pair + 1) * FULL + high]) if high else low


@compiled
def _range(keys: Any, pair: Any, stop: Any, sums: Any, per_block: Any) -> Any:
    """Return the sum of the keys below `stop`; `sums` names the prefix sums of the low table."""
    low, high = _SUM + sums * (FULL + 1), _SUM + (2 * pair + 1) * (FULL + 1)
    block, rest = stop // per_block, stop % per_block
    total = multiply(keys[low + per_block], keys[high + block])
    if rest:
        total = add(total, multiply(keys[low + rest], subtract(keys[high + block + 1], keys[high + block])))
    return total


@compiled
def _columns_sum(keys: Any, stop: Any, size: Any) -> Any:
    """Return the sum of the keys of the first bytes of columns 0 to `stop`."""
    if size == 8:
        return _range(keys, 0, stop, _EVEN_SUMS, 32768)
    words, rest = stop * size // 4, stop * size % 4
    places = np.uint64(1) if size == 4 else np.uint64(0x10001) if size == 2 else np.uint64(0x1010101)
    total = multiply(_range(keys, 0, words, 0, FULL), places)
    if rest:
        total = add(total, multiply(key_of(keys, 0, words), places & np.uint64((1 << (8 * rest)) - 1)))
    return total


@compiled
def cover(panels: Any, keys: Any, coverage: Any) -> None:
    """Fill the coverage sums of panels; releases the interpreter lock.

    Args:
        panels: i64[n, 9], see `panels.Panel`.
        keys: u64[KEYS_LENGTH] of `expand`.
        coverage: u64[n], written.
    """
    for n in range(panels.shape[0]):
        rows, columns, row, row_step = panels[n, 1], panels[n, 2], panels[n, 5], panels[n, 6]
        column, size = panels[n, 7], panels[n, 8]
        row_sum = np.uint64(0)
        if row_step == 1:
            row_sum = subtract(_range(keys, 1, row + rows, 2, FULL), _range(keys, 1, row, 2, FULL))
        else:
            for r in range(rows):
                row_sum = add(row_sum, key_of(keys, 1, row + r * row_step))
        column_sum = subtract(_columns_sum(keys, column + columns, size), _columns_sum(keys, column, size))
        coverage[n] = multiply(row_sum, column_sum)


@compiled
def gather(owners: Any, values: Any, sums: Any) -> None:
    """Add values modulo p into the sums of their owners.

    Args:
        owners: i64[n], indices into `sums`.
        values: u64[n] below p.
        sums: u64[m] below p, changed.
    """
    for n in range(owners.shape[0]):
        sums[owners[n]] = add(sums[owners[n]], values[n])
