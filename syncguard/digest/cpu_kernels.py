"""The compiled loops of the CPU path (numba): one pass over memory, any strides, no copy of the tensor.

Internal. Addresses and strides are in bytes. The inner loop is written as vector instructions of LLVM, because its
form decides the speed: 16 indices a step as eight 64-bit lanes, each lane two 32-bit words; the 56-bit keys are split
28 + 28 so that a product with a word stays below 2^60; accumulators are folded modulo p every 7 steps of two products
(14 * 2^60 + 2^61 + 8 < 2^64). Several rows share the loads of the keys.

Everything that is cached on disk is in this one file: numba keys its cache by the file, the signature and the CPU.
"""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import Any, Final

import llvmlite.binding as llvm
import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

_KEEP: Final[list[Any]] = []
_log = logging.getLogger(__name__)

STEP: Final = 16
"""Indices of one vector step."""
TABLE_PADDING: Final = STEP
"""Zero entries behind each half table, read together with the zeroed end of a copied rest."""

_I32, _I64, _I128 = ir.IntType(32), ir.IntType(64), ir.IntType(128)
_P: Final = (1 << 61) - 1
_PU: Final = np.uint64(_P)
_KEY_SPLIT_BITS: Final = 28
_STEPS_PER_FOLD: Final = 7
_PREFETCH_BYTES: Final = 1024
# Eight lanes in one register need AVX-512; elsewhere four lanes twice spill less than eight lanes split in two.
_LANES: Final = 8 if llvm.get_host_cpu_features().get("avx512f", False) else 4

# Kinds of inner loop: (sums, streams, bytes of an index in a stream). "Words" are rows of words, or columns of 4-byte
# elements; the others read columns (contiguous along the row index) and put words together from 4 / size of them.
WORDS_4, WORDS_1, PAIRS_4, PAIRS_1, HALF, QUADS_4, QUADS_1, BYTE, DOUBLES_4, DOUBLES_2 = range(10)
_SUMS: Final = (4, 1, 4, 1, 1, 4, 1, 1, 4, 2)
_STREAMS: Final = (4, 1, 8, 2, 1, 16, 4, 1, 2, 1)
_WIDTH: Final = (4, 4, 2, 2, 2, 1, 1, 1, 8, 8)


def _compiled(function: Any) -> Any:
    """Compile with a cache on disk, or without one where no folder for it can be written."""
    try:
        return numba.njit(nogil=True, cache=True)(function)
    except RuntimeError as error:
        _log.warning("digest kernels are compiled anew in each process, no cache folder: %s", error)
        return numba.njit(nogil=True)(function)


def _load(builder: Any, address: Any, kind: Any) -> Any:
    value = builder.load(builder.inttoptr(address, kind.as_pointer()))
    value.align = 1
    return value


def _loader(bits: int) -> Any:
    @intrinsic
    def load(_context: Any, _address: Any) -> Any:
        def generate(_ctx: Any, builder: Any, _sig: Any, args: Any) -> Any:
            value = _load(builder, args[0], ir.IntType(bits))
            return value if bits == 64 else builder.zext(value, _I64)  # noqa: PLR2004

        return types.uint64(types.int64), generate

    return load


def _storer(bits: int) -> Any:
    @intrinsic
    def store(_context: Any, _address: Any, _value: Any) -> Any:
        def generate(_ctx: Any, builder: Any, _sig: Any, args: Any) -> Any:
            kind = ir.IntType(bits)
            value = args[1] if bits == 64 else builder.trunc(args[1], kind)  # noqa: PLR2004
            builder.store(value, builder.inttoptr(args[0], kind.as_pointer())).align = 1
            return cgutils.get_null_value(_I32)

        return types.int32(types.int64, types.uint64), generate

    return store


_load_8, _load_16, _load_32, _load_64 = (_loader(bits) for bits in (8, 16, 32, 64))
_store_8, _store_16, _store_32, _store_64 = (_storer(bits) for bits in (8, 16, 32, 64))


