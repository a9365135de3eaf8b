"""The commands `diagnose`, `report` and `capture`, run as functions of a command line."""

import json
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from syncguard.cli.capture import capture
from syncguard.cli.diagnose import diagnose
from syncguard.cli.report import report
from syncguard.errors import BadInputError, RecordError, UnreachableError, UsageError
from syncguard.replay import ReplayEvidence, judge_replay, save_many

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
from lookalikes import make_record

app = typer.Typer()
for command in (capture, diagnose, report):
    app.command()(command)


def run(*arguments):
    return CliRunner().invoke(app, [str(part) for part in arguments])


@pytest.fixture
def saved(tmp_path):
    def save(*cases, name="r.safetensors"):
        save_many(tmp_path / name, [make_record(case, 3) for case in cases])
        return tmp_path / name

    return save


@pytest.mark.parametrize(
    ("case", "code"),
    [("clean update", 0), ("update too small", 1), ("two faults", 1), ("stale weights", 10), ("shift by one", 10)],
)
def test_the_exit_code_of_a_diagnosis_says_what_was_found(saved, case, code):
    result = run("diagnose", saved(case))
    assert result.exit_code == code
    assert "try next" in result.stdout


def test_the_worst_of_several_records_decides(saved):
    assert run("diagnose", saved("clean", "stale weights", "clean")).exit_code == 10


def test_json_is_one_object_with_every_diagnosis(saved):
    result = run("diagnose", saved("clean", "stale weights"), "--json")
    found = json.loads(result.stdout)
    assert [one["kind"] for one in found["diagnoses"]] == ["agreement", "stale weights"]
    assert found["exit_code"] == result.exit_code == 10
    assert found["diagnoses"][1]["next_experiment"]


def test_limits_of_a_diagnosis_can_be_set(saved):
    path = saved("constant offset on C")
    assert run("diagnose", path).exit_code == 10
    assert run("diagnose", path, "--mae-limit", "5").exit_code == 0


def test_pooled_responses_are_one_diagnosis(saved):
    found = json.loads(run("diagnose", saved("stale weights", "stale weights"), "--pooled", "--json").stdout)
    assert len(found["diagnoses"]) == 1


def test_a_damaged_record_is_an_error_and_no_diagnosis(tmp_path):
    (tmp_path / "r").write_bytes(b"x" * 100)
    assert isinstance(run("diagnose", tmp_path / "r").exception, RecordError)


def test_a_report_is_written_from_records_and_verdict_json(saved, tmp_path):
    path = saved("stale weights")
    verdict = judge_replay(ReplayEvidence.from_record(make_record("stale weights", 3)))
    steps = [{"step": "case 3", "readiness": "BLOCKED", "replay": verdict.as_dict()}]
    (tmp_path / "v.json").write_text(json.dumps(steps))
    result = run("report", path, "-o", tmp_path / "out" / "r.html", "--verdicts", tmp_path / "v.json", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["verdicts"] == 1
    text = (tmp_path / "out" / "r.html").read_text()
    assert "still scores as T0" in text
    assert "case 3" in text


@pytest.mark.parametrize("content", ["{", "[1, 2]", "3"])
def test_verdicts_that_are_not_objects_are_refused(saved, tmp_path, content):
    (tmp_path / "v.json").write_text(content)
    result = run("report", saved("clean"), "-o", tmp_path / "r.html", "--verdicts", tmp_path / "v.json")
    assert isinstance(result.exception, BadInputError)
    assert not (tmp_path / "r.html").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ["--prompt-ids", "1,2", "--state", "new"],
        ["--prompt-ids", "1,2", "--record", "r"],
        ["--prompt-ids", "1,x"],
        ["--prompt", "hello"],
        [],
    ],
)
def test_a_capture_that_cannot_mean_anything_is_refused_before_the_engine_is_asked_to_generate(tmp_path, arguments):
    result = run("capture", "-o", tmp_path / "r", "--engine", "http://127.0.0.1:1", *arguments)
    assert isinstance(result.exception, UsageError)


def test_an_engine_that_is_not_there_is_unreachable(tmp_path):
    result = run("capture", "-o", tmp_path / "r", "--engine", "http://127.0.0.1:1", "--prompt-ids", "1,2")
    assert isinstance(result.exception, UnreachableError)
    assert result.exception.exit_code == 13
    assert not (tmp_path / "r").exists()
