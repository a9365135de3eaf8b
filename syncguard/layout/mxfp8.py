"""MXFP8 linear layers: e4m3 values `[N, K]` and e8m0 scales `[N, K / 32]` as bytes, with copies that kernels read.

The raw scales stay; TRT-LLM's rows are shuffled in place. Both scales are compared with the exported ones, so a copy that was
not refreshed shows. Source: `sglang/srt/layers/quantization/fp8.py` 0.5.23:783-795, 1027-1100.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncguard.layout.arrangements import shuffled_rows, shuffled_scales, swizzled_scales
from syncguard.layout.forms import LinearPieces, bind_bias, form, in_blocks, refuse_packed
from syncguard.layout.fp4 import runs_of
from syncguard.layout.grids import Stored, bind_grid, needed
from syncguard.layout.repack import Rearrange
from syncguard.layout.rules import Span

if TYPE_CHECKING:
    from syncguard.layout.rules import LayerView

BLOCK = 32
"""Values under one scale."""


@form("Fp8LinearMethod+use_mxfp8")
def mxfp8(view: LayerView, pieces: LinearPieces) -> None:
    """Values, raw scales and their rearranged copy."""
    refuse_packed(view)
    method = view.attr("quant_method")
    if not method.is_checkpoint_fp8_serialized or method.convert_mxfp8_to_block:
        msg = "mxfp8 quantized or requantized on load"
        raise ValueError(msg)
    backend = str(getattr(method.mxfp8_dense_backend, "value", ""))
    weight, scale = needed(view, "weight"), needed(view, "weight_scale_inv")
    across = in_blocks(pieces.columns, BLOCK)
    rows, columns = -(-pieces.rows_held // 128) * 128, -(-across.length // 4) * 4
    front: tuple[Rearrange, ...] = ()
    if backend == "flashinfer_trtllm":
        front = (shuffled_rows(*weight.shape, gated=False),)
        copy = Stored(needed(view, "weight_scale_inv_shuffled"), (shuffled_scales(rows, across.length, gated=False),))
    elif backend in {"flashinfer_cutlass", "flashinfer_cutedsl"}:
        copied = needed(view, "weight_scale_inv_swizzled")
        op = swizzled_scales(rows, columns)
        if len(copied.shape) == 1:
            op = Rearrange(1, op.digits, op.order, op.sizes)
        copy = Stored(copied, (op,))
    else:
        msg = f"mxfp8 of backend {backend}"
        raise ValueError(msg)
    columns_held = Span(pieces.columns.start, pieces.columns.length, pieces.columns.total)
    bind_grid(view, Stored(weight, front), runs_of(pieces, "weight"), columns_held)
    for stored in (Stored(scale), copy):
        bind_grid(view, stored, runs_of(pieces, "weight_scale_inv"), across)
    bind_bias(view, pieces)
