"""Words and constants that every room shares: dtypes, boxes, weight versions.

Stable. A change of meaning here is a new `SPEC_VERSION`, which old readers refuse with `SpecVersionError`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Final

from syncguard.errors import DigestInputError, UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

SPEC_VERSION: Final = 1
"""Version of manifests, observations, records and the wire; written into each of them."""


@dataclass(frozen=True, slots=True)
class DType:
    """An element type, compared as raw bits.

    Attributes:
        name: Canonical name, the one bound into a digest.
        itemsize_bytes: Size of an element in bytes. Packed 4-bit values are `uint8` of half the columns.
        safetensors: Code in a safetensors header.
    """

    name: str
    itemsize_bytes: int
    safetensors: str


DTYPES: Final[Mapping[str, DType]] = {
    dtype.name: dtype
    for dtype in (
        DType("bool", 1, "BOOL"),
        DType("uint8", 1, "U8"),
        DType("int8", 1, "I8"),
        DType("float8_e4m3fn", 1, "F8_E4M3"),
        DType("float8_e5m2", 1, "F8_E5M2"),
        DType("float8_e4m3fnuz", 1, "F8_E4M3FNUZ"),
        DType("float8_e5m2fnuz", 1, "F8_E5M2FNUZ"),
        DType("float8_e8m0fnu", 1, "F8_E8M0"),
        DType("uint16", 2, "U16"),
        DType("int16", 2, "I16"),
        DType("float16", 2, "F16"),
        DType("bfloat16", 2, "BF16"),
        DType("uint32", 4, "U32"),
        DType("int32", 4, "I32"),
        DType("float32", 4, "F32"),
        DType("uint64", 8, "U64"),
        DType("int64", 8, "I64"),
        DType("float64", 8, "F64"),
    )
}


def dtype_named(name: str) -> DType:
    """Return the dtype of a canonical name; a leading `torch.` is accepted.

    Raises:
        DigestInputError: There is no rule for the name.
    """
    found = DTYPES.get(name.removeprefix("torch."))
    if found is None:
        raise DigestInputError(
            "dtype without a rule", expected=" ".join(DTYPES), found=name, todo="add the dtype to spec.DTYPES"
        )
    return found


@dataclass(frozen=True, slots=True, order=True)
class Box:
    """A rectangular part of a logical tensor: half-open `[offset, offset + size)` in each dimension.

    Attributes:
        offsets: First index in each dimension, in elements.
        sizes: Length in each dimension, in elements; any zero makes the box empty.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        """Refuse boxes that no tensor can hold."""
        if len(self.offsets) != len(self.sizes) or any(n < 0 for n in (*self.offsets, *self.sizes)):
            raise DigestInputError(
                "not a box",
                expected="as many non-negative offsets as sizes",
                found=f"offsets={self.offsets} sizes={self.sizes}",
                todo="fix the layout rule that made it",
            )

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Box:
        """Return the box of a whole tensor."""
        return cls((0,) * len(shape), shape)

    @property
    def count(self) -> int:
        """Number of elements; 1 for a scalar."""
        return prod(self.sizes)

    def inside(self, shape: tuple[int, ...]) -> bool:
        """Return whether the box lies in a tensor of this shape."""
        return len(shape) == len(self.sizes) and all(
            offset + size <= length for offset, size, length in zip(self.offsets, self.sizes, shape, strict=True)
        )

    def intersect(self, other: Box) -> Box:
        """Return the common part; empty (some size 0) when there is none."""
        low = tuple(max(a, b) for a, b in zip(self.offsets, other.offsets, strict=True))
        high = tuple(
            min(a + n, b + m) for a, n, b, m in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        )
        return Box(low, tuple(max(0, h - lo) for lo, h in zip(low, high, strict=True)))

    def __str__(self) -> str:
        """Return `[0:512, 128:256]`, as slices are written."""
        return "[" + ", ".join(f"{o}:{o + n}" for o, n in zip(self.offsets, self.sizes, strict=True)) + "]"


@dataclass(frozen=True, slots=True)
class WeightVersion:
    """A trainer's weight version: ordered only inside one run.

    Its label, `run@step`, is the opaque string that engines carry (`weight_version` in SGLang 0.5.23).
    """

    run_id: str
    step: int

    def __post_init__(self) -> None:
        """Refuse what could not be read back from its label."""
        if not self.run_id or "@" in self.run_id or self.step < 0:
            raise UsageError(
                "not a weight version",
                expected="a run id without '@' and a step of 0 or more",
                found=f"run_id={self.run_id!r} step={self.step}",
                todo="write it as RUN@STEP",
            )

    @classmethod
    def parse(cls, label: str) -> WeightVersion:
        """Read a label back; `WeightVersion.parse(str(v)) == v` always holds.

        Raises:
            UsageError: The text is not `RUN@STEP`.
        """
        run_id, at, step = label.rpartition("@")
        if not at or not step.isascii() or not step.isdigit():
            raise UsageError(
                "not a weight version", expected="RUN@STEP", found=repr(label), todo="write it as RUN@STEP"
            )
        return cls(run_id, int(step))

    def older_than(self, other: WeightVersion) -> bool:
        """Return whether this is an earlier step of the same run; versions of two runs have no order."""
        return self.run_id == other.run_id and self.step < other.step

    def __str__(self) -> str:
        """Return the label."""
        return f"{self.run_id}@{self.step}"
