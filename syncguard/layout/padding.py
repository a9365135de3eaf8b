"""The check of padding: memory that belongs to no exported tensor and must hold one byte value."""

from __future__ import annotations

import sys
from typing import Any


def count_wrong_padding(view: Any, value_byte: int = 0) -> int:
    """Return how many elements of a view have a byte that is not `value_byte`; a negative zero counts as wrong.

    Args:
        view: Array of numpy or torch, any dtype and strides.
        value_byte: The byte, 0 to 255.
    """
    if hasattr(view, "data_ptr"):
        torch = sys.modules["torch"]  # whoever made the tensor has imported it
        flat = view.detach().contiguous()
        raw = flat.reshape(-1).view(torch.uint8).reshape(-1, int(flat.element_size()))
        return int((raw != value_byte).any(dim=1).sum())
    import numpy as np

    flat = np.ascontiguousarray(view)
    raw = flat.reshape(-1).view(np.uint8).reshape(-1, flat.dtype.itemsize)
    return int((raw != value_byte).any(axis=1).sum())
