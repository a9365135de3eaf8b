"""Rules of fused mixture-of-experts layers: each local slot against the logical expert that it holds now.

Source: `sglang/srt/layers/moe/fused_moe_triton/layer.py` 0.5.23 (MOE). Every physical slot is bound, replicas and
redundant experts included, so that a stale copy of an expert shows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from syncguard.layout.forms import block_of, in_blocks, method_name, refuse_packed
from syncguard.layout.linear import exported_size
from syncguard.layout.ops import Narrow, Select, Transpose, Unflatten
from syncguard.layout.quantized_on_load import bind_expert_values
from syncguard.layout.rules import PADDED_FOR_SPLIT, LayerView, Span, join, rule
from syncguard.spec import Box

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from syncguard.layout.model import ResidentTensor
    from syncguard.layout.ops import ViewOp

EXPERT_FORMS: dict[str, Callable[[LayerView], None]] = {}
"""Forms of experts that are packed or moved, by the name that `method_name` gives; each in a module of its own."""


def expert_form(*method_names: str) -> Callable[[Callable[[LayerView], None]], Callable[[LayerView], None]]:
    """Register a form of experts for quantization methods, by their names."""

    def register(function: Callable[[LayerView], None]) -> Callable[[LayerView], None]:
        for name in method_names:
            EXPERT_FORMS[name] = function
        return function

    return register


CHANNELWISE = frozenset(
    {
        "W8A8Int8MoEMethod",
        "CompressedTensorsFusedMoEMethod/CompressedTensorsW8A8Fp8MoE/channel",
        "CompressedTensorsFusedMoEMethod/CompressedTensorsW8A8Int8MoE/channel",
    }
)
"""Quantization methods of experts with one scale for each output row."""


UNDER_ONE_SCALE = frozenset({"Fp8MoEMethod", "CompressedTensorsFusedMoEMethod/CompressedTensorsW8A8Fp8MoE/tensor"})
"""Quantization methods of experts with one scale for all of w13."""


@dataclass(frozen=True, slots=True)
class Slot:
    """A local expert slot.

    Attributes:
        index: Index in the fused tensor's first dimension.
        name: Checkpoint module of its expert, such as `model.layers.0.mlp.experts.5`.
        logical: Logical expert id; the number of routed experts and more for shared ones.
    """

    index: int
    name: str
    logical: int


_NONE = Box((), ())


@dataclass(frozen=True, slots=True)
class _Part:
    """One projection of every slot: the views after the slot is selected, and the box that they hold.

    Without a leaf it is padding.
    """

    resident: ResidentTensor
    leaf: str
    ops: tuple[ViewOp, ...]
    shape: tuple[int, ...] = ()
    box: Box = _NONE


def slots(view: LayerView) -> Iterator[Slot]:
    """Yield the local slots with the experts they hold: routed ones, then fused shared ones (MOE:1153-1161).

    Local slot j of a rank holds physical expert `storage_rank * n_local + j`; which logical expert that is says the
    live placement (EPLB), identity without one.
    """
    shared = int(view.attr("num_fused_shared_experts", 0) or 0)
    local = view.attr("_num_local_routed")
    routed = int(local if local is not None else view.attr("num_local_experts") - shared)
    storage = view.attr("_expert_storage_rank")
    first = int(storage if storage is not None else view.attr("moe_ep_rank", 0)) * routed
    layer_id = view.attr("layer_id")
    placed = view.placement is not None and view.attr("uses_expert_location", True) and layer_id is not None
    for index in range(routed):
        physical = first + index
        logical = view.placement(int(layer_id), physical) if placed and view.placement else physical
        yield Slot(index, join(view.name, str(logical)), logical)
    if shared:
        if not view.family.experts.shared:
            msg = f"family {view.family.name} does not name its fused shared experts"
            raise ValueError(msg)
        if shared > 1:
            msg = f"{shared} fused shared experts"
            raise ValueError(msg)
        parent = view.name.rpartition(".")[0]
        yield Slot(routed, join(parent, view.family.experts.shared), -1)


def _refuse_layouts(view: LayerView) -> None:
    refuse_packed(view)
    for flag in ("use_flashinfer_trtllm_moe", "use_triton_kernels", "_mega_moe_weights_built"):
        if view.attr(flag, False):
            msg = f"no form for experts with {flag}"
            raise ValueError(msg)
    if view.attr("use_presharded_weights", False):
        msg = "use_presharded_weights: the checkpoint is already split"
        raise ValueError(msg)


def _form_name(view: LayerView) -> str:
    name = method_name(view)
    for flag in ("use_flashinfer_trtllm_moe", "use_triton_kernels"):
        if name == "UnquantizedFusedMoEMethod" and view.attr(flag, False):
            return f"{name}+{flag}"
    return name


@rule("FusedMoE")
def fused(view: LayerView) -> None:
    """Per slot w13 is `[gate; up]` rows, w2 the down projection; both split over the moe_tp group (MOE:788-968)."""
    packed = EXPERT_FORMS.get(_form_name(view))
    if packed is not None:
        refuse_packed(view)
        packed(view)
        return
    _refuse_layouts(view)
    w13, w2 = view.tensor("w13_weight"), view.tensor("w2_weight")
    if w13 is None or w2 is None:
        msg = "no w13_weight and w2_weight"
        raise ValueError(msg)
    rank, size = int(view.attr("moe_tp_rank", 0)), int(view.attr("moe_tp_size", 1))
    part = int(view.attr("intermediate_size_per_partition"))
    hidden = int(view.attr("hidden_size"))
    inner = Span.part(part * size, rank, size, exported_size(view, part * size))
    local = int(view.attr("num_local_experts"))
    if w13.shape != (local, 2 * part, hidden) or w2.shape != (local, hidden, part):
        msg = f"experts are {w13.shape} and {w2.shape}, their layer says {local} x 2 x {part} x {hidden}"
        raise ValueError(msg)
    if view.family.experts.interleaved and (inner.padding or swiglu_interleaved(view) or up_first(view)):
        msg = f"interleaved experts, padded from {inner.total} or in another order"
        raise ValueError(msg)
    if view.family.experts.interleaved:
        _fused_interleaved(view, inner, hidden)
        return
    (_fused_under_one_scale if under_one_scale(view) else _fused_apart)(view, inner)


def _fused_apart(view: LayerView, inner: Span) -> None:
    """Claim gate, up and down of each slot, and their scales, as the checkpoint has them."""
    blocks, scale = scale_form(view)
    parts = _parts(view, inner, "weight", (1, 1))
    if scale:
        parts += _parts(view, inner, scale, blocks)
    for slot in slots(view):
        for each in parts:
            ops: tuple[ViewOp, ...] = (Select(0, slot.index), *each.ops)
            if each.leaf:
                view.bind(each.resident, f"{slot.name}.{each.leaf}", each.shape, each.box, ops)
            else:
                view.pad(each.resident, ops, PADDED_FOR_SPLIT)


def up_first(view: LayerView) -> bool:
    """Return whether the up projection stands before the gate (MOE:819-829, UQ:1227)."""
    return bool(getattr(view.attr("quant_method"), "load_up_proj_weight_first", False))


def swiglu_interleaved(view: LayerView) -> bool:
    """Return whether rows of gate and up alternate (`SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED`, UQ:922-971)."""
    return bool(getattr(view.attr("quant_method"), "w13_swiglu_interleaved", False))


def under_one_scale(view: LayerView) -> bool:
    """Return whether w13 and w2 of an expert have one fp8 scale each (FP8:2624-2735)."""
    method = view.attr("quant_method")
    blocks = getattr(method, "block_quant", False) or getattr(method, "use_mxfp8", False)
    return method_name(view) in UNDER_ONE_SCALE and not blocks


def _fused_under_one_scale(view: LayerView, inner: Span) -> None:
    """Claim gate and up under the larger of their scales, or what the rank quantized from its own part."""
    names = view.family.experts
    if not getattr(view.attr("moe_runner_config"), "is_gated", True) or swiglu_interleaved(view):
        msg = "fp8 experts under one scale, without a gate or with alternating rows"
        raise ValueError(msg)
    claims = []
    for slot in slots(view):
        for each in _parts(view, inner, "weight", (1, 1)):
            ops: tuple[ViewOp, ...] = (Select(0, slot.index), *each.ops)
            if not each.leaf:
                view.pad(each.resident, ops, PADDED_FOR_SPLIT)
                continue
            module = each.leaf.rpartition(".")[0]
            mates = (names.gate, names.up) if module != names.down else (names.down,)
            together = [f"{slot.name}.{mate}" for mate in mates]
            claims.append((slot.index, each.resident, f"{slot.name}.{module}", together, each.box, each.shape, ops))
    bind_expert_values(view, claims)


def scale_form(view: LayerView) -> tuple[tuple[int, int], str]:
    """Return rows and columns of values under one scale, and the tensors' name after `w13_`; no name without scales.

    Raises:
        ValueError: There is no form for the layer's live quantization method.
    """
    name = method_name(view)
    method = view.attr("quant_method")
    if name in {"", "UnquantizedFusedMoEMethod"}:
        return (1, 1), ""
    if name == "Fp8MoEMethod" and getattr(method, "block_quant", False) and not getattr(method, "use_mxfp8", False):
        scales = [view.attr(f"{w}_weight_scale_inv") for w in ("w13", "w2")]
        if not any(getattr(scale, "format_ue8m0", False) for scale in scales):
            return block_of(method), "weight_scale_inv"
        if any(str(getattr(scale, "dtype", "")).removeprefix("torch.") != "int32" for scale in scales):
            msg = "UE8M0 scales of experts that are not packed"
            raise ValueError(msg)
        return (1, 4 * block_of(method)[1]), "weight_scale_inv"  # as the linear layers': four exponents of one row
    if name in CHANNELWISE:
        return (1, 0), "weight_scale"
    msg = f"no form for quantization method {name}"
    raise ValueError(msg)


def _parts(view: LayerView, inner: Span, leaf: str, blocks: tuple[int, int]) -> list[_Part]:
    """Return gate, up and down of any slot; `blocks` are the values under one element, 0 columns for all of a row."""
    w13, w2 = view.tensor(f"w13_{leaf}"), view.tensor(f"w2_{leaf}")
    if w13 is None or w2 is None:
        msg = f"no w13_{leaf} and w2_{leaf}"
        raise ValueError(msg)
    names = view.family.experts
    hidden = int(view.attr("hidden_size"))
    rows = in_blocks(inner, blocks[0])
    across = in_blocks(Span.whole(hidden), blocks[1] or hidden)
    box = Box((rows.start, 0), (rows.length, across.length))
    shape = (rows.total, across.total)
    down = in_blocks(Span.whole(hidden), blocks[0])
    columns = in_blocks(inner, blocks[1]) if blocks[1] else Span.whole(1)
    down_box = Box((0, columns.start), (down.length, columns.length))
    order = (names.up, names.gate) if up_first(view) else (names.gate, names.up)
    parts: list[_Part] = []
    if swiglu_interleaved(view):
        if rows.padding or leaf != "weight":
            msg = "alternating rows of gate and up, padded or with scales"
            raise ValueError(msg)
        for half, name in enumerate(order):
            alternate = (Unflatten(0, (rows.length, 2)), Select(1, half))
            parts.append(_Part(w13, f"{name}.{leaf}", alternate, shape, box))
    else:
        for at, name in zip((0, rows.held), order, strict=True):
            parts.append(_Part(w13, f"{name}.{leaf}", (Narrow(0, at, rows.length),), shape, box))
            if rows.padding:
                parts.append(_Part(w13, "", (Narrow(0, at + rows.length, rows.padding),)))
    whole = (Narrow(1, 0, columns.length),) if columns.padding else ()
    parts.append(_Part(w2, f"{names.down}.{leaf}", whole, (down.total, columns.total), down_box))
    if columns.padding:
        parts.append(_Part(w2, "", (Narrow(1, columns.length, columns.padding),)))
    return parts


def runs_of_experts(view: LayerView) -> Iterator[tuple[int, int, int]]:
    """Yield `(first slot, first logical expert, count)` of slots whose logical experts follow one another."""
    first, start, count = 0, -1, 0
    for slot in slots(view):
        if count and slot.logical == start + count:
            count += 1
            continue
        if count:
            yield first, start, count
        first, start, count = slot.index, slot.logical, 1
    if count:
        yield first, start, count


def _fused_interleaved(view: LayerView, inner: Span, hidden: int) -> None:
    """Bind experts that the checkpoint keeps in one tensor, `[E, H, 2I]` with gate and up columns alternating.

    Resident rows alternate too, so a rank's part is one slice. The bias of w2 is whole where `moe_tp_rank` is 0 and zero
    on the others, which only add theirs up (gpt_oss.py 0.5.23:1143-1321).
    """
    names = view.family.experts
    total = logical_experts(view)
    w13_bias, w2_bias = view.tensor("w13_weight_bias"), view.tensor("w2_weight_bias")
    w13, w2 = view.tensors["w13_weight"], view.tensors["w2_weight"]
    for slot, expert, count in runs_of_experts(view):
        keep = Narrow(0, slot, count)
        experts = Span(expert, count, total)
        double = Span(2 * inner.start, 2 * inner.length, 2 * inner.total)
        for resident, leaf, spans, ops in (
            (w13, names.gate, (experts, Span.whole(hidden), double), (keep, Transpose(1, 2))),
            (w2, names.down, (experts, inner, Span.whole(hidden)), (keep, Transpose(1, 2))),
            (w13_bias, f"{names.gate}_bias", (experts, double), (keep,)),
            (w2_bias, f"{names.down}_bias", (experts, Span.whole(hidden)), (keep,)),
        ):
            if resident is None:
                continue
            if resident is w2_bias and inner.start:
                continue
            _bind_box(view, resident, join(view.name, leaf), spans, ops)
    if w2_bias is not None and inner.start:
        view.pad(w2_bias, (), "bias of w2 is added by moe_tp_rank 0 only")


def _bind_box(
    view: LayerView, resident: ResidentTensor, logical: str, spans: tuple[Span, ...], ops: tuple[ViewOp, ...]
) -> None:
    box = Box(tuple(span.start for span in spans), tuple(span.length for span in spans))
    view.bind(resident, logical, tuple(span.total for span in spans), box, ops)


def logical_experts(view: LayerView) -> int:
    """Return how many logical routed experts the model has, from its configuration.

    Raises:
        ValueError: The configuration does not say.
    """
    for config in (view.config, getattr(view.config, "text_config", None)):
        for name in ("num_local_experts", "num_experts", "n_routed_experts"):
            value = getattr(config, name, None)
            if value:
                return int(value)
    msg = "the configuration does not say how many experts there are"
    raise ValueError(msg)
