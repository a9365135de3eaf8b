"""Operations that move bytes: the second half of the closed set, for memory that a kernel wants in another order.

`ops` has views; these copy, so the in-rank probe applies them to bounded pieces (`engines/rank_scratch.py`). Each is a
bijection of the units that it moves (nibbles, bytes, elements), by construction: nothing is dropped, nothing is counted
twice, and `inverse` is again one of them. So an equal digest after it is still a claim on every bit, padding included.
They stand at the front of a chain, before any view that drops elements. Arrays of numpy and torch tensors alike.
"""

from __future__ import annotations

import sys
from math import prod
from typing import TYPE_CHECKING, Any, Final

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping


NIBBLE: Final = 4
"""Bits of half a byte."""


class Rearrange(msgspec.Struct, frozen=True, tag="rearrange"):
    """Read the last `dims` dimensions as digits of one index, put the digits in another order, and shape the result.

    Memory in tiles, swizzled scales, shuffled and alternating rows, nibbles packed along another dimension: all of them
    are this. Other dimensions (experts) stay as they are.

    Attributes:
        dims: How many trailing dimensions are read as one row-major index.
        digits: Sizes of its digits, most significant first, in units.
        order: Which digit stands where afterwards.
        sizes: Trailing dimensions of the result, in its elements.
        unit_bits: What is moved: a nibble (4), a byte (8), or a whole element.
        from_bits: Size of an element before.
        to_bits: Size of an element of the result.
        flips: Digits whose indices run backwards, as positions before the reordering (pairs whose two rows are swapped).
    """

    dims: int
    digits: tuple[int, ...]
    order: tuple[int, ...]
    sizes: tuple[int, ...]
    unit_bits: int = 8
    from_bits: int = 8
    to_bits: int = 8
    flips: tuple[int, ...] = ()

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape after the operation.

        Raises:
            ValueError: It is no bijection of the trailing dimensions of this shape.
        """
        split = len(shape) - self.dims
        units = self.from_bits // self.unit_bits
        moved, made = prod(self.digits), prod(self.sizes) * (self.to_bits // self.unit_bits)
        if (
            split < 0
            or sorted(self.order) != list(range(len(self.digits)))
            or len(set(self.flips) & set(self.order)) != len(self.flips)
            or self.unit_bits not in (NIBBLE, 8, 16, 32)
            or self.from_bits % self.unit_bits
            or self.to_bits % self.unit_bits
            or not prod(shape[split:]) * units == moved == made
        ):
            msg = f"{self} is no rearrangement of the last {self.dims} dimensions of {shape}"
            raise ValueError(msg)
        return (*shape[:split], *self.sizes)

    @property
    def whole(self) -> bool:
        """Return whether elements stay whole."""
        return self.unit_bits == self.from_bits == self.to_bits

    def inverse(self, sizes: tuple[int, ...]) -> Rearrange:
        """Return the operation that leads back to trailing dimensions of these sizes."""
        back = tuple(self.order.index(digit) for digit in range(len(self.digits)))
        digits = tuple(self.digits[digit] for digit in self.order)
        flips = tuple(sorted(self.order.index(digit) for digit in self.flips))
        return Rearrange(len(self.sizes), digits, back, sizes, self.unit_bits, self.to_bits, self.from_bits, flips)

    def apply(self, view: Any) -> Any:
        """Return the rearranged elements: a copy, as unsigned or signed integers of `to_bits` unless elements stay whole."""
        shape = self.shape(tuple(int(n) for n in view.shape))
        lead = shape[: len(shape) - len(self.sizes)]
        units = view if self.whole else _units(view, self.unit_bits)
        digits = units.reshape((*lead, *self.digits))
        keep = len(lead)
        if self.flips:
            digits = _flipped(digits, tuple(keep + digit for digit in self.flips))
        moved = _permuted(digits, (*range(keep), *(keep + digit for digit in self.order)))
        if self.whole:
            return moved.reshape(shape)
        per = self.to_bits // self.unit_bits
        return _joined(moved.reshape((*lead, *self.sizes[:-1], self.sizes[-1] * per)), self.unit_bits, self.to_bits)

    def piece(self, view: Any, start: int, stop: int) -> tuple[Any, Rearrange]:
        """Return the part of the input, and the operation on it, that give indices `[start, stop)` of the leading digit.

        The leading digit is the first of the result; so the parts, one after the other along the first dimension of
        the result, are the whole. Source dimensions before the trailing ones are kept.
        """
        first = self.order[0]
        lead = tuple(int(n) for n in view.shape[: len(view.shape) - self.dims])
        per = self.from_bits // self.unit_bits
        before, below = prod(self.digits[:first]), prod(self.digits[first + 1 :])
        if below % per:
            msg = f"the leading digit of {self} lies inside an element"
            raise ValueError(msg)
        part = view.reshape((*lead, before, self.digits[first], below // per))
        part = part[(slice(None),) * (len(lead) + 1) + (slice(start, stop),)]
        digits = (*self.digits[:first], stop - start, *self.digits[first + 1 :])
        rows = self.rows_per_leading * (stop - start)
        return part, msgspec.structs.replace(self, dims=3, digits=digits, sizes=(rows, *self.sizes[1:]))

    @property
    def leading(self) -> int:
        """Return the size of the leading digit, into whose indices the operation can be cut; 1 where it cannot."""
        first = self.order[0]
        inside = prod(self.digits[first + 1 :]) % (self.from_bits // self.unit_bits)
        return 1 if first in self.flips or inside or self.sizes[0] % self.digits[first] else self.digits[first]

    @property
    def rows_per_leading(self) -> int:
        """Return how much of the first trailing dimension of the result one index of the leading digit is."""
        return self.sizes[0] // self.leading


class Recode(msgspec.Struct, frozen=True, tag="recode"):
    """Replace each byte by another one, by a named table that is a bijection of the 256 bytes."""

    table: str

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape after the operation, the same one.

        Raises:
            ValueError: There is no such table.
        """
        if self.table not in TABLES:
            msg = f"no table {self.table} of bytes"
            raise ValueError(msg)
        return shape

    def apply(self, view: Any) -> Any:
        """Return the replaced bytes: a copy."""
        table = TABLES[self.table]
        if hasattr(view, "data_ptr"):
            torch = sys.modules["torch"]  # whoever made the tensor has imported it
            lookup = torch.tensor(table, dtype=torch.uint8, device=view.device)
            return lookup[view.view(torch.uint8).int()]
        import numpy as np

        return np.asarray(table, np.uint8)[view.view(np.uint8)]


