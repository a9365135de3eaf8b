"""An SGLang server without our plugin: never ready, but its scores can still be captured and diagnosed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import typer
from tiny_models import save_tiny_checkpoint
from typer.testing import CliRunner

from syncguard.cli.capture import capture
from syncguard.cli.diagnose import diagnose
from syncguard.cli.study import study
from syncguard.engines.sglang import SglangEngine
from syncguard.engines.sglang_launch import launch
from syncguard.errors import UnsupportedError
from syncguard.replay import load_many

pytestmark = pytest.mark.sglang
STANDINS = Path(__file__).parents[2] / "scripts" / "sglang-cpu"


def test_scores_are_captured_and_studied_and_what_needs_the_plugin_says_so(tmp_path):
    checkpoint = save_tiny_checkpoint(tmp_path / "checkpoint", dtype=torch.float32)
    app = typer.Typer()
    for function in (capture, diagnose, study):
        app.command()(function)

    def run(*arguments):
        result = CliRunner().invoke(app, [str(part) for part in arguments])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    with launch(
        checkpoint,
        log_path=tmp_path / "server.log",
        dtype="float32",
        standins=STANDINS,
        env_extra={"SGLANG_PLUGINS": "none"},
        timeout_s=600,
    ) as server:
        with SglangEngine(server.base_url) as engine, pytest.raises(UnsupportedError, match="in-rank probe"):
            engine.status()
        prompts = ("--prompt-ids", "3,14,15,92", "--prompt-ids", "23,84,62,64,33", "--batch")
        where = ("--engine", server.base_url)
        result = run(
            "capture", "-o", tmp_path / "r", *where, *prompts, "--max-new-tokens", 24, "--trainer", checkpoint, "--json"
        )
        (reason,) = json.loads(result.stdout)["no_decode"]
        assert "SYNCGUARD_INSIDE_DIR" in reason
        records = load_many(tmp_path / "r")
        assert [record.batch for record in records] == [("sample-0", "sample-1")] * 2
        assert all(record.meta["cached_tokens"]["B0.old.cold"] == 0 for record in records)
        assert run("diagnose", tmp_path / "r").exit_code == 0
        assert run("study", tmp_path / "r", *where, "--passes", 3).exit_code == 0
