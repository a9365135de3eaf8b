"""The cells of the table: which family was built in which scheme at which split, and how one rank of it is made."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from layout_checkpoints import CHECKPOINTS, Checkpoint
from layout_machines import HOPPER
from layout_quantize import SCHEMES
from layout_ranks import Rank, Split

from syncguard.layout.walk import walk_model

if TYPE_CHECKING:
    from pathlib import Path

TP = (Split(), Split(tp=2), Split(tp=4))
EP = (Split(tp=2, ep=2), Split(tp=4, ep=2), Split(tp=4, ep=4))
PP = (Split(pp=2), Split(tp=2, pp=2))
DP = (Split(tp=2, dp=2), Split(tp=4, dp=2))

SPLITS: dict[str, tuple[Split, ...]] = {
    "llama": TP + PP,
    "llama-bias": TP,
    "llama-tied": TP,
    "qwen2": TP + PP,
    "qwen3": TP + PP,
    "qwen3-tied": TP + PP,
    "qwen3-moe": TP + EP + PP + DP,
    "mixtral": TP + EP,
    "gemma2": TP,
    "gemma3": TP,
    "glm4-moe": TP + EP + PP + DP,
    "gpt-oss": TP,
    "deepseek-v2": TP + EP + DP,
    "deepseek-v3": TP + EP + PP + DP,
    "qwen3-next": TP + EP,
    "qwen3.5": TP,
    "qwen3.5-moe": TP + EP,
}

QUANTIZED: dict[str, tuple[str, ...]] = {
    "fp8-block": ("qwen3", "qwen3-moe", "glm4-moe", "deepseek-v3"),
    "fp8-tensor": ("llama", "qwen3"),
    "ct-fp8-channel": ("llama", "qwen3", "qwen3-moe", "glm4-moe"),
    "ct-int8-channel": ("llama", "qwen3"),
    "w8a8-int8": ("llama", "qwen3", "qwen3-moe", "glm4-moe"),
    "nvfp4": ("llama", "qwen3", "qwen3-moe"),
    "nvfp4-padded": ("llama-bias", "qwen3"),
    "nvfp4-trtllm": ("qwen3", "qwen3-moe", "glm4-moe"),
    "nvfp4-marlin": ("llama-bias", "qwen3"),
    "mxfp4": ("gpt-oss",),
    "mxfp4-trtllm": ("gpt-oss",),
    "mxfp4-marlin": ("gpt-oss",),
    "awq": ("llama", "qwen3"),
    "awq-marlin": ("qwen3", "qwen3-moe"),
    "gptq-marlin": ("llama", "qwen3", "qwen3-moe"),
    "gptq-8-marlin": ("qwen3",),
    "ct-wna16": ("llama", "qwen3", "qwen3-moe"),
    "ct-wna16-channel": ("qwen3",),
    "ct-wna16-asymmetric": ("qwen3",),
    "ct-nvfp4": ("qwen3",),
    "ct-nvfp4-blocks": ("qwen3-moe",),
    "ct-nvfp4-trtllm": ("qwen3", "qwen3-moe"),
    "mxfp8": ("qwen3",),
    "mxfp8-trtllm": ("qwen3",),
    "trtllm-blocks": ("qwen3-moe", "glm4-moe"),
    "triton-kernels": ("qwen3-moe",),
}

BLOCKS_OF_128: dict[str, Any] = {
    "hidden_size": 256,
    "head_dim": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 512,
    "moe_intermediate_size": 256,
}
"""Sizes at which each part of two ranks is made of whole 128 x 128 blocks, which SGLang demands."""

MLA_BLOCKS: dict[str, Any] = {
    "num_key_value_heads": 8,
    "q_lora_rank": 256,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 64,
}


@dataclass(frozen=True)
class Cell:
    """One cell: a checkpoint, a dtype or quantization scheme, and a split."""

    name: str
    scheme: str
    split: Split

    def __str__(self):
        return f"{self.name} {self.scheme} {self.split}".replace(" ", "-")

    @property
    def checkpoint(self) -> Checkpoint:
        """The checkpoint, in the sizes that the scheme needs."""
        checkpoint = CHECKPOINTS[self.name]
        if self.scheme not in SCHEMES:
            return checkpoint
        checkpoint = replace(checkpoint, casts=checkpoint.casts | SCHEMES[self.scheme].casts)
        if SCHEMES[self.scheme].sizes is not None:
            return replace(checkpoint, changes=checkpoint.changes | SCHEMES[self.scheme].sizes)
        sizes = BLOCKS_OF_128 | (MLA_BLOCKS if "kv_lora_rank" in checkpoint.changes else {})
        return replace(checkpoint, changes=checkpoint.changes | sizes)

    @property
    def dtype(self) -> str:
        """Dtype of what is not quantized."""
        return self.scheme if self.scheme not in SCHEMES else SCHEMES[self.scheme].dtype

    def export(self, folder: Path) -> dict[str, torch.Tensor]:
        """Write the checkpoint's config and return the tensors as the trainer sends them."""
        tensors = self.checkpoint.save(folder)
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"dtype": self.dtype}))
        if self.scheme in SCHEMES:
            tensors = SCHEMES[self.scheme].export(folder, tensors)
        return self.checkpoint.cast(tensors, getattr(torch, self.dtype))

    def rank(self, folder: Path, pp_rank: int, tp_rank: int) -> Rank:
        """Build one rank, not loaded."""
        machine = SCHEMES[self.scheme].machine if self.scheme in SCHEMES else HOPPER
        args = {"dtype": self.dtype, **self.checkpoint.server_args}
        return Rank(folder, self.split, pp_rank, tp_rank, machine=machine, **args)


MORE_SPLITS: dict[tuple[str, str], tuple[Split, ...]] = {
    ("gpt-oss", "mxfp4-trtllm"): (Split(tp=4, ep=2),),
    ("gpt-oss", "mxfp4-marlin"): (Split(tp=2, ep=2),),
    ("qwen3", "nvfp4"): (Split(pp=2),),
    ("qwen3-moe", "nvfp4"): (Split(tp=2),),
    ("qwen3-moe", "nvfp4-trtllm"): (Split(tp=2), Split(tp=4, ep=2)),
    ("qwen3-moe", "ct-nvfp4-trtllm"): (Split(tp=2),),
    ("qwen3-moe", "ct-wna16"): (Split(tp=2),),
    ("qwen3-moe", "awq-marlin"): (Split(tp=2),),
}
"""Splits of packed forms besides the one that each scheme is tried at."""

CELLS = [
    *(Cell(name, "float32", split) for name, splits in SPLITS.items() for split in splits),
    *(Cell(name, "bfloat16", Split(tp=2)) for name in SPLITS),
    *(
        Cell(name, scheme, split)
        for scheme, names in QUANTIZED.items()
        for name in names
        for split in (Split(tp=2, ep=2) if name in {"qwen3-moe", "deepseek-v3"} else Split(tp=2),)
    ),
    *(Cell(name, scheme, split) for (name, scheme), splits in MORE_SPLITS.items() for split in splits),
]


def walk(rank: Rank) -> tuple[Any, dict[str, Any]]:
    with rank.entered():
        return walk_model(rank.model, rank=rank.identity)
