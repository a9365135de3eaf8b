"""Looking inside a real SGLang rank: its intermediate outputs against those of the trainer's model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.numpy import load_file
from tiny_models import save_tiny_checkpoint, tiny_model

from syncguard.engines.sglang_inside import DIRECTORY_VARIABLE, look_inside
from syncguard.engines.sglang_launch import launch
from syncguard.errors import EngineError, UnsupportedError
from syncguard.replay import ReplayRecord
from syncguard.replay.inside import find_growth, inner_points
from syncguard.replay.intermediates import capturing

pytestmark = pytest.mark.sglang

STANDINS = Path(__file__).parents[2] / "scripts" / "sglang-cpu"
LAYERS = 3
FLOOR = 2e-5  # float32, two implementations of attention and norm


@pytest.fixture(scope="module")
def base_url(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inside")
    checkpoint = save_tiny_checkpoint(folder / "checkpoint", num_hidden_layers=LAYERS)
    (folder / "captures").mkdir()
    with launch(
        checkpoint,
        log_path=folder / "server.log",
        dtype="float32",
        standins=STANDINS,
        env_extra={DIRECTORY_VARIABLE: str(folder / "captures")},
        timeout_s=600,
    ) as server:
        yield server.base_url


@pytest.fixture(scope="module")
def record():
    return ReplayRecord(input_ids=[3, 14, 15, 92, 65, 35, 89, 79, 32, 38, 46, 26], prompt_length=4)


def of_trainer(model, record, names):
    """The trainer scores all but the last token's row, as a prefill of the same ids does; both keep every token."""
    with capturing(model, names) as kept, torch.no_grad():
        model(input_ids=torch.tensor(record.input_ids).unsqueeze(0), use_cache=False)
    return kept.arrays()


def test_every_point_of_the_engine_agrees_with_the_trainer(base_url, record):
    (answer,) = look_inside(base_url, record)
    assert answer.modules == ("model.embed_tokens", *(f"model.layers.{i}" for i in range(LAYERS)), "model.norm")
    theirs = of_trainer(tiny_model(num_hidden_layers=LAYERS), record, answer.modules)
    found = find_growth(load_file(answer.file), theirs, answer.modules, floor=FLOOR)
    assert found.end is None, found.reason


def test_a_trainer_with_one_other_weight_is_located_first_by_layer_then_inside_it(base_url, record):
    model = tiny_model(num_hidden_layers=LAYERS)
    with torch.no_grad():
        model.get_submodule("model.layers.1.mlp.down_proj").weight.mul_(1.01)
    (answer,) = look_inside(base_url, record)
    found = find_growth(load_file(answer.file), of_trainer(model, record, answer.modules), answer.modules, floor=FLOOR)
    assert (found.start, found.end) == ("model.layers.0", "model.layers.1")
    names = ("model.layers.0", *inner_points("model.layers.1"), "model.layers.1")
    (inner,) = look_inside(base_url, record, names)
    found = find_growth(load_file(inner.file), of_trainer(model, record, names), names, floor=FLOOR)
    assert (found.start, found.end) == ("model.layers.1.self_attn", "model.layers.1.mlp")


def test_a_module_that_the_engine_does_not_have_is_an_error_and_the_server_goes_on(base_url, record):
    with pytest.raises(EngineError, match="no such module"):
        look_inside(base_url, record, ["model.layers.77"])
    assert look_inside(base_url, record)[0].file


def test_a_server_that_was_not_started_for_it_does_not_look_inside(serve, record):
    with pytest.raises(UnsupportedError, match=DIRECTORY_VARIABLE):
        look_inside(serve("qwen3", "float32", 1).server.base_url, record)
