"""Faults of a real rollout worker (embedded engine, Qwen3 maths) and a real trainer step, seen by the replay alone."""

from __future__ import annotations

import copy
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from syncguard.engines.faults import Fault, FaultKind, FaultPlan
from syncguard.engines.local import LocalEngine, LocalWorker
from syncguard.replay import A, Kind, ReplayEvidence, ReplayStatus, ScoreKey, c_key, diagnose, judge_replay
from syncguard.replay.capture import replay_on_worker, score_with_trainer
from syncguard.replay.generate import capture_generation
from syncguard.replay.trainer import gradient_forward, trainer_forward

sys.path.insert(0, str(Path(__file__).parents[1] / "engines"))
from tiny_models import VOCAB_SIZE, save_tiny_checkpoint, tiny_model

PROMPT = [3, 14, 15, 92, 65, 35, 89, 79]
DTYPES = ["float32", "bfloat16"]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    return {name: save_tiny_checkpoint(folder / name, dtype=getattr(torch, name)) for name in DTYPES}


def step(model, record, learning_rate: float) -> None:
    """One optimizer step on balanced rewards: the first half of the response is rewarded, the second is not."""
    model.requires_grad_(True)
    ids = torch.tensor(record.input_ids).unsqueeze(0)
    logits = model(input_ids=ids, use_cache=False).logits[0, record.prompt_length - 1 : -1].float()
    scores = torch.log_softmax(logits, -1).gather(1, ids[0, record.prompt_length :].unsqueeze(1)).squeeze(1)
    reward = torch.ones_like(scores)
    reward[len(reward) // 2 :] = -1
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.0)
    (-(reward * scores).mean()).backward()
    optimizer.step()
    model.requires_grad_(False)


class Loop:
    """T0 on both sides, one response generated and scored, a trainer step, a push, and the scores at T1."""

    def __init__(self, folder: Path, dtype: str, *, tp: int = 1, faults: tuple[Fault, ...] = ()) -> None:
        self.plan = FaultPlan()
        self.worker = LocalWorker(folder, tp_size=tp, faults=self.plan)
        self.engine = LocalEngine(self.worker)
        self.model = tiny_model(dtype=getattr(torch, dtype))
        self.generation_faults = faults
        self.dtype = dtype

    def at_t0(self):
        for fault in self.generation_faults:
            self.plan.arm(fault)
        record = capture_generation(self.engine, PROMPT, max_new_tokens=48, seed=1, worker="local")
        record = replay_on_worker(self.engine, record, "old", vocab_size=VOCAB_SIZE)
        return score_with_trainer(record, trainer_forward(self.model), "old")

    def to_t1(self, record, *, fault: Fault | None = None, learning_rate: float = 3e-3):
        step(self.model, record, learning_rate)
        if fault is not None:
            self.plan.arm(fault)
        self.worker.push(self.model.state_dict().items(), label="run@1")
        record = replay_on_worker(self.engine, record, "new", vocab_size=VOCAB_SIZE, warm=2, version="run@1")
        return score_with_trainer(record, trainer_forward(self.model), "new")


def verdict_of(record):
    return judge_replay(ReplayEvidence.from_record(record))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tp", [1, 2])
def test_a_clean_update_passes(checkpoints, dtype, tp):
    loop = Loop(checkpoints[dtype], dtype, tp=tp)
    record = loop.to_t1(loop.at_t0())
    verdict = verdict_of(record)
    assert verdict.status is ReplayStatus.PASS, verdict.reason
    assert verdict.power.change_mae_nats > 10 * verdict.figure("B_new-C_new").mae
    assert diagnose(record).kind is Kind.AGREEMENT
    if dtype == "float32":
        assert verdict.figure("B_new-C_new").mae < 1e-5


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_skipped_push_shows_the_stale_fingerprint_although_the_label_says_t1(checkpoints, dtype):
    loop = Loop(checkpoints[dtype], dtype)
    record = loop.to_t1(loop.at_t0(), fault=Fault(FaultKind.SKIP_PUSH))
    assert loop.worker.label == "run@1"
    verdict = verdict_of(record)
    assert (verdict.status, verdict.fingerprint) == (ReplayStatus.FAIL, "stale")
    assert verdict.figure("B_new-B_old").mae == 0
    assert diagnose(record).kind is Kind.STALE_WEIGHTS


