"""Forms whose values an engine computes while it loads: bound to the result of the same published quantization.

The names of such bindings say what the exporter must compute (`layout.published`). Where a kernel rounds in another way
than the published arithmetic, the answer is a mismatch, never a match.
Sources: `sglang/srt/layers/quantization/fp8.py` 0.5.23:1142-1256, 2610-2735; `compressed_tensors_w8a8_fp8.py`:120.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from syncguard.layout.ops import Narrow, Select, Transpose
from syncguard.layout.published import (
    FP8_INPUT,
    FP8_PER_ROW,
    FP8_PER_TENSOR,
    Recipe,
    SourceBox,
    largest,
    requantized,
)
from syncguard.layout.rules import PADDED_FOR_SPLIT, LayerView, join
from syncguard.spec import Box

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from syncguard.layout.forms import LinearPieces, Piece
    from syncguard.layout.model import ResidentTensor
    from syncguard.layout.ops import ViewOp

SCALAR = Box((), ())


def bind_requantized(view: LayerView, pieces: LinearPieces) -> None:
    """Claim values that were brought under the largest scale of their shards, and that scale."""
    names = _one_each(view, pieces)
    scales = [f"{name}.weight_scale" for name in names]
    on_device = _on_device(view, "weight")
    weight, turned = _values(view, pieces)
    columns = pieces.columns
    for piece, scale in zip(pieces.pieces, scales, strict=True):
        recipe = requantized(f"{piece.name}.weight", scale, scales, on_device=on_device)
        box = Box((piece.rows.start, columns.start), (piece.rows.length, columns.length))
        shape = (piece.rows.total, columns.total)
        view.bind(weight, recipe.named(f"{piece.name}.weight"), shape, box, _held(turned, piece, pieces))
    _pad_values(view, weight, turned, pieces)
    bind_largest(view, "weight_scale", scales)
    if view.tensor("input_scale") is not None:
        bind_largest(view, "input_scale", [f"{name}.input_scale" for name in names])


def bind_largest(view: LayerView, local: str, scales: Sequence[str]) -> None:
    """Claim a scalar that is the largest of those of several checkpoint modules.

    Raises:
        ValueError: It is missing, or no scalar.
    """
    found = view.tensor(local)
    if found is None or found.shape:
        msg = f"{local} is {None if found is None else found.shape}, not one scalar of its shards"
        raise ValueError(msg)
    view.bind(found, largest(scales).named(join(view.name, local)), (), SCALAR)


def bind_quantized_online(view: LayerView, pieces: LinearPieces) -> None:
    """Claim values that the rank quantized from its own part of an unquantized export, and their scales.

    A scale a row (`[1, N]`, turned) where the device has fp8 kernels, else one for the whole merged part.
    """
    _one_each(view, pieces)
    if getattr(view.attr("quant_method"), "use_per_token_if_dynamic", False):
        msg = "quantized on line for aiter, which may shuffle it"
        raise ValueError(msg)
    if pieces.columns.padding or any(piece.rows.padding for piece in pieces.pieces):
        msg = "quantized on line from a part that was padded"
        raise ValueError(msg)
    dtype = _dtype_name(view.attr("orig_dtype"))
    weight, turned = _values(view, pieces)
    scale = view.tensor("weight_scale")
    columns = pieces.columns
    parts = {
        piece.name: SourceBox(
            f"{piece.name}.weight",
            Box((piece.rows.start, columns.start), (piece.rows.length, columns.length)),
        )
        for piece in pieces.pieces
    }
    by_row = scale is not None and scale.shape == (1, pieces.rows_held) and pieces.rows_held > 1
    if scale is None or not (by_row or scale.shape == ()):
        msg = f"weight_scale of values quantized on line is {None if scale is None else scale.shape}"
        raise ValueError(msg)
    everything = tuple(sorted(parts.values(), key=str))
    for piece in pieces.pieces:
        own = parts[piece.name]
        assert own.box is not None
        rest = () if by_row else tuple(other for other in everything if other != own)
        recipe = Recipe(FP8_PER_ROW if by_row else FP8_INPUT, "values", (own, *rest), dtype)
        sizes = own.box.sizes
        view.bind(weight, recipe.named(own.fqn), sizes, Box.whole(sizes), _held(turned, piece, pieces))
        if by_row:
            rows: tuple[ViewOp, ...] = (Narrow(1, piece.at, piece.rows.length), Transpose(0, 1))
            shape = (piece.rows.length, 1)
            name = replace(recipe, output="scale").named(f"{own.fqn}_scale")
            view.bind(scale, name, shape, Box.whole(shape), rows)
    if not by_row:
        name = Recipe(FP8_INPUT, "scale", everything, dtype).named(join(view.name, "weight_scale"))
        view.bind(scale, name, (), SCALAR)


def bind_expert_values(
    view: LayerView,
    parts: Iterable[tuple[int, ResidentTensor, str, Sequence[str], Box, tuple[int, ...], tuple[ViewOp, ...]]],
) -> None:
    """Claim values and scales of experts under one scale for w13 and one for w2 each.

    Args:
        view: The layer.
        parts: Of each projection of each slot: slot, resident, checkpoint module, the modules under one scale with it,
            box, full shape, and the views that lead to it.

    Raises:
        ValueError: The layer does not say in which dtype its values came, or scales have another form.
    """
    serialized = bool(
        getattr(getattr(view.attr("quant_method"), "quant_config", None), "is_checkpoint_fp8_serialized", True)
    )
    dtype = "" if serialized else _dtype_name(getattr(view.attr("moe_runner_config"), "params_dtype", None))
    on_device = _on_device(view, "w13_weight")
    merged: dict[tuple[str, int], list[SourceBox]] = {}
    for slot, resident, name, together, box, shape, ops in parts:
        scale = f"{resident.name.rpartition('.')[2]}_scale"
        fqn = f"{name}.weight"
        if not serialized:
            mates = tuple(SourceBox(f"{other}.weight", box) for other in sorted(together) if other != name)
            own = SourceBox(fqn, box)
            recipe = Recipe(FP8_PER_TENSOR, "values", (own, *mates), dtype)
            view.bind(resident, recipe.named(fqn), box.sizes, Box.whole(box.sizes), ops)
            merged.setdefault((scale, slot), []).append(own)
            continue
        if len(together) > 1:
            recipe = requantized(
                fqn, f"{fqn}_scale", [f"{other}.weight_scale" for other in together], on_device=on_device
            )
            view.bind(resident, recipe.named(fqn), shape, box, ops)
        else:  # a single shard keeps its bytes
            view.bind(resident, fqn, shape, box, ops)
        merged.setdefault((scale, slot), []).append(SourceBox(f"{fqn}_scale"))
    scales = {local: view.tensor(local) for local in sorted({local for local, _ in merged})}
    for (local, slot), sources in merged.items():
        found = scales[local]
        if found is None or found.shape != (int(view.attr("num_local_experts")),):
            msg = f"{local} is {None if found is None else found.shape}, not one scale an expert"
            raise ValueError(msg)
        # Named by the expert, not by its slot, from which it may move.
        target = sources[0].fqn if serialized else f"{sources[0].fqn}_scale"
        recipe = (
            largest([source.fqn for source in sources])
            if serialized
            else Recipe(FP8_PER_TENSOR, "scale", tuple(sorted(sources, key=str)), dtype)
        )
        view.bind(found, recipe.named(target), (), SCALAR, (Select(0, slot),))


def _one_each(view: LayerView, pieces: LinearPieces) -> list[str]:
    """Return the checkpoint module of each shard.

    Raises:
        ValueError: The layer's shards are not these pieces, so that a scale would belong to another run of rows.
    """
    names = [piece.name for piece in pieces.pieces]
    widths = [int(width) for width in view.attr("logical_widths") or ()]
    if len(set(names)) != len(names) or widths != [piece.rows.held for piece in pieces.pieces]:
        msg = f"shards of {widths} rows are not those of {', '.join(names)}"
        raise ValueError(msg)
    return names


def _values(view: LayerView, pieces: LinearPieces) -> tuple[ResidentTensor, tuple[Transpose, ...]]:
    from syncguard.layout.forms import stored_rows

    weight, turned = stored_rows(view, "weight", pieces.rows_held, pieces.columns.held)
    if weight.dtype != "float8_e4m3fn":
        msg = f"requantized to {weight.dtype}"
        raise ValueError(msg)
    return weight, turned


def _held(turned: tuple[Transpose, ...], piece: Piece, pieces: LinearPieces) -> tuple[ViewOp, ...]:
    ops: tuple[ViewOp, ...] = turned
    if piece.rows.length != pieces.rows_held:
        ops = (*ops, Narrow(0, piece.at, piece.rows.length))
    if pieces.columns.padding:
        ops = (*ops, Narrow(1, 0, pieces.columns.length))
    return ops


def _pad_values(view: LayerView, weight: ResidentTensor, turned: tuple[Transpose, ...], pieces: LinearPieces) -> None:
    """Zeros stay zeros under any scale."""
    across = (Narrow(1, 0, pieces.columns.length),) if pieces.columns.padding else ()
    for piece in pieces.pieces:
        if piece.rows.padding:
            tail = Narrow(0, piece.at + piece.rows.length, piece.rows.padding)
            view.pad(weight, (*turned, tail, *across), PADDED_FOR_SPLIT)
    if pieces.columns.padding:
        view.pad(weight, (*turned, Narrow(1, pieces.columns.length, pieces.columns.padding)), PADDED_FOR_SPLIT)


def _on_device(view: LayerView, local: str) -> bool:
    live = view.live.get(join(view.fqn, local))
    return getattr(getattr(live, "device", None), "type", "cpu") != "cpu"


def _dtype_name(dtype: Any) -> str:
    """Return the canonical name of the dtype in which a layer loaded its values.

    Raises:
        ValueError: The layer does not say.
    """
    name = str(dtype).removeprefix("torch.")
    if name not in {"bfloat16", "float16", "float32"}:
        msg = f"quantized on line from {name}"
        raise ValueError(msg)
    return name
