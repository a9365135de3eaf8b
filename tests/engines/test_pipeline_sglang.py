"""A real SGLang server of two pipeline stages: the second one's memory is read too, though SGLang drops what it says."""

from __future__ import annotations

import pytest
from tiny_models import save_tiny_checkpoint

from syncguard.agent.host import Agent
from syncguard.agent.verify import VerifyRequest
from syncguard.digest import DEFAULT_KEY_SEED
from syncguard.engines.sglang import SglangEngine
from syncguard.export.checkpoint import export_checkpoint
from syncguard.manifest.compare import compare
from syncguard.manifest.model import WorkerObservation
from syncguard.manifest.verdict import ReadinessState, VerdictStatus
from syncguard.spec import WeightVersion

pytestmark = pytest.mark.sglang


@pytest.fixture
def staged(serve):
    return serve(pp=2)


def test_every_stage_answers_for_its_own_layers(staged):
    status = staged.engine.status()
    assert status.expected_ranks == 2
    assert [(rank.rank.pp_rank, rank.rank.pp_size) for rank in status.ranks] == [(0, 2), (1, 2)]
    assert len({rank.incarnation for rank in status.ranks}) == 2
    first, second = staged.engine.layouts()
    assert any(".layers.0." in f".{shard.tensor.fqn}" for shard in first.shards())
    assert not any(".layers.1." in f".{shard.tensor.fqn}" for shard in first.shards())
    assert any(".layers.1." in f".{shard.tensor.fqn}" for shard in second.shards())


def test_a_checkpoint_is_proven_over_all_stages_and_a_change_in_the_last_is_found(staged, tmp_path):
    staged.load(staged.checkpoint, "run@1")
    status = staged.engine.status()
    observation = WorkerObservation(
        "worker-0", 2, staged.engine.layouts(), staged.engine.observe(DEFAULT_KEY_SEED), status.weight_version_label
    )
    manifest = export_checkpoint(staged.checkpoint, version=WeightVersion("run", 1))
    verdict = compare(manifest, observation)
    assert verdict.status is VerdictStatus.MATCH, [finding.text for finding in verdict.findings]
    assert verdict.coverage.proven_tensors == len(manifest.entries)
    other = export_checkpoint(
        save_tiny_checkpoint(tmp_path / "other", "qwen3", seed=9), version=WeightVersion("run", 1)
    )
    assert {f.rank for f in compare(other, observation).findings} >= {"tp0/1 pp0/2", "tp0/1 pp1/2"}


def test_an_agent_makes_such_a_worker_ready_and_each_stage_counts_the_update(staged):
    epochs = [rank.epoch for rank in staged.engine.status().ranks]
    staged.load(staged.checkpoint, "run@2")
    assert [rank.epoch for rank in staged.engine.status().ranks] == [epoch + 1 for epoch in epochs]
    agent = Agent(SglangEngine(staged.server.base_url), worker="w0")
    manifest = export_checkpoint(staged.checkpoint, version=WeightVersion("run", 2))
    outcome = agent.verify(VerifyRequest(manifest, replay_waived_because="digests are what is tested here"))
    assert outcome.readiness.state is ReadinessState.READY, outcome.verification.verdict.reason
    agent.close()
