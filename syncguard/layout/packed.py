"""Linear layers of packed integers: AWQ, GPTQ and compressed-tensors WNA16, as exported or in Marlin tiles.

A word of 32 bits holds 8 or 4 values. What is exported is compared word by word, whichever way round the engine keeps it.
What Marlin throws away because no kernel reads it (constant zero points and g_idx of GPTQ, `weight_shape` of fused shards) no
rank can hold: it is named as dropped, and counted in the verdict.
Sources: SGLang 0.5.23 `quantization/{awq,gptq,compressed_tensors}/schemes/`, `hardware_backend/gpu/quantization/
{awq,gptq}_kernels.py`, `marlin_utils.py`:266-410.
"""

from __future__ import annotations

from typing import Any

from syncguard.layout.arrangements import Packing, marlin_scales, marlin_weight, marlin_zero_points
from syncguard.layout.forms import LinearPieces, bind_bias, form, in_blocks
from syncguard.layout.fp4 import KERNEL_SCRATCH
from syncguard.layout.grids import Run, Stored, bind_grid, needed
from syncguard.layout.rules import LayerView, Span

WORD = 32
SORTED_ROWS = "rows sorted by the groups of an activation order"
UNREAD_ZEROS = "constant zero points of symmetric GPTQ: no kernel reads them"
UNREAD_GROUPS = "group indices without an activation order: no kernel reads them"
SHAPE_ON_LOAD = "shape of the last shard that was loaded: no kernel reads it"


@form("AWQLinearMethod/AWQLinearScheme")
def awq(view: LayerView, pieces: LinearPieces) -> None:
    """int32 `[K, N / 8]`, zero points `[K / group, N / 8]` and scales `[K / group, N]`, untouched (awq_linear.py)."""
    weight, zeros, scales = (needed(view, local) for local in ("qweight", "qzeros", "scales"))
    group = _group(pieces.columns, scales.shape[0])
    for resident, leaf, per_row, per_column in (
        (weight, "qweight", 8, 1),
        (zeros, "qzeros", 8, group),
        (scales, "scales", 1, group),
    ):
        _bind(view, pieces, Stored(resident, rows_dim=1), leaf, (per_row, per_column))
    bind_bias(view, pieces)


@form("AWQLinearMethod/AWQMarlinLinearScheme")
def awq_marlin(view: LayerView, pieces: LinearPieces) -> None:
    """The same three in Marlin's order (awq_kernels.py:117-162)."""
    weight, zeros, scales = (needed(view, local) for local in ("qweight", "qzeros", "scales"))
    inputs, outputs = pieces.columns.length, pieces.rows_held
    groups = scales.shape[0]
    group = _group(pieces.columns, groups)
    back = marlin_weight(inputs, outputs, 4, Packing.AWQ)
    _bind(view, pieces, Stored(weight, (back,), rows_dim=1), "qweight", (8, 1))
    zero_back = marlin_zero_points(groups, outputs, Packing.AWQ)
    _bind(view, pieces, Stored(zeros, (zero_back,), rows_dim=1), "qzeros", (8, group))
    scale_back = marlin_scales(groups, outputs, grouped=group < inputs, outputs_first=False)
    _bind(view, pieces, Stored(scales, (scale_back,), rows_dim=1), "scales", (1, group))
    _scratch(view)
    bind_bias(view, pieces)


@form("GPTQMarlinLinearMethod/GPTQMarlinLinearScheme")
def gptq_marlin(view: LayerView, pieces: LinearPieces) -> None:
    """int32 `[K / per, N]` and scales `[K / group, N]` in Marlin's order; zero points and g_idx are dropped (gptq_kernels.py)."""
    config = view.attr("quant_method").quant_config
    if config.desc_act:
        raise ValueError(SORTED_ROWS)
    _integers(
        view,
        pieces,
        "qweight",
        "scales",
        bits=int(config.weight_bits),
        group=int(config.group_size),
        packing=Packing.GPTQ,
    )
    for piece in pieces.pieces:
        drop_unread(view, piece.name, config)


