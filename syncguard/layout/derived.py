"""State that an engine computes from its weights: the rules by name, and their check on live tensors.

A derived tensor is not exported, so it is compared with what its rule gives of the resident sources, which are themselves
bound. It catches the copy that an update path forgot. Tensors of numpy and torch alike; neither is imported.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from syncguard.layout.derived_scales import SCALE_RULES
from syncguard.layout.ops import apply_ops

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from syncguard.layout.model import Derived

WEIGHT_PLUS_ONE: Final = "weight_plus_one"
"""`gemma_weight = weight + 1` in the dtype of the weight (`layernorm.py` 0.5.23:1103-1128)."""
MLA_W_KC: Final = "mla_w_kc"
"""`w_kc[h] = kv_b[h, :nope, :]` (`deepseek_weight_loader.py` 0.5.23:762-786)."""
MLA_W_VC: Final = "mla_w_vc"
"""`w_vc[h] = kv_b[h, nope:, :]^T` (same place)."""

MLA_W_KC_DEQUANTIZED: Final = "mla_w_kc_dequantized"
"""`mla_w_kc_dequantized:128x128`: the same, of kv_b_proj times its block scales, in float32, rounded once (FU:block_quant_dequant)."""
MLA_W_VC_DEQUANTIZED: Final = "mla_w_vc_dequantized"
"""Likewise for `w_vc`."""
REPEATS_ROW: Final = "repeats_row"
"""`repeats_row:17`: every row equals row 17 of the source (`convert_to_channelwise`, `quantization/utils.py` 0.5.23:141)."""
EQUALS: Final = "equals"
"""`equals:1.0`: every element has this value (KV scales that no checkpoint set, `kv_cache.py` 0.5.23:39-83)."""


@dataclass(frozen=True, slots=True)
class DerivedResult:
    """Whether a derived tensor follows from its sources.

    Attributes:
        ok: Whether it holds for every element.
        wrong_count: Elements that differ; 0 when the check could not be made.
        detail: First differing index, or why the check could not be made.
    """

    ok: bool
    wrong_count: int = 0
    detail: str = ""


def check_derived(claim: Derived, tensors: Mapping[str, Any]) -> DerivedResult:
    """Check one derived tensor against its sources.

    Args:
        claim: The derived claim of a layout.
        tensors: Live tensor of each resident name, as `walk_model` returns them.

    Returns:
        The result. A rule without a check, or a missing or unfitting tensor, does not hold.
    """
    name, _, argument = claim.rule.partition(":")
    rule = _RULES.get(name)
    names = (claim.resident, *claim.sources)
    missing = [name for name in names if name not in tensors]
    if rule is None or missing:
        reason = f"no check for rule {claim.rule}" if rule is None else f"not resident: {', '.join(missing)}"
        return DerivedResult(ok=False, detail=reason)
    found, *sources = (_plain(tensors[name]) for name in names)
    try:
        found = apply_ops(found, claim.ops)
        due = rule(found, *sources, argument) if argument else rule(found, *sources)
    except (ValueError, RuntimeError, TypeError, LookupError) as error:
        return DerivedResult(ok=False, detail=f"rule {claim.rule} does not fit: {error}")
    if tuple(due.shape) != tuple(found.shape) or due.dtype != found.dtype:
        return DerivedResult(
            ok=False, detail=f"rule {claim.rule} gives {due.dtype} {tuple(due.shape)}, found {tuple(found.shape)}"
        )
    return _compare(found, due)


def _compare(found: Any, due: Any) -> DerivedResult:
    unlike = found != due  # a NaN differs from itself: never passes
    wrong = int(unlike.sum())
    if not wrong:
        return DerivedResult(ok=True)
    first = (
        int(unlike.reshape(-1).argmax()) if not hasattr(unlike, "data_ptr") else int(unlike.reshape(-1).int().argmax())
    )
    index = []
    for size in reversed(tuple(found.shape)):
        first, rest = divmod(first, size)
        index.append(rest)
    return DerivedResult(ok=False, wrong_count=wrong, detail=f"first at {tuple(reversed(index))}")


def _plain(tensor: Any) -> Any:
    return tensor.detach() if hasattr(tensor, "detach") else tensor


def _weight_plus_one(found: Any, weight: Any) -> Any:
    del found
    return weight + 1


def _heads(matrix: Any, heads: int) -> Any:
    """Split rows `[heads * (nope + v), kv_lora]` into `[heads, nope + v, kv_lora]`."""
    rows, width = (int(n) for n in matrix.shape)
    if rows % heads:
        msg = f"{rows} rows are not of {heads} heads"
        raise ValueError(msg)
    return matrix.reshape((heads, rows // heads, width))


def _mla_w_kc(found: Any, kv_b: Any) -> Any:
    return _heads(kv_b, int(found.shape[0]))[:, : int(found.shape[1]), :]


def _mla_w_vc(found: Any, kv_b: Any) -> Any:
    by_head = _heads(kv_b, int(found.shape[0]))
    return by_head[:, int(by_head.shape[1]) - int(found.shape[2]) :, :].swapaxes(1, 2)


def _dequantized(found: Any, matrix: Any, scale: Any, block: str) -> Any:
    rows, columns = (int(n) for n in block.split("x"))
    spread = scale.repeat_interleave(rows, dim=0)[: matrix.shape[0]].repeat_interleave(columns, dim=1)
    return (matrix.float() * spread[:, : matrix.shape[1]]).to(found.dtype)


def _mla_w_kc_dequantized(found: Any, kv_b: Any, scale: Any, block: str) -> Any:
    return _mla_w_kc(found, _dequantized(found, kv_b, scale, block))


def _mla_w_vc_dequantized(found: Any, kv_b: Any, scale: Any, block: str) -> Any:
    return _mla_w_vc(found, _dequantized(found, kv_b, scale, block))


def _repeats_row(found: Any, source: Any, row: str) -> Any:
    due = source[int(row) : int(row) + 1]
    return due.expand(found.shape) if hasattr(due, "expand") else due.repeat(found.shape[0], axis=0)


def _equals(found: Any, value: str) -> Any:
    return found * 0 + float(value)


_RULES: Final[Mapping[str, Callable[..., Any]]] = {
    WEIGHT_PLUS_ONE: _weight_plus_one,
    MLA_W_KC: _mla_w_kc,
    MLA_W_VC: _mla_w_vc,
    MLA_W_KC_DEQUANTIZED: _mla_w_kc_dequantized,
    MLA_W_VC_DEQUANTIZED: _mla_w_vc_dequantized,
    REPEATS_ROW: _repeats_row,
    EQUALS: _equals,
    **SCALE_RULES,
}
"""What each rule gives, from the found tensor (for its shape only) and the sources."""

DERIVED_RULES: Final = tuple(_RULES)
"""Names of all rules that have a check."""
