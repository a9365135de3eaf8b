"""Resident faults of the embedded engine: change one thing in a rank's memory, and say what."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from syncguard.engines.faults import Fault, FaultKind
from syncguard.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from syncguard.engines.local_model import Qwen3ForCausalLM

_BITS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def damage(ranks: Sequence[Qwen3ForCausalLM], fault: Fault) -> str:
    """Do what a resident fault says to the live tensors.

    Returns:
        What was changed, for the report.

    Raises:
        UsageError: The model has nothing that the fault could concern.
    """
    with torch.no_grad():
        match fault.kind:
            case FaultKind.PADDING_DIRT:
                return _padding_dirt(ranks, fault)
            case FaultKind.ELEMENT_FLIP | FaultKind.UNANNOUNCED:
                return _element_flip(ranks, fault)
            case FaultKind.KV_REPLICA:
                return _kv_replica(ranks, fault)
            case FaultKind.EXPERT_SLOT:
                return _expert_slot(ranks, fault)
            case FaultKind.STORAGE_MOVED:
                return _storage_moved(ranks, fault)
            case _:
                raise UsageError("not a resident fault", found=fault.kind.value)


def flip_lowest_bit(tensor: torch.Tensor, index: tuple[int, ...]) -> None:
    """Flip the lowest bit of one element in place."""
    tensor.detach().view(_BITS[tensor.element_size()])[index] ^= 1


def _parameter(ranks: Sequence[Qwen3ForCausalLM], fault: Fault, default: str) -> tuple[str, torch.Tensor]:
    name = fault.resident or default
    try:
        return name, ranks[fault.rank].get_parameter(name)
    except (AttributeError, IndexError) as error:
        raise UsageError("fault on a tensor that is not resident", found=f"{name} rank {fault.rank}") from error


def _element_flip(ranks: Sequence[Qwen3ForCausalLM], fault: Fault) -> str:
    name, tensor = _parameter(ranks, fault, "model.layers.0.self_attn.qkv_proj.weight")
    index = fault.index or (0,) * tensor.dim()
    flip_lowest_bit(tensor, index)
    return f"flipped the lowest bit of {name}{list(index)} on rank {fault.rank % len(ranks)}"


def _padding_dirt(ranks: Sequence[Qwen3ForCausalLM], fault: Fault) -> str:
    name, tensor = _parameter(ranks, fault, "model.embed_tokens.weight")
    layer: Any = ranks[fault.rank].get_submodule(name.rpartition(".")[0])
    held = layer.shard_indices.num_org_elements
    if held == tensor.shape[0]:
        raise UsageError("rank without vocabulary padding", found=f"{name} rank {fault.rank}")
    index = fault.index or (tensor.shape[0] - 1, 0)
    flip_lowest_bit(tensor, index)
    return f"dirtied padding of {name}{list(index)} on rank {fault.rank % len(ranks)}"


def _kv_replica(ranks: Sequence[Qwen3ForCausalLM], fault: Fault) -> str:
    name, tensor = _parameter(ranks, fault, "model.layers.0.self_attn.qkv_proj.weight")
    layer: Any = ranks[fault.rank].get_submodule(name.rpartition(".")[0])
    if layer.num_kv_head_replicas == 1:
        raise UsageError("kv heads are not replicated", expected="tp size above the number of kv heads", found=name)
    flip_lowest_bit(tensor, (layer.q_proj_shard_size, 0))
    return f"flipped one bit of the key copy in {name} on rank {fault.rank % len(ranks)}"


def _expert_slot(ranks: Sequence[Qwen3ForCausalLM], fault: Fault) -> str:
    model = ranks[fault.rank]
    prefix = fault.resident or next(
        (name for name, module in model.named_modules() if type(module).__name__ == "FusedMoE"), ""
    )
    if not prefix:
        raise UsageError("model without experts", found=type(model).__name__)
    experts: Any = model.get_submodule(prefix)
    first, second = fault.slots
    for tensor in (experts.w13_weight, experts.w2_weight):
        kept = tensor[first].clone()
        tensor[first].copy_(tensor[second])
        tensor[second].copy_(kept)
    return f"exchanged slots {first} and {second} of {prefix} on rank {fault.rank % len(ranks)}"


def _storage_moved(ranks: Sequence[Qwen3ForCausalLM], fault: Fault) -> str:
    name, tensor = _parameter(ranks, fault, "model.norm.weight")
    tensor.data = tensor.data.clone()
    return f"moved the storage of {name} on rank {fault.rank % len(ranks)}"
