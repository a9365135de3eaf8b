"""`syncguard inside` on the embedded engine, and the search for the interval in which two sides part."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
import typer
from tiny_models import save_tiny_checkpoint, tiny_model
from typer.testing import CliRunner

from syncguard.cli.diagnose import diagnose
from syncguard.cli.inside import inside
from syncguard.engines.local import LocalWorker
from syncguard.engines.local_inside import look_inside_local
from syncguard.errors import EngineError, RecordError, SyncguardError, UsageError
from syncguard.replay import ReplayRecord, save_many
from syncguard.replay.inside import ACROSS_ENGINES, compare_routers, find_growth, join_ranks, locate
from syncguard.replay.intermediates import replay_operator, routers_of, usual_points
from syncguard.replay.packing import packed
from syncguard.replay.reference import trainer_points

LAYERS = 12
app = typer.Typer()
app.command()(inside)
app.command()(diagnose)


def run(*arguments):
    result = CliRunner().invoke(app, ["inside", *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def record(**changes) -> ReplayRecord:
    return ReplayRecord(
        **{
            "input_ids": [3, 14, 15, 92, 65, 35, 89, 79, 32, 38, 46, 26],
            "prompt_length": 4,
            "record_id": "r",
            **changes,
        }
    )


@pytest.fixture(scope="module", params=["qwen3", "qwen3_moe"])
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def folder(kind, tmp_path_factory):
    folder = tmp_path_factory.mktemp("inside")
    save_tiny_checkpoint(folder / "engine", kind, num_hidden_layers=LAYERS)
    return folder


@pytest.fixture
def saved(tmp_path):
    record().save(tmp_path / "r.safetensors")
    return tmp_path / "r.safetensors"


def trainer_with(folder, kind, name, factor):
    """Save the engine's checkpoint with one weight of the trainer scaled."""
    model = tiny_model(kind, num_hidden_layers=LAYERS)
    with torch.no_grad():
        model.get_parameter(name).mul_(factor)
    target = folder / f"{name}-{factor}"
    model.save_pretrained(target)
    return target


def test_equal_weights_agree_at_every_point_and_in_their_routing(folder, saved, kind):
    result = run(saved, "--engine", f"embedded:{folder / 'engine'}", "--trainer", folder / "engine", "--json")
    found = json.loads(result.stdout)
    assert (result.exit_code, found["parted"], found["exit_code"]) == (0, False, 0)
    assert len(found["passes"]) == 1
    assert len(found["passes"][0]["points"]) == 8
    assert [gap["flipped_share"] for gap in found["routing"]] == [0.0] * (LAYERS if kind == "qwen3_moe" else 0)


@pytest.mark.parametrize(
    ("name", "end"),
    [
        ("model.embed_tokens.weight", "model.embed_tokens"),
        ("model.layers.7.self_attn.o_proj.weight", "model.layers.7.self_attn"),
        ("model.layers.4.post_attention_layernorm.weight", "model.layers.4.mlp"),
        ("model.norm.weight", "model.norm"),
        ("lm_head.weight", "logits"),
    ],
)
def test_one_other_weight_is_found_from_few_points_over_all_layers_to_the_operator(
    folder, saved, kind, name, end, tmp_path
):
    trainer = trainer_with(folder, kind, name, 1.01)
    kept = tmp_path / "operator.safetensors"
    result = run(
        saved, "--engine", f"embedded:{folder / 'engine'}", "--trainer", trainer, "--save-operator", kept, "--json"
    )
    found = json.loads(result.stdout)
    assert result.exit_code == 10
    assert found["end"] == end, found["reason"]
    assert all(len(one["points"]) <= 10 for one in found["passes"])
    if end == "logits":
        assert found["operator"] is None
        return
    assert found["operator"]["module"] == end
    # The norm before the feed-forward is not part of it: on the same input the operator repeats, so it was inherited.
    assert found["operator"]["own_fault"] == (name != "model.layers.4.post_attention_layernorm.weight")
    if end.endswith(".mlp"):
        model = tiny_model(kind, num_hidden_layers=LAYERS)
        ours, theirs = replay_operator(lambda x: model.get_submodule(end)(x[None]), kept)
        assert (ours[0] - theirs).abs().max() < 1e-4


def test_the_terminal_names_the_interval_and_what_the_operator_does_by_itself(folder, saved, kind):
    trainer = trainer_with(folder, kind, "model.layers.7.self_attn.o_proj.weight", 1.01)
    result = run(saved, "--engine", f"embedded:{folder / 'engine'}", "--trainer", trainer)
    assert "between model.layers.6 and model.layers.7.self_attn" in " ".join(result.stdout.split())
    assert "it computes otherwise on the same input" in " ".join(result.stdout.split())
    assert ("routing" in result.stdout) == (kind == "qwen3_moe")


