"""NVFP4 linear layers: packed 4-bit values, e4m3 scales of 16, and one float32 scale a checkpoint tensor.

Values are bytes `[N, K / 2]`, the lower nibble first. What kernels want of them differs by backend: padded tiles, scales
swizzled (in place of the raw ones or beside them), rows shuffled, or Marlin tiles. Each is undone and compared bitwise.
Source: `sglang/srt/layers/quantization/modelopt_quant.py` 0.5.23:1754-2075, `marlin_utils_fp4.py`.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from syncguard.layout import derived_scales
from syncguard.layout.arrangements import (
    Packing,
    marlin_bias,
    marlin_scales,
    marlin_weight,
    shuffled_rows,
    shuffled_scales,
    swizzled_scales,
)
from syncguard.layout.forms import LinearPieces, bind_bias, form, in_blocks
from syncguard.layout.grids import (
    PADDED_FOR_KERNEL,
    Run,
    Stored,
    bind_grid,
    bind_scalars,
    needed,
    resident_of,
    same_memory,
)
from syncguard.layout.ops import Narrow
from syncguard.layout.repack import NVFP4_MARLIN_SCALE, Rearrange, Recode
from syncguard.spec import Box

if TYPE_CHECKING:
    from syncguard.layout.model import ResidentTensor
    from syncguard.layout.rules import LayerView

GROUP = 16
"""Values under one scale."""
KERNEL_SCRATCH = "scratch of a kernel: holds no weight"


def fp4_backend() -> str:
    """Return the process's backend of 4-bit matrix products, empty when the engine says none (`fp4_utils.py`:165)."""
    module = sys.modules.get("sglang.srt.layers.quantization.fp4_utils")
    return str(module.get_fp4_gemm_runner_backend().value) if module is not None else ""


def runs_of(pieces: LinearPieces, leaf: str) -> list[Run]:
    """Return the pieces of a linear layer as runs of one of its tensors with one row for each output."""
    return [Run(f"{piece.name}.{leaf}", piece.at, piece.rows) for piece in pieces.pieces]


@form("ModelOptFp4LinearMethod")
def nvfp4(view: LayerView, pieces: LinearPieces) -> None:
    """Values and scales as the live backend wants them, the scales of shards as they were sent, and their derivatives."""
    if getattr(view.attr("quant_method"), "quant_mode", "w4a4") != "w4a4":
        msg = "NVFP4 values prepared for bf16 activations (prepare_bf16_fp4_weights): no published inverse"
        raise ValueError(msg)
    if view.attr("weight_swiglu_interleaved") is not None:
        msg = "NVFP4 gate and up fused for SwiGLU: the raw weight was freed"
        raise ValueError(msg)
    weight, scale = needed(view, "weight"), needed(view, "weight_scale")
    names = [piece.name for piece in pieces.pieces]
    inputs, globals_ = needed(view, "input_scale"), needed(view, "weight_scale_2")
    bind_scalars(view, inputs, [f"{name}.input_scale" for name in names])
    bind_scalars(view, globals_, [f"{name}.weight_scale_2" for name in names])
    view.derive(needed(view, "alpha"), derived_scales.MAX_PRODUCT, inputs.name, globals_.name)
    view.derive(needed(view, "input_scale_inv"), derived_scales.INVERSE_MAX, inputs.name)
    if view.tensor("pre_quant_scale") is not None:
        if len(pieces.pieces) != 1:
            msg = "pre_quant_scale of several shards: only the last is kept"
            raise ValueError(msg)
        view.bind_spans(needed(view, "pre_quant_scale"), f"{names[0]}.pre_quant_scale", (pieces.columns,))
    if view.tensor("workspace") is not None:
        _marlin(view, pieces, weight, scale)
        view.derive(needed(view, "input_global_scale"), derived_scales.MAX_OF, inputs.name)
        kept = str(view.attr("params_dtype")).removeprefix("torch.")
        rule = f"{derived_scales.MARLIN_GLOBAL}:{kept}"
        view.derive(needed(view, "weight_global_scale"), rule, globals_.name)
        return
    shuffled = fp4_backend() == "flashinfer_trtllm"
    rows, across = weight.shape
    front = (shuffled_rows(rows, across, gated=False),) if shuffled else ()
    bind_grid(view, Stored(weight, front), runs_of(pieces, "weight"), in_blocks(pieces.columns, 2))
    undo = shuffled_scales if shuffled else _swizzled
    for stored in block_scales(view, "weight_scale", "weight_scale_interleaved", undo):
        bind_grid(view, stored, runs_of(pieces, "weight_scale"), in_blocks(pieces.columns, GROUP))
    bind_bias(view, pieces)


