from __future__ import annotations

import time
import tracemalloc
from collections import defaultdict

import pytest
import tiny_layers as tiny
import torch

from syncguard.layout.coverage import partition_problems, resident_problems
from syncguard.layout.model import RankIdentity
from syncguard.layout.ops import apply_ops
from syncguard.layout.walk import walk_model


def walked(**kwargs):
    model = tiny.qwen3(**kwargs)
    size = kwargs.get("size", 1)
    layout, live = walk_model(model, rank=RankIdentity(tp_rank=kwargs.get("rank", 0), tp_size=size))
    return model, layout, live


CASES = [
    {"size": size, "moe": moe, "ep": ep, "tied": tied}
    for size in (1, 2, 4)
    for moe, ep in ((False, False), (True, False), (True, True))
    for tied in (False, True)
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_resident_element_of_every_rank_is_claimed_exactly_once(case):
    for rank in range(case["size"]):
        _, layout, live = walked(rank=rank, **case)
        assert layout.unbound == ()
        assert resident_problems(layout) == ()
        assert set(live) == {resident.name for resident in layout.residents}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_ranks_together_hold_every_logical_element(case):
    boxes = defaultdict(set)
    shapes = {}
    for rank in range(case["size"]):
        _, layout, _ = walked(rank=rank, **case)
        for shard in layout.shards():
            boxes[shard.tensor.fqn].add(shard.box)
            assert shapes.setdefault(shard.tensor.fqn, shard.tensor.shape) == shard.tensor.shape
    for fqn, held in boxes.items():
        assert partition_problems(shapes[fqn], sorted(held)) == (), fqn
    assert shapes["model.layers.1.self_attn.k_proj.weight"] == (16, 12)
    assert ("model.layers.0.mlp.experts.3.up_proj.weight" in shapes) == case["moe"]


def test_the_views_read_the_rows_that_the_loader_would_write():
    model, layout, live = walked(rank=1, size=2)
    weight = model.model.layers[0].self_attn.qkv_proj.weight
    weight.copy_(torch.arange(weight.numel()).reshape(weight.shape))
    by_name = {b.shard.tensor.fqn: b for b in layout.bindings}
    key = by_name["model.layers.0.self_attn.k_proj.weight"]
    assert key.shard.box.offsets == (8, 0)
    assert torch.equal(apply_ops(live[key.resident], key.ops), weight[16:24])


def test_kv_heads_that_several_ranks_hold_are_bound_on_each_of_them():
    held = []
    for rank in range(4):
        _, layout, _ = walked(rank=rank, size=4)
        held += [s.box.offsets[0] for s in layout.shards() if s.tensor.fqn == "model.layers.0.self_attn.v_proj.weight"]
    assert held == [0, 0, 8, 8]


def test_a_tied_head_is_an_alias_under_its_own_checkpoint_name():
    _, layout, _ = walked(tied=True)
    heads = [b for b in layout.bindings if b.shard.tensor.fqn == "lm_head.weight"]
    assert [(b.alias, b.resident) for b in heads] == [(True, "lm_head.weight")]
    assert {r.name: r.alias_of for r in layout.residents}["lm_head.weight"] == "model.embed_tokens.weight"


def test_a_layer_class_without_a_rule_is_named_and_not_skipped():
    model = tiny.qwen3()
    model.model.layers[0].mlp.strange = type("StrangeLinear", (torch.nn.Conv1d,), {})(3, 3, 1)
    layout, _ = walk_model(model, rank=RankIdentity())
    assert {u.resident for u in layout.unbound} == {
        "model.layers.0.mlp.strange.weight",
        "model.layers.0.mlp.strange.bias",
    }
    assert all("StrangeLinear" in u.reason for u in layout.unbound)
    assert resident_problems(layout) == ()


def test_a_plain_tensor_attribute_that_no_rule_knows_is_named():
    model = tiny.qwen3()
    model.model.layers[0].self_attn.o_proj.fused_copy = torch.ones(3)
    layout, _ = walk_model(model, rank=RankIdentity())
    assert [u.resident for u in layout.unbound] == ["model.layers.0.self_attn.o_proj.fused_copy"]


def test_an_attribute_that_views_a_parameter_is_an_alias():
    model = tiny.qwen3()
    attn = model.model.layers[0].self_attn
    attn.view_of_rows = attn.qkv_proj.weight.data[3:7]
    layout, _ = walk_model(model, rank=RankIdentity())
    assert layout.unbound == ()
    alias = {r.name: r.alias_of for r in layout.residents}["model.layers.0.self_attn.view_of_rows"]
    assert alias == "model.layers.0.self_attn.qkv_proj.weight"


def test_an_emptied_parameter_is_named_and_never_bound():
    model = tiny.qwen3()
    proj = model.model.layers[0].self_attn.o_proj
    proj.weight = torch.nn.Parameter(torch.zeros(0), requires_grad=False)
    layout, _ = walk_model(model, rank=RankIdentity())
    assert [u.resident for u in layout.unbound] == ["model.layers.0.self_attn.o_proj.weight"]
    assert "no element" in layout.unbound[0].reason


def test_a_weight_of_another_shape_than_its_layer_says_is_refused():
    model = tiny.qwen3()
    model.model.layers[1].mlp.down_proj.weight = torch.nn.Parameter(torch.zeros(12, 15), requires_grad=False)
    layout, _ = walk_model(model, rank=RankIdentity())
    assert [u.resident for u in layout.unbound] == ["model.layers.1.mlp.down_proj.weight"]
    assert "(12, 15)" in layout.unbound[0].reason


def test_every_expert_slot_is_bound_to_the_expert_that_the_live_map_names():
    model = tiny.qwen3(moe=True)
    layout, _ = walk_model(model, rank=RankIdentity(), placement=lambda layer, physical: (physical + layer) % 2)
    held = [s.tensor.fqn for s in layout.shards() if s.tensor.fqn.endswith("down_proj.weight")]
    assert held == [
        f"model.layers.{layer}.mlp.experts.{(p + layer) % 2}.down_proj.weight" for layer in (0, 1) for p in range(4)
    ]


def test_the_fingerprint_follows_the_layout_and_nothing_else():
    assert walked()[1].fingerprint == walked()[1].fingerprint
    assert walked()[1].fingerprint != walked(rank=1, size=2)[1].fingerprint


def test_a_rank_of_a_hundred_layers_with_256_experts_is_bound_within_the_budget():
    layers = [
        tiny.Block(mlp=tiny.Block(experts=tiny.FusedMoE(4, 2, 256, layer_id=index)), norm=tiny.RMSNorm(4))
        for index in range(100)
    ]
    model = tiny.causal_lm(
        "Qwen3MoeForCausalLM",
        layers,
        embed=tiny.VocabParallelEmbedding(64, 4),
        head=tiny.ParallelLMHead(64, 4),
        norm=tiny.RMSNorm(4),
    )
    tracemalloc.start()
    start = time.process_time()
    layout, _ = walk_model(model, rank=RankIdentity())
    walked_s = time.process_time() - start
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(layout.bindings) == 100 * (256 * 3 + 1) + 3
    assert walked_s < 8  # 2 s without the memory trace, which costs a factor of three
    assert peak_bytes < 200e6