def test_chosen_points_are_looked_at_and_no_others(folder, saved, kind):
    trainer = trainer_with(folder, kind, "model.layers.7.self_attn.o_proj.weight", 1.01)
    points = ("--point", "model.layers.3", "--point", "model.layers.9")
    found = json.loads(
        run(saved, "--engine", f"embedded:{folder / 'engine'}", "--trainer", trainer, *points, "--json").stdout
    )
    assert [[one["name"] for one in each["points"]] for each in found["passes"]] == [
        ["model.layers.3", "model.layers.9"]
    ]
    assert (found["start"], found["end"], found["exit_code"]) == ("model.layers.3", "model.layers.9", 10)


def test_a_router_that_differs_shows_in_the_expert_ids(tmp_path):
    folder = tmp_path
    save_tiny_checkpoint(folder / "engine", "qwen3_moe", num_hidden_layers=LAYERS)
    record().save(folder / "r")
    model = tiny_model("qwen3_moe", num_hidden_layers=LAYERS)
    with torch.no_grad():
        gate = model.get_submodule("model.layers.5.mlp.gate").weight
        gate.copy_(gate.flip(0))
    model.save_pretrained(folder / "trainer")
    found = json.loads(
        run(folder / "r", "--engine", f"embedded:{folder / 'engine'}", "--trainer", folder / "trainer", "--json").stdout
    )
    assert found["end"] == "model.layers.5.mlp"
    assert [gap["flipped_share"] for gap in found["routing"][:5]] == [0.0] * 5
    assert found["routing"][5]["flipped_share"] > 0.3


@pytest.mark.parametrize(("tp", "ep"), [(2, 1), (4, 2)])
def test_ranks_are_summed_so_that_splits_make_no_difference(folder, kind, tp, ep):
    worker = LocalWorker(folder / "engine", tp_size=tp, ep_size=ep if kind == "qwen3_moe" else 1)
    names = [*usual_points(worker.ranks[0]), *routers_of(worker.ranks[0])]
    left = look_inside_local(worker, record(), names).arrays()
    model = tiny_model(kind, num_hidden_layers=LAYERS)
    right = trainer_points(model, record(), names)
    points = [name for name in names if not name.endswith(".experts")]
    found = find_growth(left, right, points, floor=ACROSS_ENGINES["float32"])
    assert found.end is None, found.reason
    assert left["logits"].shape == (9, 130)
    assert all(gap.flipped_share == 0 for gap in compare_routers(left, right, routers_of(worker.ranks[0])))


def test_a_point_that_the_engine_does_not_have_is_an_error(folder):
    with pytest.raises(EngineError, match="no such point"):
        look_inside_local(LocalWorker(folder / "engine"), record(), ["model.layers.77"])


def test_values_of_several_ranks_are_sums_where_they_differ_and_contradictions_elsewhere():
    one, other = np.full((2, 3), 1.0), np.full((2, 3), 2.0)
    values, contradicted = join_ranks(
        [
            {"l.mlp": one, "l.self_attn": one, "l": one, "norm": one},
            {"l.mlp": other, "l.self_attn": one, "l": one, "norm": other},
        ]
    )
    assert (values["l.mlp"] == 3).all()
    assert (values["l.self_attn"] == 1).all()
    assert contradicted == ("norm",)


@pytest.mark.parametrize("broken", range(40))
def test_the_search_ends_at_the_first_of_many_points_that_differs_with_few_points_a_pass(broken):
    points = ["model.embed_tokens", *(f"model.layers.{i}" for i in range(37)), "model.norm", "logits"]
    rng = np.random.default_rng(broken)
    base = {name: rng.normal(size=(4, 8)) for name in points}
    base |= {f"{name}.{part}": rng.normal(size=(4, 8)) for name in points[1:38] for part in ("self_attn", "mlp")}
    moved = dict(base)
    for name in points[broken:]:
        moved[name] = base[name] + 0.5
    if points[broken].startswith("model.layers"):
        moved[f"{points[broken]}.mlp"] = base[f"{points[broken]}.mlp"] + 0.5
    asked: list[int] = []

    def side(values):
        def give(names):
            asked.append(len(names))
            return {name: values[name] for name in names}

        return give

    reports = locate(side(base), side(moved), points, floor=1e-5, at_once=6)
    end = reports[-1].end
    assert end == (f"{points[broken]}.mlp" if points[broken].startswith("model.layers") else points[broken])
    assert max(asked) <= 8
    assert len(reports) <= 5


@pytest.mark.parametrize(
    ("changes", "arguments", "error"),
    [
        ({}, ["--engine", "127.0.0.1:9"], UsageError),
        ({}, ["--engine", "embedded:nowhere"], SyncguardError),
        ({}, ["--engine", "http://127.0.0.1:9"], SyncguardError),
        ({}, ["--engine", "embedded:nowhere", "--record-id", "other"], RecordError),
    ],
)
def test_what_cannot_be_looked_at_is_an_error(folder, saved, changes, arguments, error):
    with pytest.raises(error):
        run(saved, "--trainer", folder / "engine", *arguments)


def test_a_packed_record_is_not_looked_into_as_one_context(folder, tmp_path):
    save_many(tmp_path / "r", [packed([record(), record()])])
    with pytest.raises(RecordError, match="packed"):
        run(tmp_path / "r", "--trainer", folder / "engine", "--engine", f"embedded:{folder / 'engine'}")
