"""Commands through `main`, as a shell runs them: exit codes, one-line errors, JSON."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest
from safetensors.numpy import save_file

from syncguard.cli.main import main
from syncguard.manifest.codec import load
from syncguard.manifest.model import ExemptPolicy


@pytest.fixture
def run(monkeypatch, capsys):
    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["syncguard", *map(str, arguments)])
        try:
            main()
            code = 0
        except SystemExit as exit_:
            code = exit_.code
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.fixture
def checkpoint(tmp_path):
    def make(name="checkpoint", **changes):
        folder = tmp_path / name
        folder.mkdir()
        tensors = {
            "a.weight": np.arange(12, dtype=np.float32).reshape(3, 4),
            "b.weight": np.ones(5, dtype=np.float16),
            **{key.replace("_", "."): value for key, value in changes.items()},
        }
        (folder / "config.json").write_text("{}")
        save_file({key: value for key, value in tensors.items() if value is not None}, folder / "model.safetensors")
        return folder

    return make


@pytest.fixture
def manifest(run, checkpoint, tmp_path):
    def make(name, version="run@1", **changes):
        path = tmp_path / f"{name}.json"
        code, _, err = run("export", checkpoint(name, **changes), "-o", path, "--weight-version", version)
        assert code == 0, err
        return path

    return make


@pytest.mark.parametrize(
    "command",
    ["agent", "gate", "export", "audit", "diff", "layout", "capture", "diagnose", "inside", "study", "report", "demo"],
)
def test_every_command_explains_itself_and_its_exit_codes(run, command):
    code, out, _ = run(command, "--help")
    assert code == 0
    assert "Exit codes" in out


def test_export_says_what_it_wrote(run, checkpoint, tmp_path):
    code, out, _ = run("export", checkpoint(), "-o", tmp_path / "m.json", "--weight-version", "run@7", "--json")
    told = json.loads(out)
    assert code == told["exit_code"] == 0
    assert (told["tensors"], told["bytes"], told["weight_version"]) == (2, 58, "run@7")
    assert json.loads((tmp_path / "m.json").read_text())["manifest_id"] == told["manifest_id"]


def test_an_exemption_of_an_export_has_a_name_and_a_reason_and_is_kept(run, checkpoint, tmp_path):
    path = tmp_path / "m.json"
    code, *_ = run("export", checkpoint(), "-o", path, "--exempt", "a.weight=tied in the engine = not sent")
    assert code == 0
    assert load(path).exempt == (ExemptPolicy("a.weight", "tied in the engine = not sent"),)


def test_diff_of_equal_exports_is_0_although_the_versions_differ(run, manifest):
    code, out, _ = run("diff", manifest("x", "run@1"), manifest("y", "run@2"))
    assert code == 0
    assert "no tensor differs" in out


def test_diff_names_each_kind_of_difference_and_exits_10(run, manifest):
    left = manifest("x", gone_weight=np.zeros(2, np.float32), d_weight=np.zeros(4, np.float32))
    changed = np.arange(12, dtype=np.float32).reshape(3, 4)
    changed[2, 3] += 1
    right = manifest(
        "y",
        a_weight=changed,
        b_weight=np.ones(5, np.float32),
        d_weight=np.zeros((2, 2), np.float32),
        new_weight=np.zeros(1, np.float32),
    )
    code, out, _ = run("diff", left, right, "--json")
    told = json.loads(out)
    assert code == told["exit_code"] == 10
    assert {d["fqn"]: d["kind"] for d in told["differences"]} == {
        "a.weight": "content",
        "b.weight": "dtype",
        "d.weight": "shape",
        "gone.weight": "removed",
        "new.weight": "added",
    }
    assert told["same"] == 0


def test_diff_under_two_keys_is_incomplete_and_not_a_difference(run, checkpoint, tmp_path):
    folder = checkpoint()
    for name, seed in (("x", "00" * 32), ("y", "11" * 32)):
        code, *_ = run("export", folder, "-o", tmp_path / name, "--key-seed", seed)
        assert code == 0
    code, _, err = run("diff", tmp_path / "x", tmp_path / "y")
    assert code == 11
    assert "key seed" in err


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("export", "NOWHERE", "-o", "m.json"), 2, "NOWHERE"),
        (("export", "CHECKPOINT", "-o", "m.json", "--weight-version", "seven"), 2, "RUN@STEP"),
        (("export", "CHECKPOINT", "-o", "m.json", "--key-seed", "xyz"), 2, "hex"),
        (("export", "CHECKPOINT", "-o", "m.json", "--exempt", "a.weight"), 2, "NAME=REASON"),
        (("export", "CHECKPOINT", "-o", "m.json", "--exempt", "no.such.tensor=a reason"), 2, "exemption"),
        (("diff", "none.json", "none.json"), 2, "none.json"),
        (("audit", "--agent", "127.0.0.1:1", "--manifest", "MANIFEST", "--timeout-s", "2"), 13, "127.0.0.1:1"),
        (("audit", "--agent", "192.0.2.1:1", "--manifest", "MANIFEST"), 2, "loopback"),
        (("audit", "--agent", "127.0.0.1:1", "--manifest", "MANIFEST", "--tls-ca", "x"), 2, "--tls-key"),
        (("audit", "--agent", "127.0.0.1:1", "--manifest", "FUTURE"), 14, "specification"),
        (("audit", "--agent", "127.0.0.1:1", "--manifest", "TRUNCATED"), 2, "manifest"),
    ],
)
@pytest.mark.parametrize("as_json", [False, True])
def test_bad_input_is_one_line_with_its_exit_code_and_nothing_is_left(
    run, checkpoint, manifest, tmp_path, monkeypatch, arguments, code, said, as_json
):
    monkeypatch.chdir(tmp_path)
    whole = manifest("good").read_text()
    document = json.loads(whole)
    document["spec_version"] = 2
    (tmp_path / "future").write_text(json.dumps(document))
    (tmp_path / "truncated").write_text(whole[: len(whole) // 2])
    places = {
        "CHECKPOINT": checkpoint(),
        "MANIFEST": tmp_path / "good.json",
        "FUTURE": tmp_path / "future",
        "TRUNCATED": tmp_path / "truncated",
    }
    before = sorted(path.name for path in tmp_path.iterdir())
    found, out, err = run(*(places.get(a, a) for a in arguments), *(["--json"] if as_json else []))
    assert found == code
    if as_json:
        told = json.loads(out)
        assert told["exit_code"] == code
        assert said in " ".join(map(str, told["error"].values()))
    else:
        assert said in err
        assert len(err.strip().splitlines()) == 1
        assert "Traceback" not in err
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_a_wrong_option_is_exit_code_2(run):
    assert run("diff", "--no-such-option")[0] == 2
    assert run("no-such-command")[0] == 2
