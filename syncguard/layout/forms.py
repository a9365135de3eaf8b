"""Quantization forms of linear layers: how values, scales and metadata lie in memory, by the live quantization method.

A form turns runs of rows (`Piece`) into claims on each tensor of the layer. Every claim here is bitwise. Where the engine
requantizes what it was sent, the claim is on the result of the same quantization (`quantized_on_load`); where it repacks
it without a published inverse, the layer is refused and says so.
Sources: `sglang/srt/layers/quantization/{unquant,fp8,w8a8_int8}.py`, `compressed_tensors/schemes/` and `awq/` of 0.5.23.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from syncguard.layout.derived import REPEATS_ROW
from syncguard.layout.ops import Narrow, Select, Transpose
from syncguard.layout.quantized_on_load import bind_largest, bind_quantized_online, bind_requantized
from syncguard.layout.rules import PADDED_FOR_SPLIT, LayerView, Span
from syncguard.spec import Box

if TYPE_CHECKING:
    from collections.abc import Callable

    from syncguard.layout.model import ResidentTensor
    from syncguard.layout.ops import ViewOp

LINEAR_FORMS: dict[str, Callable[[LayerView, LinearPieces], None]] = {}
"""Form of each quantization method, by the name that `method_name` gives; the empty name is a layer without one."""

FP8_DTYPES = frozenset({"float8_e4m3fn", "float8_e4m3fnuz"})


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of resident output rows that belongs to one checkpoint tensor.

    Attributes:
        name: Checkpoint module, without `.weight`.
        at: First resident row.
        rows: Which rows of the checkpoint tensor these are.
    """

    name: str
    at: int
    rows: Span


@dataclass(frozen=True, slots=True)
class LinearPieces:
    """A linear layer as runs of rows.

    Attributes:
        pieces: In resident order.
        columns: Which input columns are held.
        rows_held: Resident output rows, padding included.
        bias_whole: Every rank holds the whole bias (row-parallel layers).
    """

    pieces: tuple[Piece, ...]
    columns: Span
    rows_held: int
    bias_whole: bool = False


def form(*method_names: str) -> Callable[[Any], Any]:
    """Register a form of linear layers for quantization methods, by their names."""

    def register(function: Any) -> Any:
        for name in method_names:
            LINEAR_FORMS[name] = function
        return function

    return register


def method_name(view: LayerView) -> str:
    """Return the class of the live quantization method, with its scheme and strategy where the method has schemes.

    Such as `Fp8LinearMethod`, `CompressedTensorsLinearMethod/CompressedTensorsW8A8Fp8/channel`.
    """
    method = view.attr("quant_method")
    if method is None:
        return ""
    parts = [type(method).__name__]
    scheme = view.attr("scheme") or getattr(method, "scheme", None)
    if scheme is not None:
        parts.append(type(scheme).__name__)
        strategy = getattr(scheme, "strategy", getattr(getattr(scheme, "weight_quant", None), "strategy", None))
        if strategy is not None:
            parts.append(str(getattr(strategy, "value", strategy)))
    return "/".join(parts)


def linear_form(view: LayerView) -> Callable[[LayerView, LinearPieces], None]:
    """Return the form of the layer's live quantization method.

    Raises:
        ValueError: There is no form for it.
    """
    name = method_name(view)
    if name == "Fp8LinearMethod" and getattr(view.attr("quant_method"), "use_mxfp8", False):
        name += "+use_mxfp8"
    found = LINEAR_FORMS.get(name)
    if found is None:
        msg = f"no form for quantization method {name}"
        raise ValueError(msg)
    return found


def refuse_packed(view: LayerView) -> None:
    """Refuse layers whose bytes were packed or shuffled under an unchanged shape (UQ:716-739, FP8:915-933)."""
    if view.attr("use_intel_amx_backend", False):
        msg = "packed for AMX (use_intel_amx_backend)"
        raise ValueError(msg)
    weight = view.attr("weight")
    if getattr(weight, "is_shuffled", False):
        msg = "weight shuffled in place for aiter (is_shuffled)"
        raise ValueError(msg)


def stored_rows(view: LayerView, local: str, rows: int, columns: int) -> tuple[ResidentTensor, tuple[Transpose, ...]]:
    """Return a matrix of the layer and the views that make it `[out, in]`.

    Strides decide, never the shape: a square weight stored as `weight.t()` has the shape of one that is not.

    Raises:
        ValueError: The matrix is missing, or neither form fits.
    """
    found = view.tensor(local)
    if found is None:
        msg = f"no {local}"
        raise ValueError(msg)
    if found.shape == (rows, columns) and (found.strides[1] == 1 or columns == 1):
        return found, ()
    if found.shape == (columns, rows) and (found.strides[0] == 1 or columns == 1):
        return found, (Transpose(0, 1),)
    msg = f"{local} is {found.shape} with strides {found.strides}, its layer says {(rows, columns)}"
    raise ValueError(msg)


