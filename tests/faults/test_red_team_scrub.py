"""Scrubs that leave something out: a lease must not rest on turns that never read what was proven."""

from __future__ import annotations

from dataclasses import replace

import pytest
from simulated_engine import SimulatedEngine, manifest_of, record_of, weights_of
from tiny_models import save_tiny_checkpoint

from syncguard.agent.core import Phase
from syncguard.agent.host import Agent
from syncguard.agent.settings import AgentConfig
from syncguard.agent.verification import VerifyRequest
from syncguard.engines.local import LocalEngine, LocalWorker
from syncguard.export.checkpoint import export_checkpoint
from syncguard.spec import WeightVersion

T0 = weights_of(0)
CONFIG = AgentConfig(race_wait_s=0.0, lease_s=1e9, scrub_lease_s=25.0, scrub_bytes=3000)


class Clock:
    """Time that moves 10 seconds a scrub."""

    now_s = 1000.0

    def __call__(self):
        return self.now_s


def scrubbed(agent, clock, times):
    for _ in range(times):
        clock.now_s += 10
        agent.watcher.scrub()
    return agent.readiness


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def engine():
    return SimulatedEngine(T0, label="run@0")


@pytest.fixture
def agent(engine, clock):
    made = Agent(engine, worker="w", clock=clock, config=CONFIG)
    made.verify(VerifyRequest(manifest_of(T0, "run@0"), (record_of(T0, T0),)))
    assert made.state.phase is Phase.READY
    yield made
    made.close()


def reads_nothing(answer):
    return replace(answer, slices=(), turns=1)


def never_reads_the_first(answer):
    return replace(answer, slices=tuple(part for part in answer.slices if part.binding))


def reads_the_end_of_the_first_only(answer):
    return replace(
        answer, slices=tuple(part if part.binding else replace(part, low=3, high=4) for part in answer.slices)
    )


@pytest.mark.parametrize("leaves_out", [reads_nothing, never_reads_the_first, reads_the_end_of_the_first_only])
def test_a_rank_that_leaves_a_tensor_out_of_its_scrubs_is_observed_in_full(engine, agent, clock, leaves_out):
    real = engine.scrub
    engine.scrub = lambda *args, **kwargs: tuple(map(leaves_out, real(*args, **kwargs)))
    scrubbed(agent, clock, 12)
    assert agent.state.phase is Phase.READY, "nothing changed, and whole observations showed it"
    engine.shards[0]["layers.0.weight"][0, 0] += 1
    readiness = scrubbed(agent, clock, 3)
    assert agent.state.phase is Phase.BLOCKED
    assert "layers.0.weight" in readiness.message


@pytest.mark.parametrize(("kind", "tp", "tied"), [("qwen3", 2, True), ("qwen3", 4, False), ("qwen3_moe", 2, False)])
def test_the_turns_of_a_real_rank_read_all_that_was_proven(kind, tp, tied, tmp_path, clock):
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "head_dim": 16, "intermediate_size": 32}
    folder = save_tiny_checkpoint(tmp_path, kind, tie_word_embeddings=tied, **sizes)
    worker = LocalWorker(folder, tp_size=tp)
    worker.set_label("run@1")
    engine = LocalEngine(worker)
    agent = Agent(engine, worker="w", clock=clock, config=replace(CONFIG, scrub_lease_s=1e9))
    manifest = export_checkpoint(folder, version=WeightVersion("run", 1))
    agent.verify(VerifyRequest(manifest, replay_waived_because="digests only"))
    whole = []
    real = engine.observe
    engine.observe = lambda seed: whole.append(seed) or real(seed)
    scrubbed(agent, clock, 1)
    scrubbed(agent, clock, 3 * int(agent.watcher.scrub_progress()["turns"]))
    assert agent.state.phase is Phase.READY
    assert agent.watcher.scrub_progress()["cycles"] >= 3
    assert whole == []
    agent.close()
