import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from syncguard.errors import ExitCode, RecordError
from syncguard.replay import ADVICE, RAW, A, Kind, ReplayRecord, ScoreDefinition, ScoreKey, b_key, c_key, diagnose

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
from lookalikes import CASES, draft, make_record


@pytest.mark.parametrize("case", CASES)
def test_each_lookalike_is_told_from_the_others(case):
    found = [diagnose(make_record(case, seed)).kind for seed in range(1000, 1020)]
    right = CASES[case][2]
    assert sum(kind in right for kind in found) >= 19, [kind.value for kind in found]


@pytest.mark.parametrize("case", CASES)
def test_each_lookalike_is_told_apart_when_several_responses_are_pooled(case):
    first = make_record(case, 2000)
    several = [make_record(case, seed) for seed in range(2000, 2004)]
    if case == "temperature on one side":  # the fault is on one side
        several = [first]
    if case == "faint temperature":  # one run has one temperature
        several = [one for one in several if one.sampling == first.sampling]
    pooled = [replace(one, sampling=first.sampling, meta=first.meta) for one in several]
    if case in {
        "shift by one",
        "mask misaligned",
        "zero-padded scores",
        "retokenized ids",
        "router differences (MoE)",
        "one outlier",
    }:
        pooled = [one for one in pooled if diagnose(one).side == diagnose(first).side]
    assert diagnose(pooled).kind in CASES[case][2] | ({Kind.ROUTING, Kind.TAIL} if case == "one outlier" else set())


def scored(update: bool = False, seed: int = 3, **changes) -> ReplayRecord:
    one = draft(seed, update=update)
    keys = {
        "A": A,
        "B0.old": b_key(0, "old"),
        "B1.old": b_key(1, "old"),
        "C0.old": c_key(0, "old"),
        "C1.old": c_key(1, "old"),
    }
    fields = {
        "input_ids": np.concatenate([np.arange(8), one.ids]),
        "prompt_length": 8,
        "scores": {key: one.scores[name] for name, key in keys.items()},
    }
    return ReplayRecord(**{**fields, **changes})


def with_changed(record: ReplayRecord, **changed) -> ReplayRecord:
    scores = dict(record.scores)
    for name, values in changed.items():
        key = name.replace("_", ".")
        scores[ScoreKey.parse(f"{key}.cold" if key.startswith("B") else key)] = values
    return replace(record, scores=scores)


def test_case_1_an_offset_on_a_from_position_1_names_the_side_and_the_position():
    record = scored()
    altered = record.scores[A].copy()
    altered[1:] -= 0.10
    found = diagnose(with_changed(record, A=altered))
    assert (found.kind, found.side) == (Kind.OFFSET, "A")
    assert "from position 1 on" in found.reason
    assert "first-token handling" in found.inspect_next
    assert any("A-B, A-C" in step for step in found.path_taken)


def test_case_2_an_offset_on_both_c_passes_names_c_although_c_repeats_exactly():
    record = scored()
    altered = record.scores[c_key(0, "old")] - 0.10
    found = diagnose(with_changed(record, C0_old=altered, C1_old=altered))
    assert (found.kind, found.side) == (Kind.OFFSET, "C")
    assert "from position 0 on" in found.reason
    assert "repeats of C.old: MAE=0.000000 max=0.000000" in found.evidence


def test_case_3_within_one_state_a_large_gap_without_shape_points_at_states_first():
    """A and B equal to the last bit, repeats exact, C far away: what a skipped update looks like in one record."""
    record = scored()
    b = record.scores[b_key(0, "old")]
    c = b - np.random.default_rng(1).exponential(11, b.size)
    found = diagnose(with_changed(record, A=b, B1_old=b, C0_old=c, C1_old=c))
    assert (found.kind, found.side) == (Kind.CROSS_ENGINE, "C")
    assert found.inspect_next.startswith("resident weights first")


