"""Experts in bfloat16 or float16 that a kernel wants in another order: TRT-LLM's blocks, and turned for triton kernels.

Source: `sglang/srt/layers/quantization/unquant.py` 0.5.23:745-1120, `layers/moe/fused_moe_triton/layer.py`:849, 944, 1375-1400.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncguard.layout.arrangements import blocked_rows
from syncguard.layout.expert_grids import bind_experts, inner_span
from syncguard.layout.experts import expert_form
from syncguard.layout.grids import Stored, needed
from syncguard.layout.ops import Transpose

if TYPE_CHECKING:
    from syncguard.layout.rules import LayerView


@expert_form("UnquantizedFusedMoEMethod+use_flashinfer_trtllm_moe")
def trtllm_blocks(view: LayerView) -> None:
    """Rows shuffled for a transposed epilogue, then blocks of 64 columns outermost; up stands before gate."""
    _refuse(view)

    def stored(local: str, *, gated: bool) -> Stored:
        found = needed(view, local)
        if len(found.shape) != 4:  # noqa: PLR2004 - experts, blocks, rows, columns
            msg = f"{local} is {found.shape}, not in blocks: an update is open"
            raise ValueError(msg)
        return Stored(found, (blocked_rows(*found.shape[1:], gated=gated),))

    w13, w2 = stored("w13_weight", gated=True), stored("w2_weight", gated=False)
    bind_experts(view, w13, w2, "weight", inner_span(view), (1, 1), swapped=True)


@expert_form("UnquantizedFusedMoEMethod+use_triton_kernels")
def turned(view: LayerView) -> None:
    """`[in, out]` per expert."""
    _refuse(view)
    w13, w2 = (Stored(needed(view, f"{which}_weight"), (Transpose(1, 2),)) for which in ("w13", "w2"))
    bind_experts(view, w13, w2, "weight", inner_span(view), (1, 1))


def _refuse(view: LayerView) -> None:
    reasons = (
        (view.family.experts.interleaved, "experts of one tensor, moved for a kernel"),
        (not getattr(view.attr("moe_runner_config"), "is_gated", True), "moved experts without a gate"),
        (view.attr("use_presharded_weights", False), "use_presharded_weights: the checkpoint is already split"),
    )
    for holds, reason in reasons:
        if holds:
            raise ValueError(reason)
