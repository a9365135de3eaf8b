from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import structs

from syncguard.errors import ExitCode
from syncguard.layout.model import Binding, Dropped, LogicalTensor, RankIdentity, Shard, Unbound
from syncguard.manifest.compare import compare, known_version
from syncguard.manifest.model import Changed, CheckResult, ExemptPolicy
from syncguard.manifest.verdict import FindingCode, Severity, VerdictStatus
from syncguard.spec import Box


def codes(verdict):
    return {finding.code for finding in verdict.findings}


def only(verdict, code):
    return [finding for finding in verdict.findings if finding.code is code]


def test_a_worker_that_holds_the_export_matches_with_full_coverage(make_weights, make_manifest, make_worker):
    tensors = make_weights(1)
    verdict = compare(make_manifest(tensors, "run@1"), make_worker(tensors).observe())
    assert verdict.status is VerdictStatus.MATCH
    assert verdict.exit_code is ExitCode.OK
    assert not verdict.findings
    assert verdict.coverage.proven_tensors == verdict.coverage.manifest_tensors == 5
    assert verdict.coverage.bound_residents == verdict.coverage.resident_tensors == 8
    assert verdict.coverage.replicas == 1
    assert verdict.coverage.padding_elements == 6 * 8


def test_a_worker_that_kept_everything_is_stale_by_name_on_every_rank(make_weights, make_manifest, make_worker):
    old, new = make_weights(0), make_weights(1)
    before = make_worker(old, label="run@0")
    history = [known_version(make_manifest(old, "run@0"), before.observe())]
    verdict = compare(make_manifest(new, "run@1"), make_worker(old).observe(), history=history)
    assert verdict.status is VerdictStatus.MISMATCH
    stale = only(verdict, FindingCode.STALE)
    assert {finding.fqn for finding in stale} == set(new)
    assert {finding.rank for finding in stale} == {"tp0/2", "tp1/2"}
    assert all("run@0" in finding.text for finding in stale)
    assert FindingCode.TORN not in codes(verdict)


def test_tensors_that_the_step_did_not_change_are_not_called_stale(make_weights, make_manifest, make_worker):
    old, new = make_weights(0), make_weights(1)
    new["norm.weight"] = old["norm.weight"]
    history = [known_version(make_manifest(old, "run@0"), make_worker(old).observe())]
    verdict = compare(make_manifest(new, "run@1"), make_worker(old).observe(), history=history)
    assert {finding.fqn for finding in only(verdict, FindingCode.STALE)} == set(new) - {"norm.weight"}
    assert verdict.coverage.proven_tensors == 1


def test_a_torn_update_names_the_tensors_that_stayed_behind(make_weights, make_manifest, make_worker):
    old, new = make_weights(0), make_weights(1)
    half = {**new, "down.weight": old["down.weight"], "norm.weight": old["norm.weight"]}
    history = [known_version(make_manifest(old, "run@0"), make_worker(old).observe())]
    verdict = compare(make_manifest(new, "run@1"), make_worker(half).observe(), history=history)
    assert {f.fqn for f in only(verdict, FindingCode.STALE)} == {"down.weight", "norm.weight"}
    assert len(only(verdict, FindingCode.TORN)) == 1


@pytest.mark.parametrize("with_parts", [True, False])
def test_one_rank_that_kept_the_old_version_is_named(make_weights, make_manifest, make_worker, with_parts):
    old, new = make_weights(0), make_weights(1)
    parts = {
        "up.weight": (Box((0, 0), (6, 8)), Box((6, 0), (6, 8))),
        "gate.weight": (Box((0, 0), (6, 8)), Box((6, 0), (6, 8))),
        "down.weight": (Box((0, 0), (8, 6)), Box((0, 6), (8, 6))),
    }
    history = [known_version(make_manifest(old, "run@0"), make_worker(old).observe())]
    worker = make_worker(new)
    worker.load(old, rank=1)
    verdict = compare(
        make_manifest(new, "run@1", parts=parts if with_parts else None), worker.observe(), history=history
    )
    assert verdict.status is VerdictStatus.MISMATCH
    named = {(f.fqn, f.rank) for f in verdict.findings if f.fqn}
    assert named == {(fqn, "tp1/2") for fqn in new}


