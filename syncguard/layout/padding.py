"""The check of padding: memory that belongs to no exported tensor and must hold one byte value."""

from __future__ import annotations

import sys
from typing import Any


def wrong_padding(view: Any, value_byte: int = 0) -> tuple[int, tuple[int, ...]]:
    """Return how many elements of a view have a byte that is not `value_byte`, and the index of the first of them.

    A negative zero counts as wrong. The index is empty when there is none.

    Args:
        view: Array of numpy or torch, any dtype and strides.
        value_byte: The byte, 0 to 255.
    """
    if hasattr(view, "data_ptr"):
        torch = sys.modules["torch"]  # whoever made the tensor has imported it
        flat = view.detach().contiguous()
        raw = flat.reshape(-1).view(torch.uint8).reshape(-1, int(flat.element_size()))
        unlike = (raw != value_byte).any(dim=1)
        count = int(unlike.sum())
        first = int(unlike.int().argmax()) if count else 0
    else:
        import numpy as np

        flat = np.ascontiguousarray(view)
        raw = flat.reshape(-1).view(np.uint8).reshape(-1, flat.dtype.itemsize)
        unlike = (raw != value_byte).any(axis=1)
        count = int(unlike.sum())
        first = int(unlike.argmax()) if count else 0
    if not count:
        return 0, ()
    index = []
    for size in reversed(tuple(int(n) for n in view.shape)):
        first, rest = divmod(first, size)
        index.append(rest)
    return count, tuple(reversed(index))


def count_wrong_padding(view: Any, value_byte: int = 0) -> int:
    """Return how many elements of a view have a byte that is not `value_byte`; a negative zero counts as wrong."""
    return wrong_padding(view, value_byte)[0]
