"""The demo as a user runs it: every step must come out as it says, on the embedded engine and on a real server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

STANDINS = Path(__file__).parents[2] / "scripts" / "sglang-cpu"


def run_demo(tmp_path, *arguments):
    report = tmp_path / "report.html"
    done = subprocess.run(
        [sys.executable, "-m", "syncguard", "demo", "--json", "--report", str(report), *arguments],
        capture_output=True,
        text=True,
        timeout=880,
        env=os.environ | {"SYNCGUARD_SGLANG_STANDINS": str(STANDINS)},
        check=False,
    )
    assert done.stdout.startswith("{"), done.stdout + done.stderr
    told = json.loads(done.stdout)
    assert "error" not in told, told
    assert not [step["wrong"] for step in told["steps"] if step["wrong"]]
    assert done.returncode == told["exit_code"] == 0
    assert report.stat().st_size > 10_000
    return {step["step"].partition(":")[0]: step for step in told["steps"]}


def kinds(step):
    return {finding["kind"] for finding in step["findings"]}


def check_story(steps, *, tp, exact):
    """What the issue of the main job asks of each step, looked up in the evidence and not in the demo's own word."""
    ready = {name for name, step in steps.items() if step["readiness"] == "READY"}
    blocked = {name for name, step in steps.items() if step["readiness"] == "BLOCKED"}
    assert {"start", "clean", "resumed", "repaired", "case 1"} == ready
    assert {"case 3", "torn", "case 2"} | ({"one rank"} if tp > 1 else set()) == blocked
    clean = steps["clean"]
    assert clean["coverage"]["proven_tensors"] == clean["coverage"]["manifest_tensors"] == 25
    assert clean["replay"]["status"] == "PASS"
    stale = steps["case 3"]
    assert {f["tensor"] for f in stale["findings"] if f["kind"] == "stale"}
    assert stale["replay"]["fingerprint"] == "stale"
    figures = {f["label"]: f["mae"] for f in stale["replay"]["figures"]}
    assert figures["B_new-B_old"] <= figures["B_old-C_old"] + 1e-6 < figures["C_new-C_old"]
    assert {"stale", "torn"} <= kinds(steps["torn"])
    if tp > 1:
        assert {f["rank"] for f in steps["one rank"]["findings"] if f["tensor"]} == {f"tp1/{tp}"}
    assert steps["case 1"]["diagnosis"]["side"] == "A"
    assert steps["case 2"]["diagnosis"]["side"] == "C"
    if exact:
        assert {f["label"]: f["mae"] for f in clean["replay"]["figures"]}["B_new-C_new"] < 1e-5


@pytest.mark.parametrize(
    ("dtype", "push", "tp"), [("fp32", "tensors", 2), ("bf16", "disk", 2), ("bf16", "tensors", 1), ("fp32", "disk", 4)]
)
@pytest.mark.timeout(400)
def test_the_demo_on_the_embedded_engine(tmp_path, dtype, push, tp):
    steps = run_demo(tmp_path, "--dtype", dtype, "--push", push, "--tp", str(tp))
    check_story(steps, tp=tp, exact=dtype == "fp32")


@pytest.mark.sglang
@pytest.mark.parametrize(("dtype", "push", "tp"), [("fp32", "tensors", 1), ("bf16", "disk", 2)])
def test_the_demo_on_a_real_sglang_server(tmp_path, dtype, push, tp):
    steps = run_demo(tmp_path, "--engine", "sglang", "--dtype", dtype, "--push", push, "--tp", str(tp))
    check_story(steps, tp=tp, exact=dtype == "fp32")
