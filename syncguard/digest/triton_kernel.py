"""The GPU kernel of MLP61v1 (Triton): exact 64-bit sums of 28-bit key halves times 32-bit words.

Internal. A *line* is a row whose words are summed along the columns, or a word column summed along the rows, whichever
way the memory runs; the other index gives the factor of the line. A word is one load of 4 bytes, or is put together
from 2 or 4 smaller ones, so that no load is unaligned.
"""

# ruff: noqa: ANN001, ANN201, ANN202, N803, PLR0915, PLR2004 - the language of kernels: only constexpr is annotated
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

TILE_FIELDS: Final = (
    "address",  # of the first part of the first word of the first line
    "lines",
    "count",  # words of a line
    "line_stride",  # strides in bytes
    "index_stride",
    "part_stride",
    "index",  # first index, within its key table
    "index_high",  # which entry of the high table all indices share
    "line",  # first line; its key is that of a row or a word, see `pair`
    "line_step",
    "line_shift",  # bits to shift the key of a line, for bytes and halves of a word
    "pair",  # key tables of the index: 0 words, 1 rows; those of the line are the other ones
)
PRODUCTS_PER_FOLD: Final = 14
"""14 products below 2^60 beside a folded sum below 2^61 + 8 stay below 2^64."""


@triton.jit
def _reduced(x):
    """Return x mod p of any 64-bit value."""
    p = tl.full((), (1 << 61) - 1, tl.uint64)
    y = (x & p) + (x >> 61)
    return tl.where(y >= p, y - p, y)


@triton.jit
def _product(a, b):
    """Return a * b mod p of values below 2^61."""
    p = tl.full((), (1 << 61) - 1, tl.uint64)
    low = a * b
    high = tl.umulhi(a, b)
    return _reduced((low & p) + ((high << 3) | (low >> 61)))


@triton.jit
def _shifted(x, bits):
    """Return x * 2^bits mod p of a value below p, for 0 <= bits < 61: a rotation of 61 bits."""
    p = tl.full((), (1 << 61) - 1, tl.uint64)
    b = bits.to(tl.uint64)
    return _reduced(((x << b) & p) | (x >> (61 - b)))


@triton.jit
def _sum(x):
    """Return the sums along the second axis modulo p, of any 64-bit values."""
    low = tl.sum(x & 0xFFFFFFFF, axis=1)
    high = tl.sum(x >> 32, axis=1)
    return _reduced(_reduced(low) + _shifted(_reduced(high), tl.full((), 32, tl.int64)))


@triton.jit
def digest_tiles(
    tiles,
    keys,
    out,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
    ALIGNED: tl.constexpr,
    LINES: tl.constexpr,
    INDICES: tl.constexpr,
    FOLD: tl.constexpr,
    FIELDS: tl.constexpr,
):
    """Store one data sum per tile and chunk of its lines; the grid is (tiles, chunks).

    tiles: i64[tiles, FIELDS]; keys: u64[4 * 65536] of the plain tables T0 T1 T2 T3; out: u64[tiles, chunks].
    WIDTH: bytes of a load; PARTS: loads of a word. ALIGNED: words follow each other without gaps, and addresses, line
    strides and counts are multiples of 16 bytes, so that loads are of 16 bytes.
    """
    program = tl.program_id(0)
    record = tiles + program * FIELDS
    address = tl.load(record)
    lines = tl.load(record + 1)
    count = tl.load(record + 2)
    line_stride = tl.load(record + 3)
    index_stride = tl.load(record + 4)
    part_stride = tl.load(record + 5)
    index = tl.load(record + 6)
    index_high = tl.load(record + 7)
    line = tl.load(record + 8)
    line_step = tl.load(record + 9)
    line_shift = tl.load(record + 10)
    pair = tl.load(record + 11)
    if ALIGNED:
        count = tl.multiple_of(count, 4)
        line_words = tl.multiple_of(line_stride // 4, 4)
        words = tl.multiple_of(address.to(tl.pointer_type(tl.uint32)), 16)
    index_keys = keys + pair * 131072
    line_keys = keys + (1 - pair) * 131072
    total = tl.zeros((LINES,), tl.uint64)
    chunks = tl.num_programs(1)
    per_chunk = tl.cdiv(tl.cdiv(lines, LINES), chunks) * LINES
    start_line = tl.program_id(1) * per_chunk
    for first_line in range(start_line, tl.minimum(start_line + per_chunk, lines), LINES):
        here = first_line + tl.arange(0, LINES)
        in_lines = here < lines
        low = tl.zeros((LINES, INDICES), tl.uint64)
        high = tl.zeros((LINES, INDICES), tl.uint64)
        line_at = address + here.to(tl.int64)[:, None] * line_stride
        for first in range(0, count, INDICES * FOLD):
            for step in range(first, tl.minimum(first + INDICES * FOLD, count), INDICES):
                at = step + tl.arange(0, INDICES)
                inside = at < count
                key = tl.load(index_keys + index + at, mask=inside, other=0)
                mask = in_lines[:, None] & inside[None, :]
                place = line_at + at.to(tl.int64)[None, :] * index_stride
                if ALIGNED:
                    word = tl.load(words + here.to(tl.int64)[:, None] * line_words + at[None, :], mask=mask, other=0)
                elif WIDTH == 4:
                    word = tl.load(place.to(tl.pointer_type(tl.uint32)), mask=mask, other=0)
                else:
                    word = tl.zeros((LINES, INDICES), tl.uint32)
                    for part in tl.static_range(PARTS):
                        part_at = place + part * part_stride
                        if WIDTH == 2:
                            piece = tl.load(part_at.to(tl.pointer_type(tl.uint16)), mask=mask, other=0)
                        else:
                            piece = tl.load(part_at.to(tl.pointer_type(tl.uint8)), mask=mask, other=0)
                        word = word | (piece.to(tl.uint32) << (8 * WIDTH * part))
                wide = word.to(tl.uint64)
                low += wide * (key & 0xFFFFFFF).to(tl.uint32).to(tl.uint64)[None, :]
                high += wide * (key >> 28).to(tl.uint32).to(tl.uint64)[None, :]
            low = (low & 0x1FFFFFFFFFFFFFFF) + (low >> 61)
            high = (high & 0x1FFFFFFFFFFFFFFF) + (high >> 61)
        sums = _reduced(_sum(low) + _shifted(_sum(high), tl.full((), 28, tl.int64)))
        number = line + here.to(tl.int64) * line_step
        factor = tl.load(line_keys + (number & 65535), mask=in_lines, other=0)
        factor = _product(factor, tl.load(line_keys + 65536 + (number >> 16), mask=in_lines, other=0))
        factor = _shifted(factor, line_shift)
        total = _reduced(total + _product(sums, factor))
    low_total = tl.sum(total & 0xFFFFFFFF, axis=0)
    high_total = tl.sum(total >> 32, axis=0)
    shared = tl.load(index_keys + 65536 + index_high)
    answer = _reduced(_reduced(low_total) + _shifted(_reduced(high_total), tl.full((), 32, tl.int64)))
    tl.store(out + program * chunks + tl.program_id(1), _product(answer, shared))
