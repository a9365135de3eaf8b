"""Tiny Qwen3 checkpoints with random weights from a fixed seed, small enough for 2 cores and awkward on purpose."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

if TYPE_CHECKING:
    from pathlib import Path

Kind = Literal["qwen3", "qwen3_moe"]

VOCAB_SIZE = 130
"""Not a multiple of 64, so that engines pad the vocabulary."""


def tiny_config(kind: Kind = "qwen3", *, tie_word_embeddings: bool = False, **overrides: Any) -> Any:
    """Return the config; `head_dim` differs from `hidden_size / heads`, kv heads are fewer than heads.

    `initializer_range` is 0.2 so that the logits of two checkpoints differ visibly.
    """
    common: dict[str, Any] = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "intermediate_size": 96,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": 512,
        "tie_word_embeddings": tie_word_embeddings,
        "initializer_range": 0.2,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    if kind == "qwen3":
        return Qwen3Config(**(common | overrides))
    experts = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    return Qwen3MoeConfig(**(common | experts | overrides))


def tiny_model(
    kind: Kind = "qwen3", *, seed: int = 0, dtype: torch.dtype = torch.float32, **config: Any
) -> torch.nn.Module:
    """Return a frozen model in eval mode; the same seed gives the same bits, whatever ran before.

    Norm weights are drawn too: Transformers leaves them at one, where a swapped or stale norm would not show.
    """
    cls = Qwen3ForCausalLM if kind == "qwen3" else Qwen3MoeForCausalLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = cls(tiny_config(kind, **config))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("norm.weight"):
                    parameter.uniform_(0.5, 1.5)
    return model.to(dtype).eval().requires_grad_(requires_grad=False)


def save_tiny_checkpoint(
    folder: Path, kind: Kind = "qwen3", *, seed: int = 0, dtype: torch.dtype = torch.float32, **config: Any
) -> Path:
    """Write the model as a safetensors folder (config.json, model.safetensors) and return the folder."""
    tiny_model(kind, seed=seed, dtype=dtype, **config).save_pretrained(folder, safe_serialization=True)
    return folder