def test_parts_blame_the_right_rank_without_any_history(make_weights, make_manifest, make_worker):
    tensors = make_weights(1)
    worker = make_worker(tensors)
    worker.residents[1]["down.weight"][3, 2] += 1
    parts = {"down.weight": (Box((0, 0), (8, 6)), Box((0, 6), (8, 6)))}
    verdict = compare(make_manifest(tensors, "run@1", parts=parts), worker.observe())
    (finding,) = verdict.findings
    assert (finding.code, finding.fqn, finding.rank) == (FindingCode.UNKNOWN_CONTENT, "down.weight", "tp1/2")
    assert finding.box == "[0:8, 6:12]"


def test_two_tensors_of_one_shape_that_were_exchanged_are_called_swapped(make_weights, make_manifest, make_worker):
    tensors = make_weights(1)
    wrong = {**tensors, "up.weight": tensors["gate.weight"], "gate.weight": tensors["up.weight"]}
    verdict = compare(make_manifest(tensors, "run@1"), make_worker(wrong, tp=1).observe())
    swapped = only(verdict, FindingCode.SWAPPED)
    assert {f.fqn for f in swapped} == {"up.weight", "gate.weight"}
    assert "gate.weight" in next(f.text for f in swapped if f.fqn == "up.weight")


def test_a_tensor_that_was_never_written_is_said_to_be_zero(make_weights, make_manifest, make_worker):
    tensors = make_weights(1)
    worker = make_worker(tensors, tp=1)
    worker.residents[0]["norm.weight"][:] = 0
    (finding,) = compare(make_manifest(tensors, "run@1"), worker.observe()).findings
    assert "zero" in finding.text


def test_replicas_that_differ_are_a_mismatch_even_when_the_first_is_right(make_weights, make_manifest, make_worker):
    tensors = make_weights(1)
    worker = make_worker(tensors)
    worker.residents[1]["norm.weight"][0] += 1
    verdict = compare(make_manifest(tensors, "run@1"), worker.observe())
    (finding,) = verdict.findings
    assert verdict.status is VerdictStatus.MISMATCH
    assert (finding.fqn, finding.rank) == ("norm.weight", "tp1/2")


def test_a_rank_that_did_not_answer_makes_the_verdict_incomplete(make_weights, make_manifest, make_worker):
    tensors = make_weights(1)
    observation = make_worker(tensors).observe()
    verdict = compare(make_manifest(tensors, "run@1"), replace(observation, ranks=observation.ranks[:1]))
    assert verdict.status is VerdictStatus.INCOMPLETE
    assert FindingCode.MISSING_RANK in codes(verdict)
    assert FindingCode.NOT_COVERED in codes(verdict)


def test_a_worker_that_claims_fewer_ranks_than_its_groups_have_is_not_believed(
    make_weights, make_manifest, make_worker
):
    tensors = {"norm.weight": make_weights(1)["norm.weight"]}
    observation = make_worker(make_weights(1)).observe(expected_ranks=1)
    verdict = compare(make_manifest(tensors, "run@1"), replace(observation, ranks=observation.ranks[:1]))
    assert FindingCode.MISSING_RANK in codes(verdict)


def test_a_rank_that_answers_twice_does_not_stand_in_for_another(make_weights, make_manifest, make_worker):
    tensors = make_weights(1)
    observation = make_worker(tensors).observe()
    twice = replace(observation, ranks=(observation.ranks[0], observation.ranks[0]))
    verdict = compare(make_manifest(tensors, "run@1"), twice)
    assert verdict.status is VerdictStatus.INCOMPLETE
    assert {FindingCode.DUPLICATE_RANK, FindingCode.MISSING_RANK} <= codes(verdict)


