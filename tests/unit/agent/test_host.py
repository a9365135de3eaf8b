"""The shell around the state machine: order of journal and announcement, evidence of T0, scrubs, silence, restarts."""

from __future__ import annotations

import sqlite3
import threading

import numpy as np
import pytest
from simulated_engine import SimulatedEngine, manifest_of, record_of, weights_of

from syncguard.agent.core import Phase
from syncguard.agent.host import Agent
from syncguard.agent.journal import Journal
from syncguard.agent.settings import AgentConfig
from syncguard.agent.verify import VerifyRequest
from syncguard.errors import VersionOrderError
from syncguard.manifest.verdict import FindingCode, ReadinessState, VerdictStatus
from syncguard.replay import b_key
from syncguard.spec import WeightVersion

T = [weights_of(seed) for seed in range(6)]


class Clock:
    """Time that tests move."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def engine() -> SimulatedEngine:
    return SimulatedEngine(T[0], tp=2, label="run@0")


@pytest.fixture
def agent(engine: SimulatedEngine, clock: Clock):
    made = Agent(engine, worker="w", clock=clock, config=AgentConfig(race_wait_s=0.0))
    yield made
    made.close()


def verify(agent: Agent, step: int, *, old: int | None = None):
    records = (record_of(T[old if old is not None else step], T[step]),)
    return agent.verify(VerifyRequest(manifest_of(T[step], f"run@{step}"), records))


def update(agent: Agent, engine: SimulatedEngine, step: int):
    agent.announce(WeightVersion("run", step), [record_of(T[step - 1])])
    engine.push(T[step], f"run@{step}")
    return verify(agent, step, old=step - 1)


def test_a_whole_run_of_updates_is_ready_after_each(agent: Agent, engine: SimulatedEngine) -> None:
    verify(agent, 0)
    for step in range(1, 5):
        outcome = update(agent, engine, step)
        assert agent.state.phase is Phase.READY
        assert outcome.readiness.weight_version == f"run@{step}"
        assert outcome.verification.verdict.evidence["old_scores"] == f"of run@{step - 1}, verified"


def test_ready_is_left_before_the_announcement_is_answered(agent: Agent, engine: SimulatedEngine) -> None:
    verify(agent, 0)
    readiness, said = agent.announce(WeightVersion("run", 1), [record_of(T[0])])
    assert readiness.state is ReadinessState.PENDING
    assert said == "of run@0"


def test_old_scores_are_not_taken_of_a_state_that_was_not_verified(agent: Agent, engine: SimulatedEngine) -> None:
    _, said = agent.announce(WeightVersion("run", 1), [record_of(T[0])])
    assert "not taken" in said
    engine.push(T[1], "run@1")
    outcome = verify(agent, 1, old=0)
    assert b_key(0, "old") not in outcome.verification.records[0].scores


def test_old_scores_outlive_a_second_push_of_the_same_version(agent: Agent, engine: SimulatedEngine) -> None:
    verify(agent, 0)
    agent.announce(WeightVersion("run", 1), [record_of(T[0])])
    engine.label = "run@1"
    assert verify(agent, 1, old=0).verification.verdict.status is VerdictStatus.MISMATCH
    agent.announce(WeightVersion("run", 1), [record_of(T[0])])
    engine.push(T[1], "run@1")
    outcome = verify(agent, 1, old=0)
    assert outcome.readiness.state is ReadinessState.READY
    assert b_key(0, "old") in outcome.verification.records[0].scores


def test_the_last_passes_serve_as_old_scores_when_nothing_is_sent_before_the_push(
    agent: Agent, engine: SimulatedEngine
) -> None:
    verify(agent, 0)
    agent.announce(WeightVersion("run", 1))
    engine.push(T[1], "run@1")
    assert b_key(0, "old") in verify(agent, 1, old=0).verification.records[0].scores


def test_a_stale_shard_is_named_by_its_version_after_several_updates(agent: Agent, engine: SimulatedEngine) -> None:
    verify(agent, 0)
    update(agent, engine, 1)
    update(agent, engine, 2)
    agent.announce(WeightVersion("run", 3))
    old = {fqn: T[3][fqn] if index else T[1][fqn] for index, fqn in enumerate(T[3])}
    engine.push(old, "run@3")
    findings = verify(agent, 3, old=2).verification.verdict.findings
    stale = [f for f in findings if f.code is FindingCode.STALE]
    assert {f.fqn for f in stale} == {"layers.0.weight"}
    assert all("run@1" in f.text for f in stale)


def test_a_version_that_goes_back_raises_and_leaves_ready_alone(agent: Agent, engine: SimulatedEngine) -> None:
    verify(agent, 0)
    update(agent, engine, 1)
    with pytest.raises(VersionOrderError, match=r"goes back.*run@1 or newer"):
        agent.announce(WeightVersion("run", 0))
    assert agent.state.phase is Phase.READY
    outcome = agent.verify(VerifyRequest(manifest_of(T[0], "run@0")))
    assert outcome.verification.verdict.findings[0].code is FindingCode.VERSION_ORDER
    assert agent.state.phase is Phase.READY


def test_an_audit_that_matches_never_makes_a_worker_ready(agent: Agent) -> None:
    assert agent.audit(manifest_of(T[0], "run@0")).verdict.status is VerdictStatus.MATCH
    assert agent.state.phase is Phase.UNKNOWN


def test_an_audit_blocks_only_by_the_manifest_that_was_proven(agent: Agent, engine: SimulatedEngine) -> None:
    verify(agent, 0)
    assert agent.audit(manifest_of(T[1], "run@1")).verdict.status is VerdictStatus.MISMATCH
    assert agent.state.phase is Phase.READY, "anyone may audit with any manifest"
    engine.shards[1]["layers.1.weight"][0, 0] += 1.0
    agent.audit(manifest_of(T[0], "run@0"))
    assert agent.state.phase is Phase.BLOCKED


def test_a_poll_finds_an_unannounced_update(agent: Agent, engine: SimulatedEngine, clock: Clock) -> None:
    verify(agent, 0)
    clock.now_s += 1
    agent.watcher.poll()
    assert agent.state.phase is Phase.READY
    engine.push(T[1], "run@0")
    clock.now_s += 1
    agent.watcher.poll()
    assert (agent.state.phase, agent.state.reason) == (Phase.INSTALLED, "update_unannounced")


def test_a_scrub_finds_one_flipped_bit_and_names_it(agent: Agent, engine: SimulatedEngine, clock: Clock) -> None:
    verify(agent, 0)
    clock.now_s += 1
    agent.watcher.scrub()
    assert agent.state.phase is Phase.READY
    engine.shards[1]["layers.2.weight"].view(np.uint32)[1, 3] ^= 1
    for _ in T[0]:
        clock.now_s += 1
        agent.watcher.scrub()
    assert agent.state.phase is Phase.BLOCKED
    assert "layers.2.weight [2:4, 0:6]" in agent.readiness.message
    assert "tp1/2" in agent.readiness.message


def test_a_silence_within_the_lease_changes_nothing(agent: Agent, engine: SimulatedEngine, clock: Clock) -> None:
    verify(agent, 0)
    engine.alive = False
    clock.now_s += 4
    agent.watcher.poll()
    assert agent.state.phase is Phase.READY
    engine.alive = True
    clock.now_s += 0.5
    agent.watcher.poll()
    clock.now_s += 4
    agent.watcher.poll()
    assert agent.state.phase is Phase.READY


def test_a_silence_beyond_the_lease_is_not_ready_until_the_same_bytes_are_proven_again(
    agent: Agent, engine: SimulatedEngine, clock: Clock
) -> None:
    verify(agent, 0)
    engine.alive = False
    clock.now_s += 6
    agent.watcher.poll()
    assert agent.state.reason == "lease_expired"
    engine.alive = True
    clock.now_s += 1
    agent.watcher.poll()
    assert agent.state.phase is Phase.UNKNOWN
    agent.watcher.reprove()
    assert (agent.state.phase, agent.state.reason) == (Phase.READY, "reproved")


@pytest.mark.parametrize("change", ["bytes", "restart", "push", "label"])
def test_a_worker_that_changed_in_its_silence_does_not_come_back(
    agent: Agent, engine: SimulatedEngine, clock: Clock, change: str
) -> None:
    verify(agent, 0)
    engine.alive = False
    clock.now_s += 6
    agent.watcher.poll()
    engine.alive = True
    if change == "bytes":
        engine.shards[0]["layers.0.weight"][0, 0] += 1
    elif change == "restart":
        engine.restart()
        engine.label = "run@0"
    elif change == "push":
        engine.push(T[0], "run@0")
    else:
        engine.label = "run@1"
    for _ in range(3):
        clock.now_s += 1
        agent.watcher.poll()
        agent.watcher.reprove()
    assert agent.state.phase is not Phase.READY


def test_an_answer_that_was_asked_for_before_a_newer_one_is_dropped(
    agent: Agent, engine: SimulatedEngine, clock: Clock
) -> None:
    stale = engine.status()
    began_s = clock.now_s
    clock.now_s += 1
    engine.push(T[1], "run@1")
    verify(agent, 1)
    assert agent.state.phase is Phase.READY
    agent.feed(stale, began_s)
    assert agent.state.phase is Phase.READY, "an old answer is no news"


def test_what_cannot_be_journaled_is_not_ready(engine: SimulatedEngine) -> None:
    agent = Agent(engine, worker="w")
    append = agent.journal.append

    def full(transition, accepted=()):
        if transition.phase == "READY":
            raise sqlite3.OperationalError("database or disk is full")
        append(transition, accepted)

    agent.journal.append = full
    outcome = verify(agent, 0)
    assert outcome.verification.verdict.status is VerdictStatus.MATCH
    assert (agent.state.phase, agent.state.reason) == (Phase.BLOCKED, "journal_failed")


def test_leaving_ready_needs_no_journal(agent: Agent, engine: SimulatedEngine) -> None:
    verify(agent, 0)

    def full(_transition, _accepted=()):
        raise sqlite3.OperationalError("database or disk is full")

    append, agent.journal.append = agent.journal.append, full
    engine.push(T[1], "run@1")
    agent.watcher.poll()
    assert agent.state.phase is Phase.INSTALLED
    agent.journal.append = append


def test_everything_that_is_announced_was_journaled_before(engine: SimulatedEngine) -> None:
    agent = Agent(engine, worker="w")
    behind = []

    def listener(readiness) -> None:
        last = agent.journal.transitions(1)[-1]
        behind.append((last.reason, readiness.reason))

    agent.listen(listener)
    verify(agent, 0)
    update(agent, engine, 1)
    assert len(behind) > 5
    assert all(journaled == told for journaled, told in behind)


def test_a_subscriber_starts_with_the_current_readiness_and_gets_each_change(
    agent: Agent, engine: SimulatedEngine
) -> None:
    with agent.subscribe() as subscription:
        verify(agent, 0)
        agent.announce(WeightVersion("run", 1))
        states = [subscription.changes.get_nowait().reason for _ in range(4)]
    assert states == ["unverified", "verifying", "verified_with_warnings", "update_announced"]


def test_a_restarted_agent_is_not_ready_but_knows_the_order_and_the_past(
    engine: SimulatedEngine, tmp_path, clock: Clock
) -> None:
    first = Agent(engine, worker="w", journal=Journal(tmp_path / "j.sqlite"), clock=clock)
    verify(first, 0)
    update(first, engine, 1)
    assert first.state.phase is Phase.READY
    first.close()
    second = Agent(engine, worker="w", journal=Journal(tmp_path / "j.sqlite"), clock=clock)
    assert (second.state.phase, second.state.reason) == (Phase.UNKNOWN, "agent_restarted")
    with pytest.raises(VersionOrderError):
        second.announce(WeightVersion("run", 0))
    second.announce(WeightVersion("run", 2))
    engine.push(T[0], "run@2")
    findings = verify(second, 2, old=1).verification.verdict.findings
    assert any(f.code is FindingCode.STALE and "run@0" in f.text for f in findings)
    second.close()


def test_two_verifications_never_interleave(engine: SimulatedEngine) -> None:
    agent = Agent(engine, worker="w")
    inside = threading.Semaphore(1)
    overlaps = []

    def enter(_name: str) -> None:
        if not inside.acquire(blocking=False):
            overlaps.append(_name)

    engine.before = enter
    engine.after = lambda _name: inside.release()
    threads = [threading.Thread(target=verify, args=(agent, 0)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not overlaps
    assert agent.state.phase is Phase.READY


def test_live_says_when_the_watcher_is_stuck(agent: Agent, clock: Clock) -> None:
    assert agent.live()[0]
    clock.now_s += 1000
    assert not agent.live()[0]
