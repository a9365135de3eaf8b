"""Exports in the workers' forms: nothing that was exported is lost, and no single worker decides for the others."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from syncguard.errors import ManifestError
from syncguard.export.checkpoint import export_checkpoint
from syncguard.export.entry import boxes_of
from syncguard.export.forms import forms_of
from syncguard.export.stream import ManifestBuilder
from syncguard.gate.client import AgentClient
from syncguard.layout.model import Binding, LogicalTensor, RankIdentity, RankLayout, ResidentTensor, Role, Shard
from syncguard.layout.published import agreed_forms, recipe_of
from syncguard.manifest.compare import compare
from syncguard.manifest.model import RankObservation, WorkerObservation
from syncguard.manifest.verdict import FindingCode, VerdictStatus
from syncguard.manifest.wire import layout_to_proto
from syncguard.spec import Box, WeightVersion

V = WeightVersion("run", 1)
FUSED = {
    "model.layers.0.mlp.experts.gate_up_proj": torch.randn(2, 4, 3).bfloat16(),
    "model.layers.0.mlp.experts.down_proj": torch.randn(2, 3, 2).bfloat16(),
    "model.norm.weight": torch.randn(3).bfloat16(),
}
LOST = {"w#fp8_per_tensor:bfloat16.values(w; never_exported)": "float8_e4m3fn", "v": "bfloat16"}
WEIGHTS = {"w": torch.randn(4, 4).bfloat16(), "v": torch.randn(4).bfloat16()}


def manifest_of(tensors, forms=None):
    builder = ManifestBuilder(V, forms=forms)
    builder.add_many(tensors.items())
    return builder.build()


def names(manifest):
    return [entry.fqn for entry in manifest.entries]


def holding(manifest, *held):
    """A worker of one rank that holds exactly these entries of a manifest, bit for bit."""
    entries = [entry for entry in manifest.entries if entry.fqn in held]
    residents = tuple(ResidentTensor(e.fqn, e.dtype, e.shape, (), Role.PARAMETER, "Linear") for e in entries)
    bindings = tuple(Binding(Shard(LogicalTensor(e.fqn, e.dtype, e.shape), Box.whole(e.shape)), e.fqn) for e in entries)
    layout = RankLayout(RankIdentity(), "Model", residents, bindings).sealed()
    rank = RankObservation(
        layout.rank,
        "a",
        1,
        False,
        layout.fingerprint,
        manifest.algorithm,
        manifest.key_seed_hex,
        tuple(entry.partial for entry in entries),
    )
    return WorkerObservation("w", 1, (layout,), (rank,), str(manifest.version))


@pytest.mark.parametrize(
    "forms", [None, {}, {"model.norm.weight": "bfloat16"}, {"x.experts.1.gate_proj.weight": "bf16"}]
)
def test_experts_in_one_tensor_that_no_worker_holds_apart_stay_in_the_manifest(forms, tmp_path):
    assert names(manifest_of(FUSED, forms)) == sorted(FUSED)
    save_file(FUSED, tmp_path / "model.safetensors")
    assert names(export_checkpoint(tmp_path, version=V, forms=forms)) == sorted(FUSED)


def test_a_worker_without_any_of_the_experts_does_not_match(tmp_path):
    manifest = manifest_of(FUSED)
    assert compare(manifest, holding(manifest, "model.norm.weight")).status is VerdictStatus.INCOMPLETE
    assert compare(manifest, holding(manifest, *FUSED)).status is VerdictStatus.MATCH


def test_a_tensor_whose_form_cannot_be_computed_is_not_lost(tmp_path):
    assert names(manifest_of(WEIGHTS, LOST)) == ["v", "w"]
    save_file(WEIGHTS, tmp_path / "model.safetensors")
    assert names(export_checkpoint(tmp_path, version=V, forms=LOST)) == ["v", "w"]


def test_a_worker_without_a_tensor_is_not_proven_because_another_claimed_a_form_of_it():
    manifest = manifest_of(WEIGHTS, LOST)
    verdict = compare(manifest, holding(manifest, "v"))
    assert verdict.status is VerdictStatus.INCOMPLETE
    assert [(finding.code, finding.fqn) for finding in verdict.findings] == [(FindingCode.NOT_HELD, "w")]


def test_a_cast_that_makes_finite_weights_infinite_is_refused():
    with pytest.raises(ManifestError, match="overflows"):
        manifest_of({"v": torch.full((4,), 1e20).bfloat16()}, {"v": "float16"})
    infinite = torch.tensor([float("inf"), 1.0]).bfloat16()
    assert names(manifest_of({"v": infinite}, {"v": "float16"})) == ["v"]


@pytest.mark.parametrize("fused_first", [True, False])
def test_an_expert_that_is_exported_alone_and_among_all_is_refused(fused_first):
    held = {f"m.experts.{e}.{p}_proj.weight": "bfloat16" for e in range(2) for p in ("gate", "up", "down")}
    both = [
        ("m.experts.gate_up_proj", torch.randn(2, 4, 3).bfloat16()),
        ("m.experts.1.up_proj.weight", torch.randn(2, 3).bfloat16()),
    ]
    first, second = both if fused_first else both[::-1]
    builder = ManifestBuilder(V, forms=held)
    builder.add(*first)
    with pytest.raises(ManifestError, match="a name twice"):
        builder.add(*second)


# --- what workers say of themselves


SOUND, WRONG = {"w": "bfloat16", "v": "float32"}, {"w": "float16", "v": "float32"}
QUANTIZED = {"w#fp8_per_row:bfloat16.values(w[0:4, 0:4])": "float8_e4m3fn", "v": "float32"}


@pytest.mark.parametrize("fleet", [[WRONG, SOUND, SOUND], [SOUND, WRONG, SOUND]])
def test_the_dtype_of_one_wrong_worker_is_not_taken_for_all(fleet):
    assert agreed_forms(fleet) == SOUND


def test_where_workers_disagree_evenly_nothing_is_cast():
    assert agreed_forms([WRONG, SOUND]) == {"v": "float32"}


def test_one_worker_that_quantizes_does_not_take_the_tensor_from_those_that_hold_it():
    assert agreed_forms([QUANTIZED, SOUND, SOUND]) == SOUND
    assert agreed_forms([QUANTIZED, SOUND]) == SOUND


def test_one_worker_that_holds_a_tensor_as_it_is_does_not_block_those_that_quantize_it():
    assert agreed_forms([SOUND, QUANTIZED, QUANTIZED]) == QUANTIZED


def test_a_worker_that_says_nothing_changes_nothing():
    assert agreed_forms([{}, QUANTIZED]) == QUANTIZED
    assert agreed_forms([]) == {}


@pytest.mark.parametrize("box", ["1 2:3", "9" * 5000 + ":3", "1::2", " 1:2", "1:2,3:4"])
def test_a_name_with_a_box_that_is_none_is_an_ordinary_name(box):
    assert recipe_of(f"w#max.value(x[{box}])") is None


@pytest.mark.parametrize("recipe", ["fp8_requantized.values(s)", "fp8_per_row.values(s)"])
def test_a_worker_that_claims_a_form_that_cannot_be_computed_is_refused_by_name(recipe):
    with pytest.raises(ManifestError):
        manifest_of({"s": torch.ones(4)}, {f"w#{recipe}": "float8_e4m3fn"})


# --- a draft model beside the served one


def layout_of(role, dtype, boxes):
    tensor = LogicalTensor("model.layers.0.mlp.down_proj.weight", dtype, (4, 4))
    bindings = tuple(Binding(Shard(tensor, box), f"r{index}") for index, box in enumerate(boxes))
    return RankLayout(RankIdentity(role=role), "Model", (), bindings).sealed()


SERVED = layout_of("target", "bfloat16", [Box((0, 0), (4, 2)), Box((0, 2), (4, 2))])
DRAFT = layout_of("draft", "float16", [Box((0, 0), (1, 4)), Box((1, 0), (3, 4))])


@pytest.mark.parametrize("layouts", [(SERVED, DRAFT), (DRAFT, SERVED)])
def test_a_draft_model_does_not_say_in_which_form_the_served_one_is_exported(layouts, monkeypatch):
    name = "model.layers.0.mlp.down_proj.weight"
    boxes = (Box((0, 0), (4, 2)), Box((0, 2), (4, 2)))
    assert forms_of(layouts) == {name: "bfloat16"}
    assert boxes_of(layouts) == {name: boxes}
    with AgentClient("127.0.0.1:1") as client:
        monkeypatch.setattr(client, "layouts", lambda: tuple(map(layout_to_proto, layouts)))
        assert client.forms() == {name: "bfloat16"}
        assert client.boxes() == {name: boxes}
