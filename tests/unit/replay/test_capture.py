from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from syncguard.engines.base import FlushResult, Generation, Scoring
from syncguard.errors import EngineError, RecordError, ScoreError, UnsupportedError
from syncguard.replay import A, b_key, c_key, diagnose
from syncguard.replay.capture import decode_on_worker, replay_batch, replay_on_worker, score_with_trainer
from syncguard.replay.generate import capture_batch, capture_calls, capture_generation


@dataclass
class TableWorker:
    """A worker whose model is one table of logits per preceding token, with a prefix cache that can keep old scores."""

    logits: np.ndarray
    calls: list = field(default_factory=list)
    refuse_flush: bool = False
    keeps_cache_over_update: bool = False
    returned: tuple | None = None
    cache: dict = field(default_factory=dict)

    def scores(self, ids, prompt_length):
        rows = self.logits[np.array(ids[prompt_length - 1 : -1])]
        shifted = rows - rows.max(1, keepdims=True)
        logp = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
        return tuple(logp[np.arange(len(rows)), ids[prompt_length:]].tolist())

    def update(self, logits):
        self.logits = logits
        if not self.keeps_cache_over_update:
            self.cache.clear()

    def generate(self, prompt_ids, *, max_new_tokens, seed):
        self.calls.append("generate")
        ids = [*prompt_ids, *np.random.default_rng(seed).integers(0, len(self.logits), max_new_tokens).tolist()]
        return Generation(
            tuple(ids[len(prompt_ids) :]), self.scores(ids, len(prompt_ids)), "run@0", {"temperature": 1.0}
        )

    def score(self, input_ids, *, prompt_length):
        key = tuple(input_ids)
        self.calls.append("score warm" if key in self.cache else "score")
        known = key in self.cache
        scores = self.cache.setdefault(key, self.scores(input_ids, prompt_length))
        return Scoring(self.returned or key[prompt_length:], scores, prompt_length - 1 if known else 0)

    def flush(self):
        self.calls.append("flush")
        if self.refuse_flush:
            return FlushResult(confirmed=False, detail="2 requests are running")
        self.cache.clear()
        return FlushResult(confirmed=True, detail="flushed")


def worker(**changes) -> TableWorker:
    return TableWorker(np.random.default_rng(0).normal(0, 2, (12, 12)), **changes)


def trained(one: TableWorker, size: float = 0.5) -> np.ndarray:
    return one.logits + np.random.default_rng(1).normal(0, size, one.logits.shape)


def generated(one: TableWorker, **fields):
    return capture_generation(one, [1, 2, 3], max_new_tokens=24, seed=4, **fields)


def test_generation_keeps_exact_ids_scores_settings_and_label():
    one = worker()
    record = generated(one, worker="w0", record_id="r")
    assert record.input_ids.tolist()[:3] == [1, 2, 3]
    assert record.response_length == 24
    np.testing.assert_array_equal(record.scores[A], one.scores(record.input_ids.tolist(), 3))
    assert (record.sampling["seed"], record.versions["old"], record.worker) == (4, "run@0", "w0")


def test_each_cold_pass_follows_a_flush_and_the_warm_pass_follows_the_cold_ones():
    one = worker()
    record = replay_on_worker(one, generated(one), "old", vocab_size=12, cold=2, warm=1)
    assert one.calls == ["generate", "flush", "score", "flush", "score", "score warm"]
    assert [str(key) for key in record.scores] == ["A", "B0.old.cold", "B1.old.cold", "B0.old.warm"]
    assert record.meta["cached_tokens"] == {"B0.old.cold": 0, "B1.old.cold": 0, "B0.old.warm": 2}


def test_after_an_update_the_cache_is_scored_as_found_before_any_flush():
    one = worker(keeps_cache_over_update=True)
    record = replay_on_worker(one, generated(one), "old", vocab_size=12)
    one.calls.clear()
    one.update(trained(one))
    replay_on_worker(one, record, "new", vocab_size=12, warm=2, version="run@1")
    assert one.calls == ["score warm", "flush", "score", "flush", "score", "score warm"]


def carried(one: TableWorker, *, push: bool = True):
    record = replay_on_worker(one, generated(one), "old", vocab_size=12)
    trainer = one.logits
    record = score_with_trainer(record, lambda r: trainer[r.input_ids], "old")
    trainer = trained(one)
    if push:
        one.update(trainer)
    record = replay_on_worker(one, record, "new", vocab_size=12, warm=2, version="run@1")
    return score_with_trainer(record, lambda r: trainer[r.input_ids], "new")


@pytest.mark.parametrize(
    ("changes", "push", "kind"),
    [
        ({}, True, "agreement"),
        ({}, False, "stale weights"),
        ({"keeps_cache_over_update": True}, True, "stale prefix cache"),
    ],
)
def test_a_record_carried_across_an_update_tells_clean_stale_and_cached(changes, push, kind):
    record = carried(worker(**changes), push=push)
    assert diagnose(record).kind.value == kind
    assert record.versions == {"old": "run@0", "new": "run@1"}


