from __future__ import annotations

import numpy as np
import pytest
import torch

from syncguard.layout.derived import DERIVED_RULES, check_derived
from syncguard.layout.model import Derived
from syncguard.layout.ops import Narrow
from syncguard.layout.padding import count_wrong_padding


def mla(dtype=torch.float32, heads=3, nope=4, v=5, rank=6):
    kv_b = torch.randn(heads * (nope + v), rank).to(dtype)
    by_head = kv_b.reshape(heads, nope + v, rank)
    return {"kv_b": kv_b, "w_kc": by_head[:, :nope].clone(), "w_vc": by_head[:, nope:].transpose(1, 2).clone()}


def gemma():
    weight = torch.randn(7).to(torch.bfloat16)
    return {"weight": weight, "gemma_weight": (weight + 1).clone()}


def scales():
    return {"scale": torch.tensor([[2.0], [2.0], [2.0], [5.0]])}


CASES = [
    (Derived("gemma_weight", "weight_plus_one", ("weight",)), gemma),
    (Derived("w_kc", "mla_w_kc", ("kv_b",)), mla),
    (Derived("w_vc", "mla_w_vc", ("kv_b",)), mla),
    (Derived("scale", "repeats_row:0", ("scale",), (Narrow(0, 1, 2),)), scales),
    (Derived("k_scale", "equals:1.0"), lambda: {"k_scale": torch.tensor(1.0)}),
]


@pytest.mark.parametrize(("claim", "make"), CASES, ids=lambda value: getattr(value, "rule", ""))
def test_a_derived_tensor_holds_until_one_element_changes(claim, make):
    tensors = make()
    assert check_derived(claim, tensors).ok
    found = tensors[claim.resident]
    found[(0,) * found.dim() if claim.rule != "repeats_row:0" else (1, 0)] += 1
    result = check_derived(claim, tensors)
    assert (result.ok, result.wrong_count) == (False, 1)


@pytest.mark.parametrize("kind", ["kc", "vc"])
def test_absorbed_weights_from_blocks_are_the_dequantized_values(kind):
    values = torch.randn(3 * 9, 6).to(torch.float8_e4m3fn)
    scale = torch.rand(14, 2) + 0.5
    spread = scale.repeat_interleave(2, 0)[:27].repeat_interleave(4, 1)[:, :6]
    by_head = (values.float() * spread).to(torch.bfloat16).reshape(3, 9, 6)
    found = by_head[:, :4].clone() if kind == "kc" else by_head[:, 4:].transpose(1, 2).clone()
    claim = Derived("w", f"mla_w_{kind}_dequantized:2x4", ("kv_b", "scale"))
    tensors = {"w": found, "kv_b": values, "scale": scale}
    assert check_derived(claim, tensors).ok
    scale[5 if kind == "kc" else 7, 1] *= 2
    assert not check_derived(claim, tensors).ok


def test_a_rule_without_a_check_does_not_hold():
    result = check_derived(Derived("x", "made_up"), {"x": torch.zeros(1)})
    assert (result.ok, result.detail) == (False, "no check for rule made_up")
    assert "made_up" not in DERIVED_RULES


def test_a_missing_source_and_a_shape_that_does_not_fit_do_not_hold():
    assert not check_derived(Derived("g", "weight_plus_one", ("w",)), {"g": torch.ones(2)}).ok
    assert not check_derived(Derived("g", "weight_plus_one", ("w",)), {"g": torch.ones(2), "w": torch.zeros(3)}).ok
    assert not check_derived(Derived("g", "mla_w_kc", ("w",)), {"g": torch.ones(2, 1, 1), "w": torch.zeros(3, 1)}).ok


def test_a_nan_never_passes():
    nan = torch.tensor([float("nan")])
    assert not check_derived(Derived("g", "weight_plus_one", ("w",)), {"g": nan, "w": nan}).ok


def test_numpy_tensors_are_checked_alike():
    tensors = {"g": np.ones(3, np.float32), "w": np.zeros(3, np.float32)}
    claim = Derived("g", "weight_plus_one", ("w",))
    assert check_derived(claim, tensors).ok
    tensors["g"][2] = 0
    assert check_derived(claim, tensors).detail == "first at (2,)"


@pytest.mark.parametrize("make", [np.zeros, torch.zeros], ids=["numpy", "torch"])
def test_wrong_padding_is_counted_by_element_and_a_negative_zero_is_wrong(make):
    view = make((4, 6))[1:, ::2]
    assert count_wrong_padding(view) == 0
    view[0, 1] = 1
    view[2, 2] = -0.0
    assert count_wrong_padding(view) == 2


def test_padding_may_be_another_byte():
    view = torch.full((5,), 0x7F, dtype=torch.uint8)
    view[3] = 0
    assert count_wrong_padding(view, 0x7F) == 1
