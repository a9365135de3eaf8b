"""Weights that no registry of torch lists: the walk finds them, or says that it cannot."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "layout"))
import tiny_layers as tiny

from syncguard.digest import DEFAULT_KEY_SEED
from syncguard.engines.rank_probe import RankProbe
from syncguard.layout.coverage import resident_problems
from syncguard.layout.model import RankIdentity
from syncguard.layout.walk import walk_model

HIDING_PLACES = {
    "a list of lists": lambda layer, tensor: setattr(layer, "copies", [[tensor]]),
    "a dict of lists": lambda layer, tensor: setattr(layer, "copies", {"a": [tensor]}),
    "a set": lambda layer, tensor: setattr(layer, "copies", {tensor}),
    "a kernel inside a quantization method": lambda layer, tensor: setattr(
        layer, "quant_method", SimpleNamespace(kernel=SimpleNamespace(packed=tensor))
    ),
    "a scheme inside a quantization method, in a list": lambda layer, tensor: setattr(
        layer, "quant_method", SimpleNamespace(scheme=SimpleNamespace(packed=[tensor]))
    ),
}


@pytest.fixture
def model():
    return tiny.qwen3()


def seen_by(model):
    layout, live = walk_model(model, rank=RankIdentity())
    return layout, {id(tensor): name for name, tensor in live.items()}


@pytest.mark.parametrize("place", HIDING_PLACES)
def test_a_copy_of_a_weight_is_found_where_an_engine_may_hide_it(model, place):
    copy = torch.ones(3, 5)
    HIDING_PLACES[place](model.model.layers[0].mlp, copy)
    layout, seen = seen_by(model)
    assert id(copy) in seen
    assert seen[id(copy)] in {unbound.resident for unbound in layout.unbound}


@pytest.mark.parametrize("place", HIDING_PLACES)
def test_a_hidden_copy_that_moves_is_read_where_it_is_now(model, place):
    layer = model.model.layers[0].mlp
    HIDING_PLACES[place](layer, torch.ones(3, 5))
    probe = RankProbe(RankIdentity(), lambda: model)
    before = probe.layout()
    HIDING_PLACES[place](layer, torch.ones(3, 6))
    after = probe.layout()
    assert {r.shape for r in after.residents} - {r.shape for r in before.residents} == {(3, 6)}


def test_a_layer_in_a_plain_list_is_walked_like_any_other(model):
    model.model.__dict__["extra"] = [tiny.RMSNorm(12)]
    layout, _ = seen_by(model)
    assert "model.extra.0.weight" in {binding.shard.tensor.fqn for binding in layout.bindings}
    assert resident_problems(layout) == ()


def test_a_plain_reference_to_a_registered_layer_changes_nothing(model):
    plain, _ = seen_by(model)
    model.model.__dict__["favourites"] = [model.model.layers[1].mlp, model.lm_head, model.model]
    referenced, _ = seen_by(model)
    assert referenced == plain


def test_a_layer_in_a_plain_list_that_is_replaced_is_read_where_it_is_now(model):
    model.model.__dict__["extra"] = [tiny.RMSNorm(12)]
    probe = RankProbe(RankIdentity(), lambda: model)
    before = probe.observe(DEFAULT_KEY_SEED)
    model.model.extra[0] = tiny.RMSNorm(12)
    model.model.extra[0].weight += 1
    after = probe.observe(DEFAULT_KEY_SEED)
    assert after.layout_fingerprint == before.layout_fingerprint
    assert sum(a != b for a, b in zip(before.partials, after.partials, strict=True)) == 1


def test_two_ways_to_one_name_hide_neither_tensor(model):
    model.model.layers[0].mlp.copies = {1: torch.ones(3), "1": torch.ones(4)}
    layout, _ = seen_by(model)
    assert {(3,), (4,)} <= {resident.shape for resident in layout.residents}


def test_a_tensor_inside_an_object_that_is_not_followed_is_listed_as_out_of_sight(model):
    model.model.layers[0].mlp.dispatcher = SimpleNamespace(expert_map=torch.arange(4))
    layout, _ = seen_by(model)
    assert layout.uncovered == ("model.layers.0.mlp.dispatcher: 1 tensors inside a SimpleNamespace",)


def test_buffers_of_a_process_group_are_no_weights_and_no_noise_in_every_verdict(model):
    group = type("GroupCoordinator", (), {})()
    group.buffer = torch.zeros(4)
    model.model.layers[0].mlp.tp_group = group
    layout, _ = seen_by(model)
    assert layout.uncovered == ()


def test_an_object_that_only_refers_to_weights_is_not_listed(model):
    model.model.layers[0].mlp.runner = SimpleNamespace(weight=model.model.layers[0].mlp.down_proj.weight)
    layout, _ = seen_by(model)
    assert layout.uncovered == ()


def test_a_calibrated_float_beside_an_unchanged_tensor_is_noticed(model):
    attention = tiny.Block()
    attention.__class__ = type("RadixAttention", (tiny.Block,), {})
    attention.k_scale, attention.k_scale_float = torch.ones(()), 1.0
    model.model.layers[0].self_attn.add_module("attn", attention)
    probe = RankProbe(RankIdentity(), lambda: model)
    assert probe.layout().unbound == ()
    attention.k_scale_float = 0.5
    assert [unbound.resident for unbound in probe.layout().unbound] == ["model.layers.0.self_attn.attn.k_scale"]
