"""Packed rows: scored as a block-diagonal forward scores them, and as the same samples one by one."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from syncguard.errors import RecordError
from syncguard.replay import ReplayRecord, b_key, c_key
from syncguard.replay.capture import decode_on_worker, replay_on_worker, score_with_trainer
from syncguard.replay.packing import packed, segments_of, unpacked
from syncguard.replay.trainer import response_scores, trainer_forward

sys.path.insert(0, str(Path(__file__).parents[2] / "engines"))
from tiny_models import VOCAB_SIZE, tiny_model

LENGTHS = ((5, 9), (3, 14), (7, 6))


@pytest.fixture(scope="module")
def model():
    return tiny_model()


def samples():
    rng = np.random.default_rng(7)
    return [
        ReplayRecord(
            input_ids=rng.integers(3, VOCAB_SIZE, prompt + response),
            prompt_length=prompt,
            mask=(rng.random(response) < 0.8) | (np.arange(response) == 0),
            record_id=f"s{index}",
        )
        for index, (prompt, response) in enumerate(LENGTHS)
    ]


def test_a_packed_row_keeps_ids_positions_and_only_the_losses_of_its_samples():
    row = packed(samples(), record_id="row")
    assert [part.size for part in segments_of(row)] == [14, 17, 13]
    assert np.asarray(row.positions).tolist() == [*range(14), *range(17), *range(13)]
    assert int(row.loss_mask.sum()) == sum(int(one.loss_mask.sum()) for one in samples())
    back = unpacked(row)
    assert [one.record_id for one in back] == ["row/0", "row/1", "row/2"]
    for one, sample in zip(back, samples(), strict=True):
        np.testing.assert_array_equal(one.input_ids, sample.input_ids)
        np.testing.assert_array_equal(one.loss_mask, sample.loss_mask)
        assert one.prompt_length == sample.prompt_length


def test_packed_scores_equal_those_of_the_samples_one_by_one(model):
    forward = trainer_forward(model)
    row = score_with_trainer(packed(samples()), forward, "old")
    for one, sample in zip(unpacked(row), samples(), strict=True):
        np.testing.assert_array_equal(one.scores[c_key(0, "old")], forward(sample))


def test_packed_scores_equal_one_forward_with_a_block_diagonal_mask(model):
    row = packed(samples())
    segment = torch.tensor(np.asarray(row.segment_ids))
    length = segment.numel()
    seen = (segment[:, None] == segment[None]) & torch.ones(length, length, dtype=torch.bool).tril()
    mask = torch.where(seen, 0.0, torch.finfo(torch.float32).min)[None, None]
    with torch.no_grad():
        logits = model(
            input_ids=torch.tensor(row.input_ids)[None],
            attention_mask=mask,
            position_ids=torch.tensor(np.asarray(row.positions))[None],
            use_cache=False,
        ).logits[0]
    whole = torch.log_softmax(logits[row.prompt_length - 1 : -1].double(), -1)
    expected = whole.gather(1, torch.tensor(row.response_ids)[:, None]).squeeze(1).numpy()
    np.testing.assert_allclose(response_scores(model, row), expected, atol=2e-5)


def test_a_row_taken_for_one_sample_has_other_scores(model):
    row = packed(samples())
    plain = ReplayRecord(input_ids=row.input_ids, prompt_length=row.prompt_length, mask=row.loss_mask)
    gap = np.abs(response_scores(model, row) - response_scores(model, plain))[row.loss_mask == 1]
    assert gap[:9].max() < 2e-5
    assert gap[10:].mean() > 0.1


def test_samples_may_be_interleaved(model):
    one, other = samples()[:2]
    row = packed([one, other])
    order = np.argsort(np.concatenate([np.arange(14) * 2, np.arange(17) * 2 + 1]), kind="stable")
    mixed = ReplayRecord(
        input_ids=row.input_ids[order],
        prompt_length=12,
        mask=np.concatenate([np.zeros(5, np.int64), row.loss_mask])[order][12:],
        positions=np.asarray(row.positions)[order],
        segment_ids=np.asarray(row.segment_ids)[order],
    )
    found = response_scores(model, mixed)
    wanted = np.concatenate([np.zeros(5), response_scores(model, row)])[order][12:]
    active = mixed.loss_mask == 1
    np.testing.assert_allclose(found[active], wanted[active], atol=2e-5)


def test_a_loss_on_the_first_token_of_a_packed_sample_is_refused(model):
    row = packed(samples())
    mask = row.loss_mask.copy()
    mask[14 - row.prompt_length] = 1
    wrong = ReplayRecord(
        input_ids=row.input_ids, prompt_length=row.prompt_length, mask=mask, segment_ids=row.segment_ids
    )
    for use in (lambda: response_scores(model, wrong), lambda: unpacked(wrong)):
        with pytest.raises(RecordError, match="first token of a packed sample"):
            use()


class Untouched:
    """An engine that must not be asked anything."""

    def score(self, input_ids, *, prompt_length):
        raise AssertionError("scored")

    def flush(self):
        raise AssertionError("flushed")


@pytest.mark.parametrize(
    "replay",
    [
        lambda r: replay_on_worker(Untouched(), r, "old", vocab_size=9),
        lambda r: decode_on_worker(Untouched(), r, "old"),
    ],
)
def test_no_engine_is_given_a_packed_row_as_one_context(replay):
    with pytest.raises(RecordError, match="one context a request"):
        replay(packed(samples()))


def test_a_sample_without_a_loss_is_left_out_and_scores_follow_their_tokens():
    row = packed(samples())
    mask = row.loss_mask.copy()
    mask[14 + 17 - row.prompt_length :] = 0
    scores = -np.arange(row.response_length, dtype=float)
    one, other = unpacked(
        ReplayRecord(
            input_ids=row.input_ids,
            prompt_length=row.prompt_length,
            mask=mask,
            segment_ids=row.segment_ids,
            scores={b_key(0, "old"): scores},
        )
    )
    np.testing.assert_array_equal(one.scores[b_key(0, "old")], scores[:9])
    np.testing.assert_array_equal(other.scores[b_key(0, "old")], scores[12:26])


def test_what_is_packed_already_is_not_packed_again():
    with pytest.raises(RecordError, match="nothing to pack"):
        packed([packed(samples())])
