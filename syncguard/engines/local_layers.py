"""Layers of the embedded engine: resident forms, class names and attributes as in SGLang 0.5.23.

Sources: `layers/linear.py`, `layers/vocab_parallel_embedding.py`, `layers/layernorm.py`,
`layers/moe/fused_moe_triton/layer.py`, `layers/rotary_embedding/base.py`. Every layer slices and packs what it loads by
itself, with arithmetic of its own: the layout rules must agree with it without sharing code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch
from torch import nn
from torch.nn import functional

from syncguard.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Sequence

VOCAB_PADDING: Final = 64


@dataclass(frozen=True, slots=True)
class Group:
    """A process group as layers see it: `tp_group` of SGLang's linear layers."""

    rank_in_group: int
    world_size: int


class UnquantizedLinearMethod:
    """Marks a linear layer whose weight is stored `[out, in]` as exported."""


class UnquantizedEmbeddingMethod:
    """Marks a vocabulary layer whose weight is stored `[rows, hidden]` as exported."""


class UnquantizedFusedMoEMethod:
    """Marks fused experts stored as `w13 [E, 2I, H]`, `w2 [E, H, I]`."""

    load_up_proj_weight_first = False
    use_triton_kernels = False


def _empty(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False)


def _divide(whole: int, parts: int, what: str) -> int:
    if whole % parts:
        raise EngineError("model cannot be sharded", expected=f"{what} divisible by {parts}", found=whole)
    return whole // parts


def _fill(target: torch.Tensor, source: torch.Tensor, name: str) -> None:
    """Copy in place, with the silent dtype cast of the engine's loaders, but never with a broadcast."""
    if target.shape != source.shape:
        raise EngineError(
            "loaded tensor does not fit",
            expected=tuple(target.shape),
            found=tuple(source.shape),
            where=name,
            todo="push the tensors of the model that the engine serves",
        )
    target.copy_(source)


