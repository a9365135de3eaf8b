"""Each named arrangement undoes what SGLang 0.5.23's own functions do, or the references that kernels are tested with."""

from __future__ import annotations

import layout_kernels
import pytest
import torch
from sglang.srt.layers.quantization import marlin_utils, marlin_utils_fp4, utils

from syncguard.layout.arrangements import (
    Packing,
    blocked_rows,
    marlin_bias,
    marlin_scales,
    marlin_weight,
    marlin_zero_points,
    shuffled_rows,
    shuffled_scales,
    swapped_rows,
    swizzled_scales,
)
from syncguard.layout.repack import NVFP4_MARLIN_SCALE, Recode

K, N, GROUP = 64, 128, 16


def same(found, due):
    assert tuple(found.shape) == tuple(due.shape)
    size = due.element_size()
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[size]
    assert torch.equal(found.contiguous().view(kind), due.contiguous().view(kind))


def values(high, *shape):
    return torch.randint(0, high, shape, dtype=torch.int64, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("bits", [4, 8])
def test_marlin_tiles_of_every_packing(bits):
    exported = values(2**bits, K, N)
    reference = layout_kernels.marlin_reference()
    resident = reference.marlin_weights(exported, K, N, bits, reference.get_weight_perm(bits))
    same(marlin_weight(K, N, bits, Packing.GPTQ).apply(resident), utils.pack_rows(exported, bits, K, N))
    rows = utils.pack_cols(exported.t().contiguous(), bits, N, K)
    same(marlin_weight(K, N, bits, Packing.ROWS).apply(resident), rows)
    same(marlin_weight(K, N, bits, Packing.ROWS, 8).apply(resident), rows.view(torch.uint8))
    if bits == 4:
        same(marlin_weight(K, N, bits, Packing.AWQ).apply(resident), reference.awq_pack(exported, bits, K, N))


def test_the_kernel_that_repacks_writes_what_the_reference_says():
    # gptq_marlin_repack.cuh: thread t of warp w of a tile reads rows 2 (t % 4) + 0 1 8 9 of columns 16 w + t / 4 and + 8.
    exported = values(16, 16, 64)
    words = torch.zeros(128, dtype=torch.int64)
    for thread in range(32):
        for warp in range(4):
            column = 16 * warp + thread // 4
            rows = [2 * (thread % 4) + offset for offset in (0, 1, 8, 9)]
            read = [exported[row, column] for row in rows] + [exported[row, column + 8] for row in rows]
            words[thread * 4 + warp] = sum(int(read[p]) << 4 * i for i, p in enumerate((0, 2, 4, 6, 1, 3, 5, 7)))
    resident = words.to(torch.int32).reshape(1, 128)
    same(marlin_weight(16, 64, 4, Packing.GPTQ).apply(resident), utils.pack_rows(exported, 4, 16, 64))


def test_marlin_scales_in_both_permutations_and_bias():
    scales = torch.randn(K // GROUP, N).half()
    grouped = marlin_utils.marlin_permute_scales(scales, K, N, GROUP)
    same(marlin_scales(K // GROUP, N, grouped=True, outputs_first=False).apply(grouped), scales)
    same(marlin_scales(K // GROUP, N, grouped=True, outputs_first=True).apply(grouped), scales.t())
    single = marlin_utils.marlin_permute_scales(scales[:1], K, N, -1)
    same(marlin_scales(1, N, grouped=False, outputs_first=True).apply(single), scales[:1].t())
    same(marlin_bias(N, 16).apply(marlin_utils.marlin_permute_bias(scales[0])), scales[0])


def test_marlin_scales_of_4_bit_floats():
    exported = values(127, N, K // 16).to(torch.uint8)
    permuted = marlin_utils.marlin_permute_scales(
        exported.view(torch.float8_e4m3fn).t().bfloat16().contiguous(), K, N, 16
    )
    resident = marlin_utils_fp4.nvfp4_marlin_process_scales(permuted)
    back = marlin_scales(K // 16, N, grouped=True, outputs_first=True, fp4=True, bits=8)
    same(Recode(NVFP4_MARLIN_SCALE).apply(back.apply(resident)), exported)
    exponents = values(256, N, K // 32).to(torch.uint8)
    numbers = marlin_utils_fp4._normalize_scale_tensor(exponents, torch.bfloat16)
    permuted = marlin_utils.marlin_permute_scales(numbers.t().contiguous(), K, N, 32)
    resident = marlin_utils_fp4.mxfp4_marlin_process_scales(permuted)
    same(marlin_scales(K // 32, N, grouped=True, outputs_first=True, fp4=True, bits=8).apply(resident), exponents)


def test_every_e4m3_scale_that_is_not_negative_comes_back_from_marlin():
    codes = torch.arange(128, dtype=torch.uint8).view(torch.float8_e4m3fn).reshape(1, 128).bfloat16()
    resident = marlin_utils_fp4.nvfp4_marlin_process_scales(codes).view(torch.uint8).reshape(-1, 4)[:, [0, 2, 1, 3]]
    assert Recode(NVFP4_MARLIN_SCALE).apply(resident.reshape(-1)).tolist() == list(range(128))


def test_marlin_zero_points():
    exported = values(16, K // GROUP, N).to(torch.int32)
    resident = marlin_utils.marlin_zero_points(exported.clone(), K // GROUP, N, 4)
    packed = layout_kernels.marlin_reference().awq_pack(exported, 4, K // GROUP, N)
    same(marlin_zero_points(K // GROUP, N, Packing.AWQ).apply(resident), packed)
    columns = utils.pack_cols(exported, 4, K // GROUP, N)
    same(marlin_zero_points(K // GROUP, N, Packing.ROWS).apply(resident), columns.t())


def test_swizzled_scales():
    exported = values(255, 2, 256, 12).to(torch.uint8)
    resident = utils.swizzle_blockscale(exported.view(torch.float8_e4m3fn))
    same(swizzled_scales(256, 12).apply(resident), exported)
    for scale in exported:
        flat = layout_kernels.block_scale_interleave(scale).reshape(256, 12)
        same(swizzled_scales(256, 12).apply(flat), scale)


@pytest.mark.parametrize("gated", [False, True])
def test_rows_and_scales_shuffled_for_trtllm(gated):
    exported = values(255, 256, 8).to(torch.uint8)
    indices = layout_kernels.w3_w1_permute_indices({}, exported, 128, is_gated_act_gemm=gated)
    same(shuffled_rows(256, 8, gated=gated).apply(exported[indices]), exported)
    flat = layout_kernels.block_scale_interleave(exported[indices]).reshape(256, 8)
    same(shuffled_scales(256, 8, gated=gated).apply(flat), exported)
    blocks = exported[indices].view(256, 4, 2).permute(1, 0, 2).contiguous()
    same(blocked_rows(4, 256, 2, gated=gated, bits=8).apply(blocks), exported)


def test_rows_whose_neighbours_were_swapped():
    exported = values(255, 128, 4).to(torch.uint8)
    swapped = exported.reshape(64, 2, 4).flip(1).reshape(128, 4)
    resident = swapped[layout_kernels.shuffled_row_indices(128, 128)]
    same(swapped_rows(128, 4, pairs=True).apply(resident), exported)


def test_alternating_rows_that_marlin_takes_apart_before_it_repacks():
    class Layer:
        w13_weight = torch.nn.Parameter(values(255, 1, N, K // 2).to(torch.uint8), requires_grad=False)

    exported = Layer.w13_weight.data[0].clone()
    marlin_utils_fp4.deinterleave_moe_mxfp4_w13_for_marlin(Layer)
    words = Layer.w13_weight.data[0].contiguous().view(torch.int32).t().contiguous()
    resident = layout_kernels.gptq_marlin_repack(words, torch.empty(0), K, N, 4)
    same(marlin_weight(K, N, 4, Packing.ROWS, 8, halves=True).apply(resident), exported)
