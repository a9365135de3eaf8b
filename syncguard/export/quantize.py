"""The published quantizations, bit for bit: what an engine makes of exported tensors while it loads them.

Torch arithmetic in the order of the engine's own; results are the same on every device, but for `FP8_REQUANTIZED` and its
half-precision twin, which say which of torch's two roundings they mean. Sources are files of SGLang 0.5.23; its CUDA
kernels (`kernels/jit/csrc/gemm/*.cuh`) are compiled without fast math, so that `x / y` and `1 / y` round to nearest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from syncguard.errors import ManifestError
from syncguard.layout.published import (
    FP8_INPUT,
    FP8_PER_ROW,
    FP8_PER_TENSOR,
    FP8_REQUANTIZED,
    FP8_REQUANTIZED_HALF,
    MAX,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from syncguard.layout.published import Recipe

FP8: Final = torch.float8_e4m3fn
FP8_MAX: Final = 448.0
FLOATS: Final = frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16})
"""Dtypes that a cast may lead from and to; quantized values are never cast."""
EXACT: Final = frozenset(
    {
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float64),
        (torch.float16, torch.float64),
        (torch.float32, torch.float64),
    }
)
"""Casts that keep every value; all others round to nearest, ties to even."""


def computed(recipe: Recipe, sources: Sequence[torch.Tensor], name: str) -> torch.Tensor:
    """Return what an engine that follows a recipe holds.

    Args:
        recipe: What to compute.
        sources: The parts that it names, in its order.
        name: Of the result, for errors.

    Raises:
        ManifestError: A source does not have the dtype or form that the recipe needs.
    """
    given = [_loaded(source, recipe.dtype, name) for source in sources]
    try:
        return _FUNCTIONS[recipe.function, recipe.output](given, name)
    except (IndexError, RuntimeError, TypeError) as error:
        forms = ", ".join(f"{source.dtype} {tuple(source.shape)}" for source in given)
        raise ManifestError("sources of a computed form", expected=recipe.function, found=forms, where=name) from error


UE8M0_BLOCK: Final = 128
"""Rows and columns of values under one scale, the only size that DeepGEMM's form has."""


