"""The repeat study of the method's source on real processes: two SGLang servers, and a real smg gateway in front of them."""

from __future__ import annotations

import contextlib
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import torch
import typer
from typer.testing import CliRunner

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "engines"))

from test_gate_gateway import STANDINS, gateway
from tiny_models import save_tiny_checkpoint

from syncguard.cli.capture import capture
from syncguard.cli.study import UNKNOWN, study
from syncguard.engines.sglang_launch import launch

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(1200)]
PROMPTS = ("3,14,15,92,65,35,89,79", "23,84,62,64,33,83,27,95,2,88,41,97", "7,5,9,11,40,41,42,60")


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    """URLs of two servers of one bf16 checkpoint, of the router, and another checkpoint."""
    folder = tmp_path_factory.mktemp("router")
    checkpoint = save_tiny_checkpoint(folder / "T0", dtype=torch.bfloat16)
    other = save_tiny_checkpoint(folder / "T1", seed=1, dtype=torch.bfloat16)
    with contextlib.ExitStack() as closing, ThreadPoolExecutor(2) as pool:
        starting = [
            pool.submit(
                launch, checkpoint, log_path=folder / f"{i}.log", standins=STANDINS, dtype="bfloat16", timeout_s=800
            )
            for i in range(2)
        ]
        urls = [closing.enter_context(future.result()).base_url for future in starting]
        yield urls, closing.enter_context(gateway(urls, folder / "smg.log")), checkpoint, other


def run(*arguments):
    app = typer.Typer()
    app.command()(capture)
    app.command()(study)
    result = CliRunner().invoke(app, [str(part) for part in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def load(url, checkpoint, label):
    body = {"model_path": str(checkpoint), "weight_version": label}
    assert httpx.post(f"{url}/update_weights_from_disk", json=body, timeout=300).json()["success"]


def test_five_passes_of_each_worker_and_through_the_router_are_compared_over_all_pairs(fleet, tmp_path):
    urls, router, checkpoint, other = fleet
    prompts = [part for ids in PROMPTS for part in ("--prompt-ids", ids)]
    run("capture", "-o", tmp_path / "r", "--engine", urls[0], *prompts, "--max-new-tokens", 64, "--decode", 0)
    engines = [part for url in urls for part in ("--engine", url)]
    result = run("study", tmp_path / "r", *engines, "--router", router, "--json")
    found = json.loads(result.stdout)
    sys.stderr.write(run("study", tmp_path / "r", *engines, "--router", router).stdout)
    assert (result.exit_code, found["apart"], found["unstable"]) == (0, [], []), found
    pairs = {group["name"]: group["pairs"] for group in found["groups"]}
    assert pairs == {
        f"within {urls[0]}": 10,
        f"within {urls[1]}": 10,
        "across workers": 25,
        "through the router": 10,
        "router against workers": 50,
    }
    # The prefix caches say whom the router chose, each of its requests once.
    assert sum(found["reached"].values()) == 5 * len(PROMPTS)
    assert set(found["reached"]) == set(urls)
    assert UNKNOWN not in found["reached"]
    # One of them takes other weights: now the workers are apart, and so are the router's passes among each other.
    load(urls[1], other, "run@1")
    result = run("study", tmp_path / "r", *engines, "--router", router, "--passes", 3, "--json")
    found = json.loads(result.stdout)
    assert result.exit_code == 10
    assert found["apart"] == ["across workers", "through the router", "router against workers"]
    assert found["unstable"] == []
    load(urls[1], checkpoint, "run@2")
    assert run("study", tmp_path / "r", *engines, "--passes", 2).exit_code == 0
