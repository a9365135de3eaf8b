import json

import numpy as np
import pytest

from syncguard.errors import ScoreError
from syncguard.replay import (
    RAW,
    ReplayEvidence,
    ReplayPolicy,
    ReplayStatus,
    ScoreDefinition,
    judge_replay,
    most_telling,
)

FLOAT32 = 2e-6
BFLOAT16 = 0.012


def evidence(
    seed: int = 0,
    *,
    noise: float = FLOAT32,
    change: float = 0.4,
    worker: float = 1.0,
    trainer: float = 1.0,
    warm: float = 1.0,
    tokens: int = 64,
    offset: float = 0.0,
    exact: bool = True,
    without: tuple[str, ...] = (),
    **changes,
) -> ReplayEvidence:
    """B and C at T0 and T1; `worker`, `trainer` and `warm` say which share of the update each one made."""
    rng = np.random.default_rng(seed)
    old = -rng.exponential(1.5, tokens) - 0.5
    step = rng.laplace(0, change, tokens)
    step *= change / np.abs(step).mean()

    def scored(share: float, moved: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
        first = old + share * step + rng.laplace(0, noise, tokens) + moved
        return first, first if exact else first + rng.laplace(0, noise, tokens)

    fields = {
        "mask": np.ones(tokens, int),
        "b_old": scored(0),
        "c_old": scored(0),
        "a": scored(0)[0],
        "b_new_cold": scored(worker),
        "b_new_warm": scored(warm if warm != 1.0 else worker)[:1],
        "c_new": scored(trainer, offset),
    }
    for name in without:
        fields[name] = None if name == "a" else ()
    return ReplayEvidence(**{**fields, **changes})


@pytest.mark.parametrize("noise", [FLOAT32, BFLOAT16])
@pytest.mark.parametrize("seed", range(12))
def test_a_worker_that_took_the_update_passes(noise, seed):
    verdict = judge_replay(evidence(seed, noise=noise, exact=seed % 2 == 0))
    assert verdict.status is ReplayStatus.PASS, verdict.reason


@pytest.mark.parametrize("noise", [FLOAT32, BFLOAT16])
@pytest.mark.parametrize("seed", range(12))
def test_a_worker_that_kept_the_old_weights_fails_with_the_stale_fingerprint(noise, seed):
    verdict = judge_replay(evidence(seed, noise=noise, worker=0.0))
    assert (verdict.status, verdict.fingerprint) == (ReplayStatus.FAIL, "stale")
    assert "still scores as T0" in verdict.reason


@pytest.mark.parametrize("change", [1e-3, 4e-3, 9e-3])
def test_a_stale_worker_is_found_in_float32_even_where_its_gap_is_under_the_fixed_limit(change):
    verdict = judge_replay(evidence(worker=0.0, change=change))
    assert verdict.figure("B_new-C_new").mae < verdict.policy.mae_limit_nats
    assert (verdict.status, verdict.fingerprint) == (ReplayStatus.FAIL, "stale")


@pytest.mark.parametrize("share", [0.3, 0.5, 0.7])
@pytest.mark.parametrize("change", [4e-3, 0.4])
def test_a_torn_update_fails_as_partial(share, change):
    verdict = judge_replay(evidence(worker=share, change=change))
    assert (verdict.status, verdict.fingerprint) == (ReplayStatus.FAIL, "partial update")


@pytest.mark.parametrize("seed", range(10))
def test_an_update_made_to_four_fifths_is_partial_although_its_gap_is_within_bfloat16_noise(seed):
    verdict = judge_replay(evidence(seed, noise=BFLOAT16, worker=0.8, change=0.2))
    assert verdict.figure("B_new-C_new").mae < verdict.limit_nats * 1.1
    assert (verdict.status, verdict.fingerprint) == (ReplayStatus.FAIL, "partial update"), verdict.reason


@pytest.mark.parametrize("change", [4e-3, 0.4])
def test_a_trainer_that_scored_with_the_old_state_is_named(change):
    verdict = judge_replay(evidence(trainer=0.0, change=change))
    assert (verdict.status, verdict.fingerprint) == (ReplayStatus.FAIL, "trainer state")


@pytest.mark.parametrize("change", [4e-3, 0.4])
def test_a_prefix_cache_of_the_old_weights_fails_although_the_cold_replay_agrees(change):
    verdict = judge_replay(evidence(warm=0.2, change=change))
    assert (verdict.status, verdict.fingerprint) == (ReplayStatus.FAIL, "stale prefix cache")


def test_a_warm_pass_of_t0_makes_the_limit_of_warm_passes_sharper():
    """Between two bfloat16 engines 0.03 nat is noise; within one engine, whose warm pass changed nothing at T0, it is not."""
    one = evidence(noise=BFLOAT16)
    warm = one.b_new_cold[0] + np.random.default_rng(3).laplace(0, 0.02, 64)
    assert judge_replay(evidence(noise=BFLOAT16, b_new_warm=(warm,))).status is ReplayStatus.PASS
    sharp = judge_replay(evidence(noise=BFLOAT16, b_new_warm=(warm,), b_old_warm=one.b_old[:1]))
    assert (sharp.status, sharp.fingerprint) == (ReplayStatus.FAIL, "stale prefix cache")
    noisy = one.b_old[0] + np.random.default_rng(4).laplace(0, 0.02, 64)
    assert judge_replay(evidence(noise=BFLOAT16, b_new_warm=(warm,), b_old_warm=(noisy,))).status is ReplayStatus.PASS


def test_of_several_warm_passes_the_one_on_the_old_cache_decides_and_is_not_taken_for_noise():
    one = evidence()
    lagging = one.b_old[0] + 0.3 * (one.b_new_cold[0] - one.b_old[0])
    for order in ((lagging, one.b_new_cold[0]), (one.b_new_cold[0], lagging)):
        verdict = judge_replay(evidence(b_new_warm=order))
        assert (verdict.status, verdict.fingerprint) == (ReplayStatus.FAIL, "stale prefix cache")
        assert verdict.limit_nats == 0.01


@pytest.mark.parametrize("change", [0.0, 1e-6, 1e-5])
def test_an_update_too_small_to_see_has_no_power_and_is_no_pass(change):
    for worker in (0.0, 1.0):
        verdict = judge_replay(
            evidence(worker=worker, change=change) if change else evidence(change=1e-12, worker=worker)
        )
        assert verdict.status is ReplayStatus.NO_POWER
        assert "look the same" in verdict.reason


def test_an_update_inside_bfloat16_noise_has_no_power_either():
    assert judge_replay(evidence(noise=BFLOAT16, change=0.02)).status is ReplayStatus.NO_POWER


def test_without_scores_of_the_old_state_the_power_is_unknown_and_nothing_passes():
    verdict = judge_replay(evidence(without=("b_old", "c_old", "a")))
    assert verdict.status is ReplayStatus.NO_POWER
    assert verdict.power.change_mae_nats is None


@pytest.mark.parametrize("noise", [FLOAT32, BFLOAT16])
@pytest.mark.parametrize("seed", range(6))
def test_without_b_old_a_stale_worker_never_passes_and_a_clean_one_never_fails(noise, seed):
    """Noise between the engines is then unmeasured: C_old alone must neither make a pass nor an alarm."""
    for change in (1e-3, 4e-3, 0.02, 0.05, 0.4):
        stale = judge_replay(evidence(seed, noise=noise, change=change, worker=0.0, without=("b_old",)))
        clean = judge_replay(evidence(seed, noise=noise, change=change, without=("b_old",)))
        assert stale.status in {ReplayStatus.FAIL, ReplayStatus.NO_POWER}, (change, stale.reason)
        assert clean.status is not ReplayStatus.FAIL or noise > clean.policy.mae_limit_nats, (change, clean.reason)
    assert stale.fingerprint == "stale"
    assert noise > 0.01 or clean.status is ReplayStatus.PASS


@pytest.mark.parametrize(
    ("without", "named"), [("b_new_cold", "B_new cold"), ("b_new_warm", "B_new warm"), ("c_new", "C_new")]
)
def test_a_missing_pass_is_incomplete_by_name(without, named):
    verdict = judge_replay(evidence(without=(without,)))
    assert verdict.status is ReplayStatus.INCOMPLETE
    assert named in verdict.reason


@pytest.mark.parametrize("name", ["b_new_cold", "c_new"])
def test_one_pass_is_not_a_repeat(name):
    one = evidence()
    changed = evidence(**{name: getattr(one, name)[:1]})
    assert judge_replay(changed).status is ReplayStatus.INCOMPLETE


def test_no_active_token_is_incomplete():
    assert judge_replay(evidence(mask=np.zeros(64, int))).status is ReplayStatus.INCOMPLETE
    assert judge_replay(evidence(tokens=4), ReplayPolicy(min_tokens=5)).status is ReplayStatus.INCOMPLETE


@pytest.mark.parametrize("name", ["b_new_cold", "c_new", "b_old"])
def test_repeats_that_disagree_are_unstable_whatever_else_agrees(name):
    one = evidence()
    first = getattr(one, name)[0]
    wild = np.random.default_rng(9).laplace(0, 0.3, first.size)
    verdict = judge_replay(evidence(**{name: (first, first + wild)}))
    assert verdict.status is ReplayStatus.UNSTABLE
    assert "nothing can be concluded" in verdict.reason


def test_a_constant_on_the_trainers_scores_is_named_and_not_taken_for_staleness():
    verdict = judge_replay(evidence(offset=-0.10, change=1e-4))
    assert (verdict.status, verdict.fingerprint) == (ReplayStatus.FAIL, "constant offset")
    assert "+0.1000 nat" in verdict.reason


def test_the_fixed_limit_is_used_while_noise_is_small_and_the_verdict_says_so():
    verdict = judge_replay(evidence())
    assert verdict.limit_nats == verdict.fixed_limit_nats == 0.01
    assert verdict.relative_limit_nats < 0.001
    assert verdict.limit_reason.startswith("fixed limit: 3 * measured noise")


def test_the_relative_limit_is_used_where_measured_noise_is_large_and_the_verdict_says_so():
    verdict = judge_replay(evidence(noise=BFLOAT16))
    assert verdict.limit_nats == verdict.relative_limit_nats > 0.01
    assert verdict.limit_reason.startswith("relative limit: 3 * measured noise")
    assert "MAE(B_old-C_old)" in verdict.limit_reason


def test_disagreement_at_t0_is_not_taken_for_noise():
    """A worker that was wrong at T0 already must not raise its own limit."""
    rng = np.random.default_rng(5)
    one = evidence()
    verdict = judge_replay(evidence(b_old=tuple(b + rng.normal(0, 3, 64) for b in one.b_old[:1] * 2)))
    assert verdict.status is ReplayStatus.UNSTABLE
    shifted = one.b_old[0] + rng.normal(0, 3, 64)
    verdict = judge_replay(evidence(b_old=(shifted, shifted), b_new_cold=(shifted, shifted), b_new_warm=(shifted,)))
    assert verdict.status is ReplayStatus.FAIL
    assert verdict.limit_nats == 0.01
    assert "no agreement" in verdict.limit_reason


def test_a_gap_exactly_at_the_limit_fails():
    base = evidence(noise=0.0, change=0.4)
    shifted = base.c_new[0] + np.where(np.arange(64) % 2, 0.01, -0.01)
    gap = float(np.abs(base.b_new_cold[0] - shifted).mean())
    verdict = judge_replay(evidence(noise=0.0, change=0.4, c_new=(shifted, shifted)), ReplayPolicy(mae_limit_nats=gap))
    assert verdict.status is ReplayStatus.FAIL


def test_outliers_may_be_left_out_only_by_policy_and_are_named():
    one = evidence(tokens=100, noise=BFLOAT16)
    flipped = one.c_new[0].copy()
    flipped[[3, 50]] -= 6.0
    odd = evidence(tokens=100, noise=BFLOAT16, c_new=(flipped, flipped))
    assert judge_replay(odd).status is ReplayStatus.FAIL
    strict = judge_replay(odd)
    assert (strict.status, strict.fingerprint) == (ReplayStatus.FAIL, "outlier"), (
        "no state of the weights moves two tokens"
    )
    assert "outlier_share" in strict.reason
    lenient = judge_replay(odd, ReplayPolicy(outlier_share=0.02))
    assert lenient.status is ReplayStatus.PASS
    assert "2 outlier tokens left out by policy (worst 6" in lenient.reason
    assert lenient.figure("B_new-C_new").count == 100
    assert lenient.figure("B_new-C_new without outliers").count == 98


def test_leaving_outliers_out_does_not_hide_a_stale_worker():
    verdict = judge_replay(evidence(worker=0.0), ReplayPolicy(outlier_share=0.1))
    assert (verdict.status, verdict.fingerprint) == (ReplayStatus.FAIL, "stale")


def test_several_responses_are_judged_together():
    verdict = judge_replay([evidence(seed, worker=0.0 if seed == 2 else 1.0) for seed in range(3)])
    assert verdict.status is ReplayStatus.FAIL
    assert verdict.figure("B_new-C_new").count == 3 * 64
    assert judge_replay([evidence(seed) for seed in range(3)]).status is ReplayStatus.PASS


def test_a_pass_that_one_of_several_responses_lacks_is_missing_for_all():
    assert judge_replay([evidence(0), evidence(1, without=("b_new_warm",))]).status is ReplayStatus.INCOMPLETE


def test_scores_of_two_definitions_are_never_subtracted():
    with pytest.raises(ScoreError, match="different definitions"):
        evidence(b_definition=RAW, c_definition=ScoreDefinition("temperature", temperature=0.8))


def test_a_score_that_is_not_finite_is_refused():
    with pytest.raises(ScoreError, match=r"b_new_cold\[1\]"):
        evidence(b_new_cold=(np.zeros(64), np.full(64, np.nan)))


def test_masked_tokens_do_not_decide():
    one = evidence()
    mask = np.ones(64, int)
    mask[10:20] = 0
    spoiled = one.c_new[0].copy()
    spoiled[10:20] -= 50
    assert judge_replay(evidence(mask=mask, c_new=(spoiled, spoiled))).status is ReplayStatus.PASS


def test_every_figure_carries_its_subtraction_order():
    labels = [figure.label for figure in judge_replay(evidence()).figures]
    assert labels == [
        "B_new-C_new", "B_old-C_old", "C_new-C_old", "B_new-B_old", "B_new-C_old", "B_new_warm0-B_new_cold0", "A-B_old",
    ]  # fmt: skip


def test_a_verdict_has_a_json_form_and_no_truth_value():
    verdict = judge_replay(evidence())
    assert json.loads(json.dumps(verdict.as_dict(), allow_nan=False))["status"] == "PASS"
    for value in (verdict, verdict.status):
        with pytest.raises(TypeError, match="truth value"):
            bool(value)


def test_the_responses_on_which_a_stale_worker_would_show_are_picked():
    picked = most_telling([evidence(change=c) for c in (1e-6, 0.2, 0.05, 0.4)], 2)
    assert [index for index, _ in picked] == [3, 1]
    assert [index for index, _ in most_telling([evidence(change=1e-6)], 2)] == []
