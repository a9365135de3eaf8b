"""Rules of linear layers: which rows and columns of which checkpoint tensors a rank holds.

Source: `sglang/srt/layers/linear.py` 0.5.23. Weights are stored `[out, in]` as in the checkpoint. How the values are
stored (bf16, fp8 with scales, ...) is the matter of the quantization form.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from syncguard.layout.forms import LinearPieces, Piece, linear_form
from syncguard.layout.rules import LayerView, Span, join, rule

if TYPE_CHECKING:
    from collections.abc import Sequence


def siblings(view: LayerView, names: Sequence[str]) -> tuple[str, ...]:
    """Return checkpoint modules that stand where the packed one stands."""
    parent = view.name.rpartition(".")[0]
    return tuple(join(parent, name) for name in names)


def packed_names(view: LayerView, count: int) -> tuple[str, ...]:
    """Return the checkpoint modules packed into this one.

    Raises:
        ValueError: The family does not say, or says another number.
    """
    leaf = view.fqn.rpartition(".")[2]
    names = view.family.packed_in(view.fqn)
    if names is not None and len(names) == 1:
        return siblings(view, names)
    if names is None or len(names) != count:
        msg = f"family {view.family.name} does not name the {count} parts of {leaf}"
        raise ValueError(msg)
    return siblings(view, names)


def _refuse_presharded(view: LayerView) -> None:
    if view.attr("use_presharded_weights", False):
        msg = "use_presharded_weights: the checkpoint is already split, so ranks hold different files"
        raise ValueError(msg)


def _claim(view: LayerView, pieces: LinearPieces) -> None:
    _refuse_presharded(view)
    linear_form(view)(view, pieces)


def _input_size(view: LayerView) -> int:
    return int(view.attr("input_size", view.attr("hidden_size", 0)))


SPLIT_SIZES = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size", "intermediate_size_mlp")

FEED_FORWARD_LAYERS = frozenset({"gate_up_proj", "gate_proj", "up_proj", "down_proj", "experts"})


def exported_size(view: LayerView, size: int) -> int | None:
    """Return the length in the checkpoint of a dimension that the engine padded to `size`; None where it did not.

    On a CPU SGLang rounds these sizes up to a multiple of `32 tp` in the model's own configuration, keeps the old value as
    `original_*`, and loads zeros behind (`configs/update_config.py` 0.5.23:173-209, 290-304; weight_utils.py:1995).

    Only feed-forward layers are split along these sizes: an attention output of the same width is not padded.

    Raises:
        ValueError: Two sizes were padded to the same one, and the layer does not say which it is.
    """
    if view.fqn.rpartition(".")[2] not in FEED_FORWARD_LAYERS:
        return None
    found = {
        int(original)
        for name in SPLIT_SIZES
        if getattr(view.config, name, None) == size
        and (original := getattr(view.config, f"original_{name}", None)) is not None
    }
    if len(found) > 1:
        msg = f"{size} is the padded form of {sorted(found)}"
        raise ValueError(msg)
    return found.pop() if found else None


@rule("ReplicatedLinear")
def replicated(view: LayerView) -> None:
    """Every rank holds all (LIN:349-379); a packed one holds its parts one after the other."""
    rows, columns = int(view.attr("output_size")), _input_size(view)
    names = view.family.packed_in(view.fqn)
    pieces = [Piece(view.name, 0, Span.whole(rows))]
    if names is not None:
        pieces, at = [], 0
        for name, width in zip(siblings(view, names), packed_widths(view), strict=True):
            pieces.append(Piece(name, at, Span.whole(width)))
            at += width
        if at != rows:
            msg = f"the parts of {view.fqn} have {at} rows, the layer {rows}"
            raise ValueError(msg)
    _claim(view, LinearPieces(tuple(pieces), Span.whole(columns), rows))


def packed_widths(view: LayerView) -> tuple[int, ...]:
    """Return the rows of each part of a packed replicated layer, from the model's configuration.

    Raises:
        ValueError: There is no rule for the layer's name.
    """
    leaf = view.fqn.rpartition(".")[2]
    if leaf == "fused_qkv_a_proj_with_mqa":  # deepseek_v2.py 0.5.23:2084
        config = view.config
        return int(config.q_lora_rank), int(config.kv_lora_rank) + int(config.qk_rope_head_dim)
    msg = f"no widths for the parts of {leaf}"
    raise ValueError(msg)


@rule("ColumnParallelLinear")
def column(view: LayerView) -> None:
    """Rank r holds rows `[rN/tp, (r+1)N/tp)`, of the bias too (LIN:550-572)."""
    rank, size = view.group()
    output = int(view.attr("output_size"))
    rows = Span.part(output, rank, size, exported_size(view, output))
    _claim(view, LinearPieces((Piece(view.name, 0, rows),), Span.whole(_input_size(view)), rows.held))


@rule("MergedColumnParallelLinear")
def merged(view: LayerView) -> None:
    """Part i of rank r stands at `sum(n_j for j < i) / tp` and comes from rows `[r n_i / tp, ...)` (LIN:812-870)."""
    rank, size = view.group()
    outputs = [int(n) for n in view.attr("output_sizes")]
    names = packed_names(view, len(outputs))
    if len(names) == 1:  # packed in the checkpoint too, in an order that a contiguous slice keeps (qwen3_next.py:305)
        outputs = [sum(outputs)]
    pieces, at = [], 0
    for name, output in zip(names, outputs, strict=True):
        rows = Span.part(output, rank, size, exported_size(view, output))
        pieces.append(Piece(name, at, rows))
        at += rows.held
    _claim(view, LinearPieces(of_one_tensor(pieces), Span.whole(_input_size(view)), at))


def of_one_tensor(pieces: Sequence[Piece]) -> tuple[Piece, ...]:
    """Shift pieces of one name to their place in one checkpoint tensor: qkv beside z (qwen3_5.py:1985), a vision qkv."""
    totals: dict[str, int] = {}
    for piece in pieces:
        totals[piece.name] = totals.get(piece.name, 0) + piece.rows.total
    shifted, before = [], dict.fromkeys(totals, 0)
    for piece in pieces:
        rows = piece.rows
        start, total = before[piece.name] + rows.start, totals[piece.name]
        if rows.padding and total != rows.total:
            msg = f"{piece.name} has several parts, one of them padded"
            raise ValueError(msg)
        shifted.append(Piece(piece.name, piece.at, Span(start, rows.length, total, rows.padding)))
        before[piece.name] += rows.total
    return tuple(shifted)


@rule("QKVParallelLinear")
def qkv(view: LayerView) -> None:
    """Rows are `[q; k; v]`; with fewer kv heads than ranks each kv head is held by several (LIN:1139-1195, 1454-1503)."""
    rank, size = view.group()
    head = int(view.attr("head_size"))
    v_head = int(view.attr("v_head_size") or head)
    heads, kv_heads = int(view.attr("num_heads")), int(view.attr("num_kv_heads"))
    replicas = int(view.attr("num_kv_head_replicas", 1))
    kv_rank, kv_size = group_of_kv(view, rank, size)
    totals = int(view.attr("total_num_heads")), int(view.attr("total_num_kv_heads"))
    if heads * size != totals[0] or kv_heads * kv_size != totals[1] * replicas:
        msg = f"{heads} heads x {size} ranks and {kv_heads} kv heads x {kv_size} / {replicas} are not {totals}"
        raise ValueError(msg)
    exported = tuple(getattr(view.config, f"original_{n}", None) for n in ("num_attention_heads", "total_num_kv_heads"))
    if any(old is not None and int(old) != now for old, now in zip(exported, totals, strict=True)):
        msg = f"heads were padded from {exported} to {totals}: no rule"
        raise ValueError(msg)
    names = packed_names(view, 3)
    query = heads * head
    key, value = kv_heads * head, kv_heads * v_head
    kv_index = kv_rank // replicas
    pieces = (
        Piece(names[0], 0, Span(rank * query, query, totals[0] * head)),
        Piece(names[1], query, Span(kv_index * key, key, totals[1] * head)),
        Piece(names[2], query + key, Span(kv_index * value, value, totals[1] * v_head)),
    )
    _claim(view, LinearPieces(of_one_tensor(pieces), Span.whole(_input_size(view)), query + key + value))


def group_of_kv(view: LayerView, rank: int, size: int) -> tuple[int, int]:
    """Return rank and size of the group that splits kv heads; it may differ from the layer's own (LIN:1133-1138)."""
    group: Any = view.attr("kv_tp_group")
    return (int(group.rank_in_group), int(group.world_size)) if group is not None else (rank, size)


@rule("RowParallelLinear")
def row(view: LayerView) -> None:
    """Rank r holds columns `[rK/tp, ...)`; every rank holds the whole bias, rank 0 adds it (LIN:1611-1701, 1762)."""
    rank, size = view.group()
    rows = int(view.attr("output_size"))
    columns = Span.part(_input_size(view), rank, size, exported_size(view, _input_size(view)))
    _claim(view, LinearPieces((Piece(view.name, 0, Span.whole(rows)),), columns, rows, bias_whole=True))