def ue8m0(values: torch.Tensor, scale: torch.Tensor, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return block-quantized fp8 under scales that are powers of two, packed as DeepGEMM reads them.

    To bfloat16, then anew under `2^ceil(log2(amax / 448))` a block; four exponents of one row in an int32, zeros behind.
    Source: `requant_weight_ue8m0` (`layers/quantization/fp8_utils.py` 0.5.23:2184-2420).

    Args:
        values: fp8 values `[N, K]`.
        scale: float32 scales `[ceil(N / 128), ceil(K / 128)]`.
        name: Of the values, for errors.

    Returns:
        Values `[N, K]` and packed scales int32 `[N, ceil(K / 512)]`.

    Raises:
        ManifestError: Other dtypes or shapes.
    """
    block = UE8M0_BLOCK
    rows, columns = (int(n) for n in values.shape) if values.dim() == 2 else (0, 0)  # noqa: PLR2004 - a matrix
    down, across = -(-rows // block), -(-columns // block)
    if values.dtype is not FP8 or scale.dtype is not torch.float32 or tuple(scale.shape) != (down, across) or not rows:
        raise ManifestError(
            "block-quantized values",
            expected=f"float8_e4m3fn [N, K] with float32 scales of blocks of {block}",
            found=f"{values.dtype} {tuple(values.shape)} with {scale.dtype} {tuple(scale.shape)}",
            where=name,
        )
    spread = scale.repeat_interleave(block, dim=0).repeat_interleave(block, dim=1)[:rows, :columns]
    wide = torch.zeros((down * block, across * block), dtype=torch.bfloat16, device=values.device)
    wide[:rows, :columns] = (values.float() * spread).to(torch.bfloat16)
    blocks = wide.view(down, block, across, block)
    amax = blocks.abs().float().amax(dim=(1, 3), keepdim=True).clamp(1e-4)
    bits = (amax / FP8_MAX).view(torch.int32)
    exponent = (((bits >> 23) & 0xFF) + ((bits & 0x7FFFFF) != 0).to(torch.int32)).clamp(1, 254)
    power = (exponent << 23).view(torch.float32)
    made = (blocks.float() * (1.0 / power)).to(FP8).view(down * block, across * block)[:rows, :columns].contiguous()
    by_row = exponent.view(down, across).to(torch.uint8).repeat_interleave(block, dim=0)[:rows]
    packed = torch.zeros((rows, -(-across // 4) * 4), dtype=torch.uint8, device=values.device)
    packed[:, :across] = by_row
    return made, packed.view(torch.int32)


def cast(tensor: torch.Tensor, dtype: torch.dtype, name: str) -> torch.Tensor:
    """Return a tensor in the dtype that the engine holds, rounded to nearest even where it does not fit.

    Raises:
        ManifestError: Not a cast between plain floating-point dtypes, or one that makes a finite value infinite.
    """
    if tensor.dtype is dtype:
        return tensor
    if tensor.dtype not in FLOATS or dtype not in FLOATS:
        raise ManifestError(
            "no published cast",
            expected=str(dtype).removeprefix("torch."),
            found=str(tensor.dtype).removeprefix("torch."),
            where=name,
            todo="export the tensor in the form that the engine is sent",
        )
    made = tensor.to(dtype)
    if torch.finfo(dtype).max < torch.finfo(tensor.dtype).max and bool((made.isinf() & ~tensor.isinf()).any()):
        raise ManifestError(
            "a cast that overflows",
            expected=f"values within {torch.finfo(dtype).max} of {dtype}",
            found=f"up to {float(tensor[tensor.isfinite()].abs().max())}",
            where=name,
            todo="let the engine hold this tensor in the dtype of the export",
        )
    return made


def _loaded(source: torch.Tensor, dtype: str, name: str) -> torch.Tensor:
    return cast(source, getattr(torch, dtype), name) if dtype else source


def _scalar(tensor: torch.Tensor, name: str) -> torch.Tensor:
    if tensor.numel() != 1 or tensor.dtype is not torch.float32:
        raise ManifestError(
            "scale of a quantized tensor",
            expected="one float32",
            found=f"{tensor.dtype} {tuple(tensor.shape)}",
            where=name,
            todo="export the scales of the checkpoint's own quantization",
        )
    return tensor.reshape(())


def _max(sources: Sequence[torch.Tensor], name: str) -> torch.Tensor:
    return torch.stack([_scalar(source, name) for source in sources]).max()


def _static(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """`per_tensor_quant_fp8_kernel`: times the reciprocal, clipped, rounded to nearest even."""
    inverse = torch.ones((), dtype=torch.float32, device=values.device) / scale
    return (values.float() * inverse).clamp(-FP8_MAX, FP8_MAX).to(FP8)


def _requantized(sources: Sequence[torch.Tensor], name: str, *, half: bool) -> torch.Tensor:
    values, own = sources[0], _scalar(sources[1], name)
    if values.dtype is not FP8:
        raise ManifestError("values to requantize", expected=FP8, found=values.dtype, where=name)
    factor = own.half().float() if half else own
    # Both factors have few bits: the product is exact in float32 or rounds once there, then once to float16, as torch does.
    wide = (values.to(torch.float16).float() * factor).to(torch.float16)
    return _static(wide, _max(sources[1:], name))


def _absmax(sources: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.stack([source.abs().amax().float() for source in sources]).max()


def _per_tensor(sources: Sequence[torch.Tensor], name: str) -> torch.Tensor:
    return _static(sources[0], _per_tensor_scale(sources, name))


def _per_tensor_scale(sources: Sequence[torch.Tensor], name: str) -> torch.Tensor:
    del name
    return _absmax(sources) / FP8_MAX


def _input_factor(sources: Sequence[torch.Tensor]) -> torch.Tensor:
    return FP8_MAX / _absmax(sources).clamp(min=1e-12)


def _input(sources: Sequence[torch.Tensor], name: str) -> torch.Tensor:
    del name
    return (sources[0].float() * _input_factor(sources)).clamp(-FP8_MAX, FP8_MAX).to(FP8)


def _input_scale(sources: Sequence[torch.Tensor], name: str) -> torch.Tensor:
    del name
    return _input_factor(sources).reciprocal()


def _per_row_scale(sources: Sequence[torch.Tensor], name: str) -> torch.Tensor:
    del name
    return sources[0].abs().amax(dim=1, keepdim=True).float() / FP8_MAX


def _per_row(sources: Sequence[torch.Tensor], name: str) -> torch.Tensor:
    scale = _per_row_scale(sources, name)
    # A row of zeros: its scale is 0, and the kernel for many rows then multiplies by 0.
    inverse = torch.where(scale == 0, torch.zeros_like(scale), torch.ones_like(scale) / scale)
    return (sources[0].float() * inverse).clamp(-FP8_MAX, FP8_MAX).to(FP8)


_FUNCTIONS: Final[dict[tuple[str, str], Callable[[Sequence[Any], str], Any]]] = {
    (MAX, "value"): _max,
    (FP8_REQUANTIZED, "values"): lambda sources, name: _requantized(sources, name, half=False),
    (FP8_REQUANTIZED_HALF, "values"): lambda sources, name: _requantized(sources, name, half=True),
    (FP8_PER_TENSOR, "values"): _per_tensor,
    (FP8_PER_TENSOR, "scale"): _per_tensor_scale,
    (FP8_INPUT, "values"): _input,
    (FP8_INPUT, "scale"): _input_scale,
    (FP8_PER_ROW, "values"): _per_row,
    (FP8_PER_ROW, "scale"): _per_row_scale,
}
