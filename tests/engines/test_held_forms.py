"""A trainer that keeps float32 before a worker in bfloat16: both sides of `syncguard export --agent` and `Gate.forms()`."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from syncguard import Gate, ManifestBuilder, WeightVersion
from syncguard.cli.demo.rigs import LocalRig
from syncguard.cli.demo.trainer import Trainer
from syncguard.cli.main import main
from syncguard.gate.client import AgentClient
from syncguard.manifest.codec import load
from syncguard.manifest.verdict import VerdictStatus


@pytest.fixture
def trainer():
    return Trainer(run_id="run", seed=5)


@pytest.fixture
def checkpoint(trainer, tmp_path):
    return trainer.save_checkpoint(tmp_path / "T0")


@pytest.fixture
def rig(checkpoint):
    rig = LocalRig(checkpoint, tp=2, dtype="bfloat16")
    rig.push_folder(checkpoint, "run@0")
    yield rig
    rig.close()


@pytest.fixture
def syncguard(monkeypatch, capsys):
    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["syncguard", *map(str, arguments)])
        try:
            main()
            code = 0
        except SystemExit as exit_:
            code = exit_.code or 0
        return code, json.loads(capsys.readouterr().out)

    return run


def test_an_export_in_the_workers_forms_is_proven_and_one_without_is_a_mismatch(rig, checkpoint, tmp_path, syncguard):
    manifest = tmp_path / "t0.json"
    version = ("--weight-version", "run@0", "--json")
    code, _ = syncguard("export", checkpoint, "-o", manifest, *version)
    assert code == 0
    code, found = syncguard("audit", "--agent", rig.address, "--manifest", manifest, "--json")
    assert code == 10
    assert {finding["code"] for finding in found["findings"]} == {"dtype_differs"}
    code, told = syncguard("export", checkpoint, "-o", manifest, "--agent", rig.address, *version)
    assert code == 0
    assert "cast float32 to bfloat16 rounded to nearest even" in told["source"]
    code, found = syncguard("audit", "--agent", rig.address, "--manifest", manifest, "--json")
    assert (code, found["findings"]) == (0, [])
    assert found["evidence"]["exported_from"] == load(manifest).source


def test_a_trainer_in_the_loop_casts_by_what_the_gate_says_and_one_wrong_element_is_found(rig, trainer):
    version = WeightVersion("run", 0)
    weights = dict(trainer.export())
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    with Gate([rig.address]) as gate, AgentClient(rig.address) as agent:
        forms = gate.forms()
        assert set(forms.values()) == {"bfloat16"}
        for wrong in (False, True):
            exported = {name: tensor.clone() for name, tensor in weights.items()}
            if wrong:
                exported["lm_head.weight"][3, 3] += 1.0
            builder = ManifestBuilder(version, forms=forms)
            builder.add_many(exported.items())
            verdict = agent.audit(builder.build())
            assert verdict.status is (VerdictStatus.MISMATCH if wrong else VerdictStatus.MATCH)
            assert {finding.fqn for finding in verdict.findings} == ({"lm_head.weight"} if wrong else set())
