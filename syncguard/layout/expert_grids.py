"""Fused experts as grids: gate and up as two runs of rows of w13, down as w2, whatever a scheme stores of them.

Source: `sglang/srt/layers/moe/fused_moe_triton/layer.py` 0.5.23:788-968.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncguard.layout.experts import slots, up_first
from syncguard.layout.forms import in_blocks
from syncguard.layout.grids import Run, Stored, bind_grid
from syncguard.layout.linear import SPLIT_SIZES, exported_size
from syncguard.layout.rules import LayerView, Span, join

if TYPE_CHECKING:
    from collections.abc import Sequence


def inner_span(view: LayerView) -> Span:
    """Return which part of the intermediate dimension is held, with the padding of its kernel behind it.

    A buffer that was padded is loaded from where the padded parts before it end, or from where the exported ones do:
    `use_padded_loading` says which (MOE:831-879).
    """
    rank, size = int(view.attr("moe_tp_rank", 0)), int(view.attr("moe_tp_size", 1))
    part = int(view.attr("intermediate_size_per_partition"))
    exported = exported_size(view, part * size)
    total = intermediate_size(view)
    if exported is not None or total is None or total == part * size:
        return Span.part(part * size, rank, size, exported)
    if view.attr("use_padded_loading", False):
        start = min(rank * part, total)
        length = min(part, total - start)
    else:
        length = total // size
        start = rank * length
    if not 0 <= length <= part:
        msg = f"{part} of {total} at rank {rank} of {size}"
        raise ValueError(msg)
    return Span(start, length, total, part - length)


def intermediate_size(view: LayerView) -> int | None:
    """Return the intermediate size of experts that the configuration says, None when it says none."""
    for config in (view.config, getattr(view.config, "text_config", None)):
        for name in ("moe_intermediate_size", *SPLIT_SIZES):
            value = getattr(config, name, None)
            if value:
                return int(value)
    return None


def bind_experts(
    view: LayerView,
    w13: Stored | None,
    w2: Stored | None,
    leaf: str,
    inner: Span,
    blocks: tuple[int, int],
    *,
    swapped: bool = False,
) -> None:
    """Claim gate, up and down of every slot.

    Args:
        view: The layer.
        w13: Where gate and up lie, None to leave them out.
        w2: Where down lies, likewise.
        leaf: What the checkpoint calls them after the projection.
        inner: The part of the intermediate dimension.
        blocks: Outputs and inputs under one stored element.
        swapped: Up stands before gate, whatever the method says.
    """
    names = view.family.experts
    hidden = int(view.attr("hidden_size_unpadded", 0) or view.attr("hidden_size"))
    held = Span(inner.start, inner.length, inner.total)
    order = (names.up, names.gate) if swapped or up_first(view) else (names.gate, names.up)
    rows, down = in_blocks(held, blocks[0]), in_blocks(Span.whole(hidden), blocks[0])
    across, below = in_blocks(Span.whole(hidden), blocks[1]), in_blocks(held, blocks[1])
    second = inner.held // blocks[0]
    if inner.held % blocks[0]:
        msg = f"{order[1]} starts at row {inner.held}, inside a block of {blocks[0]}"
        raise ValueError(msg)
    for slot in slots(view):
        runs = [Run(f"{slot.name}.{name}.{leaf}", at, rows) for name, at in zip(order, (0, second), strict=True)]
        if w13 is not None:
            bind_grid(view, w13.expert(slot.index), runs, across)
        if w2 is not None:
            bind_grid(view, w2.expert(slot.index), [Run(f"{slot.name}.{names.down}.{leaf}", 0, down)], below)


def slot_names(view: LayerView) -> list[str]:
    """Return the checkpoint module of the expert in each local slot."""
    return [slot.name for slot in slots(view)]


def global_names(view: LayerView) -> Sequence[str]:
    """Return the checkpoint modules of all physical experts, for tensors of which every rank holds all.

    Fused shared experts stand last.
    """
    count = int(view.attr("num_experts"))
    shared = int(view.attr("num_fused_shared_experts", 0) or 0)
    layer_id = view.attr("layer_id")
    placed = view.placement is not None and view.attr("uses_expert_location", True) and layer_id is not None
    names = []
    for physical in range(count - shared):
        logical = view.placement(int(layer_id), physical) if placed and view.placement else physical
        names.append(join(view.name, str(logical)))
    if shared:
        if shared > 1 or not view.family.experts.shared:
            msg = f"{shared} fused shared experts"
            raise ValueError(msg)
        names.append(join(view.name.rpartition(".")[0], view.family.experts.shared))
    return names
