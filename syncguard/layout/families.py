"""The model families: one row each, saying how resident names become checkpoint names.

Everything about sizes, groups and order comes from the live layers. A row has only what no layer knows: which checkpoint
names were packed into a resident one, how experts are named, and which modules were renamed.
Source: the `load_weights` of each model in `sglang/srt/models` 0.5.23.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

QKV: Final = ("q_proj", "k_proj", "v_proj")
GATE_UP: Final = ("gate_proj", "up_proj")
LLAMA_PACKED: Final[Mapping[str, tuple[str, ...]]] = {"qkv_proj": QKV, "gate_up_proj": GATE_UP}


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """How a checkpoint names the projections of a routed expert, and the shared expert that may be fused beside them.

    Attributes:
        gate: Name of w1 below `experts.{e}`.
        down: Name of w2.
        up: Name of w3.
        shared: Module that holds a fused shared expert beside `experts`, empty when there is none.
        interleaved: The checkpoint has one tensor for all experts, `[E, H, 2I]`, in which gate and up columns alternate.
    """

    gate: str = "gate_proj"
    down: str = "down_proj"
    up: str = "up_proj"
    shared: str = ""
    interleaved: bool = False


@dataclass(frozen=True, slots=True)
class Family:
    """Names of one model family.

    Attributes:
        name: Name of the family, for tables.
        architectures: Class names of the live models.
        packed: Checkpoint names that a resident module packs, in resident order, by the last one or two levels of its name.
        experts: Names of experts.
        renames: Regular expressions on the resident module name and their replacements, applied in order.
        tied_head: Checkpoint module that a head of its own is loaded from when embeddings are tied (qwen3.py:705-712: the
            last of several pipeline stages), empty when the class has no such copy.
    """

    name: str
    architectures: tuple[str, ...]
    packed: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: dict(LLAMA_PACKED))
    experts: ExpertNames = field(default_factory=ExpertNames)
    renames: tuple[tuple[str, str], ...] = ()
    tied_head: str = ""

    def packed_in(self, fqn: str) -> tuple[str, ...] | None:
        """Return what a resident module packs, by the last two levels of its name or the last one; None when unnamed."""
        parts = fqn.split(".")
        return self.packed.get(".".join(parts[-2:])) or self.packed.get(parts[-1])

    def checkpoint_name(self, fqn: str) -> str:
        """Return the checkpoint name of a resident module."""
        for pattern, replacement in self.renames:
            fqn = re.sub(pattern, replacement, fqn)
        return fqn


MLA_PACKED: Final[Mapping[str, tuple[str, ...]]] = {
    **LLAMA_PACKED,
    "fused_qkv_a_proj_with_mqa": ("q_a_proj", "kv_a_proj_with_mqa"),
}
NEXT_PACKED: Final[Mapping[str, tuple[str, ...]]] = {
    **LLAMA_PACKED,
    "in_proj_qkvz": ("in_proj_qkvz",),
    "in_proj_ba": ("in_proj_ba",),
}
QWEN35_PACKED: Final[Mapping[str, tuple[str, ...]]] = {
    **LLAMA_PACKED,
    "in_proj_qkvz": ("in_proj_qkv", "in_proj_qkv", "in_proj_qkv", "in_proj_z"),
    "in_proj_ba": ("in_proj_b", "in_proj_a"),
    "attn.qkv_proj": ("qkv", "qkv", "qkv"),
}
"""A name that stands several times in a row is one checkpoint tensor with as many parts."""

SELF_ATTN: Final = ((r"^(model\.layers\.\d+)\.(qkv_proj|o_proj|q_norm|k_norm)$", r"\1.self_attn.\2"),)
"""Qwen3-Next's full attention layers hold their projections without the `self_attn` level (qwen3_next.py:1138)."""

EMBED: Final = "model.embed_tokens"

FAMILIES: Final = (
    Family("Llama", ("LlamaForCausalLM",)),
    Family("Qwen2", ("Qwen2ForCausalLM",), tied_head=EMBED),
    Family("Qwen3", ("Qwen3ForCausalLM",), tied_head=EMBED),
    Family("Qwen3-MoE", ("Qwen3MoeForCausalLM",)),
    Family(
        "Qwen3-Next",
        ("Qwen3NextForCausalLM",),
        packed=NEXT_PACKED,
        experts=ExpertNames(shared="shared_expert"),
        renames=SELF_ATTN,
    ),
    Family(
        "Qwen3.5",
        ("Qwen3_5ForConditionalGeneration",),
        packed=QWEN35_PACKED,
        renames=(*SELF_ATTN, (r"^model\.", "model.language_model."), (r"^visual\.", "model.visual.")),
    ),
    # Its loader also takes experts fused as `[E, 2I, H]`; the names here are those that Transformers writes, one an expert.
    Family(
        "Qwen3.5-MoE",
        ("Qwen3_5MoeForConditionalGeneration",),
        packed=QWEN35_PACKED,
        experts=ExpertNames(shared="shared_expert"),
        renames=(*SELF_ATTN, (r"^model\.", "model.language_model."), (r"^visual\.", "model.visual.")),
    ),
    Family("Mixtral", ("MixtralForCausalLM",), experts=ExpertNames("w1", "w2", "w3")),
    Family("Gemma 2", ("Gemma2ForCausalLM",)),
    Family("Gemma 3", ("Gemma3ForCausalLM",)),
    Family("GLM4-MoE", ("Glm4MoeForCausalLM",), experts=ExpertNames(shared="shared_experts")),
    Family("gpt-oss", ("GptOssForCausalLM",), experts=ExpertNames("gate_up_proj", "down_proj", "", interleaved=True)),
    Family(
        "DeepSeek",
        ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "DeepseekV32ForCausalLM"),
        packed=MLA_PACKED,
        experts=ExpertNames(shared="shared_experts"),
    ),
)
"""Every family with a rule; adding one is a row here, and a rule if a layer class is new."""

UNKNOWN: Final = Family("unknown", ())
"""Names are taken as they are; every packed name is refused."""


def family_of(architecture: str) -> Family:
    """Return the row of a live model class, `UNKNOWN` when there is none."""
    for family in FAMILIES:
        if architecture in family.architectures:
            return family
    return UNKNOWN
