"""One verification over a worker that may do anything between any two calls."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from simulated_engine import SimulatedEngine, manifest_of, record_of, scores_of, weights_of

from syncguard.agent.host import Agent
from syncguard.agent.replay_pass import ReplayRunner
from syncguard.agent.settings import AgentConfig
from syncguard.agent.verify import Verifier, VerifyRequest
from syncguard.errors import EngineError, SpecVersionError, UnreachableError, UnsupportedError
from syncguard.manifest.compare import known_version
from syncguard.manifest.model import Changed
from syncguard.manifest.verdict import FindingCode, Severity, VerdictStatus
from syncguard.replay import ReplayRecord, ReplayStatus, b_key, c_key

T0, T1, T2 = weights_of(0), weights_of(1), weights_of(2)


def worker_at(weights, label: str, *, tp: int = 2) -> SimulatedEngine:
    engine = SimulatedEngine(T0, tp=tp)
    engine.push(weights, label)
    return engine


def request(**changes) -> VerifyRequest:
    return replace(VerifyRequest(manifest_of(T1, "run@1"), (record_of(T0, T1),)), **changes)


def verify(engine, asked=None, **options):
    return Verifier(engine, "w", sleep=lambda _s: None).verify(asked or request(), **options)


def codes(found) -> set[FindingCode]:
    return {finding.code for finding in found.verdict.findings}


def old_passes(engine):
    runner = ReplayRunner(engine, worker="w", vocab_size=100, sleep=lambda _s: None)
    return runner.take([record_of(T0)], label="run@0", warm=0)


def test_a_whole_update_with_old_scores_matches_and_the_replay_passes() -> None:
    engine = SimulatedEngine(T0, tp=2)
    old = old_passes(engine)
    engine.push(T1, "run@1")
    found = verify(engine, old=old)
    assert found.verdict.status is VerdictStatus.MATCH
    assert found.replay.status is ReplayStatus.PASS
    assert not found.verdict.findings
    assert found.fence is not None
    keys = set(found.records[0].scores)
    assert {b_key(0, "new"), b_key(1, "new"), b_key(0, "new", "warm"), b_key(0, "old"), b_key(1, "old")} <= keys


def test_a_stale_worker_is_blocked_by_digest_and_by_replay() -> None:
    engine = SimulatedEngine(T0, tp=2)
    old = old_passes(engine)
    before = Verifier(engine, "w").observe(engine.status(), manifest_of(T0, "run@0").key_seed)
    engine.push(T0, "run@1")
    found = verify(engine, old=old, history=[known_version(manifest_of(T0, "run@0"), before)])
    assert found.verdict.status is VerdictStatus.MISMATCH
    assert {FindingCode.STALE, FindingCode.REPLAY_STALE} <= codes(found)
    stale = {f.fqn for f in found.verdict.findings if f.code is FindingCode.STALE}
    assert stale == set(T0)


def test_the_replay_vetoes_although_all_digests_are_equal() -> None:
    found = verify(worker_at(T1, "run@1"), request(records=(record_of(T0, T2),)))
    assert found.verdict.status is VerdictStatus.MISMATCH
    assert FindingCode.REPLAY_MISMATCH in codes(found) or FindingCode.REPLAY_STALE in codes(found)


def test_the_digests_veto_although_the_replay_agrees() -> None:
    # Two elements exchanged: the sum that the simulated scores follow is the same.
    swapped = {fqn: value.copy() for fqn, value in T1.items()}
    swapped["layers.0.weight"][0, 0], swapped["layers.0.weight"][0, 1] = (
        T1["layers.0.weight"][0, 1],
        T1["layers.0.weight"][0, 0],
    )
    found = verify(worker_at(swapped, "run@1"))
    assert found.replay.status in (ReplayStatus.PASS, ReplayStatus.NO_POWER)
    assert found.verdict.status is VerdictStatus.MISMATCH


def test_one_stale_rank_is_named() -> None:
    engine = SimulatedEngine(T0, tp=2)
    before = Verifier(engine, "w").observe(engine.status(), manifest_of(T0, "run@0").key_seed)
    engine.push(T1, "run@1", ranks=[0])
    found = verify(engine, history=[known_version(manifest_of(T0, "run@0"), before)])
    stale = [f for f in found.verdict.findings if f.code is FindingCode.STALE]
    assert found.verdict.status is VerdictStatus.MISMATCH
    assert {f.rank for f in stale} == {"tp1/2"}


def test_without_a_record_it_is_incomplete() -> None:
    found = verify(worker_at(T1, "run@1"), request(records=()))
    assert found.verdict.status is VerdictStatus.INCOMPLETE
    assert codes(found) == {FindingCode.REPLAY_MISSING}


def test_a_record_without_trainer_scores_is_incomplete() -> None:
    found = verify(worker_at(T1, "run@1"), request(records=(record_of(T0),)))
    assert found.verdict.status is VerdictStatus.INCOMPLETE
    assert FindingCode.REPLAY_MISSING in codes(found)


@pytest.mark.parametrize("changes", [{"segment_ids": [0] * 5 + [1] * 7}, {"call": {"adapter": "sha256:1"}}], ids=str)
def test_a_record_that_ids_alone_do_not_describe_is_incomplete_and_never_sent(changes) -> None:
    engine = SimulatedEngine(T1, label="run@1")
    record = replace(record_of(T0, T1, tokens=9), **changes)
    found = verify(engine, VerifyRequest(manifest_of(T1, "run@1"), (record,)))
    assert found.verdict.status is VerdictStatus.INCOMPLETE
    assert codes(found) == {FindingCode.REPLAY_MISSING}
    assert "score" not in engine.calls


def test_a_waived_replay_matches_and_says_so() -> None:
    found = verify(worker_at(T1, "run@1"), request(records=(), replay_waived_because="no scores in this run"))
    assert found.verdict.status is VerdictStatus.MATCH
    (finding,) = found.verdict.findings
    assert (finding.code, finding.severity) == (FindingCode.REPLAY_MISSING, Severity.WARNING)
    assert "no scores in this run" in finding.text


def test_an_export_of_frozen_bytes_is_found_although_everything_is_equal() -> None:
    engine = worker_at(T1, "run@1")
    asked = request(manifest=manifest_of(T1, "run@1", changed=Changed.CHANGED))
    found = verify(engine, asked, history=[known_version(manifest_of(T1, "run@0"))])
    assert found.verdict.status is VerdictStatus.MISMATCH
    assert FindingCode.UNCHANGED in codes(found)


def test_another_label_is_a_mismatch_although_the_bytes_are_right() -> None:
    found = verify(worker_at(T1, "run@7"))
    assert found.verdict.status is VerdictStatus.MISMATCH
    assert FindingCode.VERSION_LABEL in codes(found)


def test_scores_of_another_worker_are_dropped() -> None:
    record = record_of(T0, T1)
    foreign = record.with_scores({b_key(i, "new"): record.scores[c_key(0, "new")] for i in range(2)})
    found = verify(worker_at(T0, "run@1"), request(records=(foreign,)))
    assert found.verdict.status is VerdictStatus.MISMATCH
    assert not (found.records[0].scores[b_key(0, "new")] == foreign.scores[b_key(0, "new")]).all()
    assert found.records[0].versions["new"] == "run@1"


def test_a_flush_that_is_refused_for_a_while_is_asked_for_again() -> None:
    engine = worker_at(T1, "run@1")
    engine.flush_confirms = itertools.cycle([False, True])
    assert FindingCode.FLUSH_NOT_CONFIRMED not in codes(verify(engine))


def test_a_flush_that_is_never_confirmed_is_incomplete() -> None:
    engine = worker_at(T1, "run@1")
    engine.flush_confirms = itertools.repeat(False)
    found = verify(engine)
    assert found.verdict.status is VerdictStatus.INCOMPLETE
    assert FindingCode.FLUSH_NOT_CONFIRMED in codes(found)


def test_a_cache_that_survives_its_confirmed_flush_is_not_believed() -> None:
    engine = worker_at(T1, "run@1")

    def keep_cache(name: str) -> None:
        if name == "flush":
            engine.cached_by.add(0)

    engine.after = keep_cache
    found = verify(engine)
    assert found.verdict.status is VerdictStatus.INCOMPLETE
    assert FindingCode.FLUSH_NOT_CONFIRMED in codes(found)


CALLS = len(["status", "layouts", "observe", "flush", "score", "flush", "score", "score", "status"])


def test_the_calls_of_a_verification_are_the_ones_that_the_fault_tests_cut() -> None:
    engine = worker_at(T1, "run@1")
    engine.calls.clear()
    verify(engine)
    assert len(engine.calls) == CALLS, engine.calls


@pytest.mark.parametrize("call", range(CALLS))
@pytest.mark.parametrize("change", ["push", "session", "restart", "relabel"])
@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_change_at_any_call_is_never_a_match_of_what_is_not_there(call: int, change: str, moment: str) -> None:
    engine = worker_at(T1, "run@1")
    count = itertools.count()

    def happen(_name: str) -> None:
        if next(count) != call:
            return
        if change == "push":
            engine.push(T2, "run@1")
        elif change == "session":
            engine.begin()
        elif change == "restart":
            engine.restart()
        else:
            engine.label = "run@9"

    setattr(engine, moment, happen)
    found = verify(engine)
    # A change after the last answer is the next poll's; one before the first is an ordinary mismatch.
    if moment == "after" and call == CALLS - 1:
        assert found.verdict.status is VerdictStatus.MATCH
        return
    assert found.verdict.status is not VerdictStatus.MATCH
    if moment == "after" or call > 0:
        assert found.fence is None
        assert found.raced
        assert found.observation is None, "an observation that overlaps a change must be thrown away"


@pytest.mark.parametrize("call", range(CALLS))
@pytest.mark.parametrize(
    "error",
    [
        UnreachableError("gone"),
        EngineError("refused"),
        UnsupportedError("no probe"),
        SpecVersionError("other probe"),
        RuntimeError("a bug"),
        ValueError("nonsense"),
        MemoryError(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_at_any_call_is_a_finding_and_never_a_match(call: int, error: Exception) -> None:
    engine = worker_at(T1, "run@1")
    count = itertools.count()

    def fail(_name: str) -> None:
        if next(count) == call:
            raise error

    engine.before = fail
    found = verify(engine)
    assert found.verdict.status is not VerdictStatus.MATCH
    assert found.verdict.findings


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_scores_that_are_not_finite_are_refused(bad: float) -> None:
    engine = worker_at(T1, "run@1")
    score = engine.score
    engine.score = lambda ids, prompt_length, replica: replace(
        score(ids, prompt_length=prompt_length), logprobs_nats=(bad,) * (len(ids) - prompt_length)
    )
    assert verify(engine).verdict.status is VerdictStatus.MISMATCH


def test_scores_of_other_tokens_are_refused() -> None:
    engine = worker_at(T1, "run@1")
    score = engine.score

    def shifted(ids, prompt_length, replica):
        answer = score(ids, prompt_length=prompt_length)
        return replace(answer, response_ids=(*answer.response_ids[1:], 5))

    engine.score = shifted
    found = verify(engine)
    assert found.verdict.status is VerdictStatus.MISMATCH
    assert FindingCode.REPLAY_MISMATCH in codes(found)


def test_a_worker_that_understates_its_ranks_is_not_ready() -> None:
    engine = worker_at(T1, "run@1")
    status, observe, layouts = engine.status, engine.observe, engine.layouts
    engine.status = lambda: replace(status(), ranks=status().ranks[:1], expected_ranks=1)
    engine.observe = lambda seed: observe(seed)[:1]
    engine.layouts = lambda: layouts()[:1]
    found = verify(engine)
    assert found.verdict.status is not VerdictStatus.MATCH
    assert FindingCode.MISSING_RANK in codes(found)


def test_an_audit_needs_no_record_and_another_label_is_a_warning_only() -> None:
    found = Verifier(worker_at(T1, "another"), "w").audit(manifest_of(T1, "run@1"))
    assert found.verdict.status is VerdictStatus.MATCH
    assert codes(found) == {FindingCode.VERSION_LABEL}


def test_a_raced_verification_is_tried_again_and_concludes() -> None:
    engine = worker_at(T1, "run@1")
    agent = Agent(engine, worker="w", config=AgentConfig(race_wait_s=0.0))
    hits = itertools.count()

    def once(name: str) -> None:
        if name == "observe" and next(hits) == 0:
            engine.epoch += 1

    engine.after = once
    outcome = agent.verify(request())
    assert outcome.verification.verdict.status is VerdictStatus.MATCH
    assert [t.reason for t in agent.journal.transitions()].count("verifying") == 2


def test_races_without_end_are_given_up_and_not_ready() -> None:
    engine = worker_at(T1, "run@1")
    agent = Agent(engine, worker="w", config=AgentConfig(race_wait_s=0.0, race_attempts=3))

    def always(name: str) -> None:
        engine.epoch += name == "observe"

    engine.after = always
    outcome = agent.verify(request())
    assert outcome.verification.verdict.status is VerdictStatus.INCOMPLETE
    assert engine.calls.count("observe") == 3
    assert agent.readiness.state.value == "PENDING"


def test_the_last_id_of_the_vocabulary_may_come_back_as_0_also_in_the_first_verification() -> None:
    # SGLang 0.5.23 reports it so, and its vocabulary is known only after the layout was read.
    weights = {"model.embed_tokens.weight": np.ones((100, 2), np.float32)}
    engine = SimulatedEngine(weights, label="run@1")
    ids = [7, 8, 99, 5]
    scores = {c_key(i, "new"): scores_of(weights, ids, 2) for i in range(2)}
    record = ReplayRecord(input_ids=ids, prompt_length=2, scores=scores)
    status, score = engine.status, engine.score
    engine.status = lambda: replace(status(), vocab_size=0)

    def clamped(given, prompt_length, replica):
        answer = score(given, prompt_length=prompt_length)
        return replace(answer, response_ids=tuple(0 if i == 99 else i for i in answer.response_ids))

    engine.score = clamped
    found = verify(engine, VerifyRequest(manifest_of(weights, "run@1"), (record,)))
    assert found.verdict.status is VerdictStatus.MATCH, found.verdict.findings


def replicated(weights_of_second):
    engine = SimulatedEngine(T0, tp=2)
    engine.replicas = [None, T0]
    runner = ReplayRunner(engine, worker="w", vocab_size=100, sleep=lambda _s: None)
    old = runner.take([record_of(T0)], label="run@0", warm=0, replicas=2)
    engine.push(T1, "run@1")
    engine.replicas = [None, weights_of_second]
    return engine, old


def test_every_data_parallel_replica_is_replayed() -> None:
    engine, old = replicated(T1)
    engine.calls.clear()
    found = verify(engine, old=old)
    assert found.verdict.status is VerdictStatus.MATCH
    assert found.replay.status is ReplayStatus.PASS
    assert engine.calls.count("score") == 2 * 3
    assert found.verdict.evidence["replicas_replayed"] == "2"


def test_a_replica_that_scores_as_before_is_named_though_the_first_is_right() -> None:
    engine, old = replicated(T0)
    found = verify(engine, old=old)
    assert found.verdict.status is VerdictStatus.MISMATCH
    (stale,) = [finding for finding in found.verdict.findings if finding.code is FindingCode.REPLAY_STALE]
    assert stale.text.startswith("replay of replica 1: ")
    assert found.replay.status is ReplayStatus.FAIL, "what is reported is the replica that speaks against the worker"


def test_a_replica_that_does_not_answer_is_no_pass() -> None:
    engine, old = replicated(T1)
    engine.replicas[1] = {}  # it knows no weights
    answered = engine.score

    def score(ids, *, prompt_length, replica=0):
        if replica == 1:
            raise EngineError("DP rank 1 is not active")
        return answered(ids, prompt_length=prompt_length, replica=replica)

    engine.score = score
    found = verify(engine, old=old)
    assert found.verdict.status is VerdictStatus.INCOMPLETE
    assert "DP rank 1" in found.verdict.reason
