"""Quantization forms: how a linear layer's values, scales and metadata lie in memory, by its quantization method.

A form turns runs of rows into claims on each tensor of the layer. A method without a row is refused by name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from syncguard.layout.rules import LayerView, Span

if TYPE_CHECKING:
    from collections.abc import Callable

    from syncguard.layout.linear import LinearPieces

LINEAR_FORMS: dict[str, Callable[[LayerView, LinearPieces], None]] = {}
"""Form of each quantization method class; the empty name is a layer without one."""


def linear_form(view: LayerView) -> Callable[[LayerView, LinearPieces], None]:
    """Return the form of the layer's live quantization method.

    Raises:
        ValueError: There is no form for it.
    """
    method = view.attr("quant_method")
    name = "" if method is None else type(method).__name__
    found = LINEAR_FORMS.get(name)
    if found is None:
        msg = f"no form for quantization method {name}"
        raise ValueError(msg)
    return found


def form(*method_names: str) -> Callable[[Any], Any]:
    """Register a form of linear layers for quantization method classes, by their names."""

    def register(function: Any) -> Any:
        for name in method_names:
            LINEAR_FORMS[name] = function
        return function

    return register


def refuse_packed(view: LayerView) -> None:
    """Refuse layers whose bytes a CPU backend has packed for AMX; the shape may look unchanged (UQ:716-739)."""
    if view.attr("use_intel_amx_backend", False):
        msg = "packed for AMX (use_intel_amx_backend)"
        raise ValueError(msg)


@form("", "UnquantizedLinearMethod")
def plain(view: LayerView, pieces: LinearPieces) -> None:
    """Weight `[out, in]` and bias `[out]` as in the checkpoint."""
    refuse_packed(view)
    weight = view.tensor("weight")
    if weight is not None:
        if weight.shape != (pieces.rows_held, pieces.columns.length):
            msg = f"weight is {weight.shape}, its layer says {(pieces.rows_held, pieces.columns.length)}"
            raise ValueError(msg)
        for piece in pieces.pieces:
            view.bind_spans(weight, f"{piece.name}.weight", (piece.rows, pieces.columns), (piece.at, 0))
    bind_bias(view, pieces)


def bind_bias(view: LayerView, pieces: LinearPieces) -> None:
    """Claim the bias, if there is one: whole on every rank of a row-parallel layer, else the rows of the weight."""
    bias = view.tensor("bias")
    if bias is None:
        return
    for piece in pieces.pieces:
        rows = Span.whole(piece.rows.total) if pieces.bias_whole else piece.rows
        view.bind_spans(bias, f"{piece.name}.bias", (rows,), (piece.at,))
