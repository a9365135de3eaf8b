"""One tiny checkpoint for each model family, written by Transformers as a trainer would export it.

Every size is awkward where the family allows it: head_dim differs from hidden / heads, kv heads are fewer than ranks, the
vocabulary is no multiple of the padding.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import transformers
from safetensors.torch import load_file

if TYPE_CHECKING:
    from pathlib import Path

VOCAB = 130

COMMON: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


@dataclass(frozen=True)
class Checkpoint:
    """A family's Transformers classes and what differs from `COMMON`.

    `casts` are tensors, by the end of their name, that the engine holds in a dtype of its own and that the trainer
    therefore exports in it.
    """

    family: str
    config: str
    model: str
    changes: dict[str, Any] = field(default_factory=dict)
    server_args: dict[str, Any] = field(default_factory=dict)
    casts: dict[str, torch.dtype] = field(default_factory=dict)

    def save(self, folder: Path) -> dict[str, torch.Tensor]:
        """Write config and weights; return the exported tensors."""
        changes = COMMON | self.changes
        if "vision_config" in changes:  # a model that also sees: the text part has a configuration of its own
            vision = changes.pop("vision_config")
            tied = changes["tie_word_embeddings"]
            changes = {"text_config": changes, "vision_config": vision, "tie_word_embeddings": tied}
        config = getattr(transformers, self.config)(**changes)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = getattr(transformers, self.model)(config)
        model.to(torch.float32).save_pretrained(folder, safe_serialization=True, max_shard_size="10GB")
        tensors = load_file(folder / "model.safetensors")
        generator = torch.Generator().manual_seed(1)
        for tensor in tensors.values():
            if tensor.unique().numel() < tensor.numel() // 2:  # ones and zeros at the start: a swap would not show
                tensor.copy_(torch.rand(tensor.shape, generator=generator) + 0.5)
        return tensors

    def cast(self, tensors: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Return the tensors in the dtypes in which the engine holds them; quantized ones and scales stay."""
        cast = {}
        for name, tensor in tensors.items():
            own = next((held for suffix, held in self.casts.items() if name.endswith(suffix)), dtype)
            kept = tensor.dtype != torch.float32 or "_scale" in name
            cast[name] = tensor if kept else tensor.to(own)
        return cast


_MOE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}

ROUTER_FLOAT32 = {".e_score_correction_bias": torch.float32}

_YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "original_max_position_embeddings": 16,
}

_DELTA_NET: dict[str, Any] = {
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_num_key_heads_cpu": 4,  # SGLang's model runner sets these two on a CPU
    "linear_num_value_heads_cpu": 8,
    "full_attention_interval": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "full_attention"],
}

_VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 4,
    "in_channels": 3,
    "patch_size": 4,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [],
}

CHECKPOINTS = {
    "llama": Checkpoint("Llama", "LlamaConfig", "LlamaForCausalLM"),
    "llama-bias": Checkpoint("Llama", "LlamaConfig", "LlamaForCausalLM", {"attention_bias": True}),
    "llama-tied": Checkpoint("Llama", "LlamaConfig", "LlamaForCausalLM", {"tie_word_embeddings": True}),
    "qwen2": Checkpoint("Qwen2", "Qwen2Config", "Qwen2ForCausalLM", {"head_dim": 8}),
    "qwen3": Checkpoint("Qwen3", "Qwen3Config", "Qwen3ForCausalLM"),
    "qwen3-tied": Checkpoint("Qwen3", "Qwen3Config", "Qwen3ForCausalLM", {"tie_word_embeddings": True}),
    "qwen3-moe": Checkpoint(
        "Qwen3-MoE", "Qwen3MoeConfig", "Qwen3MoeForCausalLM", _MOE | {"decoder_sparse_step": 1, "mlp_only_layers": []}
    ),
    "mixtral": Checkpoint(
        "Mixtral",
        "MixtralConfig",
        "MixtralForCausalLM",
        {"num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 8},
    ),
    "gemma2": Checkpoint(
        "Gemma 2",
        "Gemma2Config",
        "Gemma2ForCausalLM",
        {"tie_word_embeddings": True, "query_pre_attn_scalar": 16, "hidden_act": "gelu_pytorch_tanh"},
    ),
    "gemma3": Checkpoint(
        "Gemma 3", "Gemma3TextConfig", "Gemma3ForCausalLM", {"tie_word_embeddings": True, "query_pre_attn_scalar": 16}
    ),
    "glm4-moe": Checkpoint(
        "GLM4-MoE",
        "Glm4MoeConfig",
        "Glm4MoeForCausalLM",
        {
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "use_qk_norm": True,
            "attention_bias": True,
            "n_group": 1,
            "topk_group": 1,
        },
        casts=ROUTER_FLOAT32 | {".gate.weight": torch.float32},
    ),
    "gpt-oss": Checkpoint(
        "gpt-oss",
        "GptOssConfig",
        "GptOssForCausalLM",
        {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 64, "sliding_window": 16},
        {"attention_backend": "triton"},
        {".sinks": torch.bfloat16, "_proj_bias": torch.float32},
    ),
    "deepseek-v2": Checkpoint(
        "DeepSeek-V2",
        "DeepseekV2Config",
        "DeepseekV2ForCausalLM",
        {
            "num_key_value_heads": 8,
            "q_lora_rank": None,
            "kv_lora_rank": 32,
            "rope_scaling": _YARN,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 24,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "n_shared_experts": 2,
            "first_k_dense_replace": 1,
            "moe_layer_freq": 1,
            "topk_method": "greedy",
            "scoring_func": "softmax",
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    "deepseek-v3": Checkpoint(
        "DeepSeek-V3",
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        {
            "num_key_value_heads": 8,
            "q_lora_rank": 48,
            "kv_lora_rank": 32,
            "rope_scaling": _YARN,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 24,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "moe_layer_freq": 1,
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
            "n_group": 1,
            "topk_group": 1,
        },
        casts=ROUTER_FLOAT32,
    ),
    "qwen3-next": Checkpoint(
        "Qwen3-Next",
        "Qwen3NextConfig",
        "Qwen3NextForCausalLM",
        _MOE
        | _DELTA_NET
        | {
            "shared_expert_intermediate_size": 32,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        },
        casts={".A_log": torch.float32},
    ),
    "qwen3.5": Checkpoint(
        "Qwen3.5",
        "Qwen3_5Config",
        "Qwen3_5ForConditionalGeneration",
        _DELTA_NET | {"vision_config": _VISION},
        casts={".A_log": torch.float32},
    ),
    "qwen3.5-moe": Checkpoint(
        "Qwen3.5-MoE",
        "Qwen3_5MoeConfig",
        "Qwen3_5MoeForConditionalGeneration",
        _MOE | _DELTA_NET | {"shared_expert_intermediate_size": 32, "vision_config": _VISION},
        casts={".A_log": torch.float32},
    ),
}
