"""The coverage sum of a box in closed form, and the final digest that binds name, dtype and shape.

Stable. The sum of the keys of a range is a difference of prefix sums, so a box costs a handful of products, and one
more handful for each run of consecutive rows when it does not cover its inner leading dimensions.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Final

import numpy as np

from syncguard.digest.keys import key_tables, reduce_mod_p
from syncguard.digest.partial import DEFAULT_KEY_SEED, PRIME, KeySeed, PartialDigest, check_place, check_seed
from syncguard.errors import DigestInputError
from syncguard.spec import Box

if TYPE_CHECKING:
    from collections.abc import Iterator

    from syncguard.digest.keys import U64Array
    from syncguard.spec import DType

_FINAL_DOMAIN: Final = b"MLP61v1/final\0"
_DIGEST_BYTES: Final = 16
_WORD_BYTES: Final = 4
_PLACES: Final = {1: (1, 1 << 8, 1 << 16, 1 << 24), 2: (1, 1 << 16), 4: (1,)}
_MASK_28: Final = np.uint64((1 << 28) - 1)
_MASK_33: Final = np.uint64((1 << 33) - 1)


class _Sums:
    """Prefix sums of the four tables of a seed, and of every second entry of T0; sums of keys are differences."""

    def __init__(self, key_seed: KeySeed) -> None:
        tables = key_tables(key_seed).tables
        self.words, self.words_high, self.rows, self.rows_high = (_prefix_sums(table) for table in tables)
        self.even_words = _prefix_sums(tables[0, ::2])

    def below(self, low: U64Array, high: U64Array, stop: int) -> int:
        """Return the sum of the keys of indices below `stop`; a low table of half length stands for even indices."""
        blocks, rest = divmod(stop, len(low) - 1)
        if not blocks:
            return int(low[rest])
        total = int(low[-1]) * int(high[blocks])
        return total + int(low[rest]) * (int(high[blocks + 1]) - int(high[blocks])) if rest else total

    def rows_below(self, stop: int) -> int:
        """Return the sum of the keys of rows 0 to `stop`."""
        return self.below(self.rows, self.rows_high, stop)

    def columns_below(self, stop: int, itemsize_bytes: int) -> int:
        """Return the sum of the keys of the first bytes of columns 0 to `stop`."""
        if itemsize_bytes > _WORD_BYTES:
            return self.below(self.even_words, self.words_high, stop)
        words, rest = divmod(stop * itemsize_bytes, _WORD_BYTES)
        below = self.below(self.words, self.words_high, words)
        places = _PLACES[itemsize_bytes]
        total = below * sum(places)
        if rest:
            cut = self.below(self.words, self.words_high, words + 1) - below
            total += cut * sum(places[: rest // itemsize_bytes])
        return total


def _prefix_sums(values: U64Array) -> U64Array:
    """Return the sums modulo p of the first 0, 1, ... of up to 65,536 table entries."""
    low = np.cumsum(values & _MASK_28)  # below 2^44
    high = np.cumsum(values >> np.uint64(28))  # below 2^45; 2^28 times it is a rotation of 61 bits
    sums = reduce_mod_p(low + ((high & _MASK_33) << np.uint64(28)) + (high >> np.uint64(33)))
    return np.concatenate((np.zeros(1, np.uint64), sums))


@lru_cache(maxsize=4)
def _sums_of(key_seed: KeySeed) -> _Sums:
    return _Sums(key_seed)


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
    return _coverage_of(dtype.itemsize_bytes, shape, box.offsets, box.sizes, key_seed)


@lru_cache(maxsize=16384)  # a model has many tensors and few different shapes
def _coverage_of(
    itemsize: int, shape: tuple[int, ...], offsets: tuple[int, ...], sizes: tuple[int, ...], key_seed: KeySeed
) -> PartialDigest:
    count = prod(sizes)
    if not count:
        return PartialDigest.zero()
    sums = _sums_of(key_seed)
    first, size = (offsets[-1], sizes[-1]) if shape else (0, 1)
    columns = sums.columns_below(first + size, itemsize) - (sums.columns_below(first, itemsize) if first else 0)
    rows = sum(sums.rows_below(row + n) - sums.rows_below(row) for row, n in row_runs(shape, Box(offsets, sizes)))
    return PartialDigest(count, rows * columns % PRIME, 0)


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
