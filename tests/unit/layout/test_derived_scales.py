from __future__ import annotations

import pytest
import torch

from syncguard.layout.derived import DERIVED_RULES, check_derived
from syncguard.layout.derived_scales import SCALE_RULES
from syncguard.layout.model import Derived

INPUTS = torch.tensor([[0.5, 0.75], [0.25, 0.125], [0.6, 0.3]])
WEIGHTS = torch.tensor([[1.1, 1.3], [0.7, 0.9], [2.1, 1.7]])

DUE = {
    "max_product": INPUTS.max() * WEIGHTS.max(),
    "inverse_max": 1 / INPUTS.max(),
    "max_of": INPUTS.max(),
    "marlin_global:bfloat16": (INPUTS.max().to(torch.bfloat16) * 2.0**119).reshape(1),
    "marlin_global:float16": (INPUTS.max().to(torch.float16) * 2.0**7).reshape(1),
    "expert_alphas:0": INPUTS.max() * WEIGHTS[:, 0],
    "expert_alphas:1": INPUTS.max() * WEIGHTS[:, 1],
    "product": INPUTS * WEIGHTS,
    "inverse_product": 1 / (INPUTS * WEIGHTS),
    "inverse_first": 1 / INPUTS[:, 0],
    "least": INPUTS.min().expand(3).clone(),
    "least_of_row": INPUTS.min(dim=1).values,
    "divided": (1 / WEIGHTS) * INPUTS,
}

TWO = {"max_product", "expert_alphas:0", "expert_alphas:1", "product", "inverse_product", "divided"}


def test_every_rule_of_scales_is_tried():
    assert {rule.partition(":")[0] for rule in DUE} == set(SCALE_RULES)
    assert set(SCALE_RULES) <= set(DERIVED_RULES)


@pytest.mark.parametrize("rule", DUE)
def test_a_derived_scale_holds_bit_for_bit_until_it_or_its_source_changes(rule):
    sources = ("inputs", "weights") if rule in TWO else ("inputs",)
    claim = Derived("found", rule, sources)
    tensors = {"found": DUE[rule].clone(), "inputs": INPUTS.clone(), "weights": WEIGHTS.clone()}
    assert check_derived(claim, tensors).ok
    raw = tensors["found"].view({2: torch.int16, 4: torch.int32}[tensors["found"].element_size()])
    raw[(0,) * raw.dim()] ^= 1
    result = check_derived(claim, tensors)
    assert (result.ok, result.wrong_count) == (False, 1)
    raw[(0,) * raw.dim()] ^= 1
    for source in sources:
        before = tensors[source].clone()
        tensors[source] *= 1.5
        assert not check_derived(claim, tensors).ok
        tensors[source].copy_(before)
    assert check_derived(claim, tensors).ok


def test_a_derived_scale_in_another_dtype_does_not_hold():
    claim = Derived("found", "max_of", ("inputs",))
    assert not check_derived(claim, {"found": INPUTS.max().to(torch.float64), "inputs": INPUTS}).ok
