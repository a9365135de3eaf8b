"""What the CUDA kernels that move weight bytes do, on CPU tensors: the references that their own authors publish.

Marlin: the Python reference that SGLang ships for its kernel tests (`sglang/test/test_marlin_utils.py`). FlashInfer: the
row maps of `flashinfer/utils.py` 0.7:1106-1200 and `fused_moe/core.py`:682-780, walked row by row as they are written there.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace

import torch

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")  # read when SGLang is imported

BLOCK_16_ROWS = [0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15]
BLOCK_32_ROWS = [
    *(0, 8, 16, 24, 1, 9, 17, 25, 2, 10, 18, 26, 3, 11, 19, 27),
    *(4, 12, 20, 28, 5, 13, 21, 29, 6, 14, 22, 30, 7, 15, 23, 31),
]


@dataclass(frozen=True)
class ScalarType:
    """Type of packed values, as the kernel package describes it; only its size is asked for."""

    name: str
    size_bits: int


def install_scalar_types() -> None:
    """Put the kernel package's module of scalar types where SGLang looks for it when its quantization is imported."""
    if "sgl_kernel.scalar_type" not in sys.modules:
        named = ModuleType("sgl_kernel.scalar_type")
        named.ScalarType = ScalarType
        sizes = {"uint4": 4, "uint8": 8, "uint4b8": 4, "uint8b128": 8, "float8_e4m3fn": 8, "float4_e2m1f": 4}
        named.scalar_types = SimpleNamespace(**{name: ScalarType(name, bits) for name, bits in sizes.items()})
        sys.modules["sgl_kernel.scalar_type"] = named


install_scalar_types()


def marlin_reference() -> ModuleType:
    """SGLang's module of Marlin references."""
    from sglang.test import test_marlin_utils

    return test_marlin_utils


def gptq_marlin_repack(b_q_weight, perm, size_k, size_n, num_bits):
    from sglang.srt.layers.quantization.utils import unpack_cols

    assert not perm.numel(), "act order"
    values = unpack_cols(b_q_weight.t().contiguous(), num_bits, size_n, size_k).t().contiguous()
    reference = marlin_reference()
    return reference.marlin_weights(values, size_k, size_n, num_bits, reference.get_weight_perm(num_bits))


def awq_marlin_repack(qweight, size_k, size_n, num_bits):
    from sglang.srt.layers.quantization.utils import unpack_cols

    undo = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])
    values = unpack_cols(qweight, num_bits, size_k, size_n).reshape(-1, 8)[:, undo].reshape(size_k, size_n)
    reference = marlin_reference()
    return reference.marlin_weights(values, size_k, size_n, num_bits, reference.get_weight_perm(num_bits))


def awq_marlin_moe_repack(qweight, perm, size_k, size_n, num_bits):
    del perm
    return torch.stack([awq_marlin_repack(expert, size_k, size_n, num_bits) for expert in qweight])


def shuffled_row_indices(rows: int, epilogue_tile_m: int) -> torch.Tensor:
    row_map = BLOCK_32_ROWS if epilogue_tile_m % 128 == 0 else BLOCK_16_ROWS
    size = len(row_map)
    indices = torch.empty(rows, dtype=torch.long)
    for old in range(rows):
        indices[old // size * size + row_map[old % size]] = old
    return indices


def w3_w1_permute_indices(cache, weight, epilogue_tile_m, num_elts_per_sf=None, is_gated_act_gemm=True):
    del cache, num_elts_per_sf
    rows = weight.shape[0]
    gated = torch.arange(rows)
    if is_gated_act_gemm:
        gated = torch.stack((torch.arange(rows // 2), torch.arange(rows // 2, rows)), dim=1).reshape(-1)
    return gated[shuffled_row_indices(rows, epilogue_tile_m)]


def w2_permute_indices(cache, weight, epilogue_tile_m, num_elts_per_sf=None, is_gated_act_gemm=None):
    del cache, num_elts_per_sf, is_gated_act_gemm
    return shuffled_row_indices(weight.shape[0], epilogue_tile_m)


def block_scale_interleave(scale):
    """Tiles of 128 rows and 4 columns, padded with zeros: row r of a tile goes to 16-byte line r % 32, quarter r // 32."""
    rows, columns = -(-scale.shape[0] // 128) * 128, -(-scale.shape[1] // 4) * 4
    out = torch.zeros(rows * columns, dtype=torch.uint8)
    flat = scale.view(torch.uint8)
    for row in range(scale.shape[0]):
        for column in range(scale.shape[1]):
            tile = (row // 128) * (columns // 4) + column // 4
            out[tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + column % 4] = flat[row, column]
    return out


def flashinfer() -> dict[str, ModuleType]:
    """The parts of FlashInfer that SGLang's post-processing takes, as modules to put into `sys.modules`."""
    top, fused, core = ModuleType("flashinfer"), ModuleType("flashinfer.fused_moe"), ModuleType("core")
    top.shuffle_matrix_a = lambda x, tile: x[shuffled_row_indices(x.shape[0], tile)]
    top.block_scale_interleave = block_scale_interleave
    top.shuffle_matrix_sf_a = lambda x, tile, **_: block_scale_interleave(x[shuffled_row_indices(x.shape[0], tile)])
    top.nvfp4_block_scale_interleave = block_scale_interleave
    core._maybe_get_cached_w3_w1_permute_indices = w3_w1_permute_indices
    core.convert_to_block_layout = lambda x, width: x.view(x.shape[0], -1, width).permute(1, 0, 2).contiguous()
    core.get_w2_permute_indices_with_cache = w2_permute_indices
    return {"flashinfer": top, "flashinfer.fused_moe": fused, "flashinfer.fused_moe.core": core}


DEVICE = SimpleNamespace(multi_processor_count=4)
"""What `torch.cuda.get_device_properties` says of a device."""