def bind_values(view: LayerView, pieces: LinearPieces) -> ResidentTensor:
    """Claim the weight, stored either way round."""
    columns = pieces.columns
    weight, turned = stored_rows(view, "weight", pieces.rows_held, columns.held)
    across = _narrowed(1, 0, columns.length, columns.held)
    for piece in pieces.pieces:
        ops: tuple[ViewOp, ...] = (*turned, *_narrowed(0, piece.at, piece.rows.length, pieces.rows_held), *across)
        box = Box((piece.rows.start, columns.start), (piece.rows.length, columns.length))
        view.bind(weight, f"{piece.name}.weight", (piece.rows.total, columns.total), box, ops)
        if piece.rows.padding:
            tail = Narrow(0, piece.at + piece.rows.length, piece.rows.padding)
            view.pad(weight, (*turned, tail, *across), PADDED_FOR_SPLIT)
    if columns.padding:
        view.pad(weight, (*turned, Narrow(1, columns.length, columns.padding)), PADDED_FOR_SPLIT)
    return weight


def bind_bias(view: LayerView, pieces: LinearPieces) -> None:
    """Claim the bias, if there is one: whole on every rank of a row-parallel layer, else the rows of the weight."""
    bias = view.tensor("bias")
    if bias is None:
        return
    for piece in pieces.pieces:
        rows = Span.whole(piece.rows.total) if pieces.bias_whole else piece.rows
        view.bind_spans(bias, f"{piece.name}.bias", (rows,), (piece.at,))


def _narrowed(dim: int, start: int, length: int, size: int) -> tuple[Narrow, ...]:
    return () if (start, length) == (0, size) else (Narrow(dim, start, length),)


