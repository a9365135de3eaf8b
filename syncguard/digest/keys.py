"""Key tables of MLP61v1, expanded from a seed, and arithmetic modulo p = 2^61 - 1 on numpy arrays.

Stable. Four tables of 65,536 words give the key of any index below 2^32 as one product: `low[i % 65536] *
high[i // 65536]`. Tables 0 and 1 are for 32-bit words of a row, tables 2 and 3 for rows.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, TypeAlias

import numpy as np

from syncguard.digest.partial import PRIME, KeySeed, check_seed

U64Array: TypeAlias = "np.ndarray[Any, np.dtype[np.uint64]]"

TABLE_LENGTH: Final = 1 << 16
_TABLE_COUNT: Final = 4
_KEY_BITS: Final = 56
_KEY_DOMAIN: Final = b"MLP61v1/keys\0"

_P: Final = np.uint64(PRIME)
_MASK_30: Final = np.uint64((1 << 30) - 1)
_MASK_31: Final = np.uint64((1 << 31) - 1)
_30: Final = np.uint64(30)
_31: Final = np.uint64(31)
_61: Final = np.uint64(61)


def reduce_mod_p(x: U64Array) -> U64Array:
    """Return `x mod p` for any 64-bit values."""
    y = (x & _P) + (x >> _61)
    return np.where(y >= _P, y - _P, y)


def mul_mod_p(a: U64Array, b: U64Array) -> U64Array:
    """Return `a * b mod p` for values below 2^61, from four products of at most 31 x 31 bits."""
    a_high, a_low, b_high, b_low = a >> _31, a & _MASK_31, b >> _31, b & _MASK_31
    middle = a_high * b_low + a_low * b_high  # below 2^62
    # 2^62 = 2 and 2^61 = 1 modulo p.
    return reduce_mod_p(
        np.uint64(2) * a_high * b_high + (middle >> _30) + ((middle & _MASK_30) << _31) + reduce_mod_p(a_low * b_low)
    )


def sum_mod_p(x: U64Array) -> int:
    """Return the sum of values below 2^61, modulo p."""
    low = int(np.sum(x & np.uint64(0xFFFFFFFF), dtype=np.uint64))
    high = int(np.sum(x >> np.uint64(32), dtype=np.uint64))
    return (low + (high << 32)) % PRIME


@dataclass(frozen=True, slots=True, eq=False)
class KeyTables:
    """The four expanded tables of one seed; read-only.

    Attributes:
        tables: u64[4, 65536], each value in [1, 2^56]; `tables[1][0] == tables[3][0] == 1`.
    """

    tables: U64Array

    def word_keys(self, words: U64Array) -> U64Array:
        """Return the keys of 32-bit word positions in a row, below p."""
        return self._keys(0, words)

    def row_keys(self, rows: U64Array) -> U64Array:
        """Return the keys of row indices, below p."""
        return self._keys(2, rows)

    def _keys(self, pair: int, index: U64Array) -> U64Array:
        low = self.tables[pair][index & np.uint64(TABLE_LENGTH - 1)]
        return mul_mod_p(low, self.tables[pair + 1][index >> np.uint64(16)])

    def byte_keys(self, positions: U64Array) -> U64Array:
        """Return the keys of byte positions in a row: the word's key, shifted to the byte's place in the word."""
        shift = (positions & np.uint64(3)) << np.uint64(3)
        return mul_mod_p(self.word_keys(positions >> np.uint64(2)), np.uint64(1) << shift)


@lru_cache(maxsize=4)
def _expand(key_seed: KeySeed) -> KeyTables:
    size = _TABLE_COUNT * TABLE_LENGTH * 8
    raw = np.frombuffer(hashlib.shake_128(_KEY_DOMAIN + key_seed).digest(size), dtype="<u8")
    tables = (raw.astype(np.uint64) & np.uint64((1 << _KEY_BITS) - 1)) + np.uint64(1)
    tables = tables.reshape(_TABLE_COUNT, TABLE_LENGTH)
    tables[1, 0] = tables[3, 0] = 1
    tables.setflags(write=False)
    return KeyTables(tables)


def key_tables(key_seed: KeySeed) -> KeyTables:
    """Return the tables of a seed; the last four seeds are kept (2 MiB each).

    Raises:
        DigestInputError: The seed is not bytes of a permitted length.
    """
    return _expand(check_seed(key_seed))
