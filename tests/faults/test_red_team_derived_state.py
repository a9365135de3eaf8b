"""Derived state that its rule does not fit: a finding of one tensor, not the end of a whole observation."""

from __future__ import annotations

import pytest
import torch

from syncguard.layout.derived import check_derived
from syncguard.layout.model import Derived

TENSORS = {"found": torch.ones(2), "column": torch.ones(2, 1), "scale": torch.ones(2)}


@pytest.mark.parametrize(
    ("rule", "sources"),
    [
        ("expert_alphas:1", ("scale", "column")),
        ("marlin_global:float32", ("scale",)),
        ("repeats_row:9", ("column",)),
        ("no_such_rule", ()),
    ],
)
def test_a_rule_that_does_not_fit_the_live_tensors_does_not_hold_and_says_why(rule, sources):
    result = check_derived(Derived("found", rule, sources), TENSORS)
    assert not result.ok
    assert rule in result.detail
