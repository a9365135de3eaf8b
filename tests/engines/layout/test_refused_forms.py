"""Forms whose memory is not what was exported: refused by name, never guessed. Each is a row of the README's table."""

from __future__ import annotations

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
    "mxfp8": (RowParallelLinear(fp8(block_quant=True, use_mxfp8=True), {"weight": VALUES}), "mxfp8"),
    "AWQ": (RowParallelLinear(method("AWQLinearMethod"), PACKED), "AWQLinearMethod"),
    "GPTQ Marlin": (RowParallelLinear(method("GPTQMarlinLinearMethod"), PACKED), "GPTQMarlinLinearMethod"),
    "NVFP4": (RowParallelLinear(method("ModelOptFp4LinearMethod"), NVFP4), "ModelOptFp4LinearMethod"),
    "AMX packing": (
        RowParallelLinear(
            method("UnquantizedLinearMethod"), {"weight": torch.zeros(256, 256)}, use_intel_amx_backend=True
        ),
        "AMX",
    ),
    "MXFP4 experts": (FusedMoE(method("Mxfp4MoEMethod")), "Mxfp4MoEMethod"),
    "fp8 per-tensor experts, scales of another form": (
        FusedMoE(method("Fp8MoEMethod", block_quant=False)),
        "not one scale an expert",
    ),
    "NVFP4 experts": (FusedMoE(method("ModelOptNvFp4FusedMoEMethod")), "ModelOptNvFp4FusedMoEMethod"),
    "experts turned for triton kernels": (
        FusedMoE(method("UnquantizedFusedMoEMethod"), use_triton_kernels=True),
        "use_triton_kernels",
    ),
    "experts in flashinfer trtllm blocks": (
        FusedMoE(method("UnquantizedFusedMoEMethod"), use_flashinfer_trtllm_moe=True),
        "use_flashinfer_trtllm_moe",
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