def bfloat16_over_two_ranks(seed: int = 0, **changes) -> ReplayRecord:
    """As measured on a real server: A-B 0.0064 nat, B-C 0.0195 nat, repeats exact."""
    rng = np.random.default_rng(seed)
    truth = -rng.exponential(2.0, 48) - 0.5
    b = truth + rng.normal(0, 0.004, 48)
    a, c = b + rng.normal(0, 0.008, 48), b + rng.normal(0, 0.0245, 48)
    scores = {A: a, b_key(0, "old"): b, b_key(1, "old"): b, c_key(0, "old"): c, c_key(1, "old"): c}
    return ReplayRecord(input_ids=np.arange(56), prompt_length=8, scores=scores, **changes)


@pytest.mark.parametrize("seed", range(8))
def test_numerics_of_two_engines_are_never_taken_for_a_fault_with_a_shape(seed):
    record = bfloat16_over_two_ranks(seed)
    assert diagnose(record).kind in {Kind.AGREEMENT, Kind.AMBIGUOUS}
    c = record.scores[c_key(0, "old")] - 0.10
    found = diagnose(with_changed(record, C0_old=c, C1_old=c))
    assert (found.kind, found.side) == (Kind.OFFSET, "C")


@pytest.mark.parametrize("seed", range(8))
def test_a_faint_gap_at_t0_does_not_hide_what_the_update_shows(seed):
    record = bfloat16_over_two_ranks(seed)
    b, c = record.scores[b_key(0, "old")], record.scores[c_key(0, "old")]
    moved = np.random.default_rng(seed).laplace(0, 0.4, 48)
    clean = {"B0_new": b + moved, "B1_new": b + moved, "C0_new": c + moved, "C1_new": c + moved}
    keys = {"B0_new": b_key(0, "new"), "B1_new": b_key(1, "new"), "C0_new": c_key(0, "new"), "C1_new": c_key(1, "new")}
    assert diagnose(record.with_scores({keys[k]: v for k, v in clean.items()})).kind is Kind.AGREEMENT
    stale = clean | {"B0_new": b, "B1_new": b}
    assert diagnose(record.with_scores({keys[k]: v for k, v in stale.items()})).kind is Kind.STALE_WEIGHTS


def test_both_offsets_at_once_are_ambiguous_and_both_are_named():
    record = scored()
    a, c = record.scores[A].copy(), record.scores[c_key(0, "old")] - 0.3
    a[1:] += 0.2
    found = diagnose(with_changed(record, A=a, C0_old=c, C1_old=c))
    assert found.kind is Kind.AMBIGUOUS
    assert found.candidates == ("constant offset on A", "constant offset on C")


def test_a_fault_on_b_alone_is_seen_because_a_and_c_agree():
    record = scored()
    b = record.scores[b_key(0, "old")] - 0.2
    found = diagnose(with_changed(record, B0_old=b, B1_old=b))
    assert (found.kind, found.side) == (Kind.OFFSET, "B")


def at_present_state(record):
    """The record of a worker that generated and replayed with one version, so that nothing is older."""
    moved = {k if k.path == "A" else replace(k, state="new"): v for k, v in record.scores.items()}
    return replace(record, scores=moved, versions={"old": "run@3", "new": "run@3"})


def test_a_response_of_the_present_version_is_judged_at_one_state():
    record = scored()
    altered = record.scores[A].copy()
    altered[1:] -= 0.10
    assert diagnose(at_present_state(record)).kind is Kind.AGREEMENT
    found = diagnose(at_present_state(with_changed(record, A=altered)))
    assert (found.kind, found.side) == (Kind.OFFSET, "A")


def test_versions_that_differ_are_never_taken_for_one_state():
    one = at_present_state(scored())
    assert replace(one, versions={"old": "run@2", "new": "run@3"}).at_one_state().versions == {
        "old": "run@2",
        "new": "run@3",
    }
    assert replace(one, versions={}).at_one_state().passes("B", "old", "cold") == ()
    assert diagnose(replace(one, versions={"old": "run@2", "new": "run@3"})).kind is Kind.NO_POWER


