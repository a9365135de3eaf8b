"""The two architectures that the tests and the demo serve."""

from sglang.srt.models.qwen3 import Qwen3ForCausalLM
from sglang.srt.models.qwen3_moe import Qwen3MoeForCausalLM

EntryClass = [Qwen3ForCausalLM, Qwen3MoeForCausalLM]