@form(
    "CompressedTensorsLinearMethod/CompressedTensorsWNA16/group",
    "CompressedTensorsLinearMethod/CompressedTensorsWNA16/channel",
)
def ct_marlin(view: LayerView, pieces: LinearPieces) -> None:
    """int32 `[N, K / per]` and scales `[N, K / group]` in Marlin's order (`compressed_tensors_wNa16.py`:184-285)."""
    scheme = view.attr("scheme")
    if scheme.has_g_idx:
        raise ValueError(SORTED_ROWS)
    bits = WORD // int(scheme.pack_factor)
    group = int(scheme.group_size)
    _integers(view, pieces, "weight_packed", "weight_scale", bits=bits, group=group, packing=Packing.ROWS)
    zeros = view.tensor("weight_zero_point")
    if not scheme.symmetric:
        found = needed(view, "weight_zero_point")
        if bits != 4:  # noqa: PLR2004 - marlin_zero_points has another order for 8
            msg = "zero points of 8 bits"
            raise ValueError(msg)
        back = marlin_zero_points(found.shape[0], pieces.rows_held, Packing.ROWS)
        step = group if group > 0 else pieces.columns.total
        _bind(view, pieces, Stored(found, (back,)), "weight_zero_point", (8, step))
    elif zeros is not None:
        msg = "zero points of a symmetric scheme"
        raise ValueError(msg)
    shape = needed(view, "weight_shape")
    if len(pieces.pieces) == 1:
        view.bind_spans(shape, f"{pieces.pieces[0].name}.weight_shape", (Span.whole(2),))
    else:
        view.exempt(shape, SHAPE_ON_LOAD)
        for piece in pieces.pieces:
            view.drop(f"{piece.name}.weight_shape", SHAPE_ON_LOAD)


def drop_unread(view: LayerView, module: str, config: Any) -> None:
    """Name what GPTQ in Marlin tiles never reads: zero points of a symmetric scheme, and group indices in order."""
    if getattr(config, "is_sym", False):
        view.drop(f"{module}.qzeros", UNREAD_ZEROS)
    view.drop(f"{module}.g_idx", UNREAD_GROUPS)


def _integers(
    view: LayerView, pieces: LinearPieces, weight: str, scale: str, *, bits: int, group: int, packing: Packing
) -> None:
    """Claim values and scales that Marlin repacked; with one scale a row every rank holds all of them."""
    per = WORD // bits
    outputs_first = packing is Packing.ROWS
    rows_dim = 0 if outputs_first else 1
    inputs, outputs = pieces.columns.length, pieces.rows_held
    back = marlin_weight(inputs, outputs, bits, packing)
    _bind(view, pieces, Stored(needed(view, weight), (back,), rows_dim=rows_dim), weight, (1, per))
    scales = needed(view, scale)
    grouped = 0 < group < inputs
    scale_back = marlin_scales(scales.shape[0], outputs, grouped=grouped, outputs_first=outputs_first)
    stored = Stored(scales, (scale_back,), rows_dim=rows_dim)
    if group > 0:
        _bind(view, pieces, stored, scale, (1, group))
    else:
        bind_grid(view, stored, _runs(pieces, scale, 1), Span.whole(1))
    _scratch(view)
    bind_bias(view, pieces)


def _bind(view: LayerView, pieces: LinearPieces, stored: Stored, leaf: str, blocks: tuple[int, int]) -> None:
    bind_grid(view, stored, _runs(pieces, leaf, blocks[0]), in_blocks(pieces.columns, blocks[1]))


def _runs(pieces: LinearPieces, leaf: str, per: int) -> list[Run]:
    """Return the pieces as runs of a tensor with one row for `per` outputs.

    Raises:
        ValueError: A piece starts inside such a row.
    """
    for piece in pieces.pieces:
        if piece.at % per:
            msg = f"{piece.name} starts at output {piece.at}, inside a word of {per}"
            raise ValueError(msg)
    return [Run(f"{piece.name}.{leaf}", piece.at // per, in_blocks(piece.rows, per)) for piece in pieces.pieces]


def _group(columns: Span, groups: int) -> int:
    if columns.padding or columns.length % groups:
        msg = f"{groups} groups of {columns.length} inputs"
        raise ValueError(msg)
    return columns.length // groups


def _scratch(view: LayerView) -> None:
    for local in ("workspace", "scheme.workspace", "scheme.kernel.workspace"):
        workspace = view.tensor(local)
        if workspace is not None:
            view.exempt(workspace, KERNEL_SCRATCH)
