"""A real SGLang server with two data-parallel replicas: each is observed, flushed and replayed by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_models import save_tiny_checkpoint, tiny_model

from syncguard.agent.host import Agent
from syncguard.agent.verify import VerifyRequest
from syncguard.engines.sglang import SglangEngine
from syncguard.engines.sglang_launch import launch
from syncguard.export.checkpoint import export_checkpoint
from syncguard.manifest.verdict import ReadinessState
from syncguard.replay import c_key, response_scores_from_logits
from syncguard.spec import WeightVersion

pytestmark = pytest.mark.sglang
STANDINS = Path(__file__).parents[2] / "scripts" / "sglang-cpu"
V1 = WeightVersion("run", 1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("replicas")


@pytest.fixture(scope="module")
def engine(folder):
    checkpoint = save_tiny_checkpoint(folder / "checkpoint", seed=0)
    with (
        launch(
            checkpoint,
            log_path=folder / "server.log",
            dtype="float32",
            standins=STANDINS,
            extra_args=("--dp-size", "2", "--weight-version", str(V1)),
            env_extra={"SGLANG_CPU_OMP_THREADS_BIND": "0|0"},  # a CPU list for each replica
            timeout_s=600,
        ) as server,
        SglangEngine(server.base_url) as made,
    ):
        yield made


def test_a_request_reaches_the_replica_that_it_names_and_no_other(engine):
    assert engine.status().replicas == 2
    assert engine.flush().confirmed
    ids = list(range(3, 43))
    cached = [engine.score(ids, prompt_length=32, replica=replica).cached_tokens for replica in (0, 0, 1, 1)]
    assert [count > 0 for count in cached] == [False, True, False, True], cached


def test_a_worker_is_ready_after_each_replica_was_replayed(engine, folder):
    agent = Agent(engine, worker="w")
    record = agent.capture([3, 4, 5, 6], max_new_tokens=8, seed=1)
    with torch.no_grad():
        logits = tiny_model(seed=0)(torch.tensor(record.input_ids.copy())[None]).logits[0].double().numpy()
    scores = response_scores_from_logits(logits, record.input_ids, record.prompt_length)
    scored = record.with_scores({c_key(i, "new"): scores for i in range(2)})
    outcome = agent.verify(VerifyRequest(export_checkpoint(folder / "checkpoint", version=V1), (scored,)))
    verdict = outcome.verification.verdict
    assert outcome.readiness.state is ReadinessState.READY, verdict
    assert verdict.evidence["replicas_replayed"] == "2"
    assert len(outcome.verification.observation.ranks) == 2
    agent.watcher.scrub()
    assert agent.readiness.state is ReadinessState.READY, agent.readiness
