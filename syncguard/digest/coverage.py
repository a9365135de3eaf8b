"""The coverage sum of a box in closed form, and the final digest that binds name, dtype and shape.

Stable. The sum of the keys of a range is a difference of prefix sums, so a box costs a handful of products, and one
more handful for each run of consecutive rows when it does not cover its inner leading dimensions.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from itertools import product
from typing import TYPE_CHECKING, Final

from syncguard.digest.keys import TABLE_LENGTH, key_tables
from syncguard.digest.partial import DEFAULT_KEY_SEED, PRIME, KeySeed, PartialDigest, check_place, check_seed
from syncguard.errors import DigestInputError
from syncguard.spec import Box

if TYPE_CHECKING:
    from collections.abc import Iterator

    from syncguard.spec import DType

_FINAL_DOMAIN: Final = b"MLP61v1/final\0"
_DIGEST_BYTES: Final = 16
_WORD_BYTES: Final = 4
_ROW_PAIR: Final = 2


@lru_cache(maxsize=16)
def _prefix_sums(key_seed: KeySeed, table: int, stride: int) -> tuple[int, ...]:
    """Return prefix sums of every `stride`-th value of a table; entry i is the sum of the first i values."""
    sums = [0]
    total = 0
    for value in key_tables(key_seed).tables[table, ::stride].tolist():
        total += value
        sums.append(total)
    return tuple(sums)


def _range_sum(key_seed: KeySeed, pair: int, stop: int, stride: int = 1) -> int:
    """Return the sum of the keys of indices 0, stride, 2 stride, ... below `stop * stride`."""
    low = _prefix_sums(key_seed, pair, stride)
    high = _prefix_sums(key_seed, pair + 1, 1)
    blocks, rest = divmod(stop, TABLE_LENGTH // stride)
    total = low[-1] * high[blocks]
    if rest:
        total += low[rest] * (high[blocks + 1] - high[blocks])
    return total % PRIME


def _column_sum(key_seed: KeySeed, stop: int, itemsize_bytes: int) -> int:
    """Return the sum of the keys of the first bytes of columns 0 to `stop`."""
    if itemsize_bytes >= _WORD_BYTES:
        return _range_sum(key_seed, 0, stop, itemsize_bytes // _WORD_BYTES)
    words, rest = divmod(stop * itemsize_bytes, _WORD_BYTES)
    below = _range_sum(key_seed, 0, words)
    places = [1 << (8 * byte) for byte in range(0, _WORD_BYTES, itemsize_bytes)]
    total = below * sum(places)
    if rest:
        total += (_range_sum(key_seed, 0, words + 1) - below) * sum(places[: rest // itemsize_bytes])
    return total % PRIME


def row_runs(shape: tuple[int, ...], box: Box) -> Iterator[tuple[int, int]]:
    """Yield (first row, number of rows) of each run of consecutive row indices of a box, in order."""
    lead = len(shape) - 1
    if lead <= 0:
        yield 0, 1
        return
    inner = lead - 1
    while inner > 0 and box.sizes[inner] == shape[inner]:
        inner -= 1
    # Dimensions after `inner` are covered whole, so rows are consecutive over `inner` and all that follow.
    step = 1
    for length in shape[inner + 1 : lead]:
        step *= length
    for outer in product(*(range(o, o + n) for o, n in zip(box.offsets[:inner], box.sizes[:inner], strict=True))):
        row = 0
        for index, length in zip(outer, shape[:inner], strict=True):
            row = row * length + index
        yield (row * shape[inner] + box.offsets[inner]) * step, box.sizes[inner] * step


def expected_coverage(
    dtype: DType, shape: tuple[int, ...], box: Box | None = None, *, key_seed: KeySeed = DEFAULT_KEY_SEED
) -> PartialDigest:
    """Return count and coverage of a box, without any data.

    Args:
        dtype: Element type of the logical tensor.
        shape: Its full shape.
        box: Part of it; the whole tensor when None.
        key_seed: Seed of the key tables.

    Returns:
        A partial digest whose `data` is 0: only count and coverage mean anything.

    Raises:
        DigestInputError: The box lies outside, the shape is too large, or the seed is not a key seed.
    """
    check_seed(key_seed)
    box = Box.whole(shape) if box is None else box
    check_place(dtype, shape, box)
    if not box.count:
        return PartialDigest.zero()
    first, size = (box.offsets[-1], box.sizes[-1]) if shape else (0, 1)
    itemsize = dtype.itemsize_bytes
    columns = _column_sum(key_seed, first + size, itemsize) - _column_sum(key_seed, first, itemsize)
    rows = sum(
        _range_sum(key_seed, _ROW_PAIR, row + n) - _range_sum(key_seed, _ROW_PAIR, row)
        for row, n in row_runs(shape, box)
    )
    return PartialDigest(box.count, rows * columns % PRIME, 0)


def finalize(
    partial: PartialDigest, *, fqn: str, dtype: DType, shape: tuple[int, ...], key_seed: KeySeed = DEFAULT_KEY_SEED
) -> str:
    """Return the digest of a tensor: 128 bits, as 32 hex digits, over its sums, name, dtype, shape and seed.

    It says nothing about completeness: compare `partial` with `expected_coverage` as well.

    Args:
        partial: Sum of the partial digests of the parts.
        fqn: Logical name, as in the checkpoint.
        dtype: Element type.
        shape: Full logical shape.
        key_seed: Seed under which `partial` was made.

    Raises:
        DigestInputError: The sums are not those of any tensor, or the seed is not a key seed.
    """
    check_seed(key_seed)
    if not (0 <= partial.coverage < PRIME and 0 <= partial.data < PRIME and 0 <= partial.count < 1 << 64):
        raise DigestInputError(
            "not a partial digest",
            expected="count of 64 bits, sums below 2^61 - 1",
            found=partial,
            where=fqn,
            todo="add partial digests only with +",
        )
    name, kind = fqn.encode(), dtype.name.encode()
    message = [_FINAL_DOMAIN, len(key_seed).to_bytes(4, "little"), key_seed]
    message += [len(name).to_bytes(4, "little"), name, len(kind).to_bytes(4, "little"), kind]
    message += [len(shape).to_bytes(4, "little"), *(n.to_bytes(8, "little") for n in shape)]
    message += [n.to_bytes(8, "little") for n in (partial.count, partial.coverage, partial.data)]
    return hashlib.blake2b(b"".join(message), digest_size=_DIGEST_BYTES).hexdigest()
