"""What every implementation of the digest takes and gives: jobs, partial digests, and the checks before reading.

Stable. A job is a piece of memory with its place in a logical tensor; a partial digest is three integers that add
up over any partition of that tensor. See SPEC.md beside this module.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias

import msgspec
import numpy as np

from syncguard.errors import DigestInputError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from syncguard.spec import Box, DType

ALGORITHM: Final = "MLP61v1"
"""Multilinear, modulo the prime 2^61 - 1, version 1; the name fixes tables, limits, and every other parameter."""

PRIME: Final = (1 << 61) - 1
INDEX_LIMIT: Final = 1 << 32
"""Rows of a tensor, and 32-bit words of a row, are fewer than this."""

KeySeed: TypeAlias = bytes
DEFAULT_KEY_SEED: Final[KeySeed] = bytes(32)
SEED_BYTES_MIN: Final = 16
SEED_BYTES_MAX: Final = 1024


class PartialDigest(msgspec.Struct, frozen=True, gc=False):
    """Three integers over some elements of a logical tensor; they add up to those of the whole.

    A struct and no dataclass: a manifest has a hundred thousand of them, made and compared in each verification.

    Attributes:
        count: Number of elements.
        coverage: Sum of the position keys, modulo p; says *which* elements, without their data.
        data: Keyed sum of the bytes, modulo p.
    """

    count: int
    coverage: int
    data: int

    @classmethod
    def zero(cls) -> PartialDigest:
        """Return the partial digest of no elements, the neutral element of addition."""
        return _ZERO

    @classmethod
    def total(cls, partials: Iterable[PartialDigest]) -> PartialDigest:
        """Return the sum over many."""
        count = coverage = data = 0
        for partial in partials:
            count += partial.count
            coverage += partial.coverage
            data += partial.data
        return cls(count, coverage % PRIME, data % PRIME)

    def __add__(self, other: PartialDigest) -> PartialDigest:
        """Return the partial digest of both element sets together, counted twice where they overlap."""
        if not isinstance(other, PartialDigest):
            return NotImplemented
        return PartialDigest(
            self.count + other.count, (self.coverage + other.coverage) % PRIME, (self.data + other.data) % PRIME
        )

    def __sub__(self, other: PartialDigest) -> PartialDigest:
        """Return what is left when `other`'s elements are taken away."""
        if not isinstance(other, PartialDigest):
            return NotImplemented
        return PartialDigest(
            self.count - other.count, (self.coverage - other.coverage) % PRIME, (self.data - other.data) % PRIME
        )


_ZERO: Final = PartialDigest(0, 0, 0)


@dataclass(frozen=True, slots=True)
class DigestJob:
    """A piece of memory and the part of a logical tensor that it holds.

    Attributes:
        view: numpy array of raw elements, or torch tensor; its dimensions equal `box.sizes`, strides are free.
            It is read in place. Expanded views (stride 0) are read as what they show: each element once per place.
        dtype: Element type of the logical tensor; only the item size must agree with `view`.
        shape: Full logical shape.
        box: Where `view` lies in it.
        fqn: Logical name, for messages only; names are bound in `finalize`.
    """

    view: Any
    dtype: DType
    shape: tuple[int, ...]
    box: Box
    fqn: str = ""


class DigestEngine(Protocol):
    """An implementation of MLP61v1. All of them give the same integers; they differ in speed and device."""

    @property
    def name(self) -> str:
        """Short name for logs and tables."""
        ...

    def partials(self, jobs: Sequence[DigestJob], *, key_seed: KeySeed = DEFAULT_KEY_SEED) -> list[PartialDigest]:
        """Return one partial digest per job, in the order of the jobs.

        Raises:
            DigestInputError: A job or the key cannot be digested; names the tensor and the box.
        """
        ...


