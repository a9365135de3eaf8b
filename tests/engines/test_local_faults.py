"""Every scripted fault really happens, says so, and is seen from outside as what it is."""

from __future__ import annotations

import numpy as np
import pytest
from contract import PROMPT, manifest_of, observed
from safetensors.torch import load_file
from tiny_models import save_tiny_checkpoint

from syncguard.digest import DEFAULT_KEY_SEED
from syncguard.engines.faults import Fault, FaultKind, FaultPlan
from syncguard.engines.local import LocalEngine, LocalWorker
from syncguard.errors import EngineError, UnreachableError, UsageError
from syncguard.export.entry import boxes_of
from syncguard.manifest.compare import compare, known_version
from syncguard.manifest.verdict import FindingCode, VerdictStatus

Q = "model.layers.0.self_attn.q_proj.weight"
GATE, UP = "model.layers.1.mlp.gate_proj.weight", "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    base = tmp_path_factory.mktemp("faults")
    made = {
        (kind, seed): save_tiny_checkpoint(base / f"{kind}-{seed}", kind, seed=seed)
        for kind in ("qwen3", "qwen3_moe")
        for seed in (0, 1)
    }
    # A square projection, for a transposition that no shape check can see.
    for seed in (0, 1):
        made["square", seed] = save_tiny_checkpoint(base / f"square-{seed}", "qwen3", seed=seed, head_dim=16)
    return made


@pytest.fixture
def tried(folders):
    """Push checkpoint 1 over checkpoint 0 with a fault; return worker, verdict and findings by code."""

    def run(*faults, kind="qwen3", tp=2, ep=1, parts=True):
        worker = LocalWorker(folders[kind, 0], tp_size=tp, ep_size=ep, faults=FaultPlan(list(faults)))
        engine = LocalEngine(worker)
        boxes = boxes_of(engine.layouts()) if parts else None
        history = [known_version(manifest_of(folders[kind, 0], "run@0", boxes=boxes))]
        worker.push(load_file(folders[kind, 1] / "model.safetensors").items(), label="run@1")
        verdict = compare(manifest_of(folders[kind, 1], "run@1", boxes=boxes), observed(engine), history=history)
        return worker, verdict

    return run


def codes(verdict):
    return {finding.code for finding in verdict.findings}


def blamed(verdict, code):
    return {finding.fqn for finding in verdict.findings if finding.code is code and finding.fqn}


def test_without_a_fault_nothing_fires_and_all_matches(tried):
    worker, verdict = tried()
    assert verdict.status is VerdictStatus.MATCH
    assert worker.faults.fired == []


CASES = [
    (Fault(FaultKind.SKIP_PUSH), {}, FindingCode.STALE),
    (Fault(FaultKind.TORN_PUSH), {}, FindingCode.STALE),
    (Fault(FaultKind.RANK_STALE, rank=1), {}, FindingCode.STALE),
    (Fault(FaultKind.DROP_TENSOR, fqn=Q), {}, FindingCode.STALE),
    (Fault(FaultKind.SWAP, fqn=GATE, other=UP), {}, FindingCode.SWAPPED),
    (Fault(FaultKind.TRANSPOSE, fqn=Q), {"kind": "square", "tp": 1}, FindingCode.UNKNOWN_CONTENT),
    (Fault(FaultKind.PADDING_DIRT), {}, FindingCode.PADDING_NOT_ZERO),
    (Fault(FaultKind.ELEMENT_FLIP), {}, FindingCode.UNKNOWN_CONTENT),
    (Fault(FaultKind.ELEMENT_FLIP, resident="model.norm.weight"), {}, FindingCode.UNKNOWN_CONTENT),
    (Fault(FaultKind.KV_REPLICA, rank=2), {"tp": 4, "parts": False}, FindingCode.REPLICA_DIFFERS),
    (Fault(FaultKind.EXPERT_SLOT), {"kind": "qwen3_moe"}, FindingCode.SWAPPED),
    (Fault(FaultKind.EXPERT_SLOT, rank=1), {"kind": "qwen3_moe", "ep": 2}, FindingCode.SWAPPED),
    (Fault(FaultKind.UNANNOUNCED), {}, FindingCode.UNKNOWN_CONTENT),
]


@pytest.mark.parametrize(("fault", "form", "code"), CASES, ids=lambda value: getattr(value, "kind", None))
def test_a_fault_fires_once_and_is_a_mismatch_of_its_kind(tried, fault, form, code):
    worker, verdict = tried(fault, **form)
    assert worker.faults.kinds_fired() == [fault.kind]
    assert worker.faults.armed == []
    assert worker.faults.fired[0].detail
    assert verdict.status is VerdictStatus.MISMATCH
    assert code in codes(verdict), codes(verdict)


