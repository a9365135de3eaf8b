import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from syncguard.errors import ScoreError
from syncguard.replay import bootstrap_mae, compare_scores, measure_repeat_noise, objective_effect

# Recorded on a real run: rollout 0, sample 3, response position 22, token id 374; A carries a deliberate -0.10.
CASE_1 = {
    "A": -0.6760863423347473,
    "B0": -0.6931847333908081,
    "B1": -1.1369221210479736,
    "C0": -1.1369222402572632,
    "C1": -1.1369222402572632,
}
# Rollout 1, sample 15, response position 1, token id 0; the weight update was skipped.
CASE_3 = {"A": -11.931213379, "B0": -11.931213379, "B1": -11.931213379, "C0": -27.088520050, "C1": -27.088520050}


@pytest.mark.parametrize(
    ("left", "right", "line"),
    [
        ("A", "B0", "A-B0   signed=+0.017098 MAE=0.017098"),
        ("B0", "C0", "B0-C0  signed=+0.443738 MAE=0.443738"),
        ("A", "C0", "A-C0   signed=+0.460836 MAE=0.460836"),
        ("B0", "B1", "B0-B1  signed=+0.443737 MAE=0.443737"),
        ("B1", "C0", "B1-C0  signed=+0.000000 MAE=0.000000"),
        ("C0", "C1", "C0-C1  signed=+0.000000 MAE=0.000000"),
    ],
)
def test_the_six_lines_of_the_case_1_outlier_are_reproduced(left, right, line):
    found = compare_scores(CASE_1[left], CASE_1[right], 1, f"{left}-{right}")
    assert f"{found.label:6s} signed={found.signed_mean:+.6f} MAE={found.mae:.6f}" == line


@pytest.mark.parametrize(
    ("left", "right", "value"),
    [
        ("A", "B0", "0.000000000"),
        ("B0", "B1", "0.000000000"),
        ("C0", "C1", "0.000000000"),
        ("B0", "C0", "15.157306671"),
    ],
)
def test_the_case_3_outlier_is_reproduced(left, right, value):
    assert f"{compare_scores(CASE_3[left], CASE_3[right], 1, 'x').signed_mean:.9f}" == value


def test_the_probability_example_is_reproduced():
    effect = objective_effect([np.log(0.12)], [np.log(0.10)], [1])
    assert effect.ratio_mean == pytest.approx(1.20)
    assert -effect.k1 == pytest.approx(0.1823, abs=5e-5)


def test_every_statistic_of_known_numbers():
    found = compare_scores([-1.0, -2.0, -3.0, -4.0], [-1.5, -2.0, -2.0, -9.0], [1, 1, 1, 0], "A-B")
    assert (found.count, found.signed_mean, found.mae, found.median, found.maximum) == (3, -0.5 / 3, 0.5, 0.5, 1.0)
    assert (found.first_mae, found.rest_mae) == (0.5, 0.5)
    assert [(w.position, w.difference) for w in found.worst] == [(2, -1.0), (0, 0.5), (1, 0.0)]
    assert found.p95 == pytest.approx(0.95)


def test_a_masked_first_token_has_no_figure_of_its_own():
    assert compare_scores([-1.0, -2.0], [-1.0, -3.0], [0, 1], "A-B").first_mae is None
    assert compare_scores([-1.0, -2.0], [-1.0, -3.0], [1, 0], "A-B").rest_mae is None


scores = arrays(np.float64, 17, elements=st.floats(-30, 0))


@given(scores, scores, scores)
def test_a_minus_c_is_a_minus_b_plus_b_minus_c_per_token(a, b, c):
    np.testing.assert_allclose(a - c, (a - b) + (b - c), atol=1e-12)
    mask = np.ones(17)
    signed = [compare_scores(x, y, mask, "x").signed_mean for x, y in ((a, c), (a, b), (b, c))]
    assert signed[0] == pytest.approx(signed[1] + signed[2], abs=1e-9)


@given(scores, scores)
def test_masked_tokens_have_no_influence(a, b):
    mask = np.array([1, 0] * 8 + [1])
    other = np.where(mask == 1, a, -5.0)
    assert compare_scores(a, b, mask, "x") == compare_scores(other, b, mask, "x")


@given(scores, scores)
def test_exchanging_the_operands_turns_the_sign_and_keeps_the_errors(a, b):
    one, two = (compare_scores(x, y, np.ones(17), "x") for x, y in ((a, b), (b, a)))
    assert one.signed_mean == -two.signed_mean
    assert (one.mae, one.p95, one.p99, one.maximum) == (two.mae, two.p95, two.p99, two.maximum)


@pytest.mark.parametrize("mask", [[0, 0], [1, 2], [1], [1, 1, 1]])
def test_a_mask_that_is_empty_not_binary_or_of_another_length_is_refused(mask):
    with pytest.raises(ScoreError):
        compare_scores([-1.0, -2.0], [-1.0, -2.0], mask, "A-B")


def test_repeat_noise_is_the_mean_over_all_pairs():
    noise = measure_repeat_noise([[-1.0], [-1.1], [-1.3]], [1], "B.old.cold")
    assert noise.mae == pytest.approx((0.1 + 0.3 + 0.2) / 3)
    assert noise.worst_pair_mae == pytest.approx(0.3)
    assert (noise.passes, noise.exact) == (3, False)
    assert measure_repeat_noise([[-1.0], [-1.0]], [1], "C").exact


def test_one_pass_measures_no_noise():
    with pytest.raises(ScoreError, match="two passes"):
        measure_repeat_noise([[-1.0]], [1], "B")


@given(scores, scores)
def test_the_divergence_estimates_keep_their_order_and_signs(a, c):
    effect = objective_effect(c, a, np.ones(17))
    assert effect.k3 >= -1e-12
    assert effect.k2 >= 0
    assert 0 < effect.effective_sample_share <= 1 + 1e-12


def test_equal_scores_have_no_effect_on_the_objective():
    effect = objective_effect([-1.0, -2.0], [-1.0, -2.0], [1, 1])
    assert (effect.ratio_mean, effect.k1, effect.k2, effect.k3, effect.clip_share, effect.effective_sample_share) == (
        1.0, 0.0, 0.0, 0.0, 0.0, 1.0,
    )  # fmt: skip


def test_a_tenth_of_a_nat_stays_inside_the_clip_range_and_a_quarter_does_not():
    assert objective_effect([-1.0], [-1.1], [1]).clip_share == 0
    assert objective_effect([-1.0], [-1.25], [1]).clip_share == 1


def test_the_bootstrap_resamples_responses_and_not_tokens():
    """Two responses that differ inside themselves by nothing and from each other by much."""
    interval = bootstrap_mae([np.zeros(500), np.ones(500)])
    assert (interval.low, interval.estimate, interval.high) == (0.0, 0.5, 1.0)
    tokens = bootstrap_mae([[x] for x in np.r_[np.zeros(500), np.ones(500)]])
    assert tokens.high - tokens.low < 0.1


def test_the_bootstrap_weighs_responses_by_their_tokens_and_repeats_itself():
    one = bootstrap_mae([np.zeros(90), np.ones(10)], seed=3)
    assert one.estimate == pytest.approx(0.1)
    assert one == bootstrap_mae([np.zeros(90), np.ones(10)], seed=3)