def _swizzled(rows: int, columns: int, *, gated: bool) -> Any:
    del gated
    return swizzled_scales(rows, columns)


def block_scales(view: LayerView, raw: str, derived: str, undo: Any, *, gated: bool = False) -> list[Stored]:
    """Return where the block scales lie: rearranged in place of the raw ones, or raw and rearranged in two tensors.

    SGLang writes the rearranged scales over the raw ones where both have one shape and then aliases the second name; else
    both stay (`alias_or_bind_derived_param`, `layers/utils/common.py`:74-106). Which of them is told by memory, not shape.

    Args:
        view: The layer.
        raw: Local name that the loader writes.
        derived: Local name that the kernel reads.
        undo: Makes the operation that undoes the arrangement from `(rows, columns, gated=)`.
        gated: Its rows are those of gate and up.
    """
    kernel = resident_of(view, derived)
    if kernel is None:
        msg = f"no {derived}"
        raise ValueError(msg)
    stored = Stored(kernel, (undo(*kernel.shape[-2:], gated=gated),))
    if same_memory(view, raw, derived):
        return [stored]
    return [Stored(needed(view, raw)), stored]


def _marlin(view: LayerView, pieces: LinearPieces, weight: ResidentTensor, scale: ResidentTensor) -> None:
    inputs, outputs = weight.shape[0] * 16, weight.shape[1] // 2
    packed = Stored(weight, (marlin_weight(inputs, outputs, 4, Packing.ROWS, 8),), dtype="uint8")
    bind_grid(view, packed, runs_of(pieces, "weight"), in_blocks(pieces.columns, 2))
    back = marlin_scales(inputs // GROUP, outputs, grouped=True, outputs_first=True, fp4=True, bits=8)
    bind_grid(
        view,
        Stored(scale, (back, Recode(NVFP4_MARLIN_SCALE))),
        runs_of(pieces, "weight_scale"),
        in_blocks(pieces.columns, GROUP),
    )
    view.exempt(needed(view, "workspace"), KERNEL_SCRATCH)
    bind_marlin_bias(view, pieces, outputs)


def bind_marlin_bias(view: LayerView, pieces: LinearPieces, outputs: int) -> None:
    """Claim a bias in Marlin's order, padded to `outputs`."""
    bias = view.tensor("bias")
    if bias is None:
        return
    front = (marlin_bias(outputs, 16),)
    end = 0
    for piece in pieces.pieces:
        if piece.at != end:
            msg = f"bias of {piece.name} starts at {piece.at}, not {end}"
            raise ValueError(msg)
        end = piece.at + piece.rows.length
        keep = Narrow(0, piece.at, piece.rows.length)
        box = Box((piece.rows.start,), (piece.rows.length,))
        view.bind(bias, f"{piece.name}.bias", (piece.rows.total,), box, (*front, keep))
    if end < outputs:
        view.pad(bias, (*front, Narrow(0, end, outputs - end)), PADDED_FOR_KERNEL)


SCALAR_AS_VECTOR = Rearrange(0, (1,), (0,), (1,), 32, 32, 32)
"""A float32 scalar as the vector of one element that the checkpoint has."""


@form("CompressedTensorsLinearMethod/CompressedTensorsW4A4Fp4")
def ct_nvfp4(view: LayerView, pieces: LinearPieces) -> None:
    """compressed-tensors' NVFP4: one global scale a layer, the largest of its shards (`compressed_tensors_w4a4_nvfp4.py`).

    Shards that are fused have to be exported with one global scale; where they differ, that of the others is not held.
    """
    weight, scale = needed(view, "weight_packed"), needed(view, "weight_scale")
    shuffled = fp4_backend() == "flashinfer_trtllm"
    front = (shuffled_rows(*weight.shape, gated=False),) if shuffled else ()
    undo = shuffled_scales if shuffled else _swizzled
    bind_grid(view, Stored(weight, front), runs_of(pieces, "weight_packed"), in_blocks(pieces.columns, 2))
    back = (undo(*scale.shape, gated=False),)
    bind_grid(view, Stored(scale, back), runs_of(pieces, "weight_scale"), in_blocks(pieces.columns, GROUP))
    inputs, globals_ = needed(view, "input_global_scale"), needed(view, "weight_global_scale")
    for resident, leaf in ((inputs, "input_global_scale"), (globals_, "weight_global_scale")):
        for index, piece in enumerate(pieces.pieces):
            view.bind(resident, f"{piece.name}.{leaf}", (1,), Box((0,), (1,)), (SCALAR_AS_VECTOR,), alias=index > 0)
    view.derive(needed(view, "alpha"), derived_scales.INVERSE_PRODUCT, inputs.name, globals_.name)
    bind_bias(view, pieces)
