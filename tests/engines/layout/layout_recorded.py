"""Architectures without a row in the family table: their checkpoints, and one rank of them under the recorder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from layout_checkpoints import Checkpoint
from layout_ranks import Rank, Split

from syncguard.engines.loader_record import record_loader
from syncguard.layout.model import LogicalTensor
from syncguard.layout.walk import walk_model

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from syncguard.layout.recording import Recording

RECORDED = {
    "olmo2": Checkpoint("OLMo 2", "Olmo2Config", "Olmo2ForCausalLM", {"head_dim": 8, "num_key_value_heads": 8}),
    "stablelm": Checkpoint("StableLM", "StableLmConfig", "StableLmForCausalLM", {"head_dim": 8, "use_qkv_bias": True}),
    "starcoder2": Checkpoint("Starcoder 2", "Starcoder2Config", "Starcoder2ForCausalLM", {"head_dim": 8}),
    "gpt2": Checkpoint(
        "GPT-2",
        "GPT2Config",
        "GPT2LMHeadModel",
        {"n_embd": 64, "n_layer": 2, "n_head": 8, "n_positions": 64, "tie_word_embeddings": True},
    ),
    "persimmon": Checkpoint("Persimmon", "PersimmonConfig", "PersimmonForCausalLM", {"head_dim": 8}),
}
"""GPT-2 turns its matrices while loading, Persimmon takes its qkv apart head by head."""


def named(tensors: Mapping[str, torch.Tensor]) -> dict[str, LogicalTensor]:
    return {
        name: LogicalTensor(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        for name, tensor in tensors.items()
    }


def recorder(rank: Rank, tensors: Mapping[str, torch.Tensor]):
    """Return what a live rank's probe is given: the recorder over the names of the checkpoint."""

    def record(model: torch.nn.Module) -> Recording:
        with rank.entered(), rank.as_on_cuda():
            return record_loader(model, named(tensors))

    return record


@dataclass(frozen=True)
class RecordedCell:
    """One architecture at one split, in float32."""

    name: str
    split: Split
    scheme: str = "recorded"

    def __str__(self):
        return f"{self.name} {self.scheme} {self.split}".replace(" ", "-")

    @property
    def checkpoint(self) -> Checkpoint:
        return RECORDED[self.name]

    def export(self, folder: Path) -> dict[str, torch.Tensor]:
        return self.checkpoint.save(folder)

    def rank(self, folder: Path, pp_rank: int, tp_rank: int) -> Rank:
        return Rank(folder, self.split, pp_rank, tp_rank, **{"dtype": "float32", **self.checkpoint.server_args})

    def walk(self, rank: Rank, tensors: Mapping[str, torch.Tensor]) -> tuple[Any, dict[str, Any]]:
        with rank.entered():
            return walk_model(rank.model, rank=rank.identity, record=recorder(rank, tensors))