def test_a_refused_flush_ends_the_capture_with_the_engines_words():
    one = worker(refuse_flush=True)
    with pytest.raises(EngineError, match="2 requests are running"):
        replay_on_worker(one, generated(one), "old", vocab_size=12)


def test_scores_of_other_ids_are_refused():
    one = worker(returned=tuple([5] * 24))
    with pytest.raises(ScoreError, match="other tokens"):
        replay_on_worker(one, generated(one), "old", vocab_size=12)


def test_no_pass_is_taken_twice():
    one = worker()
    record = replay_on_worker(one, generated(one), "old", vocab_size=12)
    with pytest.raises(RecordError, match="already recorded"):
        replay_on_worker(one, record, "old", vocab_size=12)


def test_the_trainer_may_return_logits_or_scores_but_nothing_else():
    one = worker()
    record = generated(one)
    logits = score_with_trainer(record, lambda r: one.logits[r.input_ids], "old")
    ready = score_with_trainer(record, lambda r: one.scores(r.input_ids.tolist(), 3), "old", passes=3)
    np.testing.assert_allclose(logits.scores[c_key(0, "old")], ready.scores[c_key(2, "old")], rtol=1e-12)
    with pytest.raises(ScoreError):
        score_with_trainer(record, lambda r: np.zeros(7), "old")
    with pytest.raises(ScoreError):
        score_with_trainer(record, lambda r: np.zeros((2, 27, 12)), "old")


def test_progress_is_told_after_each_pass():
    one, seen = worker(), []
    replay_on_worker(one, generated(one), "old", vocab_size=12, on_pass=seen.append)
    assert seen == ["B0.old.cold", "B1.old.cold", "B0.old.warm"]
    assert b_key(0, "old") is not None


class BatchingWorker(TableWorker):
    """A worker in which a sample's scores depend a little on how many share its call."""

    def generate_batch(self, prompts, *, max_new_tokens, seed):
        self.calls.append(f"generate {len(prompts)}")
        return [self.generate(p, max_new_tokens=max_new_tokens, seed=seed + i) for i, p in enumerate(prompts)]

    def score_batch(self, items):
        self.calls.append(f"batch of {len(items)}")
        found = [self.score(ids, prompt_length=at) for ids, at in items]
        return [replace(one, logprobs_nats=tuple(s - 1e-3 * len(items) for s in one.logprobs_nats)) for one in found]


def test_a_batch_is_generated_and_replayed_in_one_call_and_each_record_names_its_company():
    one = BatchingWorker(np.random.default_rng(0).normal(0, 2, (12, 12)))
    names = ["a", "b", "c"]
    records = capture_batch(one, [[1, 2, 3], [4, 5], [6, 7, 8, 9]], max_new_tokens=9, seed=2, names=names, worker="w")
    assert [record.record_id for record in records] == names
    assert all(record.batch == ("a", "b", "c") and record.worker == "w" for record in records)
    assert [record.sampling["seed"] for record in records] == [2, 3, 4]
    replayed = replay_batch(one, records, "old", vocab_size=12, version="run@0")
    assert [call for call in one.calls if call.startswith(("batch", "flush", "generate 3"))] == [
        "generate 3", "flush", "batch of 3", "flush", "batch of 3", "batch of 3",
    ]  # fmt: skip
    alone = replay_on_worker(one, records[1], "old", vocab_size=12)
    np.testing.assert_allclose(alone.scores[b_key(0, "old")] - replayed[1].scores[b_key(0, "old")], 3e-3)
    assert all(record.versions == {"old": "run@0"} for record in replayed)


def test_a_conversation_is_a_list_of_calls_each_with_the_ids_that_it_saw():
    one = worker()

    def next_prompt(calls):
        if len(calls) == 3:
            return None
        # The template drops what the first turn thought: the second prompt does not begin with the first call's ids.
        return [1, *calls[-1].response_ids.tolist()[-4:], 7, 8]

    calls = capture_calls(
        one, [1, 2, 3], next_prompt, max_new_tokens=6, seed=1, record_id="chat", call={"tools": ["search"]}
    )
    assert [call.record_id for call in calls] == ["chat/0", "chat/1", "chat/2"]
    assert [call.call for call in calls] == [
        {"tools": ["search"], "conversation": "chat", "index": index} for index in range(3)
    ]
    assert calls[1].input_ids.tolist()[:7] == [1, *calls[0].response_ids.tolist()[-4:], 7, 8]
    for call in calls:
        replayed = replay_on_worker(one, call, "old", vocab_size=12)
        np.testing.assert_array_equal(replayed.scores[A], replayed.scores[b_key(0, "old")])


@pytest.mark.parametrize("beside", [{"adapter": "lora-a"}, {"images": ["xxh3:0123"]}])
def test_a_call_with_other_inputs_than_ids_is_never_replayed_without_them(beside):
    one = worker()
    record = generated(one, call=beside)
    for use in (
        lambda: replay_on_worker(one, record, "old", vocab_size=12),
        lambda: decode_on_worker(one, record, "old"),
    ):
        with pytest.raises(UnsupportedError, match=next(iter(beside))):
            use()
    assert one.calls == ["generate"]