NVFP4_MARLIN_SCALE: Final = "nvfp4_marlin_scale"
"""Scale bytes of Marlin back to e4m3 (`nvfp4_marlin_process_scales`, `marlin_utils_fp4.py` 0.5.23:29-44)."""


def _nvfp4_marlin_scale() -> tuple[int, ...]:
    """Return the e4m3 byte of each Marlin scale byte.

    Marlin keeps the upper byte of `half(scale * 2^7) << 1`, which has all three mantissa bits and no sign. Of the 128 bytes
    of scales that are not negative each has one such byte. The other 128, which a right engine never holds, take the
    bytes of negative scales, which it cannot hold: so no two resident bytes read as the same exported one.
    """
    import numpy as np

    codes = np.arange(127)
    exponent, mantissa = codes >> 3, codes & 7
    values = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    halves = (values * 2.0**7).astype(np.float16).view(np.uint16)
    made = [int(byte) for byte in (halves << 1 & 0xFFFF) >> 8]
    made.append(0xFC)  # NaN: 0x7E00 << 1 >> 8
    table = [-1] * 256
    for code, byte in enumerate(made):
        table[byte] = code
    rest = iter(range(128, 256))
    return tuple(next(rest) if code < 0 else code for code in table)


TABLES: Final[Mapping[str, tuple[int, ...]]] = {NVFP4_MARLIN_SCALE: _nvfp4_marlin_scale()}
"""What each byte becomes, by table name."""

RepackOp = Rearrange | Recode


def split_chain(ops: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return the front of a chain up to its last operation that moves bytes, and the views after it."""
    last = max((index for index, op in enumerate(ops) if isinstance(op, (Rearrange, Recode))), default=-1)
    return ops[: last + 1], ops[last + 1 :]


def moves_bytes(ops: tuple[Any, ...]) -> bool:
    """Return whether a chain has an operation that is no view."""
    return any(isinstance(op, (Rearrange, Recode)) for op in ops)


def _permuted(array: Any, order: tuple[int, ...]) -> Any:
    return array.permute(order) if hasattr(array, "data_ptr") else array.transpose(order)


def _flipped(array: Any, dims: tuple[int, ...]) -> Any:
    if hasattr(array, "data_ptr"):
        return array.flip(dims)
    import numpy as np

    return np.flip(array, dims)


def _units(view: Any, bits: int) -> Any:
    """Return the nibbles, bytes or words of elements, the least significant first, along the last dimension."""
    if hasattr(view, "data_ptr"):
        torch = sys.modules["torch"]
        flat, words = view.contiguous(), {NIBBLE: torch.uint8, 8: torch.uint8, 16: torch.int16, 32: torch.int32}[bits]
    else:
        import numpy as np

        flat, words = np.ascontiguousarray(view), {NIBBLE: np.uint8, 8: np.uint8, 16: np.int16, 32: np.int32}[bits]
    units = flat.view(words)
    if bits != NIBBLE:
        return units
    return _stacked(units & 15, units >> 4).reshape((*units.shape[:-1], units.shape[-1] * 2))


def _stacked(low: Any, high: Any) -> Any:
    if hasattr(low, "data_ptr"):
        return sys.modules["torch"].stack((low, high), -1)
    import numpy as np

    return np.stack((low, high), -1)


def _joined(units: Any, bits: int, to_bits: int) -> Any:
    """Return elements made of units along the last dimension, the least significant first."""
    if hasattr(units, "data_ptr"):
        torch = sys.modules["torch"]
        kinds = {8: torch.uint8, 16: torch.int16, 32: torch.int32, 64: torch.int64}
        units = units.contiguous()
    else:
        import numpy as np

        kinds = {8: np.uint8, 16: np.int16, 32: np.int32, 64: np.int64}
        units = np.ascontiguousarray(units)
    if bits == NIBBLE:
        units = units[..., 0::2] | units[..., 1::2] << 4
    return units.view(kinds[to_bits])
