"""NVFP4 experts: rows and scales as CUTLASS, TRT-LLM and Marlin kernels want them, and their global scales.

Every rank holds the input scales of all experts, `[gate, up]` whatever the order of rows. Source:
`sglang/srt/layers/quantization/modelopt_quant.py` 0.5.23:2366-3115, `utils.py`:629-756, `marlin_utils_fp4.py`:468-580.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncguard.layout import derived_scales
from syncguard.layout.arrangements import (
    Packing,
    marlin_scales,
    marlin_weight,
    shuffled_rows,
    shuffled_scales,
    swizzled_scales,
)
from syncguard.layout.expert_grids import bind_experts, global_names, inner_span, slot_names
from syncguard.layout.experts import expert_form
from syncguard.layout.fp4 import GROUP, KERNEL_SCRATCH, block_scales
from syncguard.layout.grids import Stored, bind_scalars, needed
from syncguard.layout.ops import Narrow, Select
from syncguard.layout.repack import NVFP4_MARLIN_SCALE, Rearrange, Recode
from syncguard.spec import Box

if TYPE_CHECKING:
    from syncguard.layout.model import ResidentTensor
    from syncguard.layout.rules import LayerView, Span

LEFT_BEHIND = "made for another backend: no kernel of this one reads or writes it"
ROUNDED_GLOBAL = "global scale rounded to the dtype of activations, of the gate alone: the exported one is not held"


@expert_form("ModelOptNvFp4FusedMoEMethod")
def nvfp4_experts(view: LayerView) -> None:
    """Dispatch on what the live method did to the layer."""
    _refuse(view)
    inner = inner_span(view)
    names = view.family.experts
    inputs13, inputs2 = needed(view, "w13_input_scale"), needed(view, "w2_input_scale")
    for physical, name in enumerate(global_names(view)):
        both = [f"{name}.{projection}.input_scale" for projection in (names.gate, names.up)]
        bind_scalars(view, inputs13, both, Select(0, physical))
    bind_scalars(view, inputs2, [f"{name}.{names.down}.input_scale" for name in global_names(view)])
    globals13, globals2 = needed(view, "w13_weight_scale_2"), needed(view, "w2_weight_scale_2")
    if view.tensor("workspace") is not None:
        _marlin(view, inner)
        view.refuse(globals13, ROUNDED_GLOBAL)
        view.refuse(globals2, ROUNDED_GLOBAL)
        for which in ("w13", "w2"):  # made for other backends and left behind (2500, 2521)
            placeholder = view.tensor(f"{which}_blockscale_swizzled")
            if placeholder is not None:
                view.exempt(placeholder, LEFT_BEHIND)
        return
    for index, name in enumerate(slot_names(view)):
        both = [f"{name}.{projection}.weight_scale_2" for projection in (names.gate, names.up)]
        bind_scalars(view, globals13, both, Select(0, index))
    bind_scalars(view, globals2, [f"{name}.{names.down}.weight_scale_2" for name in slot_names(view)])
    _kernel_scales(view, inputs13, inputs2, globals13, globals2)
    shuffled = bool(view.attr("quant_method").use_flashinfer_trtllm_weight_layout)
    w13, w2 = needed(view, "w13_weight"), needed(view, "w2_weight")
    if shuffled:
        stored = (Stored(w13, (_rows(w13, gated=True),)), Stored(w2, (_rows(w2, gated=False),)))
    else:
        stored = (Stored(w13), Stored(w2))
    bind_experts(view, *stored, "weight", inner, (1, 2))
    undo = shuffled_scales if shuffled else _swizzled
    # Where raw scales and those of the kernel lie apart, both are claimed: each list has one or two of them.
    gate_up = block_scales(view, "w13_weight_scale", "w13_blockscale_swizzled", undo, gated=True)
    down = block_scales(view, "w2_weight_scale", "w2_blockscale_swizzled", undo)
    for index in range(max(len(gate_up), len(down))):
        bind_experts(
            view,
            gate_up[index] if index < len(gate_up) else None,
            down[index] if index < len(down) else None,
            "weight_scale",
            inner,
            (1, GROUP),
        )


def _swizzled(rows: int, columns: int, *, gated: bool) -> Rearrange:
    del gated
    return swizzled_scales(rows, columns)


def _rows(resident: ResidentTensor, *, gated: bool) -> Rearrange:
    return shuffled_rows(*resident.shape[-2:], gated=gated)


def _refuse(view: LayerView) -> None:
    method = view.attr("quant_method")
    config = getattr(method, "quant_config", None)
    marlin = view.tensor("workspace") is not None
    reasons = (
        (not getattr(config, "is_checkpoint_nvfp4_serialized", True), "NVFP4 experts quantized on line"),
        (view.attr("_mega_moe_weights_built", False), "NVFP4 experts in the layout of MegaMoE"),
        (view.attr("inference_moe_w13_interleaved", False), "NVFP4 experts whose export alternates gate and up"),
        (view.attr("use_presharded_weights", False), "use_presharded_weights: the checkpoint is already split"),
        (not getattr(view.attr("moe_runner_config"), "is_gated", True), "NVFP4 experts without a gate"),
        (view.tensor("gemm1_clamp_limit") is not None, "NVFP4 block scales rescaled to one alpha for a clamp limit"),
        (getattr(config, "use_per_token_activation", False), "NVFP4 experts with activation scales of each token"),
        (
            not (
                marlin
                or any(getattr(method, f"enable_flashinfer_{kernel}_moe", False) for kernel in ("cutlass", "trtllm"))
            ),
            "NVFP4 experts of a backend that is neither CUTLASS, TRT-LLM nor Marlin",
        ),
    )
    for holds, reason in reasons:
        if holds:
            raise ValueError(reason)


def _kernel_scales(
    view: LayerView,
    inputs13: ResidentTensor,
    inputs2: ResidentTensor,
    globals13: ResidentTensor,
    globals2: ResidentTensor,
) -> None:
    """Claim what is premultiplied for the kernels, in the order in which the engine makes it (2833-2853)."""
    for column, local in enumerate(("g1_alphas", "g1_alphas_up")):
        rule = f"{derived_scales.EXPERT_ALPHAS}:{column}"
        view.derive(needed(view, local), rule, inputs13.name, globals13.name)
    view.derive(needed(view, "g2_alphas"), f"{derived_scales.EXPERT_ALPHAS}:0", inputs2.name, globals2.name)
    requantize = needed(view, "w2_input_scale_quant")
    scale_c, alphas_up = view.tensor("g1_scale_c"), view.resident[f"{view.fqn}.g1_alphas_up"]
    view.derive(needed(view, "w13_input_scale_quant"), derived_scales.INVERSE_MAX, inputs13.name)
    view.derive(requantize, derived_scales.INVERSE_MAX, inputs2.name)
    if scale_c is not None:
        view.derive(scale_c, derived_scales.PRODUCT, requantize.name, alphas_up.name)


def _marlin(view: LayerView, inner: Span) -> None:
    def weight(local: str) -> Stored:
        found = needed(view, local)
        return Stored(
            found, (marlin_weight(found.shape[1] * 16, found.shape[2] // 2, 4, Packing.ROWS, 8),), dtype="uint8"
        )

    def scale(local: str) -> Stored:
        found = needed(view, local)
        back = marlin_scales(found.shape[1], found.shape[2], grouped=True, outputs_first=True, fp4=True, bits=8)
        return Stored(found, (back, Recode(NVFP4_MARLIN_SCALE)))

    bind_experts(view, weight("w13_weight"), weight("w2_weight"), "weight", inner, (1, 2))
    bind_experts(view, scale("w13_weight_scale"), scale("w2_weight_scale"), "weight_scale", inner, (1, GROUP))
    view.exempt(needed(view, "workspace"), KERNEL_SCRATCH)


@expert_form("CompressedTensorsFusedMoEMethod/CompressedTensorsW4A4Nvfp4MoE")
def ct_nvfp4_experts(view: LayerView) -> None:
    """compressed-tensors' NVFP4: up before gate, inverse global scales (`compressed_tensors_w4a4_nvfp4_moe.py`:165-268)."""
    if view.attr("use_presharded_weights", False):
        msg = "use_presharded_weights: the checkpoint is already split"
        raise ValueError(msg)
    shuffled = bool(view.attr("scheme").use_flashinfer_trtllm)
    inner = inner_span(view)
    names = view.family.experts
    for kind in ("weight", "input"):
        w13, w2 = needed(view, f"w13_{kind}_global_scale"), needed(view, f"w2_{kind}_global_scale")
        leaf = f"{kind}_global_scale"
        for index, name in enumerate(slot_names(view)):
            for column, projection in enumerate((names.gate, names.up)):
                ops = (Select(0, index), Narrow(0, column, 1))
                view.bind(w13, f"{name}.{projection}.{leaf}", (1,), Box((0,), (1,)), ops)
            view.bind(w2, f"{name}.{names.down}.{leaf}", (1,), Box((0,), (1,)), (Narrow(0, index, 1),))
    for which in ("w13", "w2"):
        inverse, quantize = needed(view, f"{which}_weight_scale_2"), view.tensor(f"{which}_input_scale_quant")
        view.derive(inverse, derived_scales.INVERSE_FIRST, f"{view.fqn}.{which}_weight_global_scale")
        if quantize is not None and not quantize.alias_of:
            rule = derived_scales.LEAST if shuffled else derived_scales.LEAST_OF_ROW
            view.derive(quantize, rule, f"{view.fqn}.{which}_input_global_scale")
        alphas = needed(view, "g1_alphas" if which == "w13" else "g2_alphas")
        view.derive(alphas, derived_scales.DIVIDED, inverse.name, f"{view.fqn}.{which}_input_scale_quant")
    scale_c = view.tensor("g1_scale_c")
    if scale_c is not None:
        view.derive(scale_c, derived_scales.PRODUCT, f"{view.fqn}.w2_input_scale_quant", f"{view.fqn}.g1_alphas")
    rows, scales = (shuffled_rows, shuffled_scales) if shuffled else (None, _swizzled)
    weights, block = [], []
    for which, gated in (("w13", True), ("w2", False)):
        weight, scale = needed(view, f"{which}_weight"), needed(view, f"{which}_weight_scale")
        weights.append(Stored(weight, (rows(*weight.shape[-2:], gated=gated),) if rows else ()))
        block.append(Stored(scale, (scales(*scale.shape[-2:], gated=gated),)))
    bind_experts(view, weights[0], weights[1], "weight_packed", inner, (1, 2), swapped=True)
    bind_experts(view, block[0], block[1], "weight_scale", inner, (1, GROUP), swapped=True)
