"""Forms that need a GPU to come about, built as their source says they lie: shown by construction only, never on live layers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from syncguard.layout.coverage import partition_problems, resident_problems
from syncguard.layout.model import RankIdentity
from syncguard.layout.ops import apply_ops
from syncguard.layout.walk import walk_model


class Group:
    def __init__(self, rank, size):
        self.rank_in_group, self.world_size = rank, size


class Fp8LinearMethod:
    block_quant = True
    weight_block_size = (128, 128)


class RowParallelLinear(nn.Module):
    def __init__(self, rank, weight, scale):
        super().__init__()
        self.output_size, self.input_size = 256, 1024
        self.tp_group = Group(rank, 2)
        self.quant_method = Fp8LinearMethod()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.weight_scale_inv = nn.Parameter(scale, requires_grad=False)


def walked(layers):
    found = []
    for rank, layer in enumerate(layers):
        model = type("Qwen3ForCausalLM", (nn.Module,), {})()
        model.o_proj = layer
        found.append(walk_model(model, rank=RankIdentity(tp_rank=rank, tp_size=2)))
    return found


def check(found, exported):
    boxes = {name: [] for name in exported}
    for layout, live in found:
        assert layout.unbound == ()
        assert resident_problems(layout) == ()
        for binding in layout.bindings:
            box, name = binding.shard.box, binding.shard.tensor.fqn
            due = exported[name][tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))]
            view = apply_ops(live[binding.resident].detach(), binding.ops)
            assert torch.equal(raw(view), raw(due))
            assert binding.shard.tensor.dtype == str(due.dtype).removeprefix("torch.")
            boxes[name].append(box)
    for name, tensor in exported.items():
        assert partition_problems(tuple(tensor.shape), boxes[name]) == ()


def raw(tensor):
    return tensor.reshape(-1).clone(memory_format=torch.contiguous_format).view(torch.uint8)


def bytes_as(dtype, *shape):
    return torch.randint(0, 120, shape, dtype=torch.uint8).view(dtype)


def test_scales_packed_for_deepgemm_are_bound_as_they_were_sent(record_property):
    # Four exponents an int32, one row of scales for each output row, column-major (fp8_utils.py:2285-2340).
    weight = bytes_as(torch.float8_e4m3fn, 256, 1024)
    scale = torch.randint(0, 2**31 - 1, (256, 2), dtype=torch.int32)
    layers = []
    for rank in range(2):
        part = scale[:, rank : rank + 1].t().contiguous().t()
        layers.append(RowParallelLinear(rank, weight[:, rank * 512 : rank * 512 + 512].contiguous(), part))
        layers[-1].weight_scale_inv.format_ue8m0 = True
    check(walked(layers), {"o_proj.weight": weight, "o_proj.weight_scale_inv": scale})
    record_property("constructed", "fp8 block, UE8M0 scales packed for DeepGEMM, sent packed")


def test_packed_scales_that_two_ranks_would_share_are_refused():
    layer = RowParallelLinear(0, bytes_as(torch.float8_e4m3fn, 256, 384), torch.zeros(256, 1, dtype=torch.int32))
    layer.input_size = 768
    layer.weight_scale_inv.format_ue8m0 = True
    ((layout, _), *_) = walked([layer])
    assert layout.bindings == ()
    assert "is not made of blocks of 512" in layout.unbound[0].reason


def test_fnuz_values_with_doubled_scales_are_bound_in_their_own_dtype(record_property):
    # fp8_utils.py:409-430: the byte 0x80 becomes 0 and scales double; the exporter applies the same to what it exports.
    weight = bytes_as(torch.float8_e4m3fnuz, 256, 1024)
    scale = torch.rand(2, 8)
    layers = [
        RowParallelLinear(
            rank, weight[:, rank * 512 : rank * 512 + 512].contiguous(), scale[:, rank * 4 : rank * 4 + 4].contiguous()
        )
        for rank in range(2)
    ]
    check(walked(layers), {"o_proj.weight": weight, "o_proj.weight_scale_inv": scale})
    record_property("constructed", "fp8 block as e4m3fnuz with doubled scales")


@pytest.mark.parametrize("wrong", ["float32 under a packed flag", "unaligned block"])
def test_scales_that_contradict_their_flags_are_refused(wrong):
    if wrong == "unaligned block":
        layer = RowParallelLinear(0, bytes_as(torch.float8_e4m3fn, 256, 96), torch.rand(2, 1))
        layer.input_size = 192
    else:
        layer = RowParallelLinear(0, bytes_as(torch.float8_e4m3fn, 256, 512), torch.rand(2, 4))
        layer.weight_scale_inv.format_ue8m0 = True
    ((layout, _), *_) = walked([layer])
    assert layout.bindings == ()
    assert len(layout.unbound) == 2


class UnquantizedFusedMoEMethod:
    w13_swiglu_interleaved = True


class FusedMoE(nn.Module):
    def __init__(self, w13, w2):
        super().__init__()
        self.hidden_size, self.intermediate_size_per_partition = 8, 4
        self.num_local_experts, self.layer_id = 2, 0
        self.quant_method = UnquantizedFusedMoEMethod()
        self.w13_weight = nn.Parameter(w13, requires_grad=False)
        self.w2_weight = nn.Parameter(w2, requires_grad=False)


def test_alternating_rows_of_gate_and_up_are_told_apart(record_property):
    # unquant.py:922-971: rows g0, u0, g1, u1, ...
    exported = {
        f"experts.{e}.{leaf}.weight": torch.randn(*shape)
        for e in range(2)
        for leaf, shape in (("gate_proj", (4, 8)), ("up_proj", (4, 8)), ("down_proj", (8, 4)))
    }
    pairs = [
        torch.stack([exported[f"experts.{e}.gate_proj.weight"], exported[f"experts.{e}.up_proj.weight"]], dim=1)
        for e in range(2)
    ]
    w13 = torch.stack(pairs).reshape(2, 8, 8).contiguous()
    w2 = torch.stack([exported[f"experts.{e}.down_proj.weight"] for e in range(2)])
    model = type("Qwen3MoeForCausalLM", (nn.Module,), {})()
    model.experts = FusedMoE(w13, w2)
    check([walk_model(model, rank=RankIdentity())], exported)
    record_property("constructed", "experts with alternating rows of gate and up")