def rows_and_columns(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the matrix (rows, columns) as which a shape is hashed; a scalar is 1 x 1, a vector 1 x n."""
    return (prod(shape[:-1]), shape[-1]) if shape else (1, 1)


def with_rows(shape: tuple[int, ...], box: Box) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return shape and box offsets with at least two dimensions, as scalars and vectors are hashed."""
    missing = (1,) * (2 - len(shape))
    return (*missing, *shape), (*(0 for _ in missing), *box.offsets)


def check_seed(key_seed: KeySeed) -> KeySeed:
    """Return the key seed unchanged.

    Raises:
        DigestInputError: It is not `bytes` of 16 to 1024 bytes.
    """
    seed: object = key_seed
    if isinstance(seed, bytes) and SEED_BYTES_MIN <= len(seed) <= SEED_BYTES_MAX:
        return seed
    raise DigestInputError(
        "not a key seed",
        expected=f"bytes of {SEED_BYTES_MIN} to {SEED_BYTES_MAX}",
        found=f"{type(seed).__name__}" + (f" of {len(seed)}" if isinstance(seed, bytes) else ""),
        todo="pass the 32 bytes of the nonce, or DEFAULT_KEY_SEED",
    )


def check_place(dtype: DType, shape: tuple[int, ...], box: Box, *, fqn: str = "") -> None:
    """Refuse a box that does not lie in the shape, or a shape too large for the key tables.

    Raises:
        DigestInputError: Names the tensor and the box.
    """
    # Plain loops and late texts: this runs once per tensor, 100,000 times for a large model.
    inside = len(shape) == len(box.sizes)
    for offset, size, length in zip(box.offsets, box.sizes, shape, strict=False):
        inside = inside and offset + size <= length
    if not inside:
        raise DigestInputError(
            "box outside its tensor",
            expected=f"inside {shape}",
            found=box,
            where=place_of(fqn, box),
            todo="fix the layout rule",
        )
    rows, columns = rows_and_columns(shape)
    if rows > INDEX_LIMIT or columns * dtype.itemsize_bytes > 4 * INDEX_LIMIT:
        raise DigestInputError(
            "tensor too large for the key tables",
            expected="at most 2^32 rows of at most 2^34 bytes",
            found=f"{rows} rows of {columns * dtype.itemsize_bytes} bytes",
            where=place_of(fqn, box),
            todo="name the tensor in a shape with a shorter last dimension",
        )


def place_of(fqn: str, box: Box) -> str:
    """Return the name of a tensor and a box of it, as error texts show them."""
    return f"{fqn or '(unnamed)'} {box}"


def check_job(job: DigestJob, view_shape: tuple[int, ...], view_itemsize_bytes: int) -> None:
    """Refuse a job whose memory does not fit its place.

    Args:
        job: The job.
        view_shape: Dimensions of `job.view`.
        view_itemsize_bytes: Element size of `job.view`.

    Raises:
        DigestInputError: Names the tensor and the box.
    """
    check_place(job.dtype, job.shape, job.box, fqn=job.fqn)
    if view_shape != job.box.sizes:
        raise DigestInputError(
            "view does not have the dimensions of its box",
            expected=job.box.sizes,
            found=view_shape,
            where=place_of(job.fqn, job.box),
            todo="fix the binding",
        )
    if view_itemsize_bytes != job.dtype.itemsize_bytes:
        raise DigestInputError(
            "view does not have the element size of its dtype",
            expected=f"{job.dtype.itemsize_bytes} bytes ({job.dtype.name})",
            found=f"{view_itemsize_bytes} bytes",
            where=place_of(job.fqn, job.box),
            todo="view the memory as the dtype of the logical tensor",
        )


def as_array(job: DigestJob) -> np.ndarray[Any, Any]:
    """Return the checked memory of a job as a numpy array, with no copy.

    Raises:
        DigestInputError: The job cannot be digested, or its tensor is not in the memory of this process.
    """
    view = np.asarray(job.view) if isinstance(job.view, np.generic) else job.view  # numpy's scalars are 0-d
    if not isinstance(view, np.ndarray):
        from syncguard.digest.torch_path import host_array

        view = host_array(job)
    elif view.dtype.hasobject or view.dtype.fields is not None or not view.dtype.isnative:
        raise DigestInputError(
            "array without raw little-endian elements",
            expected=f"a plain array of {job.dtype.itemsize_bytes}-byte elements",
            found=view.dtype,
            where=place_of(job.fqn, job.box),
            todo="view it as unsigned integers of the same size",
        )
    check_job(job, view.shape, view.dtype.itemsize)
    return view