def test_different_definitions_end_the_walk_before_any_subtraction():
    found = diagnose(scored(definition=RAW, definitions={"C": ScoreDefinition("temperature", temperature=0.8)}))
    assert (found.kind, found.side) == (Kind.DEFINITION, "C")
    assert found.evidence == ()
    assert "log_softmax(z/T)" in found.next_experiment


def test_other_returned_ids_end_the_walk_with_the_position():
    record = scored()
    ids = record.response_ids.tolist()
    ids[5] += 1
    found = diagnose(replace(record, meta={"returned_ids": {"C": ids}}))
    assert (found.kind, found.side) == (Kind.RETOKENIZED, "C")
    assert "position 5" in found.reason


@pytest.mark.parametrize("missing", ["B1.old.cold", "C1.old"])
def test_without_a_repeat_nothing_is_concluded(missing):
    record = scored()
    scores = {key: value for key, value in record.scores.items() if str(key) != missing}
    found = diagnose(replace(record, scores=scores))
    assert found.kind is Kind.INCOMPLETE
    assert found.exit_code == ExitCode.INCOMPLETE


def test_without_a_the_pair_of_b_and_c_is_still_judged():
    record = scored()
    scores = {key: value for key, value in record.scores.items() if key != A}
    assert diagnose(replace(record, scores=scores)).kind is Kind.AGREEMENT


def test_a_gap_of_a_is_split_by_teacher_forced_decode():
    record = scored()
    b = record.scores[b_key(0, "old")]
    a = b + np.random.default_rng(4).laplace(0, 0.4, b.size)
    unsplit = diagnose(with_changed(record, A=a))
    assert (unsplit.kind, unsplit.side) == (Kind.DECODE_PATH, "A")
    assert "teacher-force" in unsplit.next_experiment
    assert diagnose(with_changed(record, A=a, D0_old=a)).kind is Kind.DECODE_PATH
    assert diagnose(with_changed(record, A=a, D0_old=b)).kind is Kind.EXTRACTION


def test_a_training_forward_that_behaves_differently_is_found_after_all_else_agrees():
    record = scored()
    c = record.scores[c_key(0, "old")]
    assert diagnose(with_changed(record, G0_old=c)).kind is Kind.AGREEMENT
    assert (
        diagnose(with_changed(record, G0_old=c + np.random.default_rng(2).laplace(0, 0.3, c.size))).kind
        is Kind.TRAINING_FORWARD
    )


def test_a_fault_before_the_update_is_named_before_the_update_is_looked_at():
    record = make_record("stale weights", 5)
    c = record.scores[c_key(0, "old")] - 0.5
    assert diagnose(with_changed(record, C0_old=c, C1_old=c)).kind is Kind.OFFSET


def test_an_offset_on_c_after_a_tiny_update_is_no_staleness():
    record = make_record("update too small", 5)
    c = record.scores[c_key(0, "new")] - 0.5
    assert diagnose(with_changed(record, C0_new=c, C1_new=c)).kind is Kind.OFFSET


def test_every_kind_has_its_advice_and_exit_code():
    assert set(ADVICE) == set(Kind)
    codes = {diagnose(make_record(case, 1)).kind: diagnose(make_record(case, 1)).exit_code for case in CASES}
    assert codes[Kind.AGREEMENT] == ExitCode.OK
    assert codes[Kind.NO_POWER] == codes[Kind.AMBIGUOUS] == ExitCode.WARNING
    assert codes[Kind.STALE_WEIGHTS] == codes[Kind.OFFSET] == ExitCode.MISMATCH


def test_a_diagnosis_has_a_json_form_and_no_truth_value():
    found = diagnose(scored())
    assert json.loads(json.dumps(found.as_dict(), allow_nan=False))["kind"] == "agreement"
    for value in (found, found.kind):
        with pytest.raises(TypeError, match="truth value"):
            bool(value)


