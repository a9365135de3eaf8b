"""Storage digests: xxh3_128 over resident bytes, bound to dtype, shape and strides.

Stable. For what is compared layout to layout: scrubbing of unchanged memory, replicas with one layout, files, records.
Two layouts of equal content differ here on purpose. 128 bits against accidents, not against an adversary.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import xxhash

from syncguard.errors import DigestInputError
from syncguard.spec import Box, dtype_named

_DOMAIN: Final = b"syncguard/storage/v1\0"
_BLOCK_BYTES: Final = 1 << 20


def storage_digest(view: Any) -> str:
    """Return 32 hex digits over header and bytes of an array or CPU tensor.

    Header: domain, u32 len(dtype) and dtype, u32 rank, u64 per dimension, i64 per stride in elements (strides that
    address nothing, those of dimensions of length 1 and of empty views, count as 0). Then the elements in the order of the logical
    indices, raw and little-endian; a contiguous view is hashed in place, another in copied blocks of 1 MiB.

    Args:
        view: numpy array, or torch tensor in host memory.

    Raises:
        DigestInputError: Not such a view, or a dtype without a rule.
    """
    array, dtype_name = _raw(view)
    hasher = xxhash.xxh3_128(_DOMAIN)
    name = dtype_name.encode()
    hasher.update(len(name).to_bytes(4, "little") + name + array.ndim.to_bytes(4, "little"))
    for length in array.shape:
        hasher.update(length.to_bytes(8, "little"))
    for length, stride in zip(array.shape, array.strides, strict=True):
        hasher.update((stride // array.itemsize if length > 1 and array.size else 0).to_bytes(8, "little", signed=True))
    if array.flags.c_contiguous:
        hasher.update(array.reshape(-1).view(np.uint8).data if array.size else b"")
        return hasher.hexdigest()
    step = max(1, _BLOCK_BYTES // array.itemsize)
    for first in range(0, array.size, step):
        index = np.unravel_index(np.arange(first, min(first + step, array.size)), array.shape)
        hasher.update(np.ascontiguousarray(array[index]).view(np.uint8).data)
    return hasher.hexdigest()


def _raw(view: Any) -> tuple[np.ndarray[Any, Any], str]:
    """Return the memory as an array, and the canonical name of its dtype."""
    if isinstance(view, np.ndarray | np.generic):
        view = np.asarray(view)
        if view.dtype.hasobject or view.dtype.fields is not None or not view.dtype.isnative:
            raise DigestInputError("array without raw little-endian elements", expected="numbers", found=view.dtype)
        return view, dtype_named(view.dtype.name).name
    dtype = dtype_named(str(getattr(view, "dtype", type(view).__name__)))
    from syncguard.digest.partial import DigestJob
    from syncguard.digest.torch_path import host_array

    shape = tuple(getattr(view, "shape", ()))
    return host_array(DigestJob(view, dtype, shape, Box.whole(shape), "(storage)")), dtype.name