def test_a_draft_model_is_listed_as_uncovered_and_stands_in_for_no_rank(make_weights, make_manifest, make_worker):
    tensors = make_weights(1)
    observation = make_worker(tensors, tp=1).observe()
    layout, rank = observation.layouts[0], observation.ranks[0]
    draft_rank = replace(layout.rank, role="draft")
    draft = replace(layout, rank=draft_rank, architecture="LlamaForCausalLMEagle3").sealed()
    draft_seen = replace(rank, rank=draft_rank, layout_fingerprint=draft.fingerprint)
    both = replace(observation, layouts=(layout, draft), ranks=(rank, draft_seen))
    verdict = compare(make_manifest(tensors, "run@1"), both)
    assert verdict.status is VerdictStatus.MATCH
    assert any("Eagle3" in name for name in verdict.coverage.uncovered)
    only_draft = replace(observation, layouts=(draft,), ranks=(draft_seen,))
    assert compare(make_manifest(tensors, "run@1"), only_draft).status is VerdictStatus.INCOMPLETE


def test_no_rank_at_all_proves_nothing(make_weights, make_manifest, make_worker):
    observation = make_worker(make_weights(1)).observe(ranks=(), layouts=(), expected_ranks=0)
    verdict = compare(make_manifest(make_weights(1), "run@1"), observation)
    assert verdict.status is VerdictStatus.INCOMPLETE
    assert verdict.coverage.proven_tensors == 0


def test_an_open_update_session_is_never_compared_to_a_match(make_weights, make_manifest, make_worker):
    tensors = make_weights(1)
    observation = make_worker(tensors).observe()
    ranks = tuple(replace(rank, updating=True) for rank in observation.ranks)
    verdict = compare(make_manifest(tensors, "run@1"), replace(observation, ranks=ranks))
    assert verdict.status is VerdictStatus.INCOMPLETE
    assert codes(verdict) == {FindingCode.UPDATE_RUNNING}


def test_ranks_at_different_update_epochs_are_incomplete(make_weights, make_manifest, make_worker):
    tensors = make_weights(1)
    observation = make_worker(tensors).observe()
    ranks = (observation.ranks[0], replace(observation.ranks[1], epoch=9))
    verdict = compare(make_manifest(tensors, "run@1"), replace(observation, ranks=ranks))
    assert verdict.status is VerdictStatus.INCOMPLETE
    assert FindingCode.EPOCH_DIFFERS in codes(verdict)


def test_padding_that_is_not_zero_is_a_mismatch(make_weights, make_manifest, make_worker):
    tensors = make_weights(1)
    worker = make_worker(tensors)
    worker.residents[1]["embed.weight"][-1, -1] = 1
    verdict = compare(make_manifest(tensors, "run@1"), worker.observe())
    (finding,) = verdict.findings
    assert (finding.code, finding.resident, finding.rank) == (
        FindingCode.PADDING_NOT_ZERO,
        "embed.weight",
        "tp1/2",
    )


def test_a_layer_without_a_rule_is_unsupported_by_name(make_weights, make_manifest, make_worker):
    tensors = make_weights(1)
    observation = make_worker(tensors, tp=1).observe()
    layout = replace(observation.layouts[0], unbound=(Unbound("x.weight", "OddLayer", "no rule"),))
    layout = replace(layout, residents=(*layout.residents, replace(layout.residents[0], name="x.weight"))).sealed()
    rank = replace(observation.ranks[0], layout_fingerprint=layout.fingerprint)
    verdict = compare(make_manifest(tensors, "run@1"), replace(observation, layouts=(layout,), ranks=(rank,)))
    assert verdict.status is VerdictStatus.UNSUPPORTED
    assert verdict.exit_code is ExitCode.UNSUPPORTED
    assert "OddLayer" in verdict.findings[0].text


