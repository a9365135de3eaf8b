"""The cells of the table: which family was built at which split, and how one rank of it is made and walked."""

from __future__ import annotations

from typing import Any

from layout_checkpoints import CHECKPOINTS
from layout_ranks import Rank, Split

from syncguard.layout.walk import walk_model

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
}

CELLS = [(name, split) for name, splits in SPLITS.items() for split in splits]


def build(name: str, folder: Any, split: Split, pp_rank: int, tp_rank: int) -> Rank:
    return Rank(folder, split, pp_rank, tp_rank, **CHECKPOINTS[name].server_args)


def walk(rank: Rank) -> tuple[Any, dict[str, Any]]:
    with rank.entered():
        return walk_model(rank.model, rank=rank.identity)
