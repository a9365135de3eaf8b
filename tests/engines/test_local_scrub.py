"""Scrubs of the embedded engine: one flipped bit anywhere in resident memory is found within one cycle."""

from __future__ import annotations

import random

import pytest
from tiny_models import save_tiny_checkpoint

from syncguard.agent.core import Phase
from syncguard.agent.host import Agent
from syncguard.agent.settings import AgentConfig
from syncguard.agent.verify import VerifyRequest
from syncguard.engines.local import LocalEngine, LocalWorker
from syncguard.engines.local_damage import flip_lowest_bit
from syncguard.export.checkpoint import export_checkpoint
from syncguard.manifest.verdict import ReadinessState
from syncguard.spec import WeightVersion

VERSION = WeightVersion("run", 1)
SMALL = {"hidden_size": 32, "num_hidden_layers": 1, "head_dim": 16, "intermediate_size": 32}
SHAPES = [("qwen3", 1, 1), ("qwen3", 4, 1), ("qwen3_moe", 2, 2)]


@pytest.fixture(params=SHAPES, ids=str, scope="module")
def proven(request, tmp_path_factory):
    kind, tp, ep = request.param
    folder = save_tiny_checkpoint(tmp_path_factory.mktemp("scrub"), kind, **SMALL)
    worker = LocalWorker(folder, tp_size=tp, ep_size=ep)
    worker.set_label(str(VERSION))
    agent = Agent(LocalEngine(worker), worker="w", config=AgentConfig(scrub_bytes=3000, lease_s=1e9, scrub_lease_s=1e9))
    request_ = VerifyRequest(export_checkpoint(folder, version=VERSION), replay_waived_because="digests only")
    yield worker, agent, request_
    agent.close()


def resident(worker):
    seen = set()
    for rank, model in enumerate(worker.ranks):
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if tensor.data_ptr() not in seen:
                seen.add(tensor.data_ptr())
                yield rank, name, tensor


def test_a_flipped_bit_anywhere_is_found_within_one_cycle(proven):
    worker, agent, request = proven
    dice = random.Random(3)
    places = list(resident(worker))
    assert len(places) > 10
    for rank, name, tensor in places:
        assert agent.verify(request).readiness.state is ReadinessState.READY
        for _ in range(dice.randrange(1, 60)):  # wherever the cycle stands
            agent.watcher.scrub()
        assert agent.state.phase is Phase.READY, agent.state.message
        index = tuple(dice.randrange(n) for n in tensor.shape)
        flip_lowest_bit(tensor, index)
        turns = int(agent.watcher.scrub_progress()["turns"])
        for _ in range(turns):
            agent.watcher.scrub()
        assert agent.state.phase is Phase.BLOCKED, f"{name}{index} of rank {rank}: {turns} turns found nothing"
        assert f"rank tp{rank}/" in agent.readiness.message
        flip_lowest_bit(tensor, index)


def test_no_turn_reads_more_than_its_budget_but_for_one_tensor(proven):
    worker, agent, request = proven
    agent.verify(request)
    largest = max(t.numel() * t.element_size() for _, _, t in resident(worker))
    seed = request.manifest.key_seed
    turns = agent.adapter.scrub(seed, turn=0, budget_bytes=3000)[0].turns
    read = [agent.adapter.scrub(seed, turn=turn, budget_bytes=3000)[0].read_bytes for turn in range(turns)]
    assert sum(read) == agent.adapter.observe(seed)[0].read_bytes
    assert max(read) <= max(3000, largest)
    assert sorted(read)[len(read) // 2] <= 3000


def test_weights_put_elsewhere_without_an_update_are_read_where_they_are_now(proven):
    worker, agent, request = proven
    assert agent.verify(request).readiness.state is ReadinessState.READY
    agent.watcher.scrub()
    norm = worker.ranks[0].model.norm.weight
    kept = norm.data
    norm.data = kept.clone()
    flip_lowest_bit(norm, (0,))
    for _ in range(2 * int(agent.watcher.scrub_progress()["turns"])):
        agent.watcher.scrub()
    assert agent.state.phase is Phase.BLOCKED
    norm.data = kept
    assert agent.verify(request).readiness.state is ReadinessState.READY, "at the very same fence"
    for _ in range(int(agent.watcher.scrub_progress()["turns"])):
        agent.watcher.scrub()
    assert agent.state.phase is Phase.READY, agent.state.message


def test_a_scrub_during_an_update_reads_nothing(proven):
    worker, agent, request = proven
    worker.begin_update()
    answers = agent.adapter.scrub(request.manifest.key_seed, turn=0, budget_bytes=3000)
    assert all(answer.updating and not answer.slices and not answer.read_bytes for answer in answers)
    worker.end_update()
