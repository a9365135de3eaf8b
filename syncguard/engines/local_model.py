"""Qwen3 and Qwen3-MoE of the embedded engine: one module tree a rank, run in step, addends summed in rank order.

Module paths and class names as in `models/qwen3.py` and `models/qwen3_moe.py` of SGLang 0.5.23.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn
from torch.nn import functional

from syncguard.engines.local_layers import (
    Group,
    MergedColumnParallelLinear,
    ParallelLMHead,
    QKVParallelLinear,
    ReplicatedLinear,
    RMSNorm,
    RotaryEmbedding,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from syncguard.engines.local_moe import FusedMoE, Qwen3MoeSparseMoeBlock

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from syncguard.engines.local_cache import KVCache
    from syncguard.engines.local_config import LocalConfig

_LAYER: Final = re.compile(r"model\.layers\.(\d+)\.(.+)")
_EXPERT: Final = re.compile(r"mlp\.experts\.(\d+)\.(gate|up|down)_proj\.weight")


@dataclass(frozen=True, slots=True)
class Place:
    """Where one rank stands in each group, as SGLang's `runtime_context` computes it."""

    tp: Group
    moe_ep: Group
    moe_tp: Group

    @classmethod
    def of(cls, tp_rank: int, tp_size: int, ep_size: int) -> Place:
        """Return the groups of a rank; expert-tensor parallelism is what expert parallelism leaves."""
        moe_tp_size = tp_size // ep_size
        return cls(
            Group(tp_rank, tp_size),
            Group(tp_rank // moe_tp_size, ep_size),
            Group(tp_rank % moe_tp_size, moe_tp_size),
        )


class Qwen3MLP(nn.Module):
    """Dense SwiGLU."""

    def __init__(self, config: LocalConfig, place: Place, dtype: torch.dtype) -> None:
        """Allocate this rank's shards."""
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_up_proj = MergedColumnParallelLinear(hidden, [inner, inner], group=place.tp, dtype=dtype)
        self.down_proj = RowParallelLinear(inner, hidden, group=place.tp, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's addend."""
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        added: torch.Tensor = self.down_proj(functional.silu(gate) * up)
        return added


class Qwen3Attention(nn.Module):
    """Grouped-query attention with normed queries and keys."""

    def __init__(self, config: LocalConfig, place: Place, dtype: torch.dtype, rope: RotaryEmbedding) -> None:
        """Allocate this rank's heads."""
        super().__init__()
        self.head_dim = config.head_dim
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        bias = config.attention_bias
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps, dtype=dtype)
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps, dtype=dtype)
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size, self.head_dim, heads, kv_heads, group=place.tp, dtype=dtype, bias=bias
        )
        self.o_proj = RowParallelLinear(
            heads * self.head_dim, config.hidden_size, group=place.tp, dtype=dtype, bias=bias
        )
        self.rotary_emb = rope

    def forward(self, x: torch.Tensor, positions: torch.Tensor, cache: KVCache, layer: int) -> torch.Tensor:
        """Return this rank's addend; appends this step's keys and values to the cache.

        Args:
            x: `[tokens, hidden]`.
            positions: int64 `[tokens]`, consecutive, after those in the cache.
            cache: Keys and values of this rank.
            layer: Index of the layer.
        """
        sizes = self.qkv_proj.output_partition_sizes
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in self.qkv_proj(x).split(sizes, dim=-1))
        q = self.rotary_emb(positions, self.q_norm(q))
        keys, values = cache.append(layer, self.rotary_emb(positions, self.k_norm(k)), v)
        groups = q.shape[1] // keys.shape[1]
        keys, values = (t.repeat_interleave(groups, dim=1).transpose(0, 1) for t in (keys, values))
        added: torch.Tensor = self.o_proj(
            _attend(q.transpose(0, 1), keys, values, positions).transpose(0, 1).flatten(1)
        )
        return added


