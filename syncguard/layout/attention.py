"""Rules of attention layers that hold tensors of their own: MLA's absorbed weights, attention sinks, gated delta nets.

They run before the rules of the layers inside them, and claim inner tensors whose meaning only the attention knows.
Source: `sglang/srt/models/{deepseek_v2,gpt_oss,qwen3_next}.py` 0.5.23.
"""

from __future__ import annotations

from typing import Any

from syncguard.layout.derived import EQUALS, MLA_W_KC, MLA_W_KC_DEQUANTIZED, MLA_W_VC, MLA_W_VC_DEQUANTIZED
from syncguard.layout.forms import block_of
from syncguard.layout.rules import LayerView, Span, group_of, join, rule


@rule("DeepseekV2AttentionMLA")
def mla(view: LayerView) -> None:
    """`w_kc` and `w_vc` are copies of kv_b_proj in the order that decoding needs (DWL:640-820).

    From block-quantized fp8 they are dequantized to bf16; per tensor they are requantized, which has no check.
    """
    projection = view.attr("kv_b_proj")
    weight = view.resident.get(join(view.fqn, "kv_b_proj.weight"))
    method = type(getattr(projection, "quant_method", None)).__name__
    sources = [weight.name] if weight is not None else []
    rules: tuple[str, str] | None = None
    if weight is not None and method in {"NoneType", "UnquantizedLinearMethod"}:
        rules = (MLA_W_KC, MLA_W_VC)
    elif weight is not None and not view.attr("use_deep_gemm_bmm", False):
        scale = join(view.fqn, "kv_b_proj.weight_scale_inv")
        if scale in view.resident and view.resident[scale].dtype == "float32":
            sources.append(scale)
            block = block_of(projection.quant_method)
            rules = (f"{MLA_W_KC_DEQUANTIZED}:{block[0]}x{block[1]}", f"{MLA_W_VC_DEQUANTIZED}:{block[0]}x{block[1]}")
    for index, local in enumerate(("w_kc", "w_vc")):
        resident = view.tensor(local)
        if resident is None:
            continue
        if rules is None or weight is None or (len(sources) == 1) != (resident.dtype == weight.dtype):
            view.refuse(resident, f"computed from kv_b_proj under {method}: no check for that")
        else:
            view.derive(resident, rules[index], *sources)
    for local in ("w_scale", "w_scale_k", "w_scale_v", "w_kc_qrep"):
        resident = view.tensor(local)
        if resident is not None:
            view.refuse(resident, "derived scale or copy without a check")


@rule("GptOssAttention")
def sinks(view: LayerView) -> None:
    """Rank r holds the sinks of its query heads, by the group of the query projection (gpt_oss.py:1291-1310)."""
    resident = view.tensor("sinks")
    if resident is None:
        return
    rank, size = group_of(view.attr("qkv_proj").tp_group)
    held = resident.shape[0]
    view.bind_spans(resident, f"{view.name}.sinks", (Span(rank * held, held, held * size),))


@rule("Qwen3GatedDeltaNet", "Qwen3_5GatedDeltaNet")
def gated_delta_net(view: LayerView) -> None:
    """Decay and bias are split by value head; each rank's convolution is its `[q; k; v]` part of `[Q; K; V]`.

    Source: qwen3_next.py:140-213; the loader of conv1d is `mamba_v2_sharded_weight_loader`, not the layer's own.
    """
    rank, size = int(view.attr("attn_tp_rank")), int(view.attr("attn_tp_size"))
    for local in ("A_log", "dt_bias"):
        resident = view.tensor(local)
        if resident is not None:
            view.bind_spans(resident, f"{view.name}.{local}", (Span.part(int(view.attr("num_v_heads")), rank, size),))
    conv = view.tensor("conv1d.weight")
    if conv is None:
        return
    key, value = int(view.attr("key_dim")), int(view.attr("value_dim"))
    total, at, start = 2 * key + value, 0, 0
    for width in (key, key, value):
        part = Span.part(width, rank, size)
        rows = Span(start + part.start, part.length, total)
        rest = tuple(Span.whole(n) for n in conv.shape[1:])
        view.bind_spans(conv, f"{view.name}.conv1d.weight", (rows, *rest), (at, *(0 for _ in rest)))
        at, start = at + part.length, start + width


@rule("RadixAttention")
def kv_scales(view: LayerView) -> None:
    """KV scales that no checkpoint sets stay 1; an exported scale is then reported as not held.

    Post-processing runs again at the end of each update and doubles them on some devices (kv_cache.py:39-83).
    """
    for local in ("k_scale", "v_scale"):
        resident = view.tensor(local)
        if resident is None:
            continue
        value = view.attr(f"{local}_float")
        if value in {None, 1.0}:
            view.derive(resident, f"{EQUALS}:1.0")
        else:
            view.refuse(resident, f"{local}_float is {value}: no rule for calibrated KV scales")


def own_replicated(view: LayerView) -> None:
    """Every own tensor is the whole checkpoint tensor of the same name."""
    for local, resident in view.tensors.items():
        whole: tuple[Any, ...] = tuple(Span.whole(n) for n in resident.shape)
        view.bind_spans(resident, join(view.name, local), whole)


rule("MoEGate", "Glm4MoeGate", "Linear", "Embedding", "RMSNormGated", "FusedRMSNormGated", "Conv3dLayer")(
    own_replicated
)
