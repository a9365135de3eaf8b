"""Sizes that SGLang rounds up on a CPU so that ranks get equal parts (`configs/update_config.py` 0.5.23)."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from syncguard.layout.coverage import partition_problems, resident_problems
from syncguard.layout.model import RankIdentity
from syncguard.layout.ops import shape_after
from syncguard.layout.walk import walk_model

_spec = importlib.util.spec_from_file_location("tiny_layers", Path(__file__).with_name("tiny_layers.py"))
tiny = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(tiny)


def padded(rank, *, size=2, moe=False, exported=12, **config):
    """The tiny model, whose feed-forward width of 12 was padded to 16."""
    model = tiny.qwen3(rank=rank, size=size, moe=moe)
    name = "moe_intermediate_size" if moe else "intermediate_size"
    settings = {name: 16, f"original_{name}": exported, **config}
    for key, value in settings.items():
        setattr(model.config, key, value)
    return walk_model(model, rank=RankIdentity(tp_rank=rank, tp_size=size))[0]


def boxes(layouts, leaf):
    found = {}
    for layout in layouts:
        for binding in layout.bindings:
            if leaf in binding.shard.tensor.fqn:
                found.setdefault((binding.shard.tensor.fqn, binding.shard.tensor.shape), []).append(binding.shard.box)
    return found


@pytest.mark.parametrize("moe", [False, True])
@pytest.mark.parametrize("exported", [9, 12, 8, 15])
def test_the_exported_width_is_bound_and_the_rest_is_padding(moe, exported):
    layouts = [padded(rank, moe=moe, exported=exported) for rank in range(2)]
    for layout in layouts:
        assert not layout.unbound
        assert not resident_problems(layout)
    for leaf, shape in (("gate_proj", (exported, 12)), ("up_proj", (exported, 12)), ("down_proj", (12, exported))):
        found = boxes(layouts, leaf)
        assert found
        for (fqn, full), held in found.items():
            assert full == shape, fqn
            assert partition_problems(full, held) == ()


def test_every_padding_element_of_the_last_rank_must_be_zero():
    layout = padded(1)
    shapes = {r.name: r.shape for r in layout.residents}
    elements = {}
    for claim in layout.paddings:
        rows, columns = shape_after(shapes[claim.resident], claim.ops)
        leaf = claim.resident.split(".")[-2]
        elements[leaf] = elements.get(leaf, 0) + rows * columns
    assert elements["gate_up_proj"] == 2 * (2 * 4 * 12)
    assert elements["down_proj"] == 2 * (12 * 4)


def test_an_attention_output_of_the_padded_width_is_not_taken_for_feed_forward():
    """Found on a real server: 4 heads of 32 are 128 wide, as is a feed-forward of 96 padded for two ranks."""
    layouts = [padded(rank, intermediate_size=32, original_intermediate_size=24) for rank in range(2)]
    (found,) = {full for (_, full) in boxes(layouts, "o_proj")}
    assert found == (12, 32)


def test_two_widths_padded_to_one_are_refused_by_name():
    layout = padded(0, moe_intermediate_size=16, original_moe_intermediate_size=10)
    assert {u.resident.split(".")[-2] for u in layout.unbound} == {"gate_up_proj", "down_proj"}
    assert "padded form of" in layout.unbound[0].reason


def test_padded_heads_are_refused_by_name():
    layout = padded(0, original_num_attention_heads=3, original_total_num_kv_heads=2)
    assert {u.resident.split(".")[-2] for u in layout.unbound} == {"qkv_proj"}
