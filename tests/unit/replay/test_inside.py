import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from syncguard.errors import RecordError, ScoreError
from syncguard.replay.inside import FLOORS, compare_routing, find_growth, inner_points
from syncguard.replay.intermediates import (
    capturing,
    replay_operator,
    residual_stream,
    saving_operator_input,
    stream_of,
    usual_points,
)

sys.path.insert(0, str(Path(__file__).parents[2] / "engines"))
from tiny_models import tiny_model

IDS = torch.tensor([[3, 14, 15, 92, 65, 35, 89, 79, 32]])


def captured(model, names=None):
    with capturing(model, names or usual_points(model)) as kept, torch.no_grad():
        model(input_ids=IDS, use_cache=False)
    return kept.arrays()


@pytest.fixture(scope="module")
def reference():
    model = tiny_model(num_hidden_layers=4)
    return usual_points(model), captured(model)


def test_the_usual_points_are_embedding_layers_and_final_norm_in_order(reference):
    names, points = reference
    assert names == ["model.embed_tokens", *(f"model.layers.{i}" for i in range(4)), "model.norm", "logits"]
    assert points["model.layers.2"].shape == (9, 64)
    assert points["logits"].shape == (9, 130)


def test_the_same_model_agrees_at_every_point(reference):
    names, points = reference
    found = find_growth(captured(tiny_model(num_hidden_layers=4)), points, names)
    assert (found.start, found.end) == (None, None)
    assert all(point.relative == 0 for point in found.points)


@pytest.mark.parametrize(
    ("module", "start", "end"),
    [
        ("model.embed_tokens", "", "model.embed_tokens"),
        ("model.layers.0.mlp.up_proj", "model.embed_tokens", "model.layers.0"),
        ("model.layers.2.self_attn.o_proj", "model.layers.1", "model.layers.2"),
        ("model.layers.3.input_layernorm", "model.layers.2", "model.layers.3"),
        ("model.norm", "model.layers.3", "model.norm"),
        ("lm_head", "model.norm", "logits"),
    ],
)
def test_the_interval_of_one_changed_weight_is_found(reference, module, start, end):
    names, points = reference
    model = tiny_model(num_hidden_layers=4)
    with torch.no_grad():
        model.get_submodule(module).weight.mul_(1.01)
    found = find_growth(captured(model), points, names)
    assert (found.start, found.end) == (start, end)
    assert found.refine == inner_points(end)


def test_more_points_inside_the_interval_tell_attention_from_feed_forward(reference):
    _names, _ = reference
    model, other = tiny_model(num_hidden_layers=4), tiny_model(num_hidden_layers=4)
    with torch.no_grad():
        other.get_submodule("model.layers.2.mlp.down_proj").weight.mul_(1.01)
    inner = ["model.layers.1", *inner_points("model.layers.2"), "model.layers.2"]
    assert find_growth(captured(other, inner), captured(model, inner), inner).end == "model.layers.2.mlp"


def test_rounding_of_bfloat16_is_no_growth_but_a_changed_weight_is(reference):
    names, points = reference
    half = tiny_model(num_hidden_layers=4, dtype=torch.bfloat16)
    assert find_growth(captured(half), points, names, floor=FLOORS["bfloat16"]).end is None
    with torch.no_grad():
        half.get_submodule("model.layers.1.mlp.down_proj").weight.mul_(-1)
    assert find_growth(captured(half), points, names, floor=FLOORS["bfloat16"]).end == "model.layers.1"


def test_points_of_other_tokens_or_missing_points_are_refused(reference):
    names, points = reference
    with pytest.raises(ScoreError, match="different computations"):
        find_growth({name: value[1:] for name, value in points.items()}, points, names)
    with pytest.raises(ScoreError, match="not captured"):
        find_growth({}, points, names)
    with pytest.raises(ScoreError, match="not finite"):
        find_growth({name: value * np.nan for name, value in points.items()}, points, names)


def test_hooks_are_gone_after_the_block_and_after_an_error():
    model = tiny_model()
    with pytest.raises(RuntimeError, match="boom"), capturing(model, usual_points(model)) as kept:
        raise RuntimeError("boom")
    model(input_ids=IDS, use_cache=False)
    assert kept.values == {}
    with pytest.raises(ScoreError, match="no such module"), capturing(model, ["model.layers.9"]):
        pass


def test_an_engines_pair_of_hidden_and_residual_is_their_sum():
    one, two = torch.ones(3, 4), torch.full((3, 4), 2.0)
    assert torch.equal(residual_stream((one, two)), one + two)
    assert torch.equal(residual_stream((one, torch.ones(1))), one)
    assert torch.equal(residual_stream(one), one)
    with pytest.raises(ScoreError):
        residual_stream((None,))


def test_a_residual_that_a_batch_object_carries_is_added_to_a_layers_output():
    one, two = torch.ones(3, 4), torch.full((3, 4), 2.0)
    batch = SimpleNamespace(residual_stream=SimpleNamespace(residual=two))
    assert torch.equal(residual_stream(stream_of("model.layers.0", (None, one, batch), {}, one)), one + two)
    assert torch.equal(residual_stream(stream_of("model.layers.0.mlp", (one, batch), {}, one)), one)
    assert torch.equal(residual_stream(stream_of("model.norm", (), {}, (one, two))), one)


def test_an_operator_is_replayed_on_its_saved_input(tmp_path):
    model = tiny_model()
    with saving_operator_input(model, "model.layers.1.mlp", tmp_path / "op"), torch.no_grad():
        model(input_ids=IDS, use_cache=False)
    mine, saved = replay_operator(model.get_submodule("model.layers.1.mlp"), tmp_path / "op")
    assert torch.equal(mine, saved)
    other, saved = replay_operator(tiny_model(seed=1).get_submodule("model.layers.1.mlp"), tmp_path / "op")
    assert not torch.allclose(other, saved)
    assert [entry.name for entry in tmp_path.iterdir()] == ["op"]


def test_an_operator_that_was_not_called_or_a_damaged_file_is_an_error(tmp_path):
    with (
        pytest.raises(ScoreError, match="not called"),
        saving_operator_input(tiny_model(), "model.norm", tmp_path / "op"),
    ):
        pass
    (tmp_path / "op").write_bytes(b"x" * 40)
    with pytest.raises(RecordError):
        replay_operator(torch.nn.Identity(), tmp_path / "op")


def test_routing_is_compared_as_sets_orders_and_weights():
    left, right = [[0, 1], [2, 3], [1, 0], [4, 5]], [[0, 1], [3, 2], [1, 2], [4, 5]]
    weights = np.array([[0.7, 0.3], [0.6, 0.4], [0.9, 0.1], [0.5, 0.5]])
    other = np.array([[0.7, 0.3], [0.4, 0.6], [0.8, 0.2], [0.5, 0.5]])
    found = compare_routing(left, right, weights, other)
    assert (found.flipped_share, found.reordered_share, found.first_flipped) == (0.25, 0.25, 2)
    assert found.weight_mae == pytest.approx(0.1 / 7)
    with pytest.raises(ScoreError):
        compare_routing(left, [[0, 1]], weights, other)
