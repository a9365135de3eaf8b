"""Locks of a running kernel beside the weights: a sound worker is observed and scrubbed while it serves."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from syncguard.digest import DEFAULT_KEY_SEED
from syncguard.engines.rank_probe import RankProbe
from syncguard.layout.fp4 import KERNEL_SCRATCH
from syncguard.layout.model import RankIdentity
from syncguard.layout.packed import SHAPE_ON_LOAD
from syncguard.layout.rules import RULES, Span


class Repacked(nn.Module):
    """A layer with a workspace, as Marlin's are."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3))
        self.workspace, self.table = torch.zeros(8, dtype=torch.int32), torch.ones(3)
        self.weight_shape = torch.tensor([4, 3])


def claims(view):
    weight = view.tensor("weight")
    view.bind_spans(weight, f"{view.name}.weight", tuple(Span.whole(size) for size in weight.shape))
    view.exempt(view.tensor("workspace"), KERNEL_SCRATCH)
    view.exempt(view.tensor("table"), "constant of a configuration")
    view.exempt(view.tensor("weight_shape"), SHAPE_ON_LOAD)


@pytest.fixture
def served(monkeypatch):
    monkeypatch.setitem(RULES, "Repacked", claims)
    model = nn.Sequential(Repacked())
    return model[0], RankProbe(RankIdentity(), lambda: model)


def wrong_in_a_cycle(probe):
    first = probe.scrub(DEFAULT_KEY_SEED, turn=0, budget_bytes=16)
    turns = [probe.scrub(DEFAULT_KEY_SEED, turn=turn, budget_bytes=16) for turn in range(first.turns)]
    return [words for turn in turns for words in turn.wrong]


@pytest.mark.parametrize("first_seen_busy", [False, True])
def test_a_workspace_that_a_kernel_has_locked_is_no_changed_state(served, first_seen_busy):
    layer, probe = served
    layer.workspace[2] = int(first_seen_busy)
    assert probe.observe(DEFAULT_KEY_SEED).altered == ()
    layer.workspace[2] = int(not first_seen_busy)
    assert probe.observe(DEFAULT_KEY_SEED).altered == ()
    assert wrong_in_a_cycle(probe) == []


def test_an_update_may_load_shards_in_another_order_than_at_the_start(served):
    layer, probe = served
    probe.observe(DEFAULT_KEY_SEED)
    layer.weight_shape.copy_(torch.tensor([2, 3]))
    assert probe.observe(DEFAULT_KEY_SEED).altered == ()
    assert wrong_in_a_cycle(probe) == []


def test_other_exempt_state_must_stay_what_it_was(served):
    layer, probe = served
    probe.observe(DEFAULT_KEY_SEED)
    layer.table[0] = 2
    assert probe.observe(DEFAULT_KEY_SEED).altered == ("0.table",)
    assert wrong_in_a_cycle(probe) == ["exempt state 0.table"]


def test_what_is_not_compared_is_named_all_the_same(served):
    _, probe = served
    assert [entry.resident for entry in probe.layout().exempt] == [
        "0.workspace",
        "0.table",
        "0.weight_shape",
    ]
