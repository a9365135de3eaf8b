import numpy as np
import pytest

from syncguard.errors import ScoreError
from syncguard.replay import (
    A,
    ReplayRecord,
    b_key,
    check_definition,
    response_scores_from_logits,
    study_repeats,
    summarize_run,
)


def response(offset: float, tokens: int) -> ReplayRecord:
    scores = {A: np.full(tokens, -1.0) + offset, b_key(0, "old"): np.full(tokens, -1.0)}
    return ReplayRecord(input_ids=np.arange(tokens + 2), prompt_length=2, scores=scores)


def test_a_run_weighs_tokens_in_the_mean_and_resamples_responses_in_the_interval():
    found = summarize_run([response(0.0, 30), response(0.4, 10)], A, b_key(0, "old"), "A-B")
    assert found.difference.mae == pytest.approx(0.1)
    assert found.difference.count == 40
    assert found.per_response_mae == (0.0, pytest.approx(0.4))
    assert (found.interval.low, found.interval.high) == (0.0, pytest.approx(0.4))


def test_a_response_without_the_scores_is_refused_and_not_left_out():
    bare = ReplayRecord(input_ids=np.arange(5), prompt_length=2, scores={A: [-1.0] * 3}, record_id="bare")
    with pytest.raises(ScoreError, match=r"bare.*B0\.old\.cold"):
        summarize_run([response(0.0, 3), bare], A, b_key(0, "old"), "A-B")


def test_five_passes_of_one_worker_make_ten_pairs():
    study = study_repeats({"w0": [[-1.0 - 0.1 * i] for i in range(5)]}, [1])
    assert study.pairs == (10, 0)
    assert study.within["w0"] == pytest.approx(np.mean([0.1 * (j - i) for i in range(5) for j in range(i + 1, 5)]))
    assert study.across is None


def test_pairs_of_different_workers_are_counted_apart():
    study = study_repeats({"w0": [[-1.0]], "w1": [[-1.2]], "w2": [[-1.2], [-1.2]]}, [1])
    assert study.pairs == (1, 5)
    assert study.within == {"w2": 0.0}
    assert study.across == pytest.approx((0.2 + 0.2 + 0.2 + 0 + 0) / 5)


def test_a_single_pass_is_no_study():
    with pytest.raises(ScoreError, match="two passes"):
        study_repeats({"w0": [[-1.0]]}, [1])


@pytest.mark.parametrize("temperature", [0.7, 1.4])
def test_the_definition_check_names_the_formula_from_the_same_rows(temperature):
    rng = np.random.default_rng(3)
    logits, ids = rng.normal(0, 2, (40, 30)), rng.integers(0, 30, 40)
    raw = response_scores_from_logits(logits, ids, 5)
    heated = response_scores_from_logits(logits, ids, 5, temperature=temperature)
    for scores, name in ((raw, "raw"), (heated, "temperature"), (raw / temperature, "divided")):
        found = check_definition(scores, logits, ids, 5, temperature=temperature)
        assert found.closest == name
        assert found.mae_nats[name] == 0
        assert found.apart_nats > 0.05
