"""gpt-oss experts in MXFP4: all experts in one tensor, rows of gate and up alternating, e8m0 scales of 32 values.

The checkpoint has `*_blocks` `[E, rows, K / 32, 16]` and `*_scales` `[E, rows, K / 32]`, both uint8; each rank whole blocks of
32 of the intermediate dimension. Source: `sglang/srt/layers/quantization/mxfp4.py` 0.5.23:398-1075, `models/gpt_oss.py`:954-1141.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from syncguard.layout.arrangements import (
    Packing,
    marlin_bias,
    marlin_scales,
    marlin_weight,
    swapped_rows,
    swapped_scales,
    widened_bias,
)
from syncguard.layout.derived import EQUALS
from syncguard.layout.expert_grids import intermediate_size
from syncguard.layout.experts import expert_form, logical_experts, runs_of_experts
from syncguard.layout.fp4 import KERNEL_SCRATCH
from syncguard.layout.grids import PADDED_FOR_KERNEL, needed
from syncguard.layout.ops import Narrow, Select, Unflatten, shape_after
from syncguard.layout.rules import LayerView, Span, join
from syncguard.spec import Box

if TYPE_CHECKING:
    from syncguard.layout.model import ResidentTensor
    from syncguard.layout.ops import ViewOp

BLOCK = 32
"""Values under one scale; 16 bytes."""
ONE = 0x7F
"""The e8m0 byte of 1.0, with which SGLang fills scales that it does not load."""
WIDENED = "lower half of a float32 that was widened from bfloat16"


@expert_form("Mxfp4MoEMethod")
def mxfp4_experts(view: LayerView) -> None:
    """Dispatch on what the live method did to the layer."""
    method = view.attr("quant_method")
    _refuse(view)
    inner = _inner(view)
    hidden = Span.whole(int(view.attr("hidden_size_unpadded", 0) or view.attr("hidden_size")))
    names = view.family.experts
    double = Span(2 * inner.start, 2 * inner.length, 2 * inner.total)
    if getattr(view.module, "_mxfp4_backend", "") == "marlin":
        weight, scale, bias = _marlin_weight, _marlin_scale, _marlin_bias
        view.exempt(needed(view, "workspace"), KERNEL_SCRATCH)
    elif getattr(method, "_fi_kernel", None) == "trtllm_sm100":
        weight, scale, bias = _trtllm_weight, _trtllm_scale, _trtllm_bias
        config = view.attr("moe_runner_config")
        for local, value in (
            ("gemm1_alpha", getattr(config, "gemm1_alpha", None) or 1.702),
            ("gemm1_beta", 1.0),
            ("gemm1_clamp_limit", getattr(config, "gemm1_clamp_limit", None) or 7.0),
        ):
            view.derive(needed(view, local), f"{EQUALS}:{float(value)}")
    else:
        weight, scale, bias = _raw_weight, _raw, _raw
    for which, rows, columns, name in (
        ("w13", double, hidden, names.gate),
        ("w2", hidden, inner, names.down),
    ):
        gated = which == "w13"
        blocks = Span(columns.start // BLOCK, columns.length // BLOCK, columns.total // BLOCK)
        if columns.start % BLOCK or columns.length % BLOCK or columns.total % BLOCK:
            msg = f"[{columns.start}:+{columns.length}) is not made of blocks of {BLOCK}"
            raise ValueError(msg)
        values = needed(view, f"{which}_weight")
        spans = (rows, blocks, Span.whole(BLOCK // 2))
        _bind(view, values, weight(values, gated=gated), f"{name}_blocks", spans, dtype="uint8")
        scales = needed(view, f"{which}_weight_scale")
        front = scale(scales, gated=gated)
        _bind(view, scales, front, f"{name}_scales", (rows, blocks), dtype="uint8", value_byte=ONE)
        biases = view.tensor(f"{which}_weight_bias")
        if biases is None:
            continue
        front = bias(biases, gated=gated)
        keep: tuple[ViewOp, ...] = ()
        if (
            biases.dtype == "float32"
        ):  # widened from bfloat16: the upper halves are what was exported, the lower ones zero
            view.pad(biases, (*front, Select(1, 0)), WIDENED)
            keep = (Select(1, 1),)
        if not gated and inner.start:
            view.pad(biases, (*front, *keep), "bias of w2 is added by moe_tp_rank 0 only")
        else:
            _bind(view, biases, (*front, *keep), f"{name}_bias", (rows,), dtype="bfloat16")


def _refuse(view: LayerView) -> None:
    method = view.attr("quant_method")
    backend = getattr(view.module, "_mxfp4_backend", "")
    weight = view.tensor("w13_weight")
    reasons = (
        (getattr(method, "use_triton_kernels", False), "MXFP4 experts in the value layout of triton_kernels"),
        (weight is None or weight.dtype not in {"uint8", "int32"}, "MXFP4 experts decoded to another dtype"),
        (backend == "deep_gemm", "MXFP4 scales packed for DeepGEMM"),
        (getattr(method, "use_mega_moe", False), "MXFP4 experts in the layout of MegaMoE"),
        (getattr(method, "_fi_kernel", None) in {"cutlass_sm90", "cutlass_sm120"}, "MXFP4 experts mixed for CUTLASS"),
        (not view.family.experts.interleaved, "MXFP4 experts whose gate and up do not alternate"),
        (view.attr("num_fused_shared_experts", 0), "MXFP4 experts with a fused shared one"),
        (view.attr("use_presharded_weights", False), "use_presharded_weights: the checkpoint is already split"),
    )
    for holds, reason in reasons:
        if holds:
            raise ValueError(reason)


def _inner(view: LayerView) -> Span:
    """Return the part of the intermediate dimension: whole blocks, the last rank has fewer (gpt_oss.py:975-1010)."""
    rank, size = int(view.attr("moe_tp_rank", 0)), int(view.attr("moe_tp_size", 1))
    total = intermediate_size(view)
    if total is None:
        msg = "the configuration does not say the intermediate size"
        raise ValueError(msg)
    part = -(-(total // BLOCK) // size) * BLOCK
    exported = int(getattr(view.config, "original_intermediate_size", None) or total)
    start = min(rank * part, exported)
    return Span(start, min(part, exported - start), exported)


def _bind(
    view: LayerView,
    resident: ResidentTensor,
    front: tuple[ViewOp, ...],
    leaf: str,
    spans: tuple[Span, ...],
    *,
    dtype: str = "",
    value_byte: int = 0,
) -> None:
    """Claim the experts of a fused tensor, and the tails of its other dimensions as padding."""
    shape = shape_after(resident.shape, front)
    if len(shape) != len(spans) + 1 or any(n < span.length for n, span in zip(shape[1:], spans, strict=True)):
        msg = f"{resident.name} gives {shape}, its layer says {[span.length for span in spans]}"
        raise ValueError(msg)
    held: list[ViewOp] = []
    for dim, (span, size) in enumerate(zip(spans, shape[1:], strict=True), start=1):
        if span.length < size:
            tail = Narrow(dim, span.length, size - span.length)
            view.pad(resident, (*front, *held, tail), PADDED_FOR_KERNEL, value_byte=value_byte)
            held.append(Narrow(dim, 0, span.length))
    total = logical_experts(view)
    for slot, expert, count in runs_of_experts(view):
        box = Box((expert, *(span.start for span in spans)), (count, *(span.length for span in spans)))
        keep = () if count == shape[0] else (Narrow(0, slot, count),)
        view.bind(
            resident,
            join(view.name, leaf),
            (total, *(span.total for span in spans)),
            box,
            (*front, *held, *keep),
            dtype=dtype,
        )


def _raw(resident: ResidentTensor, *, gated: bool) -> tuple[ViewOp, ...]:
    del resident, gated
    return ()


def _raw_weight(resident: ResidentTensor, *, gated: bool) -> tuple[ViewOp, ...]:
    del gated
    return (Unflatten(2, (resident.shape[2] * 2 // BLOCK, BLOCK // 2)),)


def _in_blocks(op: ViewOp, rows: int, columns: int) -> tuple[ViewOp, ...]:
    return (msgspec.structs.replace(op, sizes=(rows, columns * 2 // BLOCK, BLOCK // 2)),)


def _trtllm_weight(resident: ResidentTensor, *, gated: bool) -> tuple[ViewOp, ...]:
    rows, columns = resident.shape[1:]
    return _in_blocks(swapped_rows(rows, columns, pairs=gated), rows, columns)


def _trtllm_scale(resident: ResidentTensor, *, gated: bool) -> tuple[ViewOp, ...]:
    return (swapped_scales(*resident.shape[1:], pairs=gated),)


def _trtllm_bias(resident: ResidentTensor, *, gated: bool) -> tuple[ViewOp, ...]:
    return (widened_bias(resident.shape[1], pairs=gated),)


def _marlin_weight(resident: ResidentTensor, *, gated: bool) -> tuple[ViewOp, ...]:
    inputs, outputs = resident.shape[1] * 16, resident.shape[2] // 2
    return _in_blocks(marlin_weight(inputs, outputs, 4, Packing.ROWS, 8, halves=gated), outputs, inputs // 2)


def _marlin_scale(resident: ResidentTensor, *, gated: bool) -> tuple[ViewOp, ...]:
    groups, outputs = resident.shape[1:]
    return (marlin_scales(groups, outputs, grouped=True, outputs_first=True, fp4=True, bits=8, halves=gated),)


def _marlin_bias(resident: ResidentTensor, *, gated: bool) -> tuple[ViewOp, ...]:
    return (marlin_bias(resident.shape[1], 16, halves=gated),)
