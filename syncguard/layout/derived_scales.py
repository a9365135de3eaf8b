"""Rules of scales that kernels want premultiplied: what SGLang 0.5.23 makes of the exported ones, recomputed in the rank.

Bit for bit in float32, with torch's own operations: each rule is the line of the engine that it names. The exported scales
stay resident and are bound, so a derived one that was not refreshed shows.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

MAX_PRODUCT: Final = "max_product"
"""`alpha = max(input_scale) * max(weight_scale_2)` (`modelopt_quant.py`:1899-1919)."""
INVERSE_MAX: Final = "inverse_max"
"""`input_scale_inv = 1 / max(input_scale)` (same place)."""
MAX_OF: Final = "max_of"
"""The largest element."""
MARLIN_GLOBAL: Final = "marlin_global"
"""`marlin_global:bfloat16`: the largest global scale, rounded and moved by the exponent bias (`marlin_utils_fp4.py`:47-58)."""
EXPERT_ALPHAS: Final = "expert_alphas"
"""`expert_alphas:0`: largest input scale times column 0 of the weight scales, for each expert (`modelopt_quant.py`:2339-2364)."""
PRODUCT: Final = "product"
"""One tensor times another, elementwise (`_compute_g1_scale_c`, `flashinfer_trtllm.py`:587-610)."""

INVERSE_PRODUCT: Final = "inverse_product"
"""`alpha = 1 / (input_global_scale * weight_global_scale)` (`compressed_tensors_w4a4_nvfp4.py`:132)."""

INVERSE_FIRST: Final = "inverse_first"
"""One over each element, or over the first of each row (`compressed_tensors_w4a4_nvfp4_moe.py`:193-200)."""
LEAST: Final = "least"
"""The smallest element, for each expert (same place, 203-209)."""
LEAST_OF_ROW: Final = "least_of_row"
"""The smallest element of each row (same place, 210-213)."""
DIVIDED: Final = "divided"
"""`(1 / second) * first`, elementwise (same place, 214-217)."""


def _torch() -> Any:
    return sys.modules["torch"]  # whoever made the tensors has imported it


def _max_product(found: Any, inputs: Any, weights: Any) -> Any:
    del found
    return (inputs.max().float() * weights.max().float()).float()


def _inverse_max(found: Any, inputs: Any) -> Any:
    del found
    return (1 / inputs.max().float()).float()


def _max_of(found: Any, values: Any) -> Any:
    del found
    return values.max().float()


def _marlin_global(found: Any, scales: Any, dtype: str) -> Any:
    exponent = {"float16": 5, "bfloat16": 8}[dtype]
    bias = 2 ** (exponent - 1) - 2
    value = scales.max().float().to(getattr(_torch(), dtype)) * (2.0 ** (bias - 7))
    return value.reshape(found.shape)


def _expert_alphas(found: Any, inputs: Any, weights: Any, column: str) -> Any:
    del found
    column_scales = weights[:, int(column)] if weights.dim() > 1 else weights
    return (inputs.max().float() * column_scales).float()


def _product(found: Any, one: Any, other: Any) -> Any:
    del found
    return (one * other).float()


def _inverse_product(found: Any, one: Any, other: Any) -> Any:
    del found
    return 1 / (one * other)


def _inverse_first(found: Any, scales: Any) -> Any:
    del found
    return 1 / (scales[:, 0] if scales.dim() > 1 else scales)


def _least(found: Any, scales: Any) -> Any:
    return scales.min().float().expand(found.shape)


def _least_of_row(found: Any, scales: Any) -> Any:
    del found
    return scales.min(dim=1).values.float() if scales.dim() > 1 else scales


def _divided(found: Any, one: Any, other: Any) -> Any:
    del found
    return ((1 / other) * one).float()


SCALE_RULES: Final[Mapping[str, Callable[..., Any]]] = {
    MAX_PRODUCT: _max_product,
    INVERSE_MAX: _inverse_max,
    MAX_OF: _max_of,
    MARLIN_GLOBAL: _marlin_global,
    EXPERT_ALPHAS: _expert_alphas,
    PRODUCT: _product,
    INVERSE_PRODUCT: _inverse_product,
    INVERSE_FIRST: _inverse_first,
    LEAST: _least,
    LEAST_OF_ROW: _least_of_row,
    DIVIDED: _divided,
}
"""What each rule gives, from the found tensor (for its shape only) and the sources."""
