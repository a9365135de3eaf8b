"""The demo's trainer: real steps, an honest list of what changed, and a frozen forward that the worker agrees with."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from contract import PROMPT
from safetensors.torch import load_file

from syncguard.cli.demo.trainer import Sample, Trainer, balanced_rewards
from syncguard.engines.local import LocalWorker
from syncguard.errors import UsageError


def respond(worker, count=4):
    made = [worker.generate(PROMPT, max_new_tokens=16, seed=seed).response_ids for seed in range(count)]
    return [Sample((*PROMPT, *response), len(PROMPT)) for response in made]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_whole_loop_follows_the_weights(tmp_path, dtype, tied):
    trainer = Trainer(dtype=dtype, tie_word_embeddings=tied)
    worker = LocalWorker(trainer.save_checkpoint(tmp_path / "T0"), tp_size=2)
    samples = respond(worker)
    noise = 1e-5 if dtype == "float32" else 0.08
    for step in range(1, 3):
        report = trainer.train_step(samples, balanced_rewards(len(samples)))
        assert str(trainer.version) == str(report.version) == f"demo@{step}"
        before = worker.score(samples[0].input_ids, prompt_length=len(PROMPT))
        worker.push(trainer.export().items(), label=str(trainer.version))
        after = worker.score(samples[0].input_ids, prompt_length=len(PROMPT))
        reference, again = trainer.score_twice(samples[0])
        assert np.array_equal(reference, again)
        assert np.abs(reference - after.logprobs_nats).mean() < noise
        assert np.abs(reference - before.logprobs_nats).mean() > 0.3
    assert worker.ignored == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_step_changes_every_tensor_and_says_so_by_bits(dtype):
    trainer = Trainer(dtype=dtype)
    before = trainer.export()
    report = trainer.train_step([Sample((1, 2, 3, 4, 5), 2), Sample((1, 2, 6, 7, 8), 2)], [-1.0, 1.0])
    after = trainer.export()
    assert report.changed == tuple(sorted(after))
    assert report.unchanged == ()
    assert all(not torch.equal(before[name], after[name]) for name in after)


def test_a_step_too_small_for_bf16_changes_nothing_that_is_exported_but_trains_on():
    trainer = Trainer(dtype="bfloat16", learning_rate=1e-7)
    samples = [Sample((1, 2, 3, 4, 5), 2), Sample((1, 2, 6, 7, 8), 2)]
    master = trainer.model.lm_head.weight.detach().clone()
    report = trainer.train_step(samples, [-1.0, 1.0])
    assert not torch.equal(master, trainer.model.lm_head.weight)
    assert "model.norm.weight" in report.unchanged


def test_rewards_of_zero_change_nothing_and_say_so():
    trainer = Trainer()
    report = trainer.train_step([Sample((1, 2, 3, 4), 2)], [0.0])
    assert report.changed == ()
    assert len(report.unchanged) == len(trainer.export())


def test_the_same_seed_gives_the_same_bits_whatever_ran_before():
    first = Trainer(seed=3).export()
    torch.rand(7)
    again, other = Trainer(seed=3).export(), Trainer(seed=4).export()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


def test_exported_tensors_belong_to_the_caller():
    trainer = Trainer()
    exported = trainer.export()
    kept = exported["model.norm.weight"].clone()
    trainer.train_step([Sample((1, 2, 3, 4), 2)], [1.0])
    assert torch.equal(exported["model.norm.weight"], kept)
    exported["model.norm.weight"].zero_()
    assert trainer.export()["model.norm.weight"].any()


def test_a_tied_head_is_exported_once():
    assert "lm_head.weight" not in Trainer(tie_word_embeddings=True).export()
    assert "lm_head.weight" in Trainer().export()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("training", [False, True])
def test_scoring_restores_the_training_mode_and_leaves_no_gradient(dtype, training):
    trainer = Trainer(dtype=dtype)
    trainer.model.train(training)
    scores = trainer.score(Sample((1, 2, 3, 4), 2))
    assert trainer.model.training is training
    assert all(parameter.grad is None for parameter in trainer.model.parameters())
    assert scores.shape == (2,)
    with pytest.raises(IndexError):
        trainer.score(Sample((1, 2, 3, 9999), 2))
    assert trainer.model.training is training


def test_scores_are_those_of_the_token_that_follows_each_position():
    trainer = Trainer()
    ids = (1, 2, 3, 4, 5)
    with torch.no_grad():
        logits = trainer.model.eval()(torch.tensor([ids])).logits[0].double()
    by_hand = [float(torch.log_softmax(logits[t - 1], -1)[ids[t]]) for t in range(2, 5)]
    assert trainer.score(Sample(ids, 2)) == pytest.approx(by_hand, abs=1e-5)


def test_a_checkpoint_is_complete_replaces_an_older_one_and_leaves_nothing_beside(tmp_path):
    trainer = Trainer(dtype="bfloat16")
    folder = trainer.save_checkpoint(tmp_path / "deep" / "T0")
    (folder / "old-shard.safetensors").write_bytes(b"left over")
    trainer.train_step([Sample((1, 2, 3, 4), 2)], [1.0])
    trainer.save_checkpoint(folder)
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert [path.name for path in folder.parent.iterdir()] == ["T0"]
    config = json.loads((folder / "config.json").read_text())
    assert (config["architectures"], config["dtype"]) == (["Qwen3ForCausalLM"], "bfloat16")
    saved, exported = load_file(folder / "model.safetensors"), trainer.export()
    assert saved.keys() == exported.keys()
    assert all(torch.equal(saved[name], exported[name]) for name in saved)


@pytest.mark.parametrize(("count", "rewards"), [(2, [-1, 1]), (3, [-1, 1, 0]), (4, [-1, 1, -1, 1]), (1, [0])])
def test_artificial_rewards_are_balanced(count, rewards):
    assert balanced_rewards(count) == rewards


def test_an_impossible_trainer_or_batch_is_refused():
    with pytest.raises(UsageError, match="demo model"):
        Trainer(dtype="float16")
    with pytest.raises(UsageError, match="demo model"):
        Trainer(size="huge")
    with pytest.raises(UsageError, match="as many rewards"):
        Trainer().train_step([], [])
