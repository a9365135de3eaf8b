"""SGLang's own model classes on CPU tensors, any rank of any (TP, EP, PP, attention DP) split, in one process.

`create_context` makes a context that one model owns; groups are only a rank and a size, so that nothing communicates.
Weights go through the class's own `load_weights` and the `process_weights_after_loading` of its quantization methods.
"""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from unittest import mock

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")

import layout_kernels  # noqa: F401 - before SGLang, which looks for scalar types when it is imported
import torch
from sglang.srt import runtime_context
from sglang.srt.server_args import ServerArgs

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

from layout_machines import HOPPER, Machine

from syncguard.layout.model import RankIdentity

# qwen3_5.py takes these kernels of a CPU build by name when it is imported; only its forward calls them.
for _kernel in (
    "fused_sigmoid_mul_cpu",
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
):
    setattr(torch.ops.sgl_kernel, _kernel, None)


@dataclass(frozen=True)
class Split:
    """How a model is split; `dp` is attention DP (`attn_tp = tp / dp`)."""

    tp: int = 1
    ep: int = 1
    pp: int = 1
    dp: int = 1
    redundant: int = 0

    @property
    def ranks(self):
        return [(pp_rank, tp_rank) for pp_rank in range(self.pp) for tp_rank in range(self.tp)]

    def __str__(self):
        parts = [f"TP{self.tp}"] + [f"{k}{v}" for k, v in (("EP", self.ep), ("PP", self.pp), ("DP", self.dp)) if v > 1]
        return " ".join(parts) + (f" +{self.redundant} redundant" if self.redundant else "")


class Group:
    """A process group that is only a place: no communication."""

    def __init__(self, rank, size):
        self.rank_in_group, self.world_size = rank, size
        self.rank = rank
        self.is_first_rank, self.is_last_rank = rank == 0, rank == size - 1
        self.cpu_group = self.device_group = None
        self.ranks = list(range(size))


class Rank:
    """One rank's model with the context that it was built in."""

    def __init__(
        self, folder: Path, split: Split, pp_rank: int, tp_rank: int, *, machine: Machine = HOPPER, **args: Any
    ) -> None:
        self.split = split
        self.machine = machine
        # Attention DP divides the tensor-parallel group: it adds no ranks.
        self.identity = RankIdentity(tp_rank=tp_rank, tp_size=split.tp, pp_rank=pp_rank, pp_size=split.pp)
        self.args = ServerArgs(
            model_path=str(folder),
            device="cpu",
            tp_size=split.tp,
            ep_size=split.ep,
            pp_size=split.pp,
            dp_size=split.dp,
            enable_dp_attention=split.dp > 1,
            ep_num_redundant_experts=split.redundant,
            **{
                "attention_backend": "torch_native",
                "disable_cuda_graph": True,
                "disable_overlap_schedule": True,
                "skip_tokenizer_init": True,
                "dtype": "float32",
                **machine.server_args,
                **args,
            },
        )
        self.context = runtime_context.create_context(
            self.args,
            role="scheduler",
            ranks=runtime_context.SpawnRanks(world_rank=pp_rank * split.tp + tp_rank),
        )
        with self.entered(), self.as_on_cuda():
            from sglang.srt.configs.model_config import ModelConfig
            from sglang.srt.layers.moe.utils import initialize_moe_config

            self.model_config = ModelConfig.from_server_args(self.args)
            initialize_moe_config()
            self.model = self._build()

    @contextmanager
    def entered(self) -> Iterator[None]:
        parallel = self.context.parallel
        groups = {}
        for name in ("tp", "pp", "attn_tp", "attn_cp", "moe_ep", "moe_tp", "moe_dp"):
            rank, size = getattr(parallel, f"{name}_rank", 0), getattr(parallel, f"{name}_size")
            groups[f"{name}_group"] = Group(rank, size)
        before = torch.get_default_dtype()
        with (
            self.machine.chosen(),
            runtime_context.use_context(self.context),
            runtime_context.get_parallel().override(**groups),
        ):
            torch.set_default_dtype(self.model_config.dtype if hasattr(self, "model_config") else torch.float32)
            try:
                yield
            finally:
                torch.set_default_dtype(before)

    def _build(self) -> torch.nn.Module:
        from sglang.srt.configs.load_config import LoadConfig
        from sglang.srt.model_loader.loader import _get_quantization_config, _initialize_model

        load = LoadConfig()
        quant = _get_quantization_config(self.model_config, load)
        torch.set_default_dtype(self.model_config.dtype)
        return _initialize_model(self.model_config, load, quant)

    @contextmanager
    def as_on_cuda(self) -> Iterator[None]:
        """Take the branches that SGLang's quantization takes on a CUDA device; its CPU branches need AMX.

        Only flags are changed: create, load and post-process are the engine's own code, on CPU tensors.
        """
        with ExitStack() as stack:
            stack.enter_context(self.machine.building())
            stack.enter_context(
                mock.patch("sglang.srt.layers.quantization.fp8.cutlass_fp8_supported", return_value=True)
            )
            for name, module in list(sys.modules.items()):
                if name.startswith("sglang.srt.layers.quantization") and getattr(module, "_is_cpu", False) is True:
                    stack.enter_context(mock.patch.object(module, "_is_cpu", new=False))
                if name.endswith("deepseek_weight_loader"):
                    stack.enter_context(mock.patch.object(module, "_is_cuda", new=True))
            yield

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Load tensors as an engine does: the class's own loader, then each method's post-processing."""
        from sglang.srt.model_loader.loader import DefaultModelLoader

        with self.entered(), self.as_on_cuda():
            DefaultModelLoader.load_weights_and_postprocess(
                self.model, ((name, tensor.clone()) for name, tensor in tensors.items()), torch.device("cpu")
            )
