from __future__ import annotations

from io import StringIO

import pytest
import tiny_layers as tiny
import torch
from rich.console import Console

from syncguard.cli.layout import bar, explanation, print_explanation, print_summary, summary
from syncguard.errors import UsageError
from syncguard.layout.model import RankIdentity
from syncguard.layout.walk import walk_model
from syncguard.manifest.wire import layout_to_proto
from syncguard.spec import Box


def ranks(size, **kwargs):
    return [
        layout_to_proto(
            walk_model(tiny.qwen3(rank=rank, size=size, **kwargs), rank=RankIdentity(tp_rank=rank, tp_size=size))[0]
        )
        for rank in range(size)
    ]


def printed(write, value):
    out = Console(width=300, record=True, file=StringIO())
    write(out, value)
    return out.export_text()


def test_a_tensor_is_explained_by_rank_box_and_views():
    found = explanation(ranks(4), "model.layers.0.self_attn.k_proj.weight")
    assert [(h.rank, str(h.box)) for h in found.holders] == [
        ("tp0/4", "[0:8, 0:12]"),
        ("tp1/4", "[0:8, 0:12]"),
        ("tp2/4", "[8:16, 0:12]"),
        ("tp3/4", "[8:16, 0:12]"),
    ]
    text = printed(print_explanation, found)
    assert "█" * 20 + "·" * 20 in text
    assert "(replica)" in text
    assert "Narrow(dim=0, start=8, length=8)" in text


def test_a_name_that_nobody_holds_is_answered_with_the_nearest_ones():
    with pytest.raises(UsageError, match="k_proj"):
        explanation(ranks(1), "model.layers.0.attn.k_proj.weight")


def test_the_table_of_a_rank_counts_every_resident_in_one_state():
    (rank,) = ranks(1, tied=True)
    found = summary(rank)
    states = {}
    for row in found.classes.values():
        for state, count in row.states.items():
            states[state] = states.get(state, 0) + count
    assert states == {"bound": len(rank.residents) - 1, "alias": 1}
    assert "QKVParallelLinear" in printed(print_summary, found)


def test_what_loading_drops_is_counted_by_its_reason():
    (rank,) = ranks(1)
    rank.dropped.extend(["a.qzeros: no kernel reads them", "b.qzeros: no kernel reads them", "a.weight_shape: other"])
    found = summary(rank)
    assert found.as_dict()["dropped"][0] == "a.qzeros: no kernel reads them"
    text = printed(print_summary, found)
    assert "dropped on loading: 2 exported tensors, no kernel reads them" in text
    assert "dropped on loading: 1 exported tensors, other" in text


def test_what_has_no_rule_is_printed_with_its_reason():
    model = tiny.qwen3()
    model.model.layers[0].extra = torch.nn.Conv1d(1, 1, 1)
    found = summary(layout_to_proto(walk_model(model, rank=RankIdentity())[0]))
    assert found.classes["Conv1d"].states == {"unbound": 2}
    assert "no rule for layer class Conv1d" in printed(print_summary, found)


def test_a_bar_shows_at_least_one_cell():
    assert bar(Box((999,), (1,)), (1000,), cells=10) == "·" * 9 + "█"
    assert bar(Box((0, 0), (4, 4)), (4, 4), cells=3) == "███"


def test_what_the_engines_loader_placed_instead_of_a_rule_is_printed_as_recorded():
    from syncguard.engines.loader_record import record_loader
    from syncguard.layout.model import LogicalTensor

    class Placed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = torch.nn.Conv1d(1, 1, 1)

        def load_weights(self, weights):
            for name, tensor in weights:
                self.get_parameter(name.replace("conv", "inner")).copy_(tensor)

    names = {"conv.weight": (1, 1, 1), "conv.bias": (1,)}
    checkpoint = {name: LogicalTensor(name, "float32", shape) for name, shape in names.items()}
    layout, _ = walk_model(Placed(), rank=RankIdentity(), record=lambda model: record_loader(model, checkpoint))
    message = layout_to_proto(layout)
    assert summary(message).classes["Conv1d"].states == {"recorded": 2}
    assert "2 recorded" in printed(print_summary, summary(message))
    assert "inner.weight (recorded)" in printed(print_explanation, explanation([message], "conv.weight"))


def test_a_quantized_form_is_explained_under_the_name_that_says_how_it_was_made():
    from syncguard.layout.model import (
        Binding,
        CanonicalForm,
        LogicalTensor,
        RankLayout,
        ResidentTensor,
        Role,
        Shard,
    )
    from syncguard.layout.published import largest

    name = largest(["q.weight_scale", "k.weight_scale"]).named("qkv.weight_scale")
    scale = Shard(LogicalTensor(name, "float32", ()), Box((), ()))
    resident = ResidentTensor("qkv.weight_scale", "float32", (), (), Role.PARAMETER, "QKVParallelLinear")
    binding = Binding(scale, resident.name, form=CanonicalForm.QUANTIZED)
    message = layout_to_proto(RankLayout(RankIdentity(), "Model", (resident,), (binding,)).sealed())
    text = printed(print_explanation, explanation([message], name))
    assert "qkv.weight_scale#max.value(k.weight_scale; q.weight_scale)" in text
    assert "(quantized)" in text
