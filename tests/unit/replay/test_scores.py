import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncguard.errors import ScoreError
from syncguard.replay import (
    RAW,
    ScoreDefinition,
    check_returned_ids,
    checked_scores,
    require_same_definition,
    response_scores_from_logits,
    restore_order,
    scores_from_vocabulary_shards,
)


def random_logits(seed: int, length: int = 9, vocabulary: int = 12):
    rng = np.random.default_rng(seed)
    return rng.normal(0, 3, (length, vocabulary)), rng.integers(0, vocabulary, length)


def test_the_row_before_a_token_scores_it():
    logits, ids = random_logits(1)
    scores = response_scores_from_logits(logits, ids, 4)
    by_hand = [logits[j - 1, ids[j]] - np.log(np.exp(logits[j - 1]).sum()) for j in range(4, 9)]
    np.testing.assert_allclose(scores, by_hand, rtol=1e-13)


def test_the_last_row_and_the_rows_inside_the_prompt_have_no_influence():
    logits, ids = random_logits(2)
    changed = logits.copy()
    changed[-1] += 100
    changed[:3] -= 50
    np.testing.assert_array_equal(
        response_scores_from_logits(logits, ids, 4), response_scores_from_logits(changed, ids, 4)
    )


def test_the_normalizer_is_stable_for_huge_logits():
    logits, ids = random_logits(3)
    np.testing.assert_allclose(
        response_scores_from_logits(logits + 1e5, ids, 4), response_scores_from_logits(logits, ids, 4), atol=1e-9
    )


def test_temperature_divides_logits_and_not_finished_scores():
    logits, ids = random_logits(4)
    warm = response_scores_from_logits(logits, ids, 4, temperature=0.8)
    np.testing.assert_allclose(warm, response_scores_from_logits(logits / 0.8, ids, 4), rtol=1e-13)
    assert np.abs(warm - response_scores_from_logits(logits, ids, 4) / 0.8).max() > 0.1


@pytest.mark.parametrize("prompt_length", [0, 9, 10])
def test_a_boundary_without_a_prediction_row_is_refused(prompt_length):
    logits, ids = random_logits(5)
    with pytest.raises(ScoreError, match="no prediction row"):
        response_scores_from_logits(logits, ids, prompt_length)


def test_an_id_outside_the_vocabulary_is_refused():
    logits, ids = random_logits(6)
    ids[7] = 12
    with pytest.raises(ScoreError, match=r"outside the vocabulary.*0\.\.11.*12"):
        response_scores_from_logits(logits, ids, 4)


def test_a_filtered_token_is_refused_because_its_score_is_not_finite():
    logits, ids = random_logits(7)
    logits[5, ids[6]] = -np.inf
    with pytest.raises(ScoreError, match="response position 2"):
        response_scores_from_logits(logits, ids, 4)


@given(st.integers(0, 10_000), st.lists(st.integers(1, 6), min_size=1, max_size=5))
def test_vocabulary_shards_with_a_global_normalizer_equal_the_whole(seed, widths):
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 4, (7, sum(widths)))
    targets = rng.integers(0, sum(widths), 7)
    firsts = np.cumsum([0, *widths[:-1]])
    shards = [logits[:, first : first + width] for first, width in zip(firsts, widths, strict=True)]
    whole = logits[np.arange(7), targets] - np.log(np.exp(logits).sum(1))
    np.testing.assert_allclose(scores_from_vocabulary_shards(shards, firsts.tolist(), targets), whole, atol=1e-12)


def test_normalizing_each_vocabulary_shard_alone_scores_another_distribution():
    logits, ids = random_logits(8)
    right = scores_from_vocabulary_shards([logits[:, :6], logits[:, 6:]], [0, 6], ids)
    alone = [scores_from_vocabulary_shards([half], [first], [i])[0] if first <= i < first + 6 else None
             for row, i in zip(logits, ids, strict=True) for first, half in ((0, row[None, :6]), (6, row[None, 6:]))
             if first <= i < first + 6]  # fmt: skip
    assert np.abs(right - np.array(alone)).mean() > 0.05


def test_a_target_in_a_gap_between_shards_is_refused():
    logits, _ = random_logits(9)
    with pytest.raises(ScoreError, match="exactly one vocabulary shard"):
        scores_from_vocabulary_shards([logits[:, :5], logits[:, 6:]], [0, 6], [5] * 9)


def test_scores_of_different_definitions_are_refused_with_the_check_that_separates_them():
    with pytest.raises(ScoreError, match=r"B-C.*raw.*temperature=0\.8.*log_softmax\(z/T\)"):
        require_same_definition(RAW, ScoreDefinition("temperature", temperature=0.8), label="B-C")


@pytest.mark.parametrize(
    "settings",
    [
        {"kind": "raw", "temperature": 0.8},
        {"kind": "raw", "top_k": 2},
        {"kind": "temperature", "top_p": 0.9},
        {"kind": "behavior", "temperature": 0.0},
        {"kind": "behavior", "temperature": float("nan")},
        {"kind": "probability"},
    ],
)
def test_a_definition_that_contradicts_itself_is_refused(settings):
    with pytest.raises(ScoreError):
        ScoreDefinition(**settings)


def test_a_definition_survives_its_json_form():
    one = ScoreDefinition("behavior", temperature=0.7, top_k=40, top_p=0.95, repetition_penalty=1.1)
    assert ScoreDefinition.from_dict(one.as_dict()) == one
    with pytest.raises(ScoreError, match="unknown part"):
        ScoreDefinition.from_dict({**one.as_dict(), "beam": 3})


def test_returned_ids_must_be_the_saved_ones():
    check_returned_ids([4, 5, 6], [4, 5, 6], 100)
    with pytest.raises(ScoreError, match=r"response position 1.*id 5.*id 7"):
        check_returned_ids([4, 5, 6], [4, 7, 6], 100)
    with pytest.raises(ScoreError, match="another number of tokens"):
        check_returned_ids([4, 5, 6], [4, 5], 100)


def test_a_returned_zero_is_accepted_only_for_the_last_id_of_the_vocabulary():
    check_returned_ids([4, 99, 6], [4, 0, 6], 100)
    with pytest.raises(ScoreError):
        check_returned_ids([4, 98, 6], [4, 0, 6], 100)
    with pytest.raises(ScoreError):
        check_returned_ids([4, 0, 6], [4, 99, 6], 100)


@pytest.mark.parametrize("bad", [[0.1, None], [0.1, float("nan")], [0.1, float("-inf")], [[0.1], [0.2]]])
def test_missing_or_non_finite_scores_are_refused(bad):
    with pytest.raises(ScoreError):
        checked_scores(bad, label="B0")


def test_samples_of_data_parallel_ranks_come_back_in_order_and_complete():
    parts = [{0: [0.0], 3: [3.0]}, {2: [2.0], 1: [1.0]}]
    assert [float(x[0]) for x in restore_order(parts, 4)] == [0, 1, 2, 3]
    with pytest.raises(ScoreError, match=r"missing \[4\]"):
        restore_order(parts, 5)
    with pytest.raises(ScoreError, match="two ranks"):
        restore_order([{0: [0.0]}, {0: [0.0]}], 1)
