"""The vector loops of the CPU path (numba): sums of key times word over consecutive indices, in one pass over memory.

Internal. Addresses and strides are in bytes. The inner loop is written as vector instructions of LLVM, because its
form decides the speed: 16 indices a step as eight 64-bit lanes, each lane two 32-bit words; the 56-bit keys are split
28 + 28 so that a product with a word stays below 2^60; accumulators are folded modulo p every 7 steps of two products
(14 * 2^60 + 2^61 + 8 < 2^64). Several rows share the loads of the keys.
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

from syncguard.digest.cpu_keys import EVEN, FULL, HALF_TABLE, RAW, add, compiled, multiply

_KEEP: Final[list[Any]] = []
_log = logging.getLogger(__name__)

STEP: Final = 16
"""Indices of one vector step."""
SCRATCH_WORDS: Final = 8 + 8 + 16 * STEP
"""u64 words of scratch of one call: results, what the inner loop found, and the copied rests of up to 16 streams."""
_I32, _I64 = ir.IntType(32), ir.IntType(64)
_P: Final = (1 << 61) - 1
_PU: Final = np.uint64(_P)
_STEPS_PER_FOLD: Final = 7
# Eight lanes in one register need AVX-512; elsewhere four lanes twice spill less than eight lanes split in two.
_LANES: Final = 8 if llvm.get_host_cpu_features().get("avx512f", False) else 4

# Kinds of inner loop: (sums, streams, bytes of an index in a stream). "Words" are rows of words, or columns of 4-byte
# elements; the others read columns (contiguous along the row index) and put words together from 4 / size of them.
WORDS_4, WORDS_1, PAIRS_4, PAIRS_1, HALF, QUADS_4, QUADS_1, BYTE, DOUBLES_4, DOUBLES_2 = range(10)
SUMS: Final = (4, 1, 4, 1, 1, 4, 1, 1, 4, 2)
_STREAMS: Final = (4, 1, 8, 2, 1, 16, 4, 1, 2, 1)
_WIDTH: Final = (4, 4, 2, 2, 2, 1, 1, 1, 8, 8)


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


load_8, load_16, load_32, load_64 = (_loader(bits) for bits in (8, 16, 32, 64))
store_8, store_16, store_32, store_64 = (_storer(bits) for bits in (8, 16, 32, 64))


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
    loads = [_load(builder, stream, narrow) for stream in streams]
    per_word = len(streams) // SUMS[kind]
    if per_word == 1:
        return [builder.bitcast(builder.zext(load, words), lanes) for load in loads]
    found = []
    # Side by side, then one permutation of bytes (a single instruction with AVX-512 VBMI) instead of shifts.
    for first in range(0, len(loads), per_word):
        joined, count = loads[first : first + per_word], STEP
        while len(joined) > 1:
            count *= 2
            whole = ir.Constant(ir.VectorType(_I32, count), list(range(count)))
            joined = [builder.shuffle_vector(a, b, whole) for a, b in zip(joined[::2], joined[1::2], strict=True)]
        order = [part * STEP + n for n in range(STEP) for part in range(per_word)]
        mixed = builder.shuffle_vector(joined[0], joined[0], ir.Constant(ir.VectorType(_I32, count), order))
        found.append(builder.bitcast(mixed, lanes))
    return found


def _dot(kind: int) -> Any:  # noqa: C901, PLR0915 - one loop, written instruction by instruction
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
            module, ir.FunctionType(ir.VoidType(), [_I64] * 7), f"syncguard_digest_dot_{kind}"
        )
        if not function.is_declaration:
            return function
        function.linkage = "linkonce_odr"
        function.attributes.add("noinline")
        builder = ir.IRBuilder(function.append_basic_block())
        address, stride, even, odd, steps, found, ahead = function.args
        totals = [cgutils.alloca_once_value(builder, const(0)) for _ in range(2 * SUMS[kind])]
        mask, half = const(0xFFFFFFFF), const(32)

        def body(step: Any) -> None:
            at = builder.add(address, builder.mul(step, ir.Constant(_I64, STEP * _WIDTH[kind])))
            words = [split(builder, value) for value in _words_of(builder, kind, at, stride)]
            for stream in range(_STREAMS[kind] if _WIDTH[kind] >= 4 else 0):  # noqa: PLR2004
                here = builder.add(at, builder.mul(stride, ir.Constant(_I64, stream)))
                _prefetch(builder, builder.add(here, ahead))
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
    def dot(
        _context: Any, _address: Any, _stride: Any, _even: Any, _odd: Any, _steps: Any, _found: Any, _ahead: Any
    ) -> Any:
        def generate(_ctx: Any, builder: Any, _sig: Any, args: Any) -> Any:
            builder.call(define(builder.module), args)
            return cgutils.get_null_value(_I32)

        return types.int32(*[types.int64] * 7), generate

    return dot


def _prefetch(builder: Any, address: Any) -> None:
    pointer = ir.IntType(8).as_pointer()
    function = builder.module.declare_intrinsic(
        "llvm.prefetch", [pointer], ir.FunctionType(ir.VoidType(), [pointer, _I32, _I32, _I32])
    )
    builder.call(function, [builder.inttoptr(address, pointer), *(ir.Constant(_I32, n) for n in (0, 3, 1))])


_dot_w4, _dot_w1, _dot_p4, _dot_p1, _dot_h, _dot_q4, _dot_q1, _dot_b, _dot_d4, _dot_d2 = (_dot(n) for n in range(10))


@compiled
def _joined(low: Any, high: Any) -> Any:
    """Return low + 2^28 * high mod p of any 64-bit values."""
    high = (high & _PU) + (high >> np.uint64(61))
    high = high - _PU if high >= _PU else high
    high = ((high << np.uint64(28)) & _PU) | (high >> np.uint64(33))
    total = (low & _PU) + (low >> np.uint64(61)) + high
    total = total - _PU if total >= _PU else total
    return total - _PU if total >= _PU else total


@compiled
def _steps(kind: Any, address: Any, stride: Any, even: Any, odd: Any, steps: Any, found: Any, ahead: Any) -> None:
    """Run the inner loop of a kind."""
    if kind == WORDS_4:
        _dot_w4(address, stride, even, odd, steps, found, ahead)
    elif kind == WORDS_1:
        _dot_w1(address, stride, even, odd, steps, found, ahead)
    elif kind == PAIRS_4:
        _dot_p4(address, stride, even, odd, steps, found, ahead)
    elif kind == PAIRS_1:
        _dot_p1(address, stride, even, odd, steps, found, ahead)
    elif kind == HALF:
        _dot_h(address, stride, even, odd, steps, found, ahead)
    elif kind == QUADS_4:
        _dot_q4(address, stride, even, odd, steps, found, ahead)
    elif kind == QUADS_1:
        _dot_q1(address, stride, even, odd, steps, found, ahead)
    elif kind == BYTE:
        _dot_b(address, stride, even, odd, steps, found, ahead)
    elif kind == DOUBLES_4:
        _dot_d4(address, stride, even, odd, steps, found, ahead)
    else:
        _dot_d2(address, stride, even, odd, steps, found, ahead)


@compiled
def _copy(source: Any, target: Any, count: Any) -> None:
    """Copy `count` bytes, eight at a time."""
    n = 0
    while n + 8 <= count:
        store_64(target + n, load_64(source + n))
        n += 8
    while n < count:
        store_8(target + n, load_8(source + n))
        n += 1


def _sum_indices(  # noqa: C901 - one compiled unit, see `inner_loops`
    kind: Any, address: Any, stride: Any, pair: Any, first: Any, count: Any, keys: Any, scratch: Any, ahead: Any
) -> None:
    """Store at `scratch` the sums of key * word over the indices `first` to `first + count`, modulo p.

    The scratch is u64[8 + 8 + 16 * 16]: results, then what the inner loop found, then copied rests of the streams.
    """
    found, rest_at = scratch + 64, scratch + 128
    sums, streams, width = SUMS[kind], _STREAMS[kind], _WIDTH[kind]
    for n in range(sums):
        store_64(scratch + 8 * n, np.uint64(0))
    while count > 0:
        low, high = first & 65535, first >> 16
        here = min(count, 65536 - low)
        even = keys + 8 * (EVEN[pair] + (low >> 1))
        odd = even + 8 * HALF_TABLE
        if low & 1:
            even, odd = odd, even + 8
        steps, rest = here // STEP, here % STEP
        size = STEP * width
        if rest:
            for stream in range(streams):
                target = rest_at + stream * size
                for n in range(rest * width // 8 * 8, size, 8):
                    store_64(target + n, np.uint64(0))
                _copy(address + stream * stride + steps * size, target, rest * width)
        for copied in range(2):  # the whole steps in place, then the copied rest as one step
            todo = min(rest, copied) if copied else steps
            skip = 64 * steps * copied
            if todo:
                at, span = (rest_at, size) if copied else (address, stride)
                _steps(kind, at, span, even + skip, odd + skip, todo, found, ahead)
            for n in range(sums if todo else 0):
                value = _joined(load_64(found + 16 * n), load_64(found + 16 * n + 8))
                if high:
                    value = multiply(value, load_64(keys + 8 * (RAW + (2 * pair + 1) * FULL + high)))
                store_64(scratch + 8 * n, add(load_64(scratch + 8 * n), value))
        address += here * width
        first += here
        count -= here


@lru_cache(maxsize=1)
def inner_loops() -> int:
    """Compile `_sum_indices`, or load it from the cache, and return its address.

    All vector code is behind this one address: numba would put a copy of it into each function that calls it.
    """
    signature = types.void(*[types.int64] * 9)
    try:
        compiled = numba.cfunc(signature, cache=True)(_sum_indices)
    except RuntimeError as error:
        _log.warning("digest kernels are compiled anew in each process, no cache folder: %s", error)
        compiled = numba.cfunc(signature)(_sum_indices)
    _KEEP.append(compiled)
    return int(compiled.address)
