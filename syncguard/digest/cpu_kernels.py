"""The compiled walk over panels of the CPU path (numba): rows, columns, or neither contiguous.

Internal. Addresses and strides are in bytes. Each sum over indices is a call into `cpu_loops`, by address.
"""

# ruff: noqa: PLR2004 - element sizes, group sizes of the inner loops, bits and bytes

from __future__ import annotations

from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from syncguard.digest.cpu_keys import add, compiled, key_of, multiply
from syncguard.digest.cpu_loops import (
    BYTE,
    DOUBLES_2,
    DOUBLES_4,
    HALF,
    PAIRS_1,
    PAIRS_4,
    QUADS_1,
    QUADS_4,
    SCRATCH_WORDS,
    SUMS,
    WORDS_1,
    WORDS_4,
    load_8,
    load_16,
    load_32,
    load_64,
    store_8,
    store_16,
    store_32,
    store_64,
)

_I32, _I64 = ir.IntType(32), ir.IntType(64)
_PREFETCH_BYTES: Final = 1024
_SHORT_ROW_BYTES: Final = 8192
_TILE_BYTES: Final = 1 << 16


@intrinsic
def _call(
    _context: Any, _loops: Any, _1: Any, _2: Any, _3: Any, _4: Any, _5: Any, _6: Any, _7: Any, _8: Any, _9: Any
) -> Any:
    """Call `_sum_indices` by its address."""

    def generate(_ctx: Any, builder: Any, _sig: Any, args: Any) -> Any:
        function = ir.FunctionType(ir.VoidType(), [_I64] * 9)
        builder.call(builder.inttoptr(args[0], function.as_pointer()), args[1:])
        return cgutils.get_null_value(_I32)

    return types.int32(*[types.int64] * 10), generate


@compiled
def _sums(
    kind: Any,
    address: Any,
    stride: Any,
    pair: Any,
    first: Any,
    count: Any,
    keys: Any,
    scratch: Any,
    loops: Any,
    ahead: Any,
) -> None:
    _call(
        loops,
        kind,
        address,
        stride,
        pair,
        first,
        count,
        np.int64(keys.ctypes.data),
        np.int64(scratch.ctypes.data),
        ahead,
    )


@compiled
def _cut_word(address: Any, place: Any, count: Any) -> Any:
    """Return the word that has `count` bytes of memory at byte `place`, and zeros elsewhere."""
    value = np.uint64(0)
    for n in range(count):
        value |= load_8(address + n) << np.uint64(8 * (place + n))
    return value


