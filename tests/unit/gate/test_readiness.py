"""Properties of the decision, whatever the fleet looks like. The cases are in tests/scenarios/gate."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from syncguard.gate.readiness import Action, Decision, FleetState, GatePolicy, Mode, WorkerState, decide
from syncguard.manifest.verdict import Finding, FindingCode, Readiness, ReadinessState, Severity, Verdict, VerdictStatus

LABELS = ["run@1", "run@2"]
readiness = st.none() | st.builds(
    Readiness,
    st.sampled_from(ReadinessState),
    st.just("said"),
    st.just("said"),
    st.sampled_from(LABELS),
    st.floats(0, 100),
)
findings = st.lists(
    st.builds(
        Finding,
        st.sampled_from([FindingCode.STALE, FindingCode.UNKNOWN_CONTENT, FindingCode.UNCHANGED]),
        st.just(Severity.MISMATCH),
        st.just("said"),
        fqn=st.sampled_from(["w", "v"]),
        rank=st.sampled_from(["", "tp0/2", "tp1/2"]),
        observed=st.sampled_from(["", "d1", "d2"]),
    ),
    max_size=3,
).map(tuple)
verdicts = st.none() | st.builds(Verdict, st.sampled_from(VerdictStatus), st.just("said"), findings)
workers = st.lists(
    st.builds(
        WorkerState,
        st.just("w"),
        readiness,
        verdicts,
        st.floats(0, 100),
        st.integers(0, 4),
        st.integers(0, 4),
        st.sampled_from(["", "", "broken"]),
        st.sampled_from(["", "", "no answer"]),
    ),
    max_size=5,
).map(lambda found: tuple(WorkerState(f"w{i}", *_rest(w)) for i, w in enumerate(found)))
policies = st.builds(
    GatePolicy,
    st.sampled_from(Mode),
    st.integers(1, 4),
    st.floats(1, 100),
    st.floats(0, 20),
    st.integers(0, 3),
    st.integers(1, 4),
)


def _rest(worker: WorkerState) -> tuple[object, ...]:
    names = ("readiness", "verdict", "seen_s", "attempts", "faults_in_row", "quarantined", "unreachable")
    return tuple(getattr(worker, name) for name in names)


@settings(max_examples=150, deadline=None)
@given(workers=workers, policy=policies, now_s=st.floats(0, 200), published_s=st.floats(0, 100))
def test_nobody_is_let_through_without_fresh_proof_at_the_wanted_version(workers, policy, now_s, published_s) -> None:
    state = FleetState("run@2", published_s, workers, lease_s=10.0)
    decision = decide(now_s, state, policy)
    by_name = {worker.worker: worker for worker in workers}
    for name in decision.ready:
        worker = by_name[name]
        assert worker.readiness is not None
        assert worker.readiness.state is ReadinessState.READY
        assert worker.readiness.weight_version == "run@2"
        assert not worker.quarantined
        assert not worker.unreachable
        assert now_s - worker.seen_s <= 10.0
    if decision.action is Action.PROCEED:
        assert decision.ready
        needed = policy.quorum if policy.mode is Mode.QUORUM else 1
        assert len(decision.ready) >= needed
        if policy.mode is Mode.ALL:
            assert not decision.named(Action.WAIT)
            assert not decision.named(Action.RETRY_SYNC)
    assert decision.reason
    assert all(worker.reason or worker.readiness for worker in decision.workers)


@settings(max_examples=80, deadline=None)
@given(workers=workers, policy=policies, now_s=st.floats(0, 200))
def test_a_fleet_in_which_everyone_proved_the_version_proceeds(workers, policy, now_s) -> None:
    proven = tuple(
        WorkerState(
            worker.worker,
            Readiness(ReadinessState.READY, "verified", "said", "run@2"),
            Verdict(VerdictStatus.MATCH, "said"),
            now_s,
            1,
        )
        for worker in workers
    )
    if len(proven) < (policy.quorum if policy.mode is Mode.QUORUM else 1):
        return
    assert decide(now_s, FleetState("run@2", now_s, proven), policy).action is Action.PROCEED


@settings(max_examples=80, deadline=None)
@given(workers=workers, policy=policies)
def test_waiting_ends_at_the_deadline(workers, policy) -> None:
    state = FleetState("run@2", 0.0, workers)
    assert decide(policy.deadline_s + 1, state, policy).action is not Action.WAIT


def test_a_decision_has_no_truth_value() -> None:
    with pytest.raises(TypeError, match="truth value"):
        bool(Decision(Action.PROCEED, "said"))
