"""Experts of other ranks change places: what a rank holds of them has another layout, though its own slots kept theirs."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from syncguard.engines.rank_probe import RankProbe
from syncguard.layout.expert_grids import global_names
from syncguard.layout.grids import bind_scalars
from syncguard.layout.model import RankIdentity
from syncguard.layout.rules import RULES


class Experts(nn.Module):
    """The first of two ranks, with scales of the experts of both, as NVFP4 experts have them."""

    def __init__(self):
        super().__init__()
        self._num_local_routed, self._expert_storage_rank, self.layer_id = 2, 0, 0
        self.num_experts, self.num_fused_shared_experts = 4, 0
        self.input_scale = nn.Parameter(torch.arange(4.0))


def claims(view):
    bind_scalars(view, view.tensor("input_scale"), [f"{name}.input_scale" for name in global_names(view)])


@pytest.fixture
def placed(monkeypatch):
    """SGLang's live map of one layer, as the probe finds it."""
    metadata = SimpleNamespace(physical_to_logical_map_cpu=torch.arange(4)[None])
    module = SimpleNamespace(get_global_expert_location_metadata=lambda: metadata)
    monkeypatch.setitem(sys.modules, "sglang.srt.eplb.expert_location", module)
    monkeypatch.setitem(RULES, "Experts", claims)
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
