"""The configuration of the embedded engine's models, read from a checkpoint's `config.json`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from syncguard.errors import CheckpointError, UnsupportedError

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class LocalConfig:
    """The part of `config.json` that shapes the model. Sizes in elements."""

    architecture: str
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    tie_word_embeddings: bool
    attention_bias: bool = False
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = True
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] = ()
    dtype: str = "float32"

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> LocalConfig:
        """Read the keys of a Transformers config.

        Raises:
            UnsupportedError: Another architecture, or scaled rotary positions.
            CheckpointError: A key is missing.
        """
        names = raw.get("architectures") or [""]
        if names[0] not in ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM"):
            raise UnsupportedError(
                "architecture of the embedded engine", expected="Qwen3ForCausalLM Qwen3MoeForCausalLM", found=names[0]
            )
        rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
        if rope.get("rope_type", rope.get("type", "default")) != "default":
            raise UnsupportedError("rotary positions of the embedded engine", expected="default", found=rope)
        values = {name: raw[name] for name in cls.__dataclass_fields__ if name in raw}
        values["architecture"] = names[0]
        # Transformers 5 writes the number of experts under the name that Mixtral gave it.
        values["num_experts"] = raw.get("num_experts", raw.get("num_local_experts", 0))
        values["dtype"] = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
        values["rope_theta"] = float(rope.get("rope_theta", raw.get("rope_theta", 1e6)))
        values.setdefault("tie_word_embeddings", False)
        values["mlp_only_layers"] = tuple(raw.get("mlp_only_layers") or ())
        try:
            return cls(**values)
        except TypeError as error:
            raise CheckpointError("config.json lacks what the model needs", found=error) from error

    @classmethod
    def from_folder(cls, folder: Path) -> LocalConfig:
        """Read `config.json` of a checkpoint folder.

        Raises:
            CheckpointError: There is none, or it is not JSON.
        """
        try:
            return cls.from_dict(json.loads((folder / "config.json").read_text(encoding="utf-8")))
        except (OSError, ValueError) as error:
            raise CheckpointError("config.json cannot be read", found=error, where=folder) from error

    def is_sparse(self, layer: int) -> bool:
        """Return whether a layer has experts, by the rule of Qwen3-MoE."""
        return (
            self.num_experts > 0 and layer not in self.mlp_only_layers and (layer + 1) % self.decoder_sparse_step == 0
        )
