"""Looking inside a real SGLang rank: its intermediate outputs against those of the trainer's model."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import torch
import typer
from safetensors.numpy import load_file
from tiny_models import save_tiny_checkpoint, tiny_model
from typer.testing import CliRunner

from syncguard.cli.diagnose import diagnose
from syncguard.cli.inside import inside
from syncguard.engines.sglang import SglangEngine
from syncguard.engines.sglang_inside import DIRECTORY_VARIABLE, forcing, list_points, look_inside
from syncguard.engines.sglang_launch import launch
from syncguard.errors import EngineError, UnsupportedError
from syncguard.replay import ReplayRecord
from syncguard.replay.inside import ACROSS_ENGINES, compare_routers, find_growth, join_ranks
from syncguard.replay.reference import own_error, trainer_points

pytestmark = pytest.mark.sglang

STANDINS = Path(__file__).parents[2] / "scripts" / "sglang-cpu"
LAYERS = 3


@dataclass(frozen=True)
class Looked:
    """A server that looks inside, what it serves, and the floor under which two implementations agree."""

    url: str
    kind: str
    dtype: str
    checkpoint: Path

    @property
    def floor(self) -> float:
        return ACROSS_ENGINES[self.dtype]

    def model(self):
        return tiny_model(self.kind, dtype=getattr(torch, self.dtype), num_hidden_layers=LAYERS)


@pytest.fixture(
    scope="module", params=[("qwen3", "float32", 1), ("qwen3_moe", "float32", 1), ("qwen3_moe", "bfloat16", 2)], ids=str
)
def looked(request, tmp_path_factory):
    kind, dtype, tp = request.param
    folder = tmp_path_factory.mktemp("inside")
    checkpoint = save_tiny_checkpoint(
        folder / "checkpoint", kind, dtype=getattr(torch, dtype), num_hidden_layers=LAYERS
    )
    (folder / "captures").mkdir()
    with launch(
        checkpoint,
        log_path=folder / "server.log",
        dtype=dtype,
        tp=tp,
        standins=STANDINS,
        env_extra={DIRECTORY_VARIABLE: str(folder / "captures")},
        timeout_s=600,
    ) as server:
        yield Looked(server.base_url, kind, dtype, checkpoint)


@pytest.fixture(scope="module")
def record():
    return ReplayRecord(input_ids=[3, 14, 15, 92, 65, 35, 89, 79, 32, 38, 46, 26], prompt_length=4, record_id="r")


def of_engine(looked, record, names):
    """The points of all ranks together, and a promise that no rank contradicts another."""
    joined, contradicted = join_ranks([load_file(answer.file) for answer in look_inside(looked.url, record, names)])
    assert contradicted == ()
    return joined


def command(looked, record, tmp_path, *arguments, model=None):
    """Run `syncguard inside` against the server and return its JSON object."""
    record.save(tmp_path / "r.safetensors")
    trainer = looked.checkpoint
    if model is not None:
        trainer = tmp_path / "trainer"
        model.save_pretrained(trainer)
    app = typer.Typer()
    app.command()(inside)
    app.command()(diagnose)
    words = ["inside", tmp_path / "r.safetensors", "--engine", looked.url, "--trainer", trainer, "--json", *arguments]
    result = CliRunner().invoke(app, [str(word) for word in words])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    found = json.loads(result.stdout)
    assert result.exit_code == found["exit_code"]
    return found


def test_every_point_of_the_engine_agrees_with_the_trainer(looked, record):
    listed = list_points(looked.url)
    layers = [f"model.layers.{i}" for i in range(LAYERS)]
    assert listed.modules == ("model.embed_tokens", *layers, "model.norm", "logits")
    assert listed.routers == (() if looked.kind == "qwen3" else tuple(f"{name}.mlp.experts" for name in layers))
    names = (*listed.modules, *listed.routers)
    left, right = of_engine(looked, record, names), trainer_points(looked.model(), record, names)
    found = find_growth(left, right, listed.modules, floor=looked.floor)
    assert found.end is None, found.reason
    assert left["logits"].shape == (9, 130)
    for gap in compare_routers(left, right, listed.routers):
        assert gap.flipped_share == 0 if looked.dtype == "float32" else gap.flipped_share < 0.2, gap
        assert gap.weight_mae < looked.floor


def test_the_command_finds_all_points_agreeing(looked, record, tmp_path):
    found = command(looked, record, tmp_path)
    assert (found["parted"], found["exit_code"], found["ranks_contradict"]) == (False, 0, [])
    assert len(found["routing"]) == (0 if looked.kind == "qwen3" else LAYERS)


@pytest.mark.parametrize("part", ["self_attn", "mlp"])
def test_a_trainer_with_one_other_weight_is_located_down_to_the_operator(looked, record, tmp_path, part):
    model = looked.model()
    name = {
        "self_attn": "model.layers.1.self_attn.o_proj.weight",
        "mlp": "model.layers.1.mlp.down_proj.weight"
        if looked.kind == "qwen3"
        else "model.layers.1.mlp.experts.down_proj",
    }[part]
    with torch.no_grad():
        model.get_parameter(name).mul_(1.01 if looked.dtype == "float32" else 3.0)
    kept = tmp_path / "operator.safetensors"
    found = command(looked, record, tmp_path, "--save-operator", kept, model=model)
    assert found["end"] == f"model.layers.1.{part}", found["reason"]
    assert found["exit_code"] == 10
    assert found["operator"]["own_fault"]
    # The saved input runs on any implementation: the right weights repeat the engine's output, the others do not.
    right, wrong = (own_error(one, found["end"], kept, record).relative for one in (looked.model(), model))
    assert right < looked.floor < wrong


def test_a_router_that_differs_shows_in_the_expert_ids(looked, record, tmp_path):
    if looked.kind == "qwen3":
        assert command(looked, record, tmp_path)["routing"] == []
        return
    model = looked.model()
    with torch.no_grad():
        gate = model.get_submodule("model.layers.1.mlp.gate").weight
        gate.copy_(gate.flip(0))
    found = command(looked, record, tmp_path, model=model)
    assert found["end"] == "model.layers.1.mlp", found["reason"]
    shares = [gap["flipped_share"] for gap in found["routing"]]
    assert shares[0] == 0
    assert shares[1] > 0.3


def test_a_module_that_the_engine_does_not_have_is_an_error_and_the_server_goes_on(looked, record):
    for modules, operator in ((["model.layers.77"], ""), (["model.norm"], "model.layers.77")):
        with pytest.raises(EngineError, match="no such module"):
            look_inside(looked.url, record, modules, operator=operator)
    # A module whose output is no hidden state fails the look, not the forward that all requests share.
    with pytest.raises(EngineError, match="no tensor"):
        look_inside(looked.url, record, ["logits_processor"])
    assert look_inside(looked.url, record)[0].file


def test_an_operator_that_is_never_called_is_an_error_and_the_server_goes_on(looked, record):
    with pytest.raises(EngineError, match="not called"):
        look_inside(looked.url, record, ["model.norm"], operator="lm_head")
    assert look_inside(looked.url, record)[0].file


def test_forced_ids_reach_only_our_request_and_another_one_is_reported(looked, record):
    with SglangEngine(looked.url) as engine:
        ids = record.input_ids.tolist()
        found = engine.score_by_decode(ids, prompt_length=record.prompt_length)
        assert found.scoring.response_ids == tuple(ids[record.prompt_length :])
        with (
            httpx.Client(base_url=looked.url, timeout=300, trust_env=False) as http,
            pytest.raises(EngineError, match="the server is not idle"),
            forcing(http, ids[4:], 4),
        ):
            engine.generate([5] * 40, max_new_tokens=3, seed=0)
        assert engine.score_by_decode(ids, prompt_length=record.prompt_length).scoring is not None


def test_a_server_that_was_not_started_for_it_does_not_look_inside(serve, record):
    url = serve("qwen3", "float32", 1).server.base_url
    with pytest.raises(UnsupportedError, match=DIRECTORY_VARIABLE):
        look_inside(url, record)
    with SglangEngine(url) as engine:
        found = engine.score_by_decode(record.input_ids.tolist(), prompt_length=4)
    assert found.scoring is None
    assert DIRECTORY_VARIABLE in found.cannot