def test_a_resident_element_that_no_claim_covers_is_incomplete(make_weights, make_manifest, make_worker):
    tensors = make_weights(1)
    observation = make_worker(tensors, tp=1).observe()
    layout = replace(observation.layouts[0], paddings=()).sealed()
    rank = replace(observation.ranks[0], layout_fingerprint=layout.fingerprint, paddings=())
    verdict = compare(make_manifest(tensors, "run@1"), replace(observation, layouts=(layout,), ranks=(rank,)))
    assert verdict.status is VerdictStatus.INCOMPLETE
    assert verdict.findings[0].resident == "embed.weight"


def test_an_exported_tensor_that_nobody_holds_is_incomplete_unless_exempt_by_name(
    make_weights, make_manifest, make_worker
):
    tensors = make_weights(1)
    more = {**tensors, "mtp.weight": tensors["norm.weight"]}
    observation = make_worker(tensors).observe()
    verdict = compare(make_manifest(more, "run@1"), observation)
    assert verdict.status is VerdictStatus.INCOMPLETE
    assert codes(verdict) == {FindingCode.NOT_HELD}
    exempt = (ExemptPolicy("mtp.weight", "speculative head is not served"),)
    verdict = compare(make_manifest(more, "run@1", exempt=exempt), observation)
    assert verdict.status is VerdictStatus.MATCH
    assert verdict.coverage.exempt_tensors == 1


def test_a_held_tensor_that_was_not_exported_is_incomplete(make_weights, make_manifest, make_worker):
    tensors = make_weights(1)
    fewer = {name: array for name, array in tensors.items() if name != "norm.weight"}
    verdict = compare(make_manifest(fewer, "run@1"), make_worker(tensors).observe())
    assert verdict.status is VerdictStatus.INCOMPLETE
    assert codes(verdict) == {FindingCode.NOT_EXPORTED}


def test_a_second_name_of_an_exported_tensor_need_not_be_exported_but_is_checked_when_it_is(
    make_weights, make_manifest, make_worker
):
    tensors = make_weights(1)
    observation = make_worker(tensors, tp=1).observe()
    layout, rank = observation.layouts[0], observation.ranks[0]
    embed = next(b for b in layout.bindings if b.resident == "embed.weight")
    partial = rank.partials[layout.bindings.index(embed)]
    shard = Shard(LogicalTensor("head.weight", "float32", embed.shard.tensor.shape), embed.shard.box)
    layout = replace(
        layout, bindings=(*layout.bindings, Binding(shard, "embed.weight", embed.ops, alias=True))
    ).sealed()
    rank = replace(rank, layout_fingerprint=layout.fingerprint, partials=(*rank.partials, partial))
    tied = replace(observation, layouts=(layout,), ranks=(rank,))
    assert compare(make_manifest(tensors, "run@1"), tied).status is VerdictStatus.MATCH
    both = {**tensors, "head.weight": tensors["embed.weight"]}
    assert compare(make_manifest(both, "run@1"), tied).status is VerdictStatus.MATCH
    untied = {**tensors, "head.weight": tensors["embed.weight"] + 1}
    assert compare(make_manifest(untied, "run@1"), tied).status is VerdictStatus.MISMATCH


def test_another_dtype_is_named_with_the_advice_to_cast_first(make_weights, make_manifest, make_worker):
    tensors = make_weights(1)
    manifest = make_manifest(tensors, "run@1")
    entries = tuple(structs.replace(e, dtype="bfloat16") if e.fqn == "norm.weight" else e for e in manifest.entries)
    verdict = compare(replace(manifest, entries=entries), make_worker(tensors, tp=1).observe())
    (finding,) = verdict.findings
    assert (finding.code, finding.expected, finding.observed) == (FindingCode.DTYPE_DIFFERS, "bfloat16", "float32")
    assert "cast" in finding.text


