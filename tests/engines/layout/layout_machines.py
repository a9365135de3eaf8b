"""Machines that SGLang's quantization methods are told to be on, so that their branches run on CPU tensors.

Only facts and kernels are changed: create, load and post-process are the engine's own code. Kernels that move bytes are the
references of `layout_kernels`; those that compute are never called.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from unittest import mock

import layout_kernels
import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

REPACKING = ("marlin_utils_fp4", "marlin_utils_fp8", "gptq_kernels", "compressed_tensors_wNa16", "awq_kernels")


@contextmanager
def _installed(modules: dict[str, Any]) -> Iterator[None]:
    """Put modules where imports find them; what is imported meanwhile stays imported."""
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in modules:
            del sys.modules[name]


@dataclass(frozen=True)
class Machine:
    """A machine: its compute capability, what the platform says, and the backends that its server chose."""

    capability: tuple[int, int] = (9, 0)
    platform: dict[str, bool] = field(default_factory=dict)
    fp4: str = ""
    mxfp8: str = ""
    xpu: bool = False
    experts_as_on_gpu: bool = False
    server_args: dict[str, Any] = field(default_factory=dict)

    @contextmanager
    def chosen(self) -> Iterator[None]:
        """What stays so as long as the server runs: its backends."""
        with ExitStack() as stack:
            if self.fp4:
                from sglang.srt.layers.quantization import fp4_utils

                backend = fp4_utils.Fp4GemmRunnerBackend(self.fp4)
                stack.enter_context(mock.patch.object(fp4_utils, "FP4_GEMM_RUNNER_BACKEND", backend))
            yield

    @contextmanager
    def building(self) -> Iterator[None]:
        """What creating, loading and post-processing see besides."""
        from sglang.srt import runtime_context
        from sglang.srt.layers.quantization import modelopt_quant

        with ExitStack() as stack:
            enter = stack.enter_context
            enter(mock.patch("torch.cuda.get_device_capability", return_value=self.capability))
            enter(mock.patch("torch.cuda.get_device_properties", return_value=layout_kernels.DEVICE))
            enter(mock.patch.object(torch.Tensor, "cuda", lambda tensor, *_: tensor))
            if self.platform:
                enter(runtime_context.override_platform(**self.platform))
            from sglang.srt.layers.quantization import marlin_utils
            from sglang.srt.layers.quantization.awq import awq

            enter(mock.patch.object(awq, "_is_cuda", new=True))
            enter(mock.patch.object(marlin_utils, "get_device_capability", return_value=self.capability))
            if self.mxfp8:
                from sglang.srt.layers.quantization import fp8, fp8_utils

                backend = fp8_utils.Mxfp8DenseGemmBackend(self.mxfp8)
                enter(mock.patch.object(fp8, "resolve_mxfp8_dense_gemm_backend", return_value=backend))
            if self.experts_as_on_gpu:
                from sglang.srt.layers.moe.fused_moe_triton import layer

                enter(mock.patch.object(layer, "_is_cpu", new=False))
            if self.xpu:
                from sglang.srt.layers.quantization import mxfp4

                enter(mock.patch.object(mxfp4, "_is_xpu", new=True))
            if self.capability[0] >= 10:
                from sglang.srt.layers.quantization import mxfp4

                enter(
                    mock.patch.object(
                        mxfp4, "get_w2_permute_indices_with_cache", layout_kernels.w2_permute_indices, create=True
                    )
                )
                enter(
                    mock.patch.object(
                        mxfp4, "nvfp4_block_scale_interleave", layout_kernels.block_scale_interleave, create=True
                    )
                )
                enter(_installed(layout_kernels.flashinfer()))
                for name in ("reorder_rows_for_gated_act_gemm", "shuffle_matrix_sf_a"):
                    enter(mock.patch.object(modelopt_quant, name, new=object()))
            for name, module in list(sys.modules.items()):
                if name.rpartition(".")[2] in REPACKING:
                    for kernel in ("gptq_marlin_repack", "awq_marlin_repack", "awq_marlin_moe_repack"):
                        enter(mock.patch.object(module, kernel, getattr(layout_kernels, kernel), create=True))
            yield


HOPPER = Machine()
HOPPER_MARLIN = Machine(
    platform={"is_sm90": True, "is_blackwell": False}, fp4="marlin", server_args={"moe_runner_backend": "marlin"}
)
BLACKWELL_CUTLASS = Machine(
    (10, 0),
    {"is_sm100": True, "is_blackwell": True},
    "flashinfer_cutlass",
    server_args={"moe_runner_backend": "flashinfer_cutlass"},
)
BLACKWELL_TRTLLM = Machine(
    (10, 0),
    {"is_sm100": True, "is_blackwell": True},
    "flashinfer_trtllm",
    server_args={"moe_runner_backend": "flashinfer_trtllm"},
)
BLACKWELL_MXFP4 = Machine(
    (10, 0),
    {"is_sm90": False, "is_sm100": True, "is_blackwell": True},
    server_args={"moe_runner_backend": "flashinfer_mxfp4"},
)
XPU = Machine((0, 0), xpu=True)
AWQ_PLAIN = Machine((9, 0), server_args={"quantization": "awq"})
BLACKWELL_BLOCKS = Machine(
    (10, 0),
    {"is_sm100": True, "is_blackwell": True},
    server_args={"moe_runner_backend": "flashinfer_trtllm"},
)
TRITON_KERNELS = Machine(experts_as_on_gpu=True, server_args={"moe_runner_backend": "triton_kernel"})
BLACKWELL_MXFP8 = Machine((10, 0), {"is_sm100": True, "is_blackwell": True}, mxfp8="flashinfer_cutlass")
BLACKWELL_MXFP8_TRTLLM = Machine((10, 0), {"is_sm100": True, "is_blackwell": True}, mxfp8="flashinfer_trtllm")