@pytest.mark.parametrize("dtype", DTYPES)
def test_after_a_skipped_push_the_next_one_passes_again(checkpoints, dtype):
    loop = Loop(checkpoints[dtype], dtype)
    loop.to_t1(loop.at_t0(), fault=Fault(FaultKind.SKIP_PUSH))
    loop.worker.push(loop.model.state_dict().items(), label="run@1")
    record = loop.to_t1(loop.at_t0())
    assert verdict_of(record).status is ReplayStatus.PASS


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fault", [Fault(FaultKind.TORN_PUSH), Fault(FaultKind.RANK_STALE, rank=1)])
def test_half_of_an_update_fails(checkpoints, dtype, fault):
    loop = Loop(checkpoints[dtype], dtype, tp=2)
    record = loop.to_t1(loop.at_t0(), fault=fault)
    assert loop.plan.fired
    verdict = verdict_of(record)
    assert verdict.status is ReplayStatus.FAIL, verdict.reason
    assert diagnose(record).kind in {Kind.PARTIAL_UPDATE, Kind.STALE_WEIGHTS}


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_prefix_cache_that_outlives_the_update_is_seen_although_the_weights_are_right(checkpoints, dtype):
    loop = Loop(checkpoints[dtype], dtype)
    record = loop.to_t1(loop.at_t0(), fault=Fault(FaultKind.UPDATE_KEEPS_CACHE))
    assert loop.plan.fired
    verdict = verdict_of(record)
    assert (verdict.status, verdict.fingerprint) == (ReplayStatus.FAIL, "stale prefix cache"), verdict.reason
    assert diagnose(record).kind is Kind.STALE_PREFIX_CACHE


@pytest.mark.parametrize("dtype", DTYPES)
def test_case_1_names_generation_and_the_first_offset_position(checkpoints, dtype):
    loop = Loop(checkpoints[dtype], dtype, faults=(Fault(FaultKind.A_SHIFT, nats=-0.10, position=1),))
    found = diagnose(loop.at_t0())
    assert (found.kind, found.side) == (Kind.OFFSET, "A")
    assert "from position 1 on" in found.reason


@pytest.mark.parametrize("dtype", DTYPES)
def test_case_2_names_the_trainers_scores_before_and_after_an_update(checkpoints, dtype):
    loop = Loop(checkpoints[dtype], dtype)
    record = loop.to_t1(loop.at_t0())
    for state in ("old", "new"):
        keys = {c_key(0, state), c_key(1, state)}
        shifted = {key: value - 0.10 if key in keys else value for key, value in record.scores.items()}
        found = diagnose(replace(record, scores=shifted))
        assert (found.kind, found.side) == (Kind.OFFSET, "C"), state
    assert verdict_of(replace(record, scores=shifted)).fingerprint == "constant offset"


def test_an_update_of_nothing_has_no_power(checkpoints):
    loop = Loop(checkpoints["float32"], "float32")
    record = loop.to_t1(loop.at_t0(), learning_rate=0.0)
    assert verdict_of(record).status is ReplayStatus.NO_POWER


@pytest.mark.parametrize("fault", [None, Fault(FaultKind.SKIP_PUSH)])
def test_a_small_step_is_enough_in_float32(checkpoints, fault):
    """A change far under the fixed limit of 0.01 nat still tells a stale worker from an updated one."""
    loop = Loop(checkpoints["float32"], "float32")
    verdict = verdict_of(loop.to_t1(loop.at_t0(), fault=fault, learning_rate=1e-6))
    assert verdict.power.change_mae_nats < 0.005
    assert verdict.status is (ReplayStatus.PASS if fault is None else ReplayStatus.FAIL), verdict.reason


def test_the_trainer_that_scores_an_older_snapshot_is_named(checkpoints):
    loop = Loop(checkpoints["float32"], "float32")
    record = loop.at_t0()
    snapshot = copy.deepcopy(loop.model)
    step(loop.model, record, 3e-3)
    loop.worker.push(loop.model.state_dict().items(), label="run@1")
    record = replay_on_worker(loop.engine, record, "new", vocab_size=VOCAB_SIZE)
    record = score_with_trainer(record, trainer_forward(snapshot), "new")
    assert diagnose(record).kind is Kind.TRAINER_STATE


def test_a_training_forward_with_dropout_is_told_from_the_frozen_one(checkpoints):
    loop = Loop(checkpoints["float32"], "float32")
    record = loop.at_t0()
    loop.model.train()
    for layer in loop.model.model.layers:
        layer.self_attn.attention_dropout = 0.3
    scores = gradient_forward(loop.model)(record)
    assert diagnose(record.with_scores({ScoreKey("G", "old"): scores})).kind is Kind.TRAINING_FORWARD


def test_the_record_of_a_real_run_survives_its_file_and_is_diagnosed_alike(checkpoints, tmp_path):
    loop = Loop(checkpoints["bfloat16"], "bfloat16")
    record = loop.to_t1(loop.at_t0(), fault=Fault(FaultKind.SKIP_PUSH))
    record.save(tmp_path / "r.safetensors")
    loaded = type(record).load(tmp_path / "r.safetensors")
    assert diagnose(loaded) == diagnose(record)
    assert loaded.scores[A].tobytes() == record.scores[A].tobytes()
