"""`syncguard audit` from outside, over real gRPC, against a worker of the embedded engine."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from syncguard.cli.demo.rigs import LocalRig
from syncguard.cli.demo.trainer import Trainer, balanced_rewards
from syncguard.cli.main import main
from syncguard.export.checkpoint import export_checkpoint
from syncguard.manifest.codec import save
from syncguard.spec import WeightVersion


@pytest.fixture
def trainer():
    return Trainer(run_id="run", seed=5)


@pytest.fixture
def rig(trainer, tmp_path):
    rig = LocalRig(trainer.save_checkpoint(tmp_path / "T0"), tp=2, dtype="float32")
    yield rig
    rig.close()


@pytest.fixture
def audit(rig, monkeypatch, capsys):
    def run(manifest, *more):
        monkeypatch.setattr(
            sys, "argv", ["syncguard", "audit", "--agent", rig.address, "--manifest", str(manifest), *more]
        )
        with pytest.raises(SystemExit) as exit_:
            main()
        return exit_.value.code, capsys.readouterr().out

    return run


@pytest.fixture
def manifest_of(tmp_path):
    def make(folder, label):
        path = tmp_path / f"{label}.json"
        save(export_checkpoint(folder, version=WeightVersion.parse(label)), path)
        return path

    return make


def step(trainer):
    from syncguard.cli.demo.trainer import Sample

    samples = [Sample((1, 2, 3, 4, 5 + i), 2) for i in range(2)]
    return trainer.train_step(samples, balanced_rewards(2))


def test_a_worker_with_the_exported_weights_is_0_and_shows_its_coverage(audit, rig, trainer, tmp_path, manifest_of):
    rig.push_folder(tmp_path / "T0", "run@0")
    code, out = audit(manifest_of(tmp_path / "T0", "run@0"))
    assert code == 0
    assert "MATCH" in out
    assert "25 of 25 tensors proven" in out


def test_the_right_weights_under_another_label_are_a_warning(audit, rig, tmp_path, manifest_of):
    rig.push_folder(tmp_path / "T0", "run@0")
    rig.set_label("something else")
    code, out = audit(manifest_of(tmp_path / "T0", "run@0"))
    assert code == 1
    assert "version_label" in out


def test_a_worker_that_missed_the_update_is_10_with_every_changed_tensor(audit, rig, trainer, tmp_path, manifest_of):
    rig.push_folder(tmp_path / "T0", "run@1")
    changed = set(step(trainer).changed)
    manifest = manifest_of(trainer.save_checkpoint(tmp_path / "T1"), "run@1")
    code, out = audit(manifest, "--json")
    told = json.loads(out)
    assert code == told["exit_code"] == 10
    assert {finding["fqn"] for finding in told["findings"]} == changed
    code, out = audit(manifest, "--findings", "2")
    assert code == 10
    assert "more findings" in out


def test_an_audit_never_makes_a_worker_ready(audit, rig, tmp_path, manifest_of):
    from syncguard.gate.client import AgentClient
    from syncguard.manifest.verdict import ReadinessState

    rig.push_folder(tmp_path / "T0", "run@0")
    assert audit(manifest_of(tmp_path / "T0", "run@0"))[0] == 0
    with AgentClient(rig.address) as client:
        assert client.status().readiness.state is not ReadinessState.READY


def test_a_resident_layer_without_a_rule_is_12_by_name(audit, rig, tmp_path, manifest_of):
    rig.push_folder(tmp_path / "T0", "run@0")
    for model in rig.worker.ranks:
        layer = torch.nn.Module()
        layer.weight = torch.nn.Parameter(torch.ones(3))
        model.model.layers[0].mlp.add_module("adapter", layer)
    code, out = audit(manifest_of(tmp_path / "T0", "run@0"), "--json")
    told = json.loads(out)
    assert code == told["exit_code"] == 12
    assert {f["resident"] for f in told["findings"]} == {"model.layers.0.mlp.adapter.weight"}


def test_an_export_that_lacks_a_tensor_is_11_by_name(audit, rig, tmp_path, manifest_of):
    from safetensors.torch import load_file, save_file

    rig.push_folder(tmp_path / "T0", "run@0")
    named = load_file(tmp_path / "T0" / "model.safetensors")
    del named["model.norm.weight"]
    (tmp_path / "less").mkdir()
    save_file(named, tmp_path / "less" / "model.safetensors")
    (tmp_path / "less" / "config.json").write_text("{}")
    code, out = audit(manifest_of(tmp_path / "less", "run@0"), "--json")
    told = json.loads(out)
    assert code == told["exit_code"] == 11
    assert {f["fqn"] for f in told["findings"]} == {"model.norm.weight"}


def test_an_engine_that_stopped_is_not_a_match(audit, rig, tmp_path, manifest_of):
    manifest = manifest_of(tmp_path / "T0", "run@0")
    rig.worker.stop()
    code, out = audit(manifest, "--json")
    assert code in {11, 13}
    assert json.loads(out).get("status") != "MATCH"