class ReplicatedLinear(nn.Module):
    """Every rank holds the whole weight."""

    def __init__(self, input_size: int, output_size: int, *, dtype: torch.dtype) -> None:
        """Allocate `[output_size, input_size]`."""
        super().__init__()
        self.input_size, self.output_size = input_size, output_size
        self.quant_method = UnquantizedLinearMethod()
        self.tp_group = None
        self.tp_rank, self.tp_size = 0, 1
        self.weight = _empty(output_size, input_size, dtype=dtype)
        self.register_parameter("bias", None)

    def load(self, tensor: torch.Tensor, *, name: str) -> None:
        """Load the whole checkpoint tensor."""
        _fill(self.weight, tensor, name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x @ W.T`."""
        return functional.linear(x, self.weight)


class MergedColumnParallelLinear(nn.Module):
    """Several column-parallel weights packed in one: rank r holds rows of each, one after the other."""

    def __init__(self, input_size: int, output_sizes: Sequence[int], *, group: Group, dtype: torch.dtype) -> None:
        """Allocate `[sum(output_sizes) / tp, input_size]`."""
        super().__init__()
        self.input_size, self.output_sizes = input_size, list(output_sizes)
        self.output_size = sum(output_sizes)
        self.tp_group, self.tp_rank, self.tp_size = group, group.rank_in_group, group.world_size
        self.use_presharded_weights = False
        self.quant_method = UnquantizedLinearMethod()
        self.output_partition_sizes = [_divide(n, self.tp_size, "merged output size") for n in output_sizes]
        self.output_size_per_partition = sum(self.output_partition_sizes)
        self.weight = _empty(self.output_size_per_partition, input_size, dtype=dtype)
        self.register_parameter("bias", None)

    def load(self, part: int, tensor: torch.Tensor, *, name: str) -> None:
        """Load one of the merged checkpoint tensors."""
        if tensor.shape[0] != self.output_sizes[part]:
            _fill(self.weight[:0], tensor, name)
        size = self.output_partition_sizes[part]
        at = sum(self.output_partition_sizes[:part])
        _fill(self.weight[at : at + size], tensor[self.tp_rank * size : (self.tp_rank + 1) * size], name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's packed outputs."""
        return functional.linear(x, self.weight)


class QKVParallelLinear(nn.Module):
    """Query, key and value packed: rank r holds `[q heads; k heads; v heads]`, kv heads repeated when tp exceeds them."""

    def __init__(
        self,
        hidden_size: int,
        head_size: int,
        total_num_heads: int,
        total_num_kv_heads: int,
        *,
        group: Group,
        dtype: torch.dtype,
        bias: bool = False,
    ) -> None:
        """Allocate `[(num_heads + 2 num_kv_heads) head_size, hidden_size]`."""
        super().__init__()
        self.hidden_size, self.head_size, self.v_head_size = hidden_size, head_size, head_size
        self.total_num_heads, self.total_num_kv_heads = total_num_heads, total_num_kv_heads
        self.tp_group, self.tp_rank, self.tp_size = group, group.rank_in_group, group.world_size
        self.kv_tp_group = group
        self.num_heads = _divide(total_num_heads, self.tp_size, "heads")
        if self.tp_size >= total_num_kv_heads:
            self.num_kv_heads = 1
            self.num_kv_head_replicas = _divide(self.tp_size, total_num_kv_heads, "tp size")
        else:
            self.num_kv_heads = _divide(total_num_kv_heads, self.tp_size, "kv heads")
            self.num_kv_head_replicas = 1
        self.q_proj_shard_size = self.num_heads * head_size
        self.kv_proj_shard_size = self.v_proj_shard_size = self.num_kv_heads * head_size
        self.input_size = hidden_size
        self.output_partition_sizes = [self.q_proj_shard_size, self.kv_proj_shard_size, self.v_proj_shard_size]
        self.output_sizes = [n * self.tp_size for n in self.output_partition_sizes]
        self.output_size = sum(self.output_sizes)
        self.use_presharded_weights = False
        self.quant_method = UnquantizedLinearMethod()
        rows = sum(self.output_partition_sizes)
        self.weight = _empty(rows, hidden_size, dtype=dtype)
        self.register_parameter("bias", _empty(rows, dtype=dtype) if bias else None)

    def load(self, part: str, tensor: torch.Tensor, *, name: str) -> None:
        """Load the checkpoint tensor of `q`, `k` or `v`, weight or bias by its number of dimensions."""
        target = self.weight if tensor.dim() > 1 else self.bias
        if target is None:
            raise EngineError("loaded tensor has no place", expected="a model without bias", found=name)
        index = "qkv".index(part)
        heads, rank = (self.total_num_heads, self.tp_rank) if part == "q" else self._kv_place()
        if tensor.shape[0] != heads * self.head_size:
            _fill(target[:0], tensor, name)
        size = self.output_partition_sizes[index]
        at = sum(self.output_partition_sizes[:index])
        _fill(target[at : at + size], tensor[rank * size : (rank + 1) * size], name)

    def _kv_place(self) -> tuple[int, int]:
        return self.total_num_kv_heads, self.tp_rank // self.num_kv_head_replicas

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's `[q | k | v]` outputs."""
        return functional.linear(x, self.weight, self.bias)


class RowParallelLinear(nn.Module):
    """Rank r holds a range of input columns; the bias is whole on every rank and added on rank 0 only."""

    def __init__(
        self, input_size: int, output_size: int, *, group: Group, dtype: torch.dtype, bias: bool = False
    ) -> None:
        """Allocate `[output_size, input_size / tp]`."""
        super().__init__()
        self.input_size, self.output_size = input_size, output_size
        self.tp_group, self.tp_rank, self.tp_size = group, group.rank_in_group, group.world_size
        self.use_presharded_weights = False
        self.quant_method = UnquantizedLinearMethod()
        self.input_size_per_partition = _divide(input_size, self.tp_size, "row input size")
        self.weight = _empty(output_size, self.input_size_per_partition, dtype=dtype)
        self.register_parameter("bias", _empty(output_size, dtype=dtype) if bias else None)

    def load(self, tensor: torch.Tensor, *, name: str) -> None:
        """Load the whole checkpoint weight or bias; keeps this rank's columns."""
        if tensor.dim() == 1 and self.bias is not None:
            _fill(self.bias, tensor, name)
            return
        size = self.input_size_per_partition
        if tensor.shape[-1] != self.input_size:
            _fill(self.weight[:0], tensor, name)
        _fill(self.weight, tensor[:, self.tp_rank * size : (self.tp_rank + 1) * size], name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's addend of the output."""
        return functional.linear(x, self.weight, self.bias if self.tp_rank == 0 else None)


@dataclass(frozen=True, slots=True)
class VocabParallelEmbeddingShardIndices:
    """Which vocabulary rows a rank holds; the names are SGLang's."""

    padded_org_vocab_start_index: int
    padded_org_vocab_end_index: int
    padded_added_vocab_start_index: int
    padded_added_vocab_end_index: int
    org_vocab_start_index: int
    org_vocab_end_index: int
    added_vocab_start_index: int
    added_vocab_end_index: int

    @property
    def num_org_elements(self) -> int:
        """Rows that belong to tokens."""
        return self.org_vocab_end_index - self.org_vocab_start_index

    @property
    def num_elements_padded(self) -> int:
        """Rows held, padding included."""
        return self.padded_org_vocab_end_index - self.padded_org_vocab_start_index


class VocabParallelEmbedding(nn.Module):
    """Vocabulary rows sharded over ranks; padded to a multiple of 64 (of 64 tp where 64 would not divide)."""

    def __init__(self, num_embeddings: int, embedding_dim: int, *, group: Group, dtype: torch.dtype) -> None:
        """Allocate `[padded vocabulary / tp, embedding_dim]`, zero in the padding."""
        super().__init__()
        self.num_embeddings = self.org_vocab_size = num_embeddings
        self.embedding_dim = embedding_dim
        self.tp_group, self.tp_rank, self.tp_size = group, group.rank_in_group, group.world_size
        self.enable_tp, self.use_attn_tp_group, self.use_presharded_weights = True, False, False
        self.num_added_embeddings = 0
        self.quant_method = UnquantizedEmbeddingMethod()
        padded = _round_up(num_embeddings, VOCAB_PADDING)
        self.padding_size = VOCAB_PADDING * (self.tp_size if padded % self.tp_size else 1)
        self.org_vocab_size_padded = self.num_embeddings_padded = _round_up(num_embeddings, self.padding_size)
        rows = self.num_embeddings_per_partition = self.num_embeddings_padded // self.tp_size
        low, high = self.tp_rank * rows, (self.tp_rank + 1) * rows
        self.shard_indices = VocabParallelEmbeddingShardIndices(
            padded_org_vocab_start_index=low,
            padded_org_vocab_end_index=high,
            padded_added_vocab_start_index=num_embeddings,
            padded_added_vocab_end_index=num_embeddings,
            org_vocab_start_index=min(low, num_embeddings),
            org_vocab_end_index=min(high, num_embeddings),
            added_vocab_start_index=num_embeddings,
            added_vocab_end_index=num_embeddings,
        )
        self.num_org_embeddings_per_partition = self.shard_indices.num_org_elements
        self.num_added_embeddings_per_partition = 0
        self.weight = _empty(rows, embedding_dim, dtype=dtype)
        self.register_parameter("bias", None)

    def load(self, tensor: torch.Tensor, *, name: str) -> None:
        """Load the whole checkpoint tensor; writes zeros into the padding each time."""
        if tensor.shape[0] != self.org_vocab_size:
            _fill(self.weight[:0], tensor, name)
        held = self.shard_indices
        count = held.num_org_elements
        _fill(self.weight[:count], tensor[held.org_vocab_start_index : held.org_vocab_end_index], name)
        self.weight[count:].zero_()

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Return embeddings of the ids held here, zeros for the others."""
        held = self.shard_indices
        mine = (ids >= held.org_vocab_start_index) & (ids < held.org_vocab_end_index)
        local = torch.where(mine, ids - held.org_vocab_start_index, 0)
        return functional.embedding(local, self.weight) * mine.unsqueeze(-1)


class ParallelLMHead(VocabParallelEmbedding):
    """The output head, in the form of the embedding."""


class RMSNorm(nn.Module):
    """Root-mean-square norm in fp32, on the last dimension."""

    def __init__(self, hidden_size: int, eps: float, *, dtype: torch.dtype) -> None:
        """Allocate `[hidden_size]`."""
        super().__init__()
        self.hidden_size, self.variance_epsilon, self.has_weight = hidden_size, eps, True
        self.weight = _empty(hidden_size, dtype=dtype)

    def load(self, tensor: torch.Tensor, *, name: str) -> None:
        """Load the whole checkpoint tensor."""
        _fill(self.weight, tensor, name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the normed and scaled input in its own dtype."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return wide.to(x.dtype) * self.weight


class RotaryEmbedding(nn.Module):
    """Rotary positions, neox style; one cache of `[cos | sin]` for all layers of a rank."""

    cos_sin_cache: torch.Tensor

    def __init__(self, head_size: int, max_position: int, base: float) -> None:
        """Compute the fp32 cache `[max_position, head_size]` from the config."""
        super().__init__()
        self.head_size = self.rotary_dim = head_size
        self.max_position_embeddings, self.base, self.is_neox_style = max_position, base, True
        inverse = 1.0 / (base ** (torch.arange(0, head_size, 2, dtype=torch.float) / head_size))
        angles = torch.outer(torch.arange(max_position, dtype=torch.float), inverse)
        self.register_buffer("cos_sin_cache", torch.cat((angles.cos(), angles.sin()), dim=-1), persistent=False)

    def forward(self, positions: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Rotate `[tokens, heads, head_size]`."""
        cos, sin = self.cos_sin_cache[positions].to(x.dtype).unsqueeze(1).chunk(2, dim=-1)
        low, high = x.chunk(2, dim=-1)
        return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