def test_an_export_of_frozen_bytes_is_found_although_everything_is_equal(make_weights, make_manifest, make_worker):
    tensors = make_weights(1)
    history = [known_version(make_manifest(tensors, "run@0"))]
    manifest = make_manifest(tensors, "run@1")
    claimed = tuple(structs.replace(entry, changed=Changed.CHANGED) for entry in manifest.entries)
    verdict = compare(replace(manifest, entries=claimed), make_worker(tensors).observe(), history=history)
    assert verdict.status is VerdictStatus.MISMATCH
    assert codes(verdict) == {FindingCode.UNCHANGED}
    assert len(verdict.findings) == 5


@pytest.mark.parametrize(("require", "status"), [(True, VerdictStatus.MISMATCH), (False, VerdictStatus.MATCH)])
def test_another_label_blocks_in_the_loop_and_warns_in_an_audit(
    make_weights, make_manifest, make_worker, require, status
):
    tensors = make_weights(1)
    observation = make_worker(tensors, label="run@0").observe()
    verdict = compare(make_manifest(tensors, "run@1"), observation, require_label=require)
    assert verdict.status is status
    assert codes(verdict) == {FindingCode.VERSION_LABEL}
    if not require:
        assert verdict.exit_code is ExitCode.WARNING


def test_an_empty_manifest_proves_nothing(make_weights, make_manifest, make_worker):
    observation = make_worker(make_weights(1)).observe()
    verdict = compare(make_manifest({}, "run@1"), replace(observation, layouts=(), ranks=(), expected_ranks=0))
    assert verdict.status is VerdictStatus.INCOMPLETE


def test_digests_of_another_key_are_incomplete_and_not_a_mismatch(make_weights, make_manifest, make_worker):
    tensors = make_weights(1)
    observation = make_worker(tensors).observe()
    other_key = tuple(replace(rank, key_seed_hex="11" * 32) for rank in observation.ranks)
    verdict = compare(make_manifest(tensors, "run@1"), replace(observation, ranks=other_key))
    assert verdict.status is VerdictStatus.INCOMPLETE
    assert FindingCode.ALGORITHM_DIFFERS in codes(verdict)


def test_an_answer_that_does_not_fit_its_layout_is_incomplete(make_weights, make_manifest, make_worker):
    tensors = make_weights(1)
    observation = make_worker(tensors, tp=1).observe()
    rank = observation.ranks[0]
    short = replace(rank, partials=rank.partials[:-1])
    verdict = compare(make_manifest(tensors, "run@1"), replace(observation, ranks=(short,)))
    assert verdict.status is VerdictStatus.INCOMPLETE
    assert FindingCode.LAYOUT_UNKNOWN in codes(verdict)


def test_a_partial_digest_of_fewer_elements_than_its_box_is_not_accepted(make_weights, make_manifest, make_worker):
    tensors = make_weights(1)
    observation = make_worker(tensors, tp=1).observe()
    rank = observation.ranks[0]
    torn = (structs.replace(rank.partials[0], count=rank.partials[0].count - 1), *rank.partials[1:])
    verdict = compare(make_manifest(tensors, "run@1"), replace(observation, ranks=(replace(rank, partials=torn),)))
    assert verdict.status is VerdictStatus.INCOMPLETE


def test_storage_that_moved_is_a_warning(make_weights, make_manifest, make_worker):
    tensors = make_weights(1)
    observation = make_worker(tensors, tp=1).observe()
    moved = replace(observation.ranks[0], moved=("norm.weight",))
    verdict = compare(make_manifest(tensors, "run@1"), replace(observation, ranks=(moved,)))
    assert verdict.status is VerdictStatus.MATCH
    assert verdict.exit_code is ExitCode.WARNING
    assert verdict.findings[0].severity is Severity.WARNING


