"""Experts of packed integers in Marlin tiles: AWQ, GPTQ and compressed-tensors WNA16.

Resident matrices are `[in, out]` per expert. Which of two permutations the scales have SGLang decides by a size that is not
always the number of inputs; each form says which. Source: SGLang 0.5.23 `hardware_backend/gpu/quantization/
{awq,gptq}_kernels.py`, `compressed_tensors/schemes/compressed_tensors_wNa16_moe.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from syncguard.layout.arrangements import Packing, marlin_scales, marlin_weight, marlin_zero_points
from syncguard.layout.expert_grids import bind_experts, inner_span, slot_names
from syncguard.layout.experts import expert_form
from syncguard.layout.fp4 import KERNEL_SCRATCH
from syncguard.layout.grids import Stored, needed
from syncguard.layout.packed import SHAPE_ON_LOAD, SORTED_ROWS, UNREAD_ZEROS, WORD, drop_unread

if TYPE_CHECKING:
    from syncguard.layout.rules import LayerView, Span

NIBBLES = 8
"""4-bit values in a word."""


@dataclass(frozen=True, slots=True)
class _Scheme:
    """What a quantization method does to experts.

    Attributes:
        weight: Local name after `w13_`, which is also that of the checkpoint.
        scale: Likewise of scales.
        bits: Size of a value.
        group: Inputs under one scale, -1 for all of a row.
        packing: How the checkpoint packs.
        compared: Sizes of w13 and w2 that the engine compares with the group to choose the permutation of scales.
    """

    weight: str
    scale: str
    bits: int
    group: int
    packing: Packing
    compared: tuple[int, int]


@expert_form("AWQMoEMethod/AWQMoEScheme")
def awq_experts(view: LayerView) -> None:
    """Words of eight outputs with zero points (awq_kernels.py:195-270)."""
    config = _config(view)
    inner = inner_span(view)
    part = int(view.attr("intermediate_size_per_partition"))
    scheme = _Scheme("qweight", "scales", 4, int(config.group_size), Packing.AWQ, (part, part))
    _bind(view, scheme, inner)

    def zeros(local: str) -> Stored:
        found = needed(view, local)
        back = marlin_zero_points(found.shape[1], found.shape[2] * NIBBLES, Packing.AWQ)
        return Stored(found, (back,), rows_dim=1)

    bind_experts(view, zeros("w13_qzeros"), zeros("w2_qzeros"), "qzeros", inner, (NIBBLES, scheme.group))


@expert_form("GPTQMarlinMoEMethod/GPTQMarlinMoEScheme")
def gptq_experts(view: LayerView) -> None:
    """Words of inputs; constant zero points are kept in the dtype of scales, and no kernel reads them (gptq_kernels.py:239-330)."""
    config = _config(view)
    if config.desc_act:
        raise ValueError(SORTED_ROWS)
    inner = inner_span(view)
    bits, group = int(config.weight_bits), int(config.group_size)
    part = int(view.attr("intermediate_size_per_partition"))
    groups = needed(view, "w2_scales").shape[1]
    scheme = _Scheme(
        "qweight", "scales", bits, group, Packing.GPTQ, (part, groups * (group if group > 0 else WORD // bits))
    )
    if group > 0 and inner.length // group != groups:
        msg = f"w2_scales has {groups} groups, of which a rank loads {inner.length // group}"
        raise ValueError(msg)
    _bind(view, scheme, inner)
    for which in ("w13", "w2"):
        view.exempt(needed(view, f"{which}_qzeros"), UNREAD_ZEROS)
    for module in _projections(view):
        drop_unread(view, module, config)


@expert_form(
    "CompressedTensorsFusedMoEMethod/CompressedTensorsWNA16MoE/group",
    "CompressedTensorsFusedMoEMethod/CompressedTensorsWNA16MoE/channel",
)
def ct_experts(view: LayerView) -> None:
    """Words of inputs, `[N, K / per]` in the checkpoint (`compressed_tensors_wNa16_moe.py`:208-330)."""
    live = view.attr("scheme")
    if not view.attr("is_marlin_converted", False):
        msg = "WNA16 experts before they are repacked: an update is open"
        raise ValueError(msg)
    if not live.sym or live.actorder not in (None, "static", "weight"):
        msg = "WNA16 experts with zero points or an activation order"
        raise ValueError(msg)
    inner = inner_span(view)
    groups = needed(view, "w2_weight_scale").shape[1]
    bits, group = int(live.num_bits), int(live.group_size)
    compared = (needed(view, "w13_weight_packed").shape[2], groups * (group if group > 0 else WORD // bits))
    _bind(view, _Scheme("weight_packed", "weight_scale", bits, group, Packing.ROWS, compared), inner)
    for which in ("w13", "w2"):
        view.exempt(needed(view, f"{which}_weight_shape"), SHAPE_ON_LOAD)
    for module in _projections(view):
        view.drop(f"{module}.weight_shape", SHAPE_ON_LOAD)


def _projections(view: LayerView) -> list[str]:
    """Return the checkpoint modules of every expert that this rank holds, each once."""
    names = view.family.experts
    parts = (names.gate, names.up, names.down)
    return [f"{slot}.{part}" for slot in dict.fromkeys(slot_names(view)) for part in parts]


def _config(view: LayerView) -> Any:
    return view.attr("quant_method").quant_config


def _bind(view: LayerView, scheme: _Scheme, inner: Span) -> None:
    if view.attr("use_presharded_weights", False):
        msg = "use_presharded_weights: the checkpoint is already split"
        raise ValueError(msg)
    per = WORD // scheme.bits
    outputs_first = scheme.packing is Packing.ROWS
    rows_dim = 0 if outputs_first else 1

    def weight(which: str) -> Stored:
        found, outputs = needed(view, f"{which}_{scheme.weight}"), needed(view, f"{which}_{scheme.scale}").shape[2]
        back = marlin_weight(found.shape[1] * 16, outputs, scheme.bits, scheme.packing)
        return Stored(found, (back,), rows_dim=rows_dim)

    def scale(which: str, compared: int) -> Stored:
        found = needed(view, f"{which}_{scheme.scale}")
        grouped = scheme.group < compared
        back = marlin_scales(found.shape[1], found.shape[2], grouped=grouped, outputs_first=outputs_first)
        return Stored(found, (back,), rows_dim=rows_dim)

    if scheme.group <= 0:
        msg = "experts of packed integers with one scale a row"
        raise ValueError(msg)
    blocks = (NIBBLES, 1) if scheme.packing is Packing.AWQ else (1, per)
    w13, w2 = weight("w13"), weight("w2")
    scale13, scale2 = scale("w13", scheme.compared[0]), scale("w2", scheme.compared[1])
    bind_experts(view, w13, w2, scheme.weight, inner, blocks)
    bind_experts(view, scale13, scale2, scheme.scale, inner, (1, scheme.group))
    workspace = view.tensor("workspace")
    if workspace is not None:
        view.exempt(workspace, KERNEL_SCRATCH)
