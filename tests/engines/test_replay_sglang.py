"""Capture, verdict and diagnosis on a real SGLang server: clean, stale, an old prefix cache, and Cases 1 and 2."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from tiny_models import VOCAB_SIZE
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from syncguard.replay import (
    A,
    Kind,
    ReplayEvidence,
    ReplayPolicy,
    ReplayRecord,
    ReplayStatus,
    c_key,
    diagnose,
    judge_replay,
    load_many,
)

pytestmark = pytest.mark.sglang

PROMPTS = ("3,14,15,92,65,35,89,79", "23,84,62,64,33,83,27,95,2,88,41,97")
TOKENS = 48


@pytest.fixture(scope="module", params=[("qwen3", "float32", 1), ("qwen3", "bfloat16", 2)], ids=str)
def served(request, serve):
    return serve(*request.param)


@pytest.fixture(scope="module")
def command():
    import typer

    from syncguard.cli.capture import capture
    from syncguard.cli.diagnose import diagnose as diagnose_command
    from syncguard.cli.report import report

    app = typer.Typer()
    for function in (capture, diagnose_command, report):
        app.command()(function)

    def run(*arguments):
        result = CliRunner().invoke(app, [str(part) for part in arguments])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return run


@pytest.fixture(scope="module")
def at_t0(served, command, tmp_path_factory):
    """Two responses captured at T0 with all scores, by the command."""
    served.load(served.checkpoint, "run@0")
    path = tmp_path_factory.mktemp("t0") / "t0.safetensors"
    prompts = [part for ids in PROMPTS for part in ("--prompt-ids", ids)]
    result = command(
        "capture", "-o", path, "--engine", served.server.base_url, *prompts, "--max-new-tokens", TOKENS,
        "--trainer", served.checkpoint, "--vocab-size", VOCAB_SIZE, "--warm", 2, "--json",
    )  # fmt: skip
    assert json.loads(result.stdout)["responses"] == 2
    return path


@pytest.fixture(scope="module")
def t1_checkpoint(served, at_t0, tmp_path_factory):
    """One optimizer step on balanced rewards: the first response is rewarded, the second is not."""
    model = AutoModelForCausalLM.from_pretrained(served.checkpoint, dtype="auto")
    loss = torch.zeros(())
    for record, reward in zip(load_many(at_t0), (1.0, -1.0), strict=True):
        ids = torch.tensor(record.input_ids).unsqueeze(0)
        rows = model(input_ids=ids, use_cache=False).logits[0, record.prompt_length - 1 : -1].float()
        scores = torch.log_softmax(rows, -1).gather(1, ids[0, record.prompt_length :].unsqueeze(1))
        loss = loss - reward * scores.mean()
    loss.backward()
    torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0).step()
    folder = tmp_path_factory.mktemp("t1")
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def carry(served, command, at_t0, t1_checkpoint, tmp_path):
    """Return a function that carries the records of T0 to T1 after some update of the worker."""

    def to_t1(update) -> list[ReplayRecord]:
        served.load(served.checkpoint, "run@0")
        for record in load_many(at_t0):  # the worker has the response in its prefix cache, as after T0's replay
            served.engine.score(record.input_ids.tolist(), prompt_length=record.prompt_length)
        update()
        command(
            "capture", "-o", tmp_path / "t1.safetensors", "--engine", served.server.base_url, "--record", at_t0,
            "--state", "new", "--trainer", t1_checkpoint, "--vocab-size", VOCAB_SIZE, "--warm", 2,
        )  # fmt: skip
        return load_many(tmp_path / "t1.safetensors")

    return to_t1


def verdict_of(records):
    return judge_replay([ReplayEvidence.from_record(record) for record in records])


def test_generation_replay_and_trainer_agree_at_t0(served, at_t0):
    for record in load_many(at_t0):
        found = diagnose(record)
        # bfloat16 over two ranks is further from a trainer on one than from itself: agreement, or said to be ambiguous.
        wanted = {Kind.AGREEMENT} if served.dtype == "float32" else {Kind.AGREEMENT, Kind.AMBIGUOUS}
        assert found.kind in wanted, found
        assert diagnose(record, ReplayPolicy(mae_limit_nats=0.05)).kind is Kind.AGREEMENT
        assert record.response_length == TOKENS
        assert record.versions == {"old": "run@0"}
        assert record.meta["cached_tokens"]["B0.old.cold"] == 0
        assert record.meta["cached_tokens"]["B0.old.warm"] > 0
        if served.dtype == "float32":
            assert all("MAE=0.0000" in line for line in found.evidence)


def test_an_installed_update_passes(served, carry, t1_checkpoint):
    records = carry(lambda: served.load(t1_checkpoint, "run@1"))
    verdict = verdict_of(records)
    assert verdict.status is ReplayStatus.PASS, verdict.reason
    assert verdict.power.change_mae_nats > 10 * verdict.figure("B_new-C_new").mae
    assert {diagnose(record).kind for record in records} == {Kind.AGREEMENT}


def test_a_skipped_update_behind_a_new_label_is_stale(served, carry):
    def label_only():
        assert served.post("/update_weight_version", new_version="run@1").status_code == 200

    records = carry(label_only)
    verdict = verdict_of(records)
    assert (verdict.status, verdict.fingerprint) == (ReplayStatus.FAIL, "stale"), verdict.reason
    assert {record.versions["new"] for record in records} == {"run@1"}
    assert {diagnose(record).kind for record in records} == {Kind.STALE_WEIGHTS}


def test_an_update_that_keeps_the_prefix_cache_is_seen_although_the_weights_are_right(served, carry, t1_checkpoint):
    def update_without_flush():
        response = served.post(
            "/update_weights_from_disk", model_path=str(t1_checkpoint), weight_version="run@1", flush_cache=False
        )
        assert response.status_code == 200, response.text

    verdict = verdict_of(carry(update_without_flush))
    assert (verdict.status, verdict.fingerprint) == (ReplayStatus.FAIL, "stale prefix cache"), verdict.reason
    assert verdict.figure("B_new-C_new").mae < verdict.limit_nats


def test_case_1_on_the_servers_scores_names_generation(at_t0):
    for record in load_many(at_t0):
        altered = record.scores[A].copy()
        altered[1:] -= 0.10
        found = diagnose(replace(record, scores={**record.scores, A: altered}))
        assert (found.kind, found.side) == (Kind.OFFSET, "A"), found
        assert "from position 1 on" in found.reason


def test_case_2_on_the_servers_scores_names_the_trainer(at_t0):
    for record in load_many(at_t0):
        moved = {c_key(i, "old"): record.scores[c_key(i, "old")] - 0.10 for i in (0, 1)}
        found = diagnose(replace(record, scores={**record.scores, **moved}))
        assert (found.kind, found.side) == (Kind.OFFSET, "C"), found


def test_the_last_id_of_the_vocabulary_is_scored_although_the_server_reports_it_as_0(served):
    from syncguard.replay import ReplayRecord
    from syncguard.replay.capture import replay_on_worker

    record = ReplayRecord(input_ids=[5, 6, 7, VOCAB_SIZE - 1, 9, VOCAB_SIZE - 1], prompt_length=2)
    found = served.engine.score(record.input_ids.tolist(), prompt_length=2)
    assert found.response_ids[1] == 0
    assert replay_on_worker(served.engine, record, "old", vocab_size=VOCAB_SIZE).passes("B", "old", "cold")
