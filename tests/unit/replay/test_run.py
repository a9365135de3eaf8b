import numpy as np
import pytest

from syncguard.errors import ScoreError
from syncguard.replay import (
    A,
    ReplayRecord,
    b_key,
    check_definition,
    response_scores_from_logits,
    study_run,
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


def moved(*offsets: float) -> list[list[list[float]]]:
    """One response of two tokens, scored once for each offset."""
    return [[[-1.0 - offset, -2.0 - offset] for offset in offsets]]


def test_five_passes_of_one_worker_make_ten_pairs():
    study = study_run({"w0": moved(0, 0.1, 0.2, 0.3, 0.4)}, [[1, 1]])
    (group,) = study.groups
    assert (group.name, group.pairs, study.responses) == ("within w0", 10, 1)
    assert group.interval.estimate == pytest.approx(np.mean([0.1 * (j - i) for i in range(5) for j in range(i + 1, 5)]))
    assert group.maximum == pytest.approx(0.4)
    assert study.within_nats == group.interval.estimate


def test_pairs_within_across_and_through_the_router_are_counted_apart():
    study = study_run({"w0": moved(0), "w1": moved(0.2), "w2": moved(0.2, 0.2)}, [[1, 1]], router=moved(0.2, 0.2, 0.2))
    found = {group.name: (group.pairs, round(group.interval.estimate, 9), group.exact) for group in study.groups}
    assert found == {
        "within w2": (1, 0.0, True),
        "across workers": (5, round((0.2 + 0.2 + 0.2) / 5, 9), False),
        "through the router": (3, 0.0, True),
        "router against workers": (12, 0.05, False),
    }


def test_masked_tokens_and_the_number_of_tokens_weigh_in_a_study_as_in_a_run():
    passes = [[[-1.0, -1.0], [-1.0, -9.0]], [[-1.0] * 3, [-1.3] * 3]]
    (group,) = study_run({"w": passes}, [[1, 0], [1, 1, 1]]).groups
    assert group.interval.estimate == pytest.approx(0.9 / 4)
    assert (group.interval.low, group.interval.high) == (0.0, pytest.approx(0.3))
    assert group.interval.responses == 2


def test_a_worker_of_another_state_is_told_from_noise():
    rng = np.random.default_rng(1)
    masks = [np.ones(40, np.int64)] * 8
    truth = [-rng.exponential(1.0, 40) for _ in masks]

    def noisy(shift: float):
        return [
            [values + shift * rng.laplace(0, 1, 40) + rng.laplace(0, 0.006, 40) for _ in range(5)] for values in truth
        ]

    assert study_run({"a": noisy(0), "b": noisy(0)}, masks).apart == ()
    assert study_run({"a": noisy(0), "b": noisy(0.4)}, masks).apart == ()  # b moves within itself as much
    state = [rng.laplace(0, 0.4, 40) for _ in masks]
    stale = [[values + change for values in passes] for passes, change in zip(noisy(0), state, strict=True)]
    assert study_run({"a": noisy(0), "b": stale}, masks).apart == ("across workers",)
    found = study_run({"a": noisy(0), "c": noisy(0)}, masks, router=stale)
    assert found.apart == ("router against workers",)


def test_a_single_pass_is_no_study():
    with pytest.raises(ScoreError, match="two passes"):
        study_run({"w0": moved(0)}, [[1, 1]])


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