def test_derived_state_that_does_not_follow_is_a_mismatch(make_weights, make_manifest, make_worker):
    from syncguard.layout.model import Derived

    tensors = make_weights(1)
    observation = make_worker(tensors, tp=1).observe()
    layout = observation.layouts[0]
    extra = replace(layout.residents[0], name="norm.plus_one", shape=(8,))
    derived = Derived("norm.plus_one", "weight_plus_one", ("norm.weight",))
    layout = replace(layout, residents=(*layout.residents, extra), derived=(derived,)).sealed()
    rank = replace(
        observation.ranks[0],
        layout_fingerprint=layout.fingerprint,
        derived=(CheckResult(ok=False, wrong_count=8, detail="first at (0,)"),),
    )
    verdict = compare(make_manifest(tensors, "run@1"), replace(observation, layouts=(layout,), ranks=(rank,)))
    assert [f.code for f in verdict.findings] == [FindingCode.DERIVED_STALE]


def test_verdicts_have_no_truth_value(make_weights, make_manifest, make_worker):
    tensors = make_weights(1)
    verdict = compare(make_manifest(tensors, "run@1"), make_worker(tensors).observe())
    with pytest.raises(TypeError, match="no truth value"):
        bool(verdict)
    with pytest.raises(TypeError, match="no truth value"):
        bool(verdict.status)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_single_bit_anywhere_is_caught_and_blamed_on_its_rank(make_weights, make_manifest, make_worker, data):
    tensors = make_weights(1)
    worker = make_worker(tensors)
    rank = data.draw(st.integers(0, 1))
    name = data.draw(st.sampled_from(sorted(worker.residents[rank])))
    raw = worker.residents[rank][name].view(np.uint32).reshape(-1)
    raw[data.draw(st.integers(0, raw.size - 1))] ^= np.uint32(1 << data.draw(st.integers(0, 31)))
    parts = {
        "up.weight": (Box((0, 0), (6, 8)), Box((6, 0), (6, 8))),
        "gate.weight": (Box((0, 0), (6, 8)), Box((6, 0), (6, 8))),
        "down.weight": (Box((0, 0), (8, 6)), Box((0, 6), (8, 6))),
        "embed.weight": (Box((0, 0), (8, 8)), Box((8, 0), (2, 8))),
    }
    verdict = compare(make_manifest(tensors, "run@1", parts=parts), worker.observe())
    assert verdict.status is VerdictStatus.MISMATCH
    (finding,) = verdict.findings
    assert finding.resident == name
    assert str(RankIdentity(tp_rank=rank, tp_size=2)) == finding.rank


def with_dropped(observation, *names):
    layouts = [
        replace(layout, dropped=tuple(Dropped(name, "no kernel reads it") for name in names)).sealed()
        for layout in observation.layouts
    ]
    ranks = tuple(
        replace(rank, layout_fingerprint=layout.fingerprint)
        for rank, layout in zip(observation.ranks, layouts, strict=True)
    )
    return replace(observation, layouts=tuple(layouts), ranks=ranks)


def test_what_loading_drops_by_rule_is_counted_and_missed_by_nobody(make_weights, make_manifest, make_worker):
    tensors = make_weights(1)
    observation = make_worker(tensors).observe()
    manifest = make_manifest({**tensors, "q.g_idx": np.arange(4, dtype=np.float32)}, "run@1")
    assert codes(compare(manifest, observation)) == {FindingCode.NOT_HELD}
    verdict = compare(manifest, with_dropped(observation, "q.g_idx"))
    assert verdict.status is VerdictStatus.MATCH
    assert (verdict.coverage.exempt_tensors, verdict.evidence["dropped_by_the_engine"]) == (1, "1")
    assert "1 exempt by name" in verdict.reason


def test_a_tensor_that_a_rank_holds_is_judged_although_another_word_calls_it_dropped(
    make_weights, make_manifest, make_worker
):
    observation = make_worker(make_weights(0)).observe()
    verdict = compare(make_manifest(make_weights(1), "run@1"), with_dropped(observation, "norm.weight"))
    assert "norm.weight" in {finding.fqn for finding in verdict.findings}
    assert verdict.coverage.exempt_tensors == 0