@intrinsic
def _mul(_context: Any, _a: Any, _b: Any) -> Any:
    """Return a * b mod p of values below 2^61, by one 128-bit product."""

    def generate(_ctx: Any, builder: Any, _sig: Any, args: Any) -> Any:
        wide = builder.mul(builder.zext(args[0], _I128), builder.zext(args[1], _I128))
        low = builder.and_(builder.trunc(wide, _I64), ir.Constant(_I64, _P))
        total = builder.add(low, builder.trunc(builder.lshr(wide, ir.Constant(_I128, 61)), _I64))
        less = builder.sub(total, ir.Constant(_I64, _P))
        return builder.select(builder.icmp_unsigned(">=", total, ir.Constant(_I64, _P)), less, total)

    return types.uint64(types.uint64, types.uint64), generate


def _words_of(builder: Any, kind: int, address: Any, stride: Any) -> list[Any]:
    """Return, per sum, the 16 words of one step as vectors of 64-bit lanes."""
    words, width = ir.VectorType(_I32, STEP), _WIDTH[kind]
    lanes = ir.VectorType(_I64, STEP // 2)
    streams = [builder.add(address, builder.mul(stride, ir.Constant(_I64, n))) for n in range(_STREAMS[kind])]
    if width == 4:  # noqa: PLR2004
        return [_load(builder, stream, lanes) for stream in streams]
    if width == 8:  # noqa: PLR2004
        wide = ir.VectorType(_I32, 2 * STEP)
        whole = [_load(builder, stream, wide) for stream in streams]
        picks = [ir.Constant(words, [2 * n + half for n in range(STEP)]) for half in (0, 1)]
        parts = [builder.shuffle_vector(value, value, pick) for value in whole for pick in picks]
        return [builder.bitcast(part, lanes) for part in parts]
    narrow = ir.VectorType(ir.IntType(8 * width), STEP)
    values = [builder.zext(_load(builder, stream, narrow), words) for stream in streams]
    per_word = len(streams) // _SUMS[kind]
    found = []
    for first in range(0, len(values), per_word):
        word = values[first]
        for place in range(1, per_word):
            shift = ir.Constant(words, [8 * width * place] * STEP)
            word = builder.or_(word, builder.shl(values[first + place], shift))
        found.append(builder.bitcast(word, lanes))
    return found


def _dot(kind: int) -> Any:
    """Return the inner loop of a kind: sums of key * word over `steps` steps of 16 indices.

    Stores at `found`, per sum, that with the low and that with the high 28 bits of the keys; below 2^63, modulo p.
    """
    lanes = ir.VectorType(_I64, _LANES)
    parts = STEP // 2 // _LANES  # vectors of lanes in one step

    def const(value: int) -> Any:
        return ir.Constant(lanes, [value] * _LANES)

    def split(builder: Any, value: Any) -> list[Any]:
        """Cut eight lanes into vectors that fit a register."""
        if parts == 1:
            return [value]
        index = ir.VectorType(_I32, _LANES)
        cuts = [ir.Constant(index, list(range(n * _LANES, (n + 1) * _LANES))) for n in range(parts)]
        return [builder.shuffle_vector(value, value, cut) for cut in cuts]

    def fold(builder: Any, value: Any) -> Any:
        return builder.add(builder.and_(value, const(_P)), builder.lshr(value, const(61)))

    def horizontal(builder: Any, value: Any) -> Any:
        """Add the lanes; each is below 2^61 + 8, and four of them below 2^63 + 32 are folded at a time."""
        fours = []
        for first in range(0, _LANES, 4):
            total = builder.extract_element(value, ir.Constant(_I32, first))
            for lane in range(first + 1, first + 4):
                total = builder.add(total, builder.extract_element(value, ir.Constant(_I32, lane)))
            low = builder.and_(total, ir.Constant(_I64, _P))
            fours.append(builder.add(low, builder.lshr(total, ir.Constant(_I64, 61))))
        return fours[0] if len(fours) == 1 else builder.add(*fours)

    def define(module: Any) -> Any:
        """Return the loop as one function of the module that is not inlined, so that it is compiled once."""
        function = cgutils.get_or_insert_function(
            module, ir.FunctionType(ir.VoidType(), [_I64] * 6), f"syncguard_digest_dot_{kind}"
        )
        if not function.is_declaration:
            return function
        function.linkage = "linkonce_odr"
        function.attributes.add("noinline")
        builder = ir.IRBuilder(function.append_basic_block())
        address, stride, even, odd, steps, found = function.args
        totals = [cgutils.alloca_once_value(builder, const(0)) for _ in range(2 * _SUMS[kind])]
        mask, half = const(0xFFFFFFFF), const(32)

        def body(step: Any) -> None:
            at = builder.add(address, builder.mul(step, ir.Constant(_I64, STEP * _WIDTH[kind])))
            words = [split(builder, value) for value in _words_of(builder, kind, at, stride)]
            for stream in range(_STREAMS[kind] if _WIDTH[kind] >= 4 else 0):  # noqa: PLR2004
                ahead = builder.add(at, builder.mul(stride, ir.Constant(_I64, stream)))
                _prefetch(builder, builder.add(ahead, ir.Constant(_I64, _PREFETCH_BYTES)))
            for part in range(parts):
                place = ir.Constant(_I64, part * _LANES * 8)
                key_at = builder.add(builder.mul(step, ir.Constant(_I64, STEP // 2 * 8)), place)
                keys = [_load(builder, builder.add(table, key_at), lanes) for table in (even, odd)]
                low = [builder.and_(key, mask) for key in keys]
                high = [builder.lshr(key, half) for key in keys]
                for n, vectors in enumerate(words):
                    pair = (builder.and_(vectors[part], mask), builder.lshr(vectors[part], half))
                    for total, key in zip(totals[2 * n : 2 * n + 2], (low, high), strict=True):
                        value = builder.add(builder.load(total), builder.mul(pair[0], key[0]))
                        builder.store(builder.add(value, builder.mul(pair[1], key[1])), total)

        def fold_all() -> None:
            for total in totals:
                builder.store(fold(builder, builder.load(total)), total)

        # The trip count of the inner loop is not a constant, so that it is not unrolled: that only costs compile time.
        per_fold = ir.Constant(_I64, max(1, _STEPS_PER_FOLD // parts))
        blocks = builder.udiv(builder.add(steps, builder.sub(per_fold, ir.Constant(_I64, 1))), per_fold)
        with cgutils.for_range(builder, blocks) as outer:
            first = builder.mul(outer.index, per_fold)
            left = builder.sub(steps, first)
            here = builder.select(builder.icmp_unsigned("<", left, per_fold), left, per_fold)
            with cgutils.for_range(builder, here) as inner:
                body(builder.add(first, inner.index))
            fold_all()
        for n, total in enumerate(totals):
            place = builder.inttoptr(builder.add(found, ir.Constant(_I64, 8 * n)), _I64.as_pointer())
            builder.store(horizontal(builder, builder.load(total)), place)
        builder.ret_void()
        return function

    @intrinsic
    def dot(_context: Any, _address: Any, _stride: Any, _even: Any, _odd: Any, _steps: Any, _found: Any) -> Any:
        def generate(_ctx: Any, builder: Any, _sig: Any, args: Any) -> Any:
            builder.call(define(builder.module), args)
            return cgutils.get_null_value(_I32)

        return types.int32(*[types.int64] * 6), generate

    return dot


def _prefetch(builder: Any, address: Any) -> None:
    pointer = ir.IntType(8).as_pointer()
    function = builder.module.declare_intrinsic(
        "llvm.prefetch", [pointer], ir.FunctionType(ir.VoidType(), [pointer, _I32, _I32, _I32])
    )
    builder.call(function, [builder.inttoptr(address, pointer), *(ir.Constant(_I32, n) for n in (0, 3, 1))])


_dot_w4, _dot_w1, _dot_p4, _dot_p1, _dot_h, _dot_q4, _dot_q1, _dot_b, _dot_d4, _dot_d2 = (_dot(n) for n in range(10))

# One u64 array holds everything that depends on the key; these are the places of its parts.
_HALF: Final = 32768 + TABLE_PADDING
_FULL: Final = 65536
_EVEN: Final = (0, 2 * _HALF)  # of columns, of rows; packed as high << 32 | low; the odd half follows the even one
_RAW: Final = 4 * _HALF  # T0 T1 T2 T3
_SUM: Final = _RAW + 4 * _FULL  # prefix sums, with a 0 in front: T0, T1, T2, T3, every second of T0
KEYS_LENGTH: Final = _SUM + 5 * (_FULL + 1)
_EVEN_SUMS: Final = 4


@_compiled
def _add(a: Any, b: Any) -> Any:
    """Return a + b mod p of values below p."""
    total = a + b
    return total - _PU if total >= _PU else total


@_compiled
def _subtract(a: Any, b: Any) -> Any:
    """Return a - b mod p of values below p."""
    return a - b if a >= b else a + _PU - b


@_compiled
def _joined(low: Any, high: Any) -> Any:
    """Return low + 2^28 * high mod p of any 64-bit values."""
    high = (high & _PU) + (high >> np.uint64(61))
    high = high - _PU if high >= _PU else high
    high = ((high << np.uint64(28)) & _PU) | (high >> np.uint64(33))
    total = (low & _PU) + (low >> np.uint64(61)) + high
    total = total - _PU if total >= _PU else total
    return total - _PU if total >= _PU else total


@_compiled
def expand(tables: Any, keys: Any) -> None:
    """Fill the array of everything that depends on the key from the four tables of `KeyTables`."""
    mask = np.uint64((1 << 28) - 1)
    for pair in range(2):
        for n in range(_FULL):
            value = tables[2 * pair, n]
            # 2^56 itself has a high half of 2^28, still below 2^32, and its products stay at 2^60.
            packed = ((value >> np.uint64(28)) << np.uint64(32)) | (value & mask)
            keys[_EVEN[pair] + (n & 1) * _HALF + (n >> 1)] = packed
    for table in range(4):
        total = np.uint64(0)
        for n in range(_FULL):
            keys[_RAW + table * _FULL + n] = tables[table, n]
            total = _add(total, tables[table, n])
            keys[_SUM + table * (_FULL + 1) + n + 1] = total
    total = np.uint64(0)
    for n in range(0, _FULL, 2):
        total = _add(total, tables[0, n])
        keys[_SUM + _EVEN_SUMS * (_FULL + 1) + n // 2 + 1] = total


@_compiled
def _key(keys: Any, pair: Any, index: Any) -> Any:
    """Return the key of a word (pair 0) or row (pair 1)."""
    low = keys[_RAW + 2 * pair * _FULL + (index & 65535)]
    high = index >> 16
    return _mul(low, keys[_RAW + (2 * pair + 1) * _FULL + high]) if high else low


@_compiled
def _range(keys: Any, pair: Any, stop: Any, sums: Any, per_block: Any) -> Any:
    """Return the sum of the keys below `stop`; `sums` names the prefix sums of the low table."""
    low, high = _SUM + sums * (_FULL + 1), _SUM + (2 * pair + 1) * (_FULL + 1)
    block, rest = stop // per_block, stop % per_block
    total = _mul(keys[low + per_block], keys[high + block])
    if rest:
        total = _add(total, _mul(keys[low + rest], _subtract(keys[high + block + 1], keys[high + block])))
    return total


@_compiled
def _columns_sum(keys: Any, stop: Any, size: Any) -> Any:
    """Return the sum of the keys of the first bytes of columns 0 to `stop`."""
    if size == 8:
        return _range(keys, 0, stop, _EVEN_SUMS, 32768)
    words, rest = stop * size // 4, stop * size % 4
    places = np.uint64(1) if size == 4 else np.uint64(0x10001) if size == 2 else np.uint64(0x1010101)
    total = _mul(_range(keys, 0, words, 0, _FULL), places)
    if rest:
        total = _add(total, _mul(_key(keys, 0, words), places & np.uint64((1 << (8 * rest)) - 1)))
    return total


@_compiled
def _steps(kind: Any, address: Any, stride: Any, even: Any, odd: Any, steps: Any, found: Any) -> None:
    """Run the inner loop of a kind."""
    if kind == WORDS_4:
        _dot_w4(address, stride, even, odd, steps, found)
    elif kind == WORDS_1:
        _dot_w1(address, stride, even, odd, steps, found)
    elif kind == PAIRS_4:
        _dot_p4(address, stride, even, odd, steps, found)
    elif kind == PAIRS_1:
        _dot_p1(address, stride, even, odd, steps, found)
    elif kind == HALF:
        _dot_h(address, stride, even, odd, steps, found)
    elif kind == QUADS_4:
        _dot_q4(address, stride, even, odd, steps, found)
    elif kind == QUADS_1:
        _dot_q1(address, stride, even, odd, steps, found)
    elif kind == BYTE:
        _dot_b(address, stride, even, odd, steps, found)
    elif kind == DOUBLES_4:
        _dot_d4(address, stride, even, odd, steps, found)
    else:
        _dot_d2(address, stride, even, odd, steps, found)


@_compiled
def _copy(source: Any, target: Any, count: Any) -> None:
    """Copy `count` bytes, eight at a time."""
    n = 0
    while n + 8 <= count:
        _store_64(target + n, _load_64(source + n))
        n += 8
    while n < count:
        _store_8(target + n, _load_8(source + n))
        n += 1


def _sum_indices(
    kind: Any, address: Any, stride: Any, pair: Any, first: Any, count: Any, keys: Any, scratch: Any
) -> None:
    """Store at `scratch` the sums of key * word over the indices `first` to `first + count`, modulo p.

    The scratch is u64[8 + 8 + 16 * 16]: results, then what the inner loop found, then copied rests of the streams.
    """
    found, rest_at = scratch + 64, scratch + 128
    sums, streams, width = _SUMS[kind], _STREAMS[kind], _WIDTH[kind]
    for n in range(sums):
        _store_64(scratch + 8 * n, np.uint64(0))
    while count > 0:
        low, high = first & 65535, first >> 16
        here = min(count, 65536 - low)
        even = keys + 8 * (_EVEN[pair] + (low >> 1))
        odd = even + 8 * _HALF
        if low & 1:
            even, odd = odd, even + 8
        steps, rest = here // STEP, here % STEP
        size = STEP * width
        if rest:
            for stream in range(streams):
                target = rest_at + stream * size
                for n in range(rest * width // 8 * 8, size, 8):
                    _store_64(target + n, np.uint64(0))
                _copy(address + stream * stride + steps * size, target, rest * width)
        for copied in range(2):  # the whole steps in place, then the copied rest as one step
            todo = min(rest, copied) if copied else steps
            skip = 64 * steps * copied
            if todo:
                at, span = (rest_at, size) if copied else (address, stride)
                _steps(kind, at, span, even + skip, odd + skip, todo, found)
            for n in range(sums if todo else 0):
                value = _joined(_load_64(found + 16 * n), _load_64(found + 16 * n + 8))
                if high:
                    value = _mul(value, _load_64(keys + 8 * (_RAW + (2 * pair + 1) * _FULL + high)))
                _store_64(scratch + 8 * n, _add(_load_64(scratch + 8 * n), value))
        address += here * width
        first += here
        count -= here


@lru_cache(maxsize=1)
def inner_loops() -> int:
    """Compile `_sum_indices`, or load it from the cache, and return its address.

    All vector code is behind this one address: numba would put a copy of it into each function that calls it.
    """
    signature = types.void(*[types.int64] * 8)
    try:
        compiled = numba.cfunc(signature, cache=True)(_sum_indices)
    except RuntimeError as error:
        _log.warning("digest kernels are compiled anew in each process, no cache folder: %s", error)
        compiled = numba.cfunc(signature)(_sum_indices)
    _KEEP.append(compiled)
    return int(compiled.address)


@intrinsic
def _call(_context: Any, _loops: Any, _1: Any, _2: Any, _3: Any, _4: Any, _5: Any, _6: Any, _7: Any, _8: Any) -> Any:
    """Call `_sum_indices` by its address."""

    def generate(_ctx: Any, builder: Any, _sig: Any, args: Any) -> Any:
        function = ir.FunctionType(ir.VoidType(), [_I64] * 8)
        builder.call(builder.inttoptr(args[0], function.as_pointer()), args[1:])
        return cgutils.get_null_value(_I32)

    return types.int32(*[types.int64] * 9), generate


@_compiled
def _sums(
    kind: Any, address: Any, stride: Any, pair: Any, first: Any, count: Any, keys: Any, scratch: Any, loops: Any
) -> None:
    _call(loops, kind, address, stride, pair, first, count, np.int64(keys.ctypes.data), np.int64(scratch.ctypes.data))


@_compiled
def _cut_word(address: Any, place: Any, count: Any) -> Any:
    """Return the word that has `count` bytes of memory at byte `place`, and zeros elsewhere."""
    value = np.uint64(0)
    for n in range(count):
        value |= _load_8(address + n) << np.uint64(8 * (place + n))
    return value


@_compiled
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
    head_key = _key(keys, 0, byte // 4) if head else np.uint64(0)
    tail_key = _key(keys, 0, stop) if tail else np.uint64(0)
    done = 0
    while done < rows:
        group = 4 if rows - done >= 4 else 1
        at = address + done * stride
        _sums(WORDS_4 if group == 4 else WORDS_1, at + head, stride, 0, word, stop - word, keys, scratch, loops)
        for n in range(group):
            value = scratch[n]
            if head:
                value = _add(value, _mul(head_key, _cut_word(at + n * stride, byte & 3, head)))
            if tail:
                value = _add(value, _mul(tail_key, _cut_word(at + n * stride + size - tail, 0, tail)))
            total = _add(total, _mul(value, _key(keys, 1, row + (done + n) * row_step)))
        done += group
    return total


@_compiled
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
        _sums(kind, at, stride, 1, row, rows, keys, scratch, loops)
        for n in range(_SUMS[kind]):
            key = _key(keys, 0, place // 4 + n)
            if place & 3:
                key = _mul(key, np.uint64(1) << np.uint64(8 * (place & 3)))
            total = _add(total, _mul(key, scratch[n]))
        done += group
    return total


@_compiled
def _element(source: Any, target: Any, size: Any) -> None:
    if size == 1:
        _store_8(target, _load_8(source))
    elif size == 2:
        _store_16(target, _load_16(source))
    elif size == 4:
        _store_32(target, _load_32(source))
    else:
        _store_64(target, _load_64(source))


@_compiled
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
            total = _add(total, part)
    return total


@_compiled
def run(panels: Any, first: Any, stop: Any, keys: Any, loops: Any, data: Any, coverage: Any) -> None:
    """Fill data and coverage sums of the panels `first` to `stop`; releases the interpreter lock.

    Args:
        panels: i64[n, 9], see `cpu.Panel`.
        first: First panel.
        stop: End of the panels.
        keys: u64[KEYS_LENGTH] of `expand`.
        loops: Address of the inner loops, `inner_loops()`.
        data: u64[n], written.
        coverage: u64[n], written.
    """
    scratch = np.empty(16 + 2 * 16 * STEP, np.uint64)
    tile = np.empty(1 << 16, np.uint8)
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
        row_sum = np.uint64(0)
        if row_step == 1:
            row_sum = _subtract(_range(keys, 1, row + rows, 2, _FULL), _range(keys, 1, row, 2, _FULL))
        else:
            for r in range(rows):
                row_sum = _add(row_sum, _key(keys, 1, row + r * row_step))
        column_sum = _subtract(_columns_sum(keys, column + columns, size), _columns_sum(keys, column, size))
        coverage[n] = _mul(row_sum, column_sum)
        if row_step == 1 and row_stride == size and (column_stride != size or columns * size < 8) and rows > 1:
            data[n] = _columns(address, rows, columns, size, column_stride, row, byte, keys, scratch, loops)
        elif column_stride == size or columns == 1:
            data[n] = _rows(address, rows, columns * size, row_stride, row, row_step, byte, keys, scratch, loops)
        else:
            data[n] = _scattered(
                address, rows, columns, size, row_stride, column_stride, row, row_step, byte, keys, scratch, loops, tile
            )