def in_blocks(span: Span, block: int) -> Span:
    """Return a span counted in blocks.

    Raises:
        ValueError: It starts or ends inside a block, so that two ranks would share a scale, or it was padded.
    """
    if span.padding and block > 1:
        msg = f"no rule for scales of a dimension that was padded from {span.total}"
        raise ValueError(msg)
    stop = span.start + span.length
    if span.start % block or (stop % block and stop != span.total):
        msg = f"[{span.start}:{stop}) of {span.total} is not made of blocks of {block}"
        raise ValueError(msg)
    return Span(span.start // block, -(-span.length // block), -(-span.total // block), span.padding)


def bind_block_scales(view: LayerView, pieces: LinearPieces, local: str, blocks: tuple[int, int]) -> None:
    """Claim scales of `blocks[0] x blocks[1]` values each; resident rows as SGLang offsets them (LIN:1051, 1310)."""
    scale = view.tensor(local)
    if scale is None:
        msg = f"no {local}"
        raise ValueError(msg)
    columns = in_blocks(pieces.columns, blocks[1])
    for piece in pieces.pieces:
        rows = in_blocks(piece.rows, blocks[0])
        if piece.at % blocks[0]:
            msg = f"{piece.name} starts at row {piece.at}, inside a block of {blocks[0]}"
            raise ValueError(msg)
        view.bind_spans(scale, f"{piece.name}.{local}", (rows, columns), (piece.at // blocks[0], 0))


def bind_row_scales(view: LayerView, pieces: LinearPieces, local: str) -> None:
    """Claim one scale for each output row, `[N, 1]`; a row-parallel layer holds them all on every rank."""
    scale = view.tensor(local)
    if scale is None:
        msg = f"no {local}"
        raise ValueError(msg)
    rest = tuple(Span.whole(n) for n in scale.shape[1:])
    for piece in pieces.pieces:
        view.bind_spans(scale, f"{piece.name}.{local}", (piece.rows, *rest), (piece.at, *(0 for _ in rest)))


@form("", "UnquantizedLinearMethod")
def plain(view: LayerView, pieces: LinearPieces) -> None:
    """Weight `[out, in]` and bias `[out]` as in the checkpoint."""
    refuse_packed(view)
    if view.tensor("weight") is not None:
        weight, turned = stored_rows(view, "weight", pieces.rows_held, pieces.columns.held)
        if turned:
            msg = f"weight is stored turned, {weight.shape} with strides {weight.strides}"
            raise ValueError(msg)
        bind_values(view, pieces)
    bind_bias(view, pieces)


@form("Fp8LinearMethod")
def fp8(view: LayerView, pieces: LinearPieces) -> None:
    """Block scales beside unchanged values, or one scale a shard repeated over its rows (FP8:743-935, 1142-1256).

    Other devices bring all shards under their largest scale, or quantize what came unquantized: `quantized_on_load`.
    """
    refuse_packed(view)
    method = view.attr("quant_method")
    if getattr(method, "use_marlin", False):
        msg = "fp8 repacked for Marlin: scales are rounded to the dtype of activations, the exported ones are not held"
        raise ValueError(msg)
    if getattr(method, "block_quant", False):
        _fp8_block(view, pieces, "weight_scale_inv", block_of(method))
        return
    if not getattr(method, "is_checkpoint_fp8_serialized", True):
        bind_quantized_online(view, pieces)
        bind_bias(view, pieces)
        return
    scale = view.tensor("weight_scale")
    if scale is None or scale.shape != (pieces.rows_held, 1):
        bind_requantized(view, pieces)
        bind_bias(view, pieces)
        return
    bind_values(view, pieces)
    if view.tensor("input_scale") is not None:
        bind_largest(view, "input_scale", [f"{piece.name}.input_scale" for piece in pieces.pieces])
    for piece in pieces.pieces:
        view.bind(scale, f"{piece.name}.weight_scale", (), Box((), ()), (Select(0, piece.at), Select(0, 0)))
        if piece.rows.length > 1:
            rest = (Narrow(0, piece.at + 1, piece.rows.length - 1),)
            view.derive(scale, f"{REPEATS_ROW}:{piece.at}", scale.name, ops=rest)
    bind_bias(view, pieces)


def block_of(holder: Any) -> tuple[int, int]:
    """Return `(rows, columns)` of a scale block, from the method, its configuration or its scheme.

    Raises:
        ValueError: None of them says.
    """
    for owner in (holder, getattr(holder, "quant_config", None)):
        block = getattr(owner, "weight_block_size", None)
        if block:
            return int(block[0]), int(block[1])
    msg = "no weight_block_size"
    raise ValueError(msg)


def _fp8_block(view: LayerView, pieces: LinearPieces, local: str, block: tuple[int, int]) -> None:
    weight = bind_values(view, pieces)
    scale = view.tensor(local)
    if weight.dtype not in FP8_DTYPES or scale is None:
        msg = f"{weight.dtype} values with {local} {'missing' if scale is None else scale.dtype}"
        raise ValueError(msg)
    if getattr(view.live[scale.name], "format_ue8m0", False):
        # DeepGEMM's packed form: four exponents of one row in an int32 (FU:2285-2340). Equal to what was sent only if
        # the trainer sends it so; float32 scales were requantized, which the exporter repeats (`export.forms`).
        if scale.dtype != "int32":
            msg = f"UE8M0 scales as {scale.dtype}"
            raise ValueError(msg)
        bind_block_scales(view, pieces, local, (1, 4 * block[1]))
    else:
        bind_block_scales(view, pieces, local, block)
    bind_bias(view, pieces)


@form(
    "W8A8Int8LinearMethod",
    "CompressedTensorsLinearMethod/CompressedTensorsW8A8Int8/channel",
    "CompressedTensorsLinearMethod/CompressedTensorsW8A8Fp8/channel",
)
def channelwise(view: LayerView, pieces: LinearPieces) -> None:
    """8-bit values, turned after loading, and one scale for each output row (`compressed_tensors_w8a8_fp8.py`:147)."""
    refuse_packed(view)
    for local in ("input_scale", "input_zero_point", "azp_adj"):
        if view.tensor(local) is not None:
            msg = f"static {local}: merged from those of the shards"
            raise ValueError(msg)
    bind_values(view, pieces)
    bind_row_scales(view, pieces, "weight_scale")
    bind_bias(view, pieces)


@form("CompressedTensorsLinearMethod/CompressedTensorsW8A8Fp8/tensor")
def ct_tensor(view: LayerView, pieces: LinearPieces) -> None:
    """All shards under their largest scale (`compressed_tensors_w8a8_fp8.py`:120)."""
    refuse_packed(view)
    bind_requantized(view, pieces)
    bind_bias(view, pieces)


@form("CompressedTensorsLinearMethod/CompressedTensorsW8A8Fp8/block")
def ct_block(view: LayerView, pieces: LinearPieces) -> None:
    """As `fp8` in blocks, under the name `weight_scale`."""
    refuse_packed(view)
    _fp8_block(view, pieces, "weight_scale", block_of(view.attr("scheme")))