def test_a_diagnosis_is_the_same_each_time_and_after_the_file(tmp_path):
    record = make_record("router differences (MoE)", 7)
    record.save(tmp_path / "r")
    assert diagnose(record) == diagnose(record) == diagnose(ReplayRecord.load(tmp_path / "r"))


def test_no_record_is_an_error():
    with pytest.raises(RecordError, match="nothing to diagnose"):
        diagnose([])


def decoded_and_altered(seed: int = 4):
    """A record whose A is off without a shape, its B, and that A."""
    record = scored()
    b = record.scores[b_key(0, "old")]
    return record, b, b + np.random.default_rng(seed).laplace(0, 0.4, b.size)


def test_decode_that_equals_neither_a_nor_b_is_ambiguous_and_says_so():
    record, b, a = decoded_and_altered()
    neither = b + np.random.default_rng(9).laplace(0, 0.4, b.size)
    found = diagnose(with_changed(record, A=a, D0_old=neither))
    assert (found.kind, found.side) == (Kind.AMBIGUOUS, "A")
    assert "decode equals neither" in found.reason
    assert found.candidates == ("decode versus prefill", "score extraction")


def test_an_offset_on_a_says_whether_decode_makes_it_too():
    record = scored()
    a = record.scores[A].copy()
    a[1:] -= 0.10
    altered = diagnose(with_changed(record, A=a, D0_old=record.scores[A]))
    made = diagnose(with_changed(record, A=a, D0_old=a))
    assert altered.kind is made.kind is Kind.OFFSET
    assert "A was altered after the engine" in altered.reason
    assert "decode makes this each time" in made.reason


def test_a_prefill_replay_that_stands_apart_is_told_from_a_worker_that_changed():
    record, b, _ = decoded_and_altered()
    moved = b + np.random.default_rng(5).laplace(0, 0.4, b.size)
    apart = with_changed(record, A=b, C0_old=b, C1_old=b, B0_old=moved, B1_old=moved)
    unsplit = diagnose(apart)
    assert (unsplit.kind, unsplit.side) == (Kind.DECODE_PATH, "B")
    path = diagnose(with_changed(apart, D0_old=b))
    assert (path.kind, path.side) == (Kind.DECODE_PATH, "B")
    changed = diagnose(with_changed(apart, D0_old=moved))
    assert (changed.kind, changed.side) == (Kind.CROSS_ENGINE, "B")
    assert "the worker changed since A" in changed.reason


def test_decode_alone_apart_is_seen_where_all_else_agrees():
    record, b, a = decoded_and_altered()
    assert diagnose(with_changed(record, D0_old=b)).kind is Kind.AGREEMENT
    found = diagnose(with_changed(record, D0_old=a))
    assert (found.kind, found.side) == (Kind.DECODE_PATH, "D")


def test_decode_that_keeps_the_old_weights_is_seen_although_prefill_followed_the_update():
    record = make_record("clean update", 5)
    old, new = record.scores[b_key(0, "old")], record.scores[b_key(0, "new")]
    assert diagnose(record.with_scores({ScoreKey("D", "new"): new})).kind is Kind.AGREEMENT
    found = diagnose(record.with_scores({ScoreKey("D", "new"): old}))
    assert (found.kind, found.side) == (Kind.DECODE_PATH, "D")
    assert "decode scores as before the update" in found.reason


def test_unstable_decode_is_named():
    record, b, a = decoded_and_altered()
    found = diagnose(with_changed(record, D0_old=b, D1_old=a))
    assert (found.kind, found.side) == (Kind.UNSTABLE, "D")


def test_decode_of_another_definition_is_not_subtracted():
    record, b, _ = decoded_and_altered()
    heated = replace(record, definitions={"D": ScoreDefinition("temperature", temperature=0.8)})
    assert diagnose(heated).kind is Kind.AGREEMENT
    found = diagnose(with_changed(heated, D0_old=b))
    assert (found.kind, found.side) == (Kind.DEFINITION, "D")
