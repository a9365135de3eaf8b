"""Fused experts of the embedded engine, in the resident form of SGLang's Triton backend (unquantized, no padding).

Source: `layers/moe/fused_moe_triton/layer.py` of SGLang 0.5.23: `w13 [E_local, 2 I/moe_tp, H]` with gate rows first,
`w2 [E_local, H, I/moe_tp]`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from syncguard.engines.local_layers import Group, ReplicatedLinear, UnquantizedFusedMoEMethod
from syncguard.errors import EngineError


@dataclass(frozen=True, slots=True)
class MoeRunnerConfig:
    """What SGLang's runner is told of the experts; the layout rules read `is_gated`."""

    num_experts: int
    num_local_experts: int
    hidden_size: int
    intermediate_size_per_partition: int
    activation: str = "silu"
    is_gated: bool = True


class FusedMoE(nn.Module):
    """Routed experts, sharded over expert-parallel and, inside an expert, tensor-parallel ranks."""

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        layer_id: int,
        top_k: int,
        moe_ep: Group,
        moe_tp: Group,
        dtype: torch.dtype,
    ) -> None:
        """Allocate the fused weights of this rank's experts."""
        super().__init__()
        if num_experts % moe_ep.world_size or intermediate_size % moe_tp.world_size:
            raise EngineError(
                "experts cannot be sharded",
                expected=f"{num_experts} experts of {intermediate_size} rows to divide",
                found=f"ep {moe_ep.world_size} tp {moe_tp.world_size}",
            )
        self.layer_id, self.top_k, self.hidden_size = layer_id, top_k, hidden_size
        self.num_experts = self._num_global_routed = num_experts
        self.moe_ep_rank, self.moe_ep_size = moe_ep.rank_in_group, moe_ep.world_size
        self.moe_tp_rank, self.moe_tp_size = moe_tp.rank_in_group, moe_tp.world_size
        self.num_local_experts = self._num_local_routed = num_experts // self.moe_ep_size
        self._expert_storage_rank = self.moe_ep_rank
        self.num_fused_shared_experts, self._has_fused_shared = 0, False
        self.is_draft, self.uses_expert_location, self.use_presharded_weights = False, True, False
        self.use_triton_kernels, self.use_flashinfer_trtllm_moe = False, False
        self.intermediate_size_per_partition = intermediate_size // self.moe_tp_size
        self.quant_method = UnquantizedFusedMoEMethod()
        rows = self.intermediate_size_per_partition
        self.moe_runner_config = MoeRunnerConfig(num_experts, self.num_local_experts, hidden_size, rows)
        self.w13_weight = _empty(self.num_local_experts, 2 * rows, hidden_size, dtype=dtype)
        self.w2_weight = _empty(self.num_local_experts, hidden_size, rows, dtype=dtype)

    def load(self, expert: int, part: str, tensor: torch.Tensor, *, name: str) -> None:
        """Load one checkpoint tensor of one expert (`gate`, `up` or `down`); others' experts are passed over."""
        slot = expert - self.moe_ep_rank * self.num_local_experts
        if not 0 <= expert < self.num_experts:
            raise EngineError("expert outside the model", expected=f"below {self.num_experts}", found=name)
        if not 0 <= slot < self.num_local_experts:
            return
        rows = self.intermediate_size_per_partition
        low, high = self.moe_tp_rank * rows, (self.moe_tp_rank + 1) * rows
        whole = rows * self.moe_tp_size
        shape = (self.hidden_size, whole) if part == "down" else (whole, self.hidden_size)
        if tuple(tensor.shape) != shape:
            raise EngineError("loaded tensor does not fit", expected=shape, found=tuple(tensor.shape), where=name)
        if part == "down":
            self.w2_weight[slot].copy_(tensor[:, low:high])
        else:
            at = 0 if part == "gate" else rows
            self.w13_weight[slot, at : at + rows].copy_(tensor[low:high])

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return this rank's addend: its experts' outputs for the tokens that chose them.

        Args:
            x: `[tokens, hidden]`.
            chosen: int64 `[tokens, top_k]`, global expert ids.
            weights: `[tokens, top_k]`, router weights.
        """
        out = torch.zeros_like(x)
        rows = self.intermediate_size_per_partition
        for slot in range(self.num_local_experts):
            token, choice = torch.nonzero(chosen == self.moe_ep_rank * self.num_local_experts + slot, as_tuple=True)
            if not token.numel():
                continue
            gate, up = functional.linear(x[token], self.w13_weight[slot]).split(rows, dim=-1)
            done = functional.linear(functional.silu(gate) * up, self.w2_weight[slot])
            out.index_add_(0, token, done * weights[token, choice].unsqueeze(-1).to(done.dtype))
        return out


class Qwen3MoeSparseMoeBlock(nn.Module):
    """Router and experts: softmax in fp32, top-k, weights renormalized when the config says so."""

    def __init__(self, gate: ReplicatedLinear, experts: FusedMoE, *, renormalize: bool) -> None:
        """Keep the parts under SGLang's names."""
        super().__init__()
        self.gate, self.experts, self.renormalize = gate, experts, renormalize

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's addend of the block's output."""
        probabilities = torch.softmax(self.gate(x), dim=-1, dtype=torch.float)
        weights, chosen = torch.topk(probabilities, self.experts.top_k, dim=-1)
        if self.renormalize:
            weights = weights / weights.sum(-1, keepdim=True)
        added: torch.Tensor = self.experts(x, chosen, weights)
        return added


def _empty(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False)