def _attend(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Attend causally, `[heads, tokens, head_dim]`; decode and prefill use two kernels, as engines do."""
    if positions.numel() == 1:
        # The query is scaled, and rounded, before the product: the source of A-B noise in half precision.
        weights = torch.softmax((q * q.shape[-1] ** -0.5) @ keys.transpose(1, 2), dim=-1, dtype=torch.float)
        return weights.to(values.dtype) @ values
    seen = torch.arange(keys.shape[1]) <= positions.unsqueeze(-1)
    return functional.scaled_dot_product_attention(q, keys, values, attn_mask=seen)


class Qwen3DecoderLayer(nn.Module):
    """Attention and MLP of one layer, with their norms; run by `forward_ranks`."""

    def __init__(
        self, config: LocalConfig, place: Place, dtype: torch.dtype, rope: RotaryEmbedding, layer: int
    ) -> None:
        """Allocate this rank's part of the layer."""
        super().__init__()
        self.self_attn = Qwen3Attention(config, place, dtype, rope)
        self.mlp: nn.Module
        if config.is_sparse(layer):
            self.mlp = Qwen3MoeSparseMoeBlock(
                ReplicatedLinear(config.hidden_size, config.num_experts, dtype=dtype),
                FusedMoE(
                    config.num_experts,
                    config.hidden_size,
                    config.moe_intermediate_size,
                    layer_id=layer,
                    top_k=config.num_experts_per_tok,
                    moe_ep=place.moe_ep,
                    moe_tp=place.moe_tp,
                    dtype=dtype,
                ),
                renormalize=config.norm_topk_prob,
            )
        else:
            self.mlp = Qwen3MLP(config, place, dtype)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype)


class Qwen3Model(nn.Module):
    """Embedding, layers and final norm of one rank."""

    def __init__(self, config: LocalConfig, place: Place, dtype: torch.dtype) -> None:
        """Allocate this rank's part."""
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size, group=place.tp, dtype=dtype)
        rope = RotaryEmbedding(config.head_dim, config.max_position_embeddings, config.rope_theta)
        self.layers = nn.ModuleList(
            Qwen3DecoderLayer(config, place, dtype, rope, layer) for layer in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype)


class Qwen3ForCausalLM(nn.Module):
    """Dense model of one rank; a tied head *is* the embedding module, as in SGLang."""

    lm_head: VocabParallelEmbedding

    def __init__(self, config: LocalConfig, place: Place, dtype: torch.dtype) -> None:
        """Allocate this rank's part, all zero until loaded."""
        super().__init__()
        self.config = config
        self.model = Qwen3Model(config, place, dtype)
        self.lm_head = (
            self.model.embed_tokens
            if config.tie_word_embeddings and self.shares_tied_head()
            else ParallelLMHead(config.vocab_size, config.hidden_size, group=place.tp, dtype=dtype)
        )

    @staticmethod
    def shares_tied_head() -> bool:
        """Return whether a tied head is the embedding module itself."""
        return True

    def load_one(self, name: str, tensor: torch.Tensor) -> bool:
        """Load one checkpoint tensor into this rank's storage, in place.

        Returns:
            False for a name that has no place here, which engines drop in silence.

        Raises:
            EngineError: The shape does not fit.
        """
        if name == "model.embed_tokens.weight":
            self.model.embed_tokens.load(tensor, name=name)
            return True
        if name == "lm_head.weight":
            if self.lm_head is not self.model.embed_tokens:
                self.lm_head.load(tensor, name=name)
            return True
        if name == "model.norm.weight":
            self.model.norm.load(tensor, name=name)
            return True
        found = _LAYER.fullmatch(name)
        if found is None or int(found[1]) >= len(self.model.layers):
            return False
        return _load_in_layer(self.model.layers[int(found[1])], found[2], tensor, name)


class Qwen3MoeForCausalLM(Qwen3ForCausalLM):
    """Mixture-of-experts model of one rank; always has a head of its own, as in SGLang."""

    @staticmethod
    def shares_tied_head() -> bool:
        """Return False: `models/qwen3_moe.py` allocates a head even for a tied checkpoint."""
        return False


