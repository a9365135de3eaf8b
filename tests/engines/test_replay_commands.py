"""`syncguard capture`, `diagnose` and `study` end to end on the embedded engine."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import typer
from tiny_models import VOCAB_SIZE, save_tiny_checkpoint, tiny_model
from typer.testing import CliRunner

from syncguard.cli.capture import capture
from syncguard.cli.diagnose import diagnose
from syncguard.cli.study import study
from syncguard.engines.faults import Fault, FaultKind
from syncguard.engines.local import LocalEngine, LocalWorker
from syncguard.errors import RecordError, UsageError
from syncguard.replay import A, Kind, ScoreKey, b_key, load_many, response_scores_from_logits, save_many
from syncguard.replay import diagnose as diagnose_records
from syncguard.replay.capture import decode_on_worker, replay_on_worker, score_with_trainer
from syncguard.replay.generate import capture_generation
from syncguard.replay.packing import packed
from syncguard.replay.trainer import response_logits, trainer_forward

PROMPTS = ("3,14,15,92,65,35,89,79", "23,84,62,64,33,83,27,95,2,88,41,97")
app = typer.Typer()
for function in (capture, diagnose, study):
    app.command()(function)


def run(*arguments):
    result = CliRunner().invoke(app, [str(part) for part in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.fixture(scope="module", params=["qwen3", "qwen3_moe"])
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def checkpoint(kind, tmp_path_factory):
    return save_tiny_checkpoint(tmp_path_factory.mktemp("checkpoint"), kind)


def captured(checkpoint, path, *arguments, count=2):
    prompts = [part for ids in PROMPTS[:count] for part in ("--prompt-ids", ids)]
    engine = ("--engine", f"embedded:{checkpoint}", "--trainer", checkpoint)
    return json.loads(
        run("capture", "-o", path, *engine, *prompts, "--max-new-tokens", 24, *arguments, "--json").stdout
    )


def test_one_command_takes_all_five_scores_and_they_agree(checkpoint, kind, tmp_path):
    found = captured(checkpoint, tmp_path / "r", "--decode", 2, "--training-forward")
    keys = ["A", "B0.old.cold", "B1.old.cold", "B0.old.warm", "D0.old", "D1.old", "C0.old", "C1.old", "G0.old"]
    assert found["scores"] == [keys, keys]
    assert found["no_decode"] == []
    for record in load_many(tmp_path / "r"):
        np.testing.assert_array_equal(record.scores[ScoreKey("D")], record.scores[A])
        assert record.meta["decode"] == {"how": "incremental decode, one saved id a step"}
        assert record.meta.get("num_experts", 0) == (0 if kind == "qwen3" else 4)
        assert record.meta["cached_tokens"]["D0.old"] == 0
        assert record.meta["cached_tokens"]["B0.old.warm"] > record.meta["cached_tokens"]["B0.old.cold"] == 0
    result = run("diagnose", tmp_path / "r")
    assert result.exit_code == 0
    assert all(label in result.stdout for label in ("A-D", "D-B", "C'-C"))


def test_no_decode_and_no_training_forward_unless_asked_for(checkpoint, tmp_path):
    found = captured(checkpoint, tmp_path / "r", "--decode", 0, count=1)
    assert not any(key.startswith(("D", "G")) for key in found["scores"][0])


def test_a_training_forward_without_a_trainer_is_refused(checkpoint, tmp_path):
    arguments = ("--prompt-ids", "3,4", "--training-forward")
    with pytest.raises(UsageError, match="training forward"):
        run("capture", "-o", tmp_path / "r", "--engine", f"embedded:{checkpoint}", *arguments)


@pytest.fixture
def worker(checkpoint):
    return LocalWorker(checkpoint)


def record_of(worker, checkpoint, kind):
    engine = LocalEngine(worker)
    record = capture_generation(engine, [3, 14, 15, 92, 65], max_new_tokens=24, seed=1)
    record = replay_on_worker(engine, record, "old", vocab_size=VOCAB_SIZE)
    return score_with_trainer(record, trainer_forward(tiny_model(kind)), "old")


def test_a_score_that_was_altered_after_the_engine_is_told_from_one_that_decode_makes(worker, checkpoint, kind):
    worker.faults.arm(Fault(FaultKind.A_SHIFT, nats=-0.1, position=1))
    record = record_of(worker, checkpoint, kind)
    found = diagnose_records(decode_on_worker(LocalEngine(worker), record, "old"))
    assert (found.kind, found.side) == (Kind.OFFSET, "A")
    assert "A was altered after the engine" in found.reason


def test_weights_that_change_between_generation_and_replay_show_as_both_replays_leaving_a(checkpoint, kind):
    """A and C are of one state; the worker took other weights before B and D."""
    worker = LocalWorker(checkpoint)
    engine = LocalEngine(worker)
    record = capture_generation(engine, [3, 14, 15, 92, 65], max_new_tokens=48, seed=1)
    record = score_with_trainer(record, trainer_forward(tiny_model(kind)), "old")
    rng = torch.Generator().manual_seed(3)
    weights = tiny_model(kind).state_dict().items()
    worker.push([(name, value + 0.05 * torch.randn(value.shape, generator=rng)) for name, value in weights])
    record = replay_on_worker(engine, record, "old", vocab_size=VOCAB_SIZE)
    found = diagnose_records(decode_on_worker(engine, record, "old"))
    assert found.side == "B", found
    assert "the worker changed since A" in found.reason


def test_decode_is_taken_after_a_flush_and_counts_as_scores_of_its_own(worker, checkpoint, kind):
    record = record_of(worker, checkpoint, kind)
    decoded = decode_on_worker(LocalEngine(worker), record, "old", passes=2)
    np.testing.assert_array_equal(decoded.scores[ScoreKey("D")], record.scores[A])
    assert np.abs(decoded.scores[ScoreKey("D")] - record.scores[b_key(0, "old")]).max() < 1e-4
    with pytest.raises(RecordError, match="already recorded"):
        decode_on_worker(LocalEngine(worker), decoded, "old")


def test_an_engine_that_cannot_decode_saved_ids_leaves_its_reason_and_no_score(worker, checkpoint, kind):
    from syncguard.engines.base import DecodeScoring

    class Plain(LocalEngine):
        def score_by_decode(self, input_ids, *, prompt_length):
            return DecodeScoring(None, cannot="no sampler to hook")

    record = decode_on_worker(Plain(worker), record_of(worker, checkpoint, kind), "old")
    assert record.meta["decode"] == {"cannot": "no sampler to hook"}
    assert record.passes("D", "old") == ()


def test_repeats_of_equal_workers_agree_and_their_pairs_are_all_there(checkpoint, tmp_path):
    captured(checkpoint, tmp_path / "r", "--decode", 0)
    engines = [f"embedded:{checkpoint}", f"embedded:{checkpoint}/"]
    arguments = [part for one in engines for part in ("--engine", one)]
    result = run("study", tmp_path / "r", *arguments, "--router", engines[0], "--json")
    found = json.loads(result.stdout)
    assert (result.exit_code, found["apart"], found["unstable"], found["responses"]) == (0, [], [], 2)
    pairs = {group["name"]: group["pairs"] for group in found["groups"]}
    assert pairs == {
        f"within {engines[0]}": 10,
        f"within {engines[1]}": 10,
        "across workers": 25,
        "through the router": 10,
        "router against workers": 50,
    }
    assert all(group["interval"]["responses"] == 2 for group in found["groups"])


def test_a_worker_with_other_weights_is_found_by_the_study(checkpoint, kind, tmp_path):
    captured(checkpoint, tmp_path / "r", "--decode", 0)
    stale = save_tiny_checkpoint(tmp_path / "stale", kind, seed=1)
    result = run(
        "study", tmp_path / "r", "--engine", f"embedded:{checkpoint}", "--engine", f"embedded:{stale}", "--passes", 2
    )
    assert result.exit_code == 10
    assert "some hold another state" in " ".join(result.stdout.split())


def test_a_packed_record_is_studied_sample_by_sample(checkpoint, tmp_path):
    captured(checkpoint, tmp_path / "r", "--decode", 0)
    packed(load_many(tmp_path / "r")).save(tmp_path / "packed")
    found = json.loads(
        run("study", tmp_path / "packed", "--engine", f"embedded:{checkpoint}", "--passes", 2, "--json").stdout
    )
    assert found["responses"] == 2


def test_the_same_worker_twice_is_no_study_across_workers(checkpoint, tmp_path):
    captured(checkpoint, tmp_path / "r", "--decode", 0, count=1)
    with pytest.raises(UsageError, match="each once"):
        run("study", tmp_path / "r", *["--engine", f"embedded:{checkpoint}"] * 2)


def test_a_batch_and_a_conversation_are_captured_by_the_command(checkpoint, tmp_path):
    captured(checkpoint, tmp_path / "batch", "--batch", "--decode", 0)
    assert [record.batch for record in load_many(tmp_path / "batch")] == [("sample-0", "sample-1")] * 2
    captured(checkpoint, tmp_path / "chat", "--follow-up", "9,8,7", "--follow-up", "4", "--decode", 0)
    calls = load_many(tmp_path / "chat")
    assert [call.record_id for call in calls] == [f"sample-{i}/{turn}" for i in (0, 1) for turn in (0, 1, 2)]
    assert calls[1].input_ids.tolist()[: calls[1].prompt_length] == [*calls[0].input_ids.tolist(), 9, 8, 7]
    assert run("diagnose", tmp_path / "chat").exit_code == 0
    with pytest.raises(UsageError, match="a batch"):
        captured(checkpoint, tmp_path / "r", "--batch", "--follow-up", "3")


def test_the_definition_check_says_which_formula_each_path_fits(checkpoint, tmp_path):
    captured(checkpoint, tmp_path / "r", "--decode", 0, count=1)
    (record,) = load_many(tmp_path / "r")
    model = tiny_model("qwen3_moe" if record.meta.get("num_experts") else "qwen3")
    logits = response_logits(model, record)
    heated = response_scores_from_logits(logits, record.input_ids, record.prompt_length, temperature=0.7)
    wrong = {key: heated if key.path == "C" else values for key, values in record.scores.items()}
    replace(record, scores=wrong, sampling={**record.sampling, "temperature": 0.7}).save(tmp_path / "heated")
    result = run("diagnose", tmp_path / "heated", "--check-definition", checkpoint, "--json")
    found = json.loads(result.stdout)
    assert found["diagnoses"][0]["kind"] == "temperature"
    (check,) = found["definitions"]
    assert check["temperature"] == 0.7
    assert {path: one["closest"] for path, one in check["paths"].items()} == {
        "A": "raw",
        "B": "raw",
        "C": "temperature",
    }
    assert check["paths"]["C"]["mae_nats"]["temperature"] < 1e-6
    assert check["paths"]["C"]["apart_nats"] > 0.05
    assert (
        "which formula the scores fit" in run("diagnose", tmp_path / "heated", "--check-definition", checkpoint).stdout
    )
    with pytest.raises(UsageError, match="temperature 1"):
        run("diagnose", tmp_path / "r", "--check-definition", checkpoint)


def test_the_responses_that_would_show_a_stale_worker_are_kept_and_the_others_are_not(tmp_path):
    sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))
    from lookalikes import make_record

    cases = ("update too small", "clean update", "update too small", "clean update", "clean")
    save_many(tmp_path / "r", [make_record(case, seed) for seed, case in enumerate(cases)])
    result = run("diagnose", tmp_path / "r", "--keep-telling", 5, "-o", tmp_path / "kept", "--json")
    found = json.loads(result.stdout)["telling"]
    assert {one["record"] for one in found} == {"clean update 1", "clean update 3"}
    changes = [one["change_mae_nats"] for one in found]
    assert changes == sorted(changes, reverse=True)
    assert [record.record_id for record in load_many(tmp_path / "kept")] == [one["record"] for one in found]
    save_many(tmp_path / "small", [make_record("update too small", 1)])
    run("diagnose", tmp_path / "small", "--keep-telling", 5, "-o", tmp_path / "none")
    assert not (tmp_path / "none").exists()
    with pytest.raises(UsageError, match="telling"):
        run("diagnose", tmp_path / "r", "--keep-telling", 5)


@pytest.fixture
def tokenizer_folder(tmp_path):
    """A real tokenizer of whole words, with a chat template."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["[UNK]", "<user>", "<end>", "<assistant>", *(f"w{i}" for i in range(100))]
    raw = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="[UNK]", additional_special_tokens=words[1:4])
    fast.chat_template = (
        "{% for message in messages %}<user> {{ message['content'] }} <end> {% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    fast.save_pretrained(tmp_path / "tokenizer")
    return tmp_path / "tokenizer"


def test_text_prompts_go_through_the_models_own_tokenizer_and_template(checkpoint, tokenizer_folder, tmp_path):
    arguments = ("--engine", f"embedded:{checkpoint}", "--tokenizer", tokenizer_folder, "--max-new-tokens", 8)
    run("capture", "-o", tmp_path / "plain", *arguments, "--prompt", "w5 w6", "--prompt", "w7")
    first, second = load_many(tmp_path / "plain")
    assert first.input_ids[: first.prompt_length].tolist() == [9, 10]
    assert second.input_ids[: second.prompt_length].tolist() == [11]
    run("capture", "-o", tmp_path / "chat", *arguments, "--prompt", "w5 w6", "--chat")
    (chat,) = load_many(tmp_path / "chat")
    assert chat.input_ids[: chat.prompt_length].tolist() == [1, 9, 10, 2, 3]
    assert chat.tokenizer_revision == first.tokenizer_revision
    assert chat.tokenizer_revision.startswith("tokenizer@xxh3-")
    (tokenizer_folder / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    run("capture", "-o", tmp_path / "other", *arguments, "--prompt", "w5 w6", "--chat")
    (other,) = load_many(tmp_path / "other")
    assert other.tokenizer_revision != chat.tokenizer_revision


def test_a_text_prompt_without_a_tokenizer_is_refused(checkpoint, tmp_path):
    with pytest.raises(UsageError, match="text prompt"):
        run("capture", "-o", tmp_path / "r", "--engine", f"embedded:{checkpoint}", "--prompt", "hello")