@compiled
def _rows(
    address: Any,
    rows: Any,
    size: Any,
    stride: Any,
    row: Any,
    row_step: Any,
    byte: Any,
    keys: Any,
    scratch: Any,
    loops: Any,
) -> Any:
    """Return the data sum of rows of `size` contiguous bytes that begin at byte `byte` of their logical rows."""
    word, stop = (byte + 3) // 4, (byte + size) // 4
    head = min(4 * word - byte, size)
    tail = (byte + size) - 4 * stop if stop >= word else 0
    total = np.uint64(0)
    # A short row ends before anything far ahead in it: fetch the same place of the next group of rows instead.
    ahead = 4 * stride if size <= _SHORT_ROW_BYTES else _PREFETCH_BYTES
    head_key = key_of(keys, 0, byte // 4) if head else np.uint64(0)
    tail_key = key_of(keys, 0, stop) if tail else np.uint64(0)
    done = 0
    while done < rows:
        group = 4 if rows - done >= 4 else 1
        at = address + done * stride
        _sums(WORDS_4 if group == 4 else WORDS_1, at + head, stride, 0, word, stop - word, keys, scratch, loops, ahead)
        for n in range(group):
            value = scratch[n]
            if head:
                value = add(value, multiply(head_key, _cut_word(at + n * stride, byte & 3, head)))
            if tail:
                value = add(value, multiply(tail_key, _cut_word(at + n * stride + size - tail, 0, tail)))
            total = add(total, multiply(value, key_of(keys, 1, row + (done + n) * row_step)))
        done += group
    return total


@compiled
def _columns(
    address: Any,
    rows: Any,
    columns: Any,
    size: Any,
    stride: Any,
    row: Any,
    byte: Any,
    keys: Any,
    scratch: Any,
    loops: Any,
) -> Any:
    """Return the data sum of columns that are contiguous along the row index (a transposed view)."""
    total = np.uint64(0)
    done = 0
    while done < columns:
        at, place, left = address + done * stride, byte + done * size, columns - done
        if size == 8:
            kind, group = (DOUBLES_4, 2) if left >= 2 else (DOUBLES_2, 1)
        elif size == 4:
            kind, group = (WORDS_4, 4) if left >= 4 else (WORDS_1, 1)
        elif size == 2:
            kind, group = (HALF, 1) if place & 3 or left < 2 else (PAIRS_4, 8) if left >= 8 else (PAIRS_1, 2)
        else:
            kind, group = (BYTE, 1) if place & 3 or left < 4 else (QUADS_4, 16) if left >= 16 else (QUADS_1, 4)
        _sums(kind, at, stride, 1, row, rows, keys, scratch, loops, _PREFETCH_BYTES)
        for n in range(SUMS[kind]):
            key = key_of(keys, 0, place // 4 + n)
            if place & 3:
                key = multiply(key, np.uint64(1) << np.uint64(8 * (place & 3)))
            total = add(total, multiply(key, scratch[n]))
        done += group
    return total


@compiled
def _element(source: Any, target: Any, size: Any) -> None:
    if size == 1:
        store_8(target, load_8(source))
    elif size == 2:
        store_16(target, load_16(source))
    elif size == 4:
        store_32(target, load_32(source))
    else:
        store_64(target, load_64(source))


@compiled
def _scattered(
    address: Any,
    rows: Any,
    columns: Any,
    size: Any,
    row_stride: Any,
    column_stride: Any,
    row: Any,
    row_step: Any,
    byte: Any,
    keys: Any,
    scratch: Any,
    loops: Any,
    tile: Any,
) -> Any:
    """Return the data sum of a view that is contiguous in neither direction, by tiles copied in the cache."""
    total = np.uint64(0)
    width = min(columns, 1024 // size)
    height = tile.size // (width * size)
    for top in range(0, rows, height):
        high = min(height, rows - top)
        for left in range(0, columns, width):
            wide = min(width, columns - left)
            source, target = address + top * row_stride + left * column_stride, np.int64(tile.ctypes.data)
            if abs(row_stride) < abs(column_stride):
                for c in range(wide):
                    for r in range(high):
                        _element(source + r * row_stride + c * column_stride, target + (r * wide + c) * size, size)
            else:
                for r in range(high):
                    for c in range(wide):
                        _element(source + r * row_stride + c * column_stride, target + (r * wide + c) * size, size)
            part = _rows(
                target,
                high,
                wide * size,
                wide * size,
                row + top * row_step,
                row_step,
                byte + left * size,
                keys,
                scratch,
                loops,
            )
            total = add(total, part)
    return total


@compiled
def run(panels: Any, first: Any, stop: Any, keys: Any, loops: Any, data: Any) -> None:
    """Fill the data sums of the panels `first` to `stop`; releases the interpreter lock.

    Args:
        panels: i64[n, 9], see `panels.Panel`.
        first: First panel.
        stop: End of the panels.
        keys: u64[KEYS_LENGTH] of `expand`.
        loops: Address of the inner loops, `inner_loops()`.
        data: u64[n], written.
    """
    scratch = np.empty(SCRATCH_WORDS, np.uint64)
    tile = np.empty(_TILE_BYTES, np.uint8)
    for n in range(first, stop):
        address, rows, columns, row_stride, column_stride = (
            panels[n, 0],
            panels[n, 1],
            panels[n, 2],
            panels[n, 3],
            panels[n, 4],
        )
        row, row_step, column, size = panels[n, 5], panels[n, 6], panels[n, 7], panels[n, 8]
        byte = column * size
        if row_step == 1 and row_stride == size and (column_stride != size or columns * size < 8) and rows > 1:
            data[n] = _columns(address, rows, columns, size, column_stride, row, byte, keys, scratch, loops)
        elif column_stride == size or columns == 1:
            data[n] = _rows(address, rows, columns * size, row_stride, row, row_step, byte, keys, scratch, loops)
        else:
            data[n] = _scattered(
                address, rows, columns, size, row_stride, column_stride, row, row_step, byte, keys, scratch, loops, tile
            )