def _load_in_layer(layer: Any, rest: str, tensor: torch.Tensor, name: str) -> bool:
    block, _, kind = rest.rpartition(".")
    expert = _EXPERT.fullmatch(rest)
    sparse = isinstance(layer.mlp, Qwen3MoeSparseMoeBlock)
    if expert is not None:
        if sparse:
            layer.mlp.experts.load(int(expert[1]), expert[2], tensor, name=name)
        return sparse
    if kind not in ("weight", "bias"):
        return False
    match block.split("."):
        case ["self_attn", ("q_proj" | "k_proj" | "v_proj") as part]:
            layer.self_attn.qkv_proj.load(part[0], tensor, name=name)
        case ["self_attn", ("o_proj" | "q_norm" | "k_norm") as part]:
            getattr(layer.self_attn, part).load(tensor, name=name)
        case ["input_layernorm" | "post_attention_layernorm" as part]:
            getattr(layer, part).load(tensor, name=name)
        case ["mlp", "gate"] if sparse:
            layer.mlp.gate.load(tensor, name=name)
        case ["mlp", ("gate_proj" | "up_proj") as part] if not sparse:
            layer.mlp.gate_up_proj.load(int(part == "up_proj"), tensor, name=name)
        case ["mlp", "down_proj"] if not sparse:
            layer.mlp.down_proj.load(tensor, name=name)
        case _:
            return False
    return True


def build_ranks(config: LocalConfig, *, tp_size: int, ep_size: int, dtype: torch.dtype) -> list[Qwen3ForCausalLM]:
    """Return one model tree per rank, zero until loaded.

    Raises:
        EngineError: The sizes do not divide.
    """
    cls = Qwen3MoeForCausalLM if config.architecture == "Qwen3MoeForCausalLM" else Qwen3ForCausalLM
    return [cls(config, Place.of(rank, tp_size, ep_size), dtype).eval() for rank in range(tp_size)]


def all_reduce(addends: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum in rank order, rounded to the activation dtype after each addition."""
    total = addends[0]
    for addend in addends[1:]:
        total = total + addend
    return total


def forward_ranks(
    ranks: Sequence[Qwen3ForCausalLM],
    ids: torch.Tensor,
    caches: Sequence[KVCache],
    *,
    start: int,
    logits_from: int,
    observe: Callable[[str, torch.Tensor, torch.Tensor], None] | None = None,
) -> torch.Tensor:
    """Run all ranks in step over tokens that follow those in the caches.

    Args:
        ranks: One model per rank.
        ids: int64 `[tokens]`.
        caches: One per rank, holding `start` tokens; extended by these.
        start: Position of the first token.
        logits_from: First of these tokens whose logits are wanted.
        observe: Called with module name, input and summed output of each point of the computation.

    Returns:
        fp32 `[tokens - logits_from, vocabulary]`, cut to the real vocabulary.
    """
    positions = torch.arange(start, start + ids.numel())
    hidden = all_reduce([rank.model.embed_tokens.embed(ids) for rank in ranks])
    if observe is not None:
        observe("model.embed_tokens", ids, hidden)
    for index in range(len(ranks[0].model.layers)):
        layers: list[Any] = [rank.model.layers[index] for rank in ranks]
        before = hidden
        normed = [layer.input_layernorm(hidden) for layer in layers]
        attended = all_reduce(
            [
                layer.self_attn(x, positions, cache, index)
                for layer, x, cache in zip(layers, normed, caches, strict=True)
            ]
        )
        hidden = hidden + attended
        given = [layer.post_attention_layernorm(hidden) for layer in layers]
        added = all_reduce([layer.mlp(x) for layer, x in zip(layers, given, strict=True)])
        hidden = hidden + added
        if observe is not None:
            name = f"model.layers.{index}"
            observe(f"{name}.self_attn", normed[0], attended)
            observe(f"{name}.mlp", given[0], added)
            observe(name, before, hidden)
    last = [rank.model.norm(hidden[logits_from:]) for rank in ranks]
    logits = torch.cat([functional.linear(h, rank.lm_head.weight) for h, rank in zip(last, ranks, strict=True)], dim=-1)
    logits = logits[:, : ranks[0].config.vocab_size].float()
    if observe is not None:
        observe("model.norm", hidden[logits_from:], last[0])
        observe("logits", last[0], logits)
    return logits
