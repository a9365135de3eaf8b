"""Where bindings were recorded from the engine's own loader, no verification is ready without a replay that agreed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from simulated_engine import SimulatedEngine, manifest_of, record_of, weights_of

from syncguard.agent.verify import Verifier, VerifyRequest
from syncguard.layout.model import BindingSource
from syncguard.manifest.recorded import recorded_tensors
from syncguard.manifest.verdict import FindingCode, Severity, VerdictStatus
from syncguard.replay import ReplayStatus

T0, T1 = weights_of(0), weights_of(1)


class RecordedEngine(SimulatedEngine):
    """An engine one of whose tensors is bound by a recording on each rank."""

    def layouts(self):
        return tuple(
            replace(
                layout,
                bindings=(replace(layout.bindings[0], source=BindingSource.RECORDED), *layout.bindings[1:]),
            )
            for layout in super().layouts()
        )


def verified(**changes):
    engine = RecordedEngine(T0, tp=2)
    engine.push(T1, "run@1")
    asked = replace(VerifyRequest(manifest_of(T1, "run@1"), (record_of(T0, T1),)), **changes)
    return Verifier(engine, "w", sleep=lambda _s: None).verify(asked)


def the_finding(found):
    (finding,) = [finding for finding in found.verdict.findings if finding.code is FindingCode.RECORDED]
    return finding


def test_a_replay_that_agreed_lets_a_recorded_binding_count_and_the_verdict_says_so() -> None:
    found = verified()
    assert found.verdict.status is VerdictStatus.MATCH
    finding = the_finding(found)
    assert finding.severity is Severity.WARNING
    assert "1 tensors have no rule" in finding.text
    (name,) = recorded_tensors(found.observation.layouts)
    assert finding.observed == name
    assert found.verdict.evidence["recorded_bindings"] == "2"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"records": (), "replay_waived_because": "no scores in this run"}, "waived: no scores in this run"),
        ({"records": ()}, "there was none"),
        ({"records": (record_of(T0),)}, "it ended as"),
    ],
)
def test_without_a_replay_that_agreed_a_recorded_binding_is_not_ready_whatever_the_digests_say(changes, why) -> None:
    found = verified(**changes)
    assert found.verdict.status is VerdictStatus.INCOMPLETE
    finding = the_finding(found)
    assert finding.severity is Severity.INCOMPLETE
    assert why in finding.text


def test_a_first_version_whose_replay_agrees_but_has_nothing_to_compare_with_may_be_ready() -> None:
    record = record_of(T0, T1)
    first = replace(record, scores={key: scores for key, scores in record.scores.items() if key.state == "new"})
    found = verified(records=(first,))
    assert found.replay.status is ReplayStatus.NO_POWER
    assert found.verdict.status is VerdictStatus.MATCH
    assert "agreed with the trainer" in the_finding(found).text


def test_a_replay_that_disagrees_is_a_mismatch_and_the_recording_is_named_as_unchecked() -> None:
    found = verified(records=(record_of(T0, weights_of(2)),))
    assert found.verdict.status is VerdictStatus.MISMATCH
    assert the_finding(found).severity is Severity.INCOMPLETE


def test_an_audit_says_that_a_binding_was_recorded_and_that_no_replay_checked_it() -> None:
    engine = RecordedEngine(T0, tp=2)
    engine.push(T1, "run@1")
    found = Verifier(engine, "w", sleep=lambda _s: None).audit(manifest_of(T1, "run@1"))
    assert found.verdict.status is VerdictStatus.MATCH
    assert the_finding(found).severity is Severity.WARNING
    assert "no replay checked it" in the_finding(found).text
    assert found.verdict.exit_code == 1


def test_bindings_by_rules_need_no_such_finding() -> None:
    engine = SimulatedEngine(T0, tp=2)
    engine.push(T1, "run@1")
    asked = VerifyRequest(manifest_of(T1, "run@1"), (), replay_waived_because="no scores")
    found = Verifier(engine, "w", sleep=lambda _s: None).verify(asked)
    assert FindingCode.RECORDED not in {finding.code for finding in found.verdict.findings}
