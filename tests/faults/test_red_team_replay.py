"""One response that contradicts must not be outvoted by others that agree."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from syncguard.replay import ReplayEvidence, ReplayStatus, judge_replay


def evidence(gap=0.0, count=20, *, old=True, change=0.2, seed=0):
    rng = np.random.default_rng(seed)
    c_old = -1 - rng.random(count)
    c_new = c_old + change * rng.choice([-1, 1], count)
    b_new = c_new + gap * rng.choice([-1, 1], count)
    known = {"b_old": (c_old, c_old), "c_old": (c_old, c_old)} if old else {}
    return ReplayEvidence(
        mask=np.ones(count, int), b_new_cold=(b_new, b_new), b_new_warm=(b_new,), c_new=(c_new, c_new), **known
    )


def test_one_response_that_disagrees_is_not_diluted_by_others_that_agree():
    assert judge_replay(evidence(gap=0.15, old=False)).status is ReplayStatus.FAIL
    others = [evidence(seed=seed, old=False) for seed in range(1, 20)]
    joined = judge_replay([others[0], evidence(gap=0.15, old=False), *others[1:]])
    assert joined.status is ReplayStatus.FAIL
    assert joined.reason.startswith("response 2 of 20")


def test_one_stale_response_is_not_diluted_where_old_scores_are_known():
    joined = judge_replay([evidence(gap=0.15), *(evidence(seed=seed) for seed in range(1, 20))])
    assert joined.status is ReplayStatus.FAIL


def test_one_record_without_old_scores_does_not_take_the_stale_check_from_the_others():
    fresh = evidence()
    c_new = tuple(scores * 0 + fresh.c_old[0] + 0.004 for scores in fresh.c_new)
    stale = replace(fresh, b_new_cold=fresh.b_old, b_new_warm=(fresh.b_old[0],), c_new=c_new)
    assert judge_replay(stale).status is ReplayStatus.FAIL
    assert judge_replay([stale, evidence(old=False, seed=3)]).status is ReplayStatus.FAIL


def test_noise_of_one_response_alone_is_no_alarm_where_all_together_show_it():
    """bfloat16: each response has its own noise, and a quiet one measures the others' badly."""
    rng = np.random.default_rng(7)

    def noisy(scale):
        clean = evidence(seed=int(scale * 1000))
        noise = rng.normal(0, scale, 20)
        b_new = clean.c_new[0] + noise
        b_old = clean.c_old[0] + rng.normal(0, scale, 20)
        return replace(clean, b_new_cold=(b_new, b_new), b_new_warm=(b_new,), b_old=(b_old, b_old))

    joined = judge_replay([noisy(0.004), *(noisy(0.015 + i / 1000) for i in range(8))])
    assert joined.status is ReplayStatus.PASS, joined.reason
