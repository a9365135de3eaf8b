"""Rules of attention layers that hold tensors of their own: MLA's absorbed weights, attention sinks, gated delta nets.

They run before the rules of the layers inside them, and claim inner tensors whose meaning only the attention knows.
Source: `sglang/srt/models/{deepseek_v2,gpt_oss,qwen3_next}.py` 0.5.23.
"""

from __future__ import annotations

from typing import Any

from syncguard.layout.derived import MLA_W_KC, MLA_W_VC
from syncguard.layout.rules import LayerView, Span, group_of, join, rule


@rule("DeepseekV2AttentionMLA")
def mla(view: LayerView) -> None:
    """`w_kc` and `w_vc` are copies of kv_b_proj in the order that decoding needs (DWL:762-820)."""
    source = view.resident.get(join(view.fqn, "kv_b_proj.weight"))
    for local, name in (("w_kc", MLA_W_KC), ("w_vc", MLA_W_VC)):
        resident = view.tensor(local)
        if resident is None:
            continue
        if source is None or resident.dtype != source.dtype:
            view.refuse(resident, "computed from a quantized kv_b_proj: no check for that")
        else:
            view.derive(resident, name, source.name)


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


def own_replicated(view: LayerView) -> None:
    """Every own tensor is the whole checkpoint tensor of the same name."""
    for local, resident in view.tensors.items():
        whole: tuple[Any, ...] = tuple(Span.whole(n) for n in resident.shape)
        view.bind_spans(resident, join(view.name, local), whole)


rule("MoEGate", "Glm4MoeGate", "Linear", "Embedding", "RMSNormGated", "FusedRMSNormGated")(own_replicated)