def test_a_skipped_push_leaves_every_tensor_stale_under_the_new_label_and_epoch(tried, folders):
    worker, verdict = tried(Fault(FaultKind.SKIP_PUSH))
    assert worker.label == "run@1"
    assert all(rank.epoch == 1 for rank in LocalEngine(worker).status().ranks)
    assert blamed(verdict, FindingCode.STALE) == set(load_file(folders["qwen3", 0] / "model.safetensors"))


def test_a_torn_push_leaves_exactly_the_second_half_stale(tried, folders):
    _, verdict = tried(Fault(FaultKind.TORN_PUSH))
    names = list(load_file(folders["qwen3", 1] / "model.safetensors"))
    assert blamed(verdict, FindingCode.STALE) == set(names[(len(names) + 1) // 2 :])
    assert FindingCode.TORN in codes(verdict)


def test_a_stale_rank_is_the_only_one_that_is_blamed(tried):
    _, verdict = tried(Fault(FaultKind.RANK_STALE, rank=1))
    assert {finding.rank for finding in verdict.findings if finding.code is FindingCode.STALE} == {"tp1/2"}


def test_with_parts_in_the_manifest_the_rank_of_a_different_replica_is_named(tried):
    _, verdict = tried(Fault(FaultKind.KV_REPLICA, rank=2), tp=4)
    key = "model.layers.0.self_attn.k_proj.weight"
    assert [(finding.fqn, finding.rank) for finding in verdict.findings] == [(key, "tp2/4")]


def test_moved_storage_is_reported_by_name_and_its_content_still_matches(folders):
    worker = LocalWorker(folders["qwen3", 0])
    engine = LocalEngine(worker)
    before = engine.observe(DEFAULT_KEY_SEED)
    worker.inject(Fault(FaultKind.STORAGE_MOVED, resident="model.norm.weight"))
    after = engine.observe(DEFAULT_KEY_SEED)
    assert (before[0].moved, after[0].moved) == ((), ("model.norm.weight",))
    assert after[0].partials == before[0].partials
    assert engine.observe(DEFAULT_KEY_SEED)[0].moved == ("model.norm.weight",)


def test_an_unannounced_update_is_an_epoch_more(folders):
    worker = LocalWorker(folders["qwen3", 0])
    fence = LocalEngine(worker).status().fence
    worker.inject(Fault(FaultKind.UNANNOUNCED))
    assert LocalEngine(worker).status().fence != fence


def test_a_flipped_element_is_silent_but_for_the_digest(folders):
    worker = LocalWorker(folders["qwen3", 0])
    engine = LocalEngine(worker)
    before, fence = engine.observe(DEFAULT_KEY_SEED), engine.status().fence
    worker.inject(Fault(FaultKind.ELEMENT_FLIP))
    assert engine.status().fence == fence
    assert engine.observe(DEFAULT_KEY_SEED)[0].partials != before[0].partials


def test_a_refused_flush_says_so_once_and_keeps_the_cache(folders):
    engine = LocalEngine(LocalWorker(folders["qwen3", 0], faults=FaultPlan([Fault(FaultKind.FLUSH_REFUSED)])))
    ids = (*PROMPT, 7, 8)
    engine.score(ids, prompt_length=len(PROMPT))
    refused = engine.flush()
    assert not refused.confirmed
    assert refused.detail
    assert engine.score(ids, prompt_length=len(PROMPT)).cached_tokens == len(PROMPT) - 1
    assert engine.flush().confirmed
    assert engine.score(ids, prompt_length=len(PROMPT)).cached_tokens == 0


def test_a_flush_that_is_confirmed_and_ignored_shows_in_the_cached_tokens(folders):
    engine = LocalEngine(LocalWorker(folders["qwen3", 0], faults=FaultPlan([Fault(FaultKind.FLUSH_IGNORED)])))
    ids = (*PROMPT, 7, 8)
    engine.score(ids, prompt_length=len(PROMPT))
    assert engine.flush().confirmed
    assert engine.score(ids, prompt_length=len(PROMPT)).cached_tokens == len(PROMPT) - 1


def test_a_cache_kept_across_an_update_makes_warm_scores_wrong_and_cold_ones_right(folders):
    worker = LocalWorker(folders["qwen3", 0], tp_size=2, faults=FaultPlan([Fault(FaultKind.UPDATE_KEEPS_CACHE)]))
    engine = LocalEngine(worker)
    ids = (*PROMPT, 7, 8, 9)
    engine.score(ids, prompt_length=len(PROMPT))
    worker.update_from_disk(folders["qwen3", 1], label="run@1")
    stale = engine.score(ids, prompt_length=len(PROMPT))
    engine.flush()
    cold = engine.score(ids, prompt_length=len(PROMPT))
    warm = engine.score(ids, prompt_length=len(PROMPT))
    assert (stale.cached_tokens, cold.cached_tokens, warm.cached_tokens) == (len(PROMPT) - 1, 0, len(PROMPT) - 1)
    assert np.abs(np.subtract(stale.logprobs_nats, cold.logprobs_nats)).max() > 0.1
    assert np.abs(np.subtract(warm.logprobs_nats, cold.logprobs_nats)).max() < 1e-5


def test_an_update_drops_the_cache_unless_told_otherwise(folders):
    worker = LocalWorker(folders["qwen3", 0])
    ids = (*PROMPT, 7, 8, 9)
    worker.score(ids, prompt_length=len(PROMPT))
    worker.update_from_disk(folders["qwen3", 1])
    assert worker.score(ids, prompt_length=len(PROMPT)).cached_tokens == 0


def test_a_restart_in_an_update_loses_the_session_and_comes_back_with_the_old_weights(folders):
    worker = LocalWorker(folders["qwen3", 0], faults=FaultPlan([Fault(FaultKind.RESTART_IN_UPDATE)]))
    engine = LocalEngine(worker)
    before = engine.status()
    with pytest.raises(EngineError, match="restarted during the update"):
        worker.push(load_file(folders["qwen3", 1] / "model.safetensors").items(), label="run@1")
    after = engine.status()
    assert after.ranks[0].incarnation != before.ranks[0].incarnation
    assert (after.ranks[0].epoch, after.ranks[0].updating) == (0, False)
    with pytest.raises(EngineError, match="begin the update first"):
        worker.end_update()
    verdict = compare(manifest_of(folders["qwen3", 0], "run@0"), observed(engine), require_label=False)
    assert verdict.status is VerdictStatus.MATCH


def test_a_restart_in_an_observation_leaves_ranks_of_two_incarnations(folders):
    worker = LocalWorker(folders["qwen3", 0], tp_size=2, faults=FaultPlan([Fault(FaultKind.RESTART_IN_OBSERVE)]))
    engine = LocalEngine(worker)
    fence = engine.status().fence
    read = engine.observe(DEFAULT_KEY_SEED)
    incarnations = {rank: incarnation for rank, incarnation, _, _ in fence}
    assert [incarnations[one.rank] == one.incarnation for one in read] == [True, False]
    assert engine.status().fence != fence


def test_shifted_generation_scores_are_off_by_the_shift_from_its_position_on(folders):
    plain = LocalWorker(folders["qwen3", 0]).generate(PROMPT, max_new_tokens=4, seed=1)
    worker = LocalWorker(folders["qwen3", 0], faults=FaultPlan([Fault(FaultKind.A_SHIFT, nats=-0.1, position=1)]))
    shifted = worker.generate(PROMPT, max_new_tokens=4, seed=1)
    assert shifted.response_ids == plain.response_ids
    assert np.subtract(shifted.logprobs_nats, plain.logprobs_nats) == pytest.approx([0, -0.1, -0.1, -0.1])


def test_an_open_session_shows_as_updating_until_it_ends(folders):
    worker = LocalWorker(folders["qwen3", 0])
    engine = LocalEngine(worker)
    worker.begin_update()
    assert engine.status().ranks[0].updating
    assert engine.observe(DEFAULT_KEY_SEED)[0].updating
    with pytest.raises(EngineError, match="none open"):
        worker.begin_update()
    worker.end_update()
    assert not engine.status().ranks[0].updating


def test_a_stopped_worker_does_not_answer_anything(folders):
    worker = LocalWorker(folders["qwen3", 0])
    engine = LocalEngine(worker)
    worker.stop()
    for call in (
        engine.status,
        engine.layouts,
        engine.flush,
        lambda: engine.observe(DEFAULT_KEY_SEED),
        lambda: engine.score((1, 2), prompt_length=1),
        lambda: engine.generate((1,), max_new_tokens=1, seed=0),
        worker.begin_update,
    ):
        with pytest.raises(UnreachableError, match="restart it"):
            call()


@pytest.mark.parametrize(
    "fault",
    [
        Fault(FaultKind.KV_REPLICA),
        Fault(FaultKind.EXPERT_SLOT),
        Fault(FaultKind.ELEMENT_FLIP, resident="model.nothing.weight"),
        Fault(FaultKind.SKIP_PUSH),
    ],
    ids=lambda fault: fault.kind.value,
)
def test_a_fault_that_this_model_cannot_have_is_refused_and_not_reported(folders, fault):
    worker = LocalWorker(folders["qwen3", 0])
    with pytest.raises(UsageError):
        worker.inject(fault)
    assert worker.faults.fired == []
