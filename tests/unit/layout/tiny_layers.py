"""Layers with the names and attributes of SGLang's, on torch tensors, without SGLang: what the rules read and no more."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import nn


def _parameter(*shape, dtype=torch.float32):
    return nn.Parameter(torch.zeros(*shape, dtype=dtype), requires_grad=False)


class QKVParallelLinear(nn.Module):
    def __init__(self, hidden_size, head_size, heads, kv_heads, *, rank=0, size=1, bias=False):
        super().__init__()
        self.hidden_size, self.head_size = hidden_size, head_size
        self.total_num_heads, self.total_num_kv_heads = heads, kv_heads
        self.tp_rank, self.tp_size = rank, size
        self.num_heads = heads // size
        self.num_kv_heads = max(1, kv_heads // size)
        self.num_kv_head_replicas = max(1, size // kv_heads)
        rows = (self.num_heads + 2 * self.num_kv_heads) * head_size
        self.weight = _parameter(rows, hidden_size)
        if bias:
            self.bias = _parameter(rows)


class MergedColumnParallelLinear(nn.Module):
    def __init__(self, input_size, output_sizes, *, rank=0, size=1):
        super().__init__()
        self.input_size, self.output_sizes = input_size, output_sizes
        self.tp_rank, self.tp_size = rank, size
        self.weight = _parameter(sum(output_sizes) // size, input_size)


class RowParallelLinear(nn.Module):
    def __init__(self, input_size, output_size, *, rank=0, size=1, bias=False):
        super().__init__()
        self.input_size, self.output_size = input_size, output_size
        self.tp_rank, self.tp_size = rank, size
        self.weight = _parameter(output_size, input_size // size)
        if bias:
            self.bias = _parameter(output_size)


class ReplicatedLinear(nn.Module):
    def __init__(self, input_size, output_size):
        super().__init__()
        self.input_size, self.output_size = input_size, output_size
        self.tp_group = None
        self.weight = _parameter(output_size, input_size)


class RMSNorm(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weight = _parameter(size)


class VocabParallelEmbedding(nn.Module):
    def __init__(self, vocab, hidden, *, rank=0, size=1):
        super().__init__()
        padded = -(-vocab // (64 * size)) * 64 * size
        part = padded // size
        self.org_vocab_size, self.num_embeddings, self.embedding_dim, self.tp_size = vocab, vocab, hidden, size
        self.shard_indices = SimpleNamespace(
            org_vocab_start_index=min(rank * part, vocab), org_vocab_end_index=min((rank + 1) * part, vocab)
        )
        self.weight = _parameter(part, hidden)


class ParallelLMHead(VocabParallelEmbedding):
    pass


class FusedMoE(nn.Module):
    def __init__(self, hidden, inner, experts, *, tp=(0, 1), ep=(0, 1), layer_id=0):
        super().__init__()
        self.hidden_size, self.layer_id = hidden, layer_id
        self.moe_tp_rank, self.moe_tp_size = tp
        self.moe_ep_rank, self.moe_ep_size = ep
        self.num_local_experts = experts // ep[1]
        self.intermediate_size_per_partition = part = inner // tp[1]
        self.w13_weight = _parameter(self.num_local_experts, 2 * part, hidden)
        self.w2_weight = _parameter(self.num_local_experts, hidden, part)


class Block(nn.Module):
    def __init__(self, **children):
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)


def causal_lm(architecture, layers, *, embed, head, norm):
    """A model class of the given name around the layers, named as in a Qwen3 checkpoint."""
    model = type(architecture, (Block,), {})(
        model=Block(embed_tokens=embed, layers=nn.ModuleList(layers), norm=norm), lm_head=head
    )
    model.config = SimpleNamespace(tie_word_embeddings=embed is head)
    return model


def qwen3(*, rank=0, size=1, tied=False, moe=False, ep=False, architecture=None):
    """A Qwen3 shaped model of two layers: 4 heads of 8, 2 kv heads, hidden 12, vocabulary 130."""
    moe_group = {"ep": (rank, size)} if ep else {"tp": (rank, size)}
    layers = [
        Block(
            input_layernorm=RMSNorm(12),
            self_attn=Block(
                qkv_proj=QKVParallelLinear(12, 8, 4, 2, rank=rank, size=size),
                o_proj=RowParallelLinear(32, 12, rank=rank, size=size),
                q_norm=RMSNorm(8),
                k_norm=RMSNorm(8),
            ),
            mlp=Block(gate=ReplicatedLinear(12, 4), experts=FusedMoE(12, 16, 4, layer_id=index, **moe_group))
            if moe
            else Block(
                gate_up_proj=MergedColumnParallelLinear(12, [16, 16], rank=rank, size=size),
                down_proj=RowParallelLinear(16, 12, rank=rank, size=size),
            ),
        )
        for index in range(2)
    ]
    embed = VocabParallelEmbedding(130, 12, rank=rank, size=size)
    head = embed if tied else ParallelLMHead(130, 12, rank=rank, size=size)
    name = architecture or ("Qwen3MoeForCausalLM" if moe else "Qwen3ForCausalLM")
    return causal_lm(name, layers, embed=embed, head=head, norm=RMSNorm(12))
