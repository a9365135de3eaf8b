"""Differences under a secret key of each version: earlier versions still explain them."""

from __future__ import annotations

import pytest
from simulated_engine import SimulatedEngine, manifest_of, record_of, weights_of

from syncguard.agent.core import Phase
from syncguard.agent.host import Agent
from syncguard.agent.settings import AgentConfig
from syncguard.agent.verify import VerifyRequest
from syncguard.errors import EngineError
from syncguard.manifest.model import Changed
from syncguard.manifest.verdict import FindingCode

T = [weights_of(seed) for seed in range(4)]


def key(step):
    return bytes([step + 1]) * 32


@pytest.fixture
def engine():
    return SimulatedEngine(T[0], tp=2, label="run@0")


@pytest.fixture
def agent(engine):
    made = Agent(engine, worker="w", config=AgentConfig(race_wait_s=0.0))
    verify(made, 0)
    assert made.state.phase is Phase.READY
    engine.calls.clear()
    yield made
    made.close()


def verify(agent, step, weights=None, **options):
    manifest = manifest_of(weights or T[step], f"run@{step}", key_seed=key(step), **options)
    record = record_of(T[max(0, step - 1)], weights or T[step])
    return agent.verify(VerifyRequest(manifest, (record,))).verification.verdict


def found(verdict, code):
    return [finding for finding in verdict.findings if finding.code is code]


def test_a_worker_that_kept_the_version_before_is_called_stale_by_name(agent, engine):
    engine.push({}, "run@1")
    verdict = verify(agent, 1)
    assert agent.state.phase is Phase.BLOCKED
    stale = found(verdict, FindingCode.STALE)
    assert {finding.fqn for finding in stale} == set(T[0])
    assert all("run@0" in finding.text for finding in stale)
    assert not found(verdict, FindingCode.UNKNOWN_CONTENT)
    assert verdict.evidence["history"] == "read again under 1 earlier keys"


def test_an_older_version_is_found_under_its_own_key(agent, engine):
    engine.push(T[1], "run@1")
    verify(agent, 1)
    assert agent.state.phase is Phase.READY
    engine.push(T[0], "run@2")
    verdict = verify(agent, 2)
    assert all("run@0" in finding.text for finding in found(verdict, FindingCode.STALE))
    assert len(found(verdict, FindingCode.STALE)) == 2 * len(T[0])


def test_a_torn_update_is_called_torn(agent, engine):
    names = sorted(T[0])
    engine.push({names[0]: T[1][names[0]]}, "run@1")
    verdict = verify(agent, 1)
    assert {finding.fqn for finding in found(verdict, FindingCode.STALE)} == set(names[1:])


def test_one_rank_that_heard_nothing_is_named(agent, engine):
    engine.push(T[1], "run@1", ranks=[0])
    verdict = verify(agent, 1)
    assert {finding.rank for finding in found(verdict, FindingCode.STALE)} == {"tp1/2"}


def test_content_of_no_version_stays_unknown(agent, engine):
    engine.push(T[3], "run@1")
    verdict = verify(agent, 1)
    assert found(verdict, FindingCode.UNKNOWN_CONTENT)
    assert not found(verdict, FindingCode.STALE)


def test_an_export_of_frozen_bytes_is_found_across_keys(agent, engine):
    engine.push(T[0], "run@1")
    verdict = verify(agent, 1, weights=T[0], changed=Changed.CHANGED)
    assert agent.state.phase is Phase.BLOCKED
    assert {finding.fqn for finding in found(verdict, FindingCode.UNCHANGED)} == set(T[0])


def test_a_sound_update_is_read_once(agent, engine):
    engine.push(T[1], "run@1")
    verify(agent, 1)
    assert agent.state.phase is Phase.READY
    assert engine.calls.count("observe") == 1


def test_an_engine_that_cannot_be_read_again_keeps_its_first_verdict(agent, engine):
    engine.push({}, "run@1")

    def once(name):
        if name == "observe" and engine.calls.count("observe") > 1:
            raise EngineError("cannot digest now")

    engine.before = once
    verdict = verify(agent, 1)
    assert agent.state.phase is Phase.BLOCKED
    assert found(verdict, FindingCode.UNKNOWN_CONTENT)
    assert "cannot digest now" in verdict.evidence["history"]


def test_an_update_between_the_two_readings_concludes_nothing(agent, engine):
    engine.push({}, "run@1")

    def push_before_the_second(name):
        if name == "observe" and engine.calls.count("observe") == 2:
            engine.before = lambda _name: None
            engine.push(T[1], "run@1")

    engine.before = push_before_the_second
    verify(agent, 1)
    assert agent.state.phase is Phase.READY, "the second attempt read the finished update"
