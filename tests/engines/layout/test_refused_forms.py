"""Forms whose memory is not what was exported: refused by name, never guessed. Each is a row of the README's table."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from syncguard.layout.coverage import resident_problems
from syncguard.layout.model import RankIdentity
from syncguard.layout.walk import walk_model


def method(name, **attributes):
    return type(name, (), attributes)()


class RowParallelLinear(nn.Module):
    """SGLang's layer as its attributes show it, after a quantization method has repacked it."""

    def __init__(self, quant_method, tensors, **attributes):
        super().__init__()
        self.input_size = self.output_size = 256
        self.tp_group = None
        self.quant_method = quant_method
        for name, tensor in tensors.items():
            self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
        for name, value in attributes.items():
            setattr(self, name, value)


class FusedMoE(nn.Module):
    def __init__(self, quant_method, **attributes):
        super().__init__()
        self.hidden_size, self.intermediate_size_per_partition = 64, 32
        self.num_local_experts, self.layer_id = 2, 0
        self.quant_method = quant_method
        self.w13_weight = nn.Parameter(torch.zeros(2, 64, 64), requires_grad=False)
        self.w2_weight = nn.Parameter(torch.zeros(2, 64, 32), requires_grad=False)
        for name, value in attributes.items():
            setattr(self, name, value)


def fp8(**attributes):
    return method("Fp8LinearMethod", **{"block_quant": False, "is_checkpoint_fp8_serialized": True} | attributes)


def named(value):
    return SimpleNamespace(value=value)


VALUES = torch.zeros(256, 256, dtype=torch.float8_e4m3fn)
SCALE = torch.ones(())
PACKED = {"qweight": torch.zeros(32, 256, dtype=torch.int32), "scales": torch.zeros(2, 256)}
NVFP4 = {"weight": torch.zeros(256, 128, dtype=torch.uint8), "weight_scale": VALUES[:, :16], "weight_scale_2": SCALE}

