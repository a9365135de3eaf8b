"""Experts of other ranks change places: what a rank holds of them has another layout, though its own slots kept theirs."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from syncguard.engines.rank_probe import RankProbe
from syncguard.export.forms import forms_of
from syncguard.layout.expert_grids import global_names
from syncguard.layout.experts import slots
from syncguard.layout.grids import bind_scalars
from syncguard.layout.model import RankIdentity
from syncguard.layout.ops import Select
from syncguard.layout.published import recipe_of
from syncguard.layout.quantized_on_load import bind_expert_values
from syncguard.layout.rules import RULES
from syncguard.spec import Box


class Experts(nn.Module):
    """The first of two ranks, with scales of the experts of both, as NVFP4 experts have them."""

    def __init__(self):
        super().__init__()
        self._num_local_routed, self._expert_storage_rank, self.layer_id = 2, 0, 0
        self.num_experts, self.num_fused_shared_experts = 4, 0
        self.input_scale = nn.Parameter(torch.arange(4.0))


def claims(view):
    bind_scalars(view, view.tensor("input_scale"), [f"{name}.input_scale" for name in global_names(view)])


class QuantizedExperts(nn.Module):
    """Two experts in two slots, quantized on line under one scale each."""

    def __init__(self):
        super().__init__()
        self._num_local_routed, self._expert_storage_rank, self.layer_id = 2, 0, 0
        self.num_experts, self.num_local_experts, self.num_fused_shared_experts = 4, 2, 0
        self.moe_runner_config = SimpleNamespace(params_dtype=torch.bfloat16)
        self.quant_method = SimpleNamespace(quant_config=SimpleNamespace(is_checkpoint_fp8_serialized=False))
        self.w2_weight = nn.Parameter(torch.zeros(2, 4, 3).to(torch.float8_e4m3fn), requires_grad=False)
        self.w2_weight_scale = nn.Parameter(torch.ones(2), requires_grad=False)


def quantized_claims(view):
    weight = view.tensor("w2_weight")
    bind_expert_values(
        view,
        [
            (s.index, weight, f"{s.name}.down_proj", [f"{s.name}.down_proj"], WHOLE, (4, 3), (Select(0, s.index),))
            for s in slots(view)
        ],
    )


WHOLE = Box.whole((4, 3))


@pytest.fixture
def placed(monkeypatch):
    """SGLang's live map of one layer, as the probe finds it."""
    metadata = SimpleNamespace(physical_to_logical_map_cpu=torch.arange(4)[None])
    module = SimpleNamespace(get_global_expert_location_metadata=lambda: metadata)
    monkeypatch.setitem(sys.modules, "sglang.srt.eplb.expert_location", module)
    monkeypatch.setitem(RULES, "Experts", claims)
    monkeypatch.setitem(RULES, "QuantizedExperts", quantized_claims)
    return metadata


@pytest.mark.parametrize("order", [[0, 1, 3, 2], [1, 0, 2, 3], [3, 1, 2, 0]])
def test_a_layout_follows_the_experts_of_every_rank(placed, order):
    model = nn.Sequential(Experts())
    probe = RankProbe(RankIdentity(), lambda: model)
    before = probe.layout()
    placed.physical_to_logical_map_cpu = torch.tensor([order])
    after = probe.layout()
    assert [binding.shard.tensor.fqn for binding in after.bindings] == [f"0.{expert}.input_scale" for expert in order]
    assert after.fingerprint != before.fingerprint
    placed.physical_to_logical_map_cpu = torch.arange(4)[None]
    assert probe.layout() == before


def test_forms_of_experts_that_are_quantized_on_line_do_not_depend_on_their_slots(placed):
    model = nn.Sequential(QuantizedExperts())
    probe = RankProbe(RankIdentity(), lambda: model)
    before = forms_of([probe.layout()])
    assert len(before) == 4
    assert all(recipe_of(name) for name in before)
    placed.physical_to_logical_map_cpu = torch.tensor([[1, 0, 2, 3]])
    assert forms_of([probe.layout()]) == before, "a manifest that was exported before a rebalance stays good"
    placed.physical_to_logical_map_cpu = torch.tensor([[1, 1, 2, 3]])
    assert len(forms_of([probe.layout()])) == 2, "replicas of one expert are one form"