REFUSED = {
    "fp8 requantized, shards unknown": (
        RowParallelLinear(fp8(), {"weight": VALUES.t(), "weight_scale": SCALE}),
        "shards of [] rows",
    ),
    "fp8 quantized on line from an unknown dtype": (
        RowParallelLinear(
            fp8(is_checkpoint_fp8_serialized=False),
            {"weight": VALUES.t(), "weight_scale": SCALE},
            logical_widths=[256],
        ),
        "quantized on line from",
    ),
    "fp8 Marlin": (RowParallelLinear(fp8(use_marlin=True), {"weight": VALUES, "weight_scale": SCALE}), "Marlin"),
    "mxfp8 for DeepGEMM": (
        RowParallelLinear(
            fp8(block_quant=True, use_mxfp8=True, convert_mxfp8_to_block=False, mxfp8_dense_backend=named("deep_gemm")),
            {"weight": VALUES, "weight_scale_inv": torch.zeros(256, 8, dtype=torch.uint8)},
        ),
        "mxfp8 of backend deep_gemm",
    ),
    "mxfp8 converted to blocks of 128": (
        RowParallelLinear(fp8(block_quant=True, use_mxfp8=True, convert_mxfp8_to_block=True), {"weight": VALUES}),
        "requantized on load",
    ),
    "GPTQ with an activation order": (
        RowParallelLinear(
            method("GPTQMarlinLinearMethod", quant_config=SimpleNamespace(desc_act=True)),
            PACKED,
            scheme=method("GPTQMarlinLinearScheme"),
        ),
        "activation order",
    ),
    "compressed-tensors WNA16 with an activation order": (
        RowParallelLinear(
            method("CompressedTensorsLinearMethod"),
            PACKED,
            scheme=method("CompressedTensorsWNA16", strategy="group", has_g_idx=True),
        ),
        "activation order",
    ),
    "AWQ on another device": (
        RowParallelLinear(method("AWQLinearMethod"), PACKED, scheme=method("AWQAscendLinearScheme")),
        "AWQAscendLinearScheme",
    ),
    "NVFP4 prepared for bf16 activations": (
        RowParallelLinear(method("ModelOptFp4LinearMethod", quant_mode="w4a16"), NVFP4),
        "prepared for bf16 activations",
    ),
    "NVFP4 fused for SwiGLU": (
        RowParallelLinear(
            method("ModelOptFp4LinearMethod", quant_mode="w4a4"), NVFP4, weight_swiglu_interleaved=VALUES.clone()
        ),
        "the raw weight was freed",
    ),
    "NVFP4 weights alone (W4A16)": (
        RowParallelLinear(method("ModelOptNvFp4A16LinearMethod"), NVFP4),
        "A16LinearMethod",
    ),
    "AMX packing": (
        RowParallelLinear(
            method("UnquantizedLinearMethod"), {"weight": torch.zeros(256, 256)}, use_intel_amx_backend=True
        ),
        "AMX",
    ),
    "MXFP4 experts of triton_kernels": (
        FusedMoE(method("Mxfp4MoEMethod", use_triton_kernels=True)),
        "value layout of triton_kernels",
    ),
    "MXFP4 experts decoded to bfloat16": (
        FusedMoE(method("Mxfp4MoEMethod", use_triton_kernels=False)),
        "decoded to another dtype",
    ),
    "fp8 per-tensor experts, scales of another form": (
        FusedMoE(method("Fp8MoEMethod", block_quant=False)),
        "not one scale an expert",
    ),
    "NVFP4 experts of CuTe DSL": (
        FusedMoE(
            method(
                "ModelOptNvFp4FusedMoEMethod",
                enable_flashinfer_cutlass_moe=False,
                enable_flashinfer_trtllm_moe=False,
                load_up_proj_weight_first=True,
            )
        ),
        "neither CUTLASS, TRT-LLM nor Marlin",
    ),
    "NVFP4 experts rescaled for a clamp limit": (
        FusedMoE(method("ModelOptNvFp4FusedMoEMethod"), gemm1_clamp_limit=torch.ones(2)),
        "rescaled to one alpha",
    ),
    "NVFP4 experts of MegaMoE": (
        FusedMoE(method("ModelOptNvFp4FusedMoEMethod"), _mega_moe_weights_built=True),
        "MegaMoE",
    ),
    "compressed-tensors WNA16 experts with zero points": (
        FusedMoE(
            method("CompressedTensorsFusedMoEMethod"),
            scheme=method("CompressedTensorsWNA16MoE", strategy="group", sym=False, actorder=None),
            is_marlin_converted=True,
        ),
        "zero points",
    ),
    "experts in TRT-LLM blocks during an update": (
        FusedMoE(method("UnquantizedFusedMoEMethod"), use_flashinfer_trtllm_moe=True),
        "an update is open",
    ),
}


@pytest.mark.parametrize("form", REFUSED)
def test_a_form_that_cannot_be_compared_bitwise_is_refused_with_its_reason(form, record_property):
    layer, reason = REFUSED[form]
    model = type("Qwen3MoeForCausalLM", (nn.Module,), {})()
    model.layer = layer
    layout, _ = walk_model(model, rank=RankIdentity())
    assert layout.bindings == ()
    assert {unbound.resident for unbound in layout.unbound} == {resident.name for resident in layout.residents}
    assert all(reason in unbound.reason for unbound in layout.unbound)
    assert resident_problems(layout) == ()
    record_property("refused", layout.unbound[0].reason.partition(": ")[2])


def test_a_square_weight_stored_turned_is_read_turned():
    # Its shape is that of one stored straight: only the strides tell.
    turned = RowParallelLinear(method("UnquantizedLinearMethod"), {"weight": torch.zeros(256, 256).t()})
    model = type("Qwen3ForCausalLM", (nn.Module,), {})()
    model.layer = turned
    layout, _ = walk_model(model, rank=RankIdentity())
    assert "stored turned" in layout.unbound[0].reason
    turned.quant_method = method("W8A8Int8LinearMethod")
    turned.weight = nn.Parameter(torch.zeros(256, 256, dtype=torch.int8).t(), requires_grad=False)
    turned.weight_scale = nn.Parameter(torch.zeros(256, 1), requires_grad=False)
    layout, _ = walk_model(model, rank=RankIdentity())
    assert [len(binding.ops) for binding in layout.bindings] == [1, 0]
