"""A real SGLang server of an architecture without a row in the family table: its ranks record their own loader."""

from __future__ import annotations

import shutil
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel, PersimmonConfig, PersimmonForCausalLM

from syncguard.agent.verify import Verifier, VerifyRequest
from syncguard.digest import DEFAULT_KEY_SEED
from syncguard.engines.sglang import SglangEngine
from syncguard.engines.sglang_launch import launch
from syncguard.export.checkpoint import export_checkpoint
from syncguard.layout.model import BindingSource
from syncguard.manifest.compare import compare
from syncguard.manifest.model import WorkerObservation
from syncguard.manifest.verdict import FindingCode, VerdictStatus
from syncguard.replay import A, ReplayRecord, ReplayStatus, c_key
from syncguard.replay.trainer import trainer_forward
from syncguard.spec import WeightVersion

pytestmark = pytest.mark.sglang

STANDINS = Path(__file__).parents[2] / "scripts" / "sglang-cpu"
COMMON = {"vocab_size": 130, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.2}
KINDS = {
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(**COMMON, n_positions=512, n_embd=64, n_layer=2, n_head=4)),
    "persimmon": lambda: PersimmonForCausalLM(
        PersimmonConfig(
            **COMMON,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=512,
            tie_word_embeddings=False,
        )
    ),
}
"""GPT-2's loader turns every matrix (its forward fails on two ranks), Persimmon's takes qkv apart head by head."""
PLACED = {
    "gpt2": "transformer.h.1.attn.c_attn.weight",
    "persimmon": "model.layers.1.self_attn.query_key_value.weight",
}
"""A tensor that only the recording places."""


def saved(folder: Path, kind: str, seed: int) -> Path:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = KINDS[kind]()
        for parameter in model.parameters():
            parameter.data += 0.1 * torch.rand_like(parameter)
    model.save_pretrained(folder, safe_serialization=True)
    return folder


def scored(engine, kind, folder):
    """Return a response of the engine with the scores of the trainer's own model."""
    prompt = [5, 9, 17, 33]
    generation = engine.generate(prompt, max_new_tokens=24, seed=1)
    record = ReplayRecord(
        input_ids=[*prompt, *generation.response_ids],
        prompt_length=len(prompt),
        scores={A: generation.logprobs_nats},
    )
    model = type(KINDS[kind]()).from_pretrained(folder, dtype=torch.float32)
    forward = trainer_forward(model)
    return record.with_scores({c_key(index, "new"): forward(record) for index in range(2)})


def observed(engine):
    status = engine.status()
    return WorkerObservation(
        "w0", status.expected_ranks, engine.layouts(), engine.observe(DEFAULT_KEY_SEED), status.weight_version_label
    )


@pytest.mark.parametrize(("kind", "tp"), [("gpt2", 1), ("persimmon", 2)])
def test_a_live_server_without_rules_is_compared_by_its_own_recording_and_not_ready_without_a_replay(
    kind, tp, tmp_path
):
    first = saved(tmp_path / "t0", kind, 0)
    second = saved(tmp_path / "t1", kind, 1)
    with (
        launch(
            first,
            log_path=tmp_path / "server.log",
            tp=tp,
            dtype="float32",
            standins=STANDINS,
            env_extra={"SGLANG_EXTERNAL_MODEL_PACKAGE": ""},
            timeout_s=600,
        ) as server,
        SglangEngine(server.base_url) as engine,
        httpx.Client(base_url=server.base_url, timeout=300, trust_env=False) as http,
    ):
        held = export_checkpoint(first, version=WeightVersion("run", 0))
        verdict = compare(held, observed(engine), require_label=False)
        assert verdict.status is VerdictStatus.MATCH, [finding.text for finding in verdict.findings]
        sources = {binding.source for layout in engine.layouts() for binding in layout.bindings}
        assert BindingSource.RECORDED in sources
        update = {"model_path": str(second), "weight_version": "run@1"}
        assert http.post("/update_weights_from_disk", json=update).status_code == 200
        new = export_checkpoint(second, version=WeightVersion("run", 1))
        assert compare(held, observed(engine), require_label=False).status is VerdictStatus.MISMATCH
        verdict = compare(new, observed(engine))
        assert verdict.status is VerdictStatus.MATCH, [finding.text for finding in verdict.findings]
        other_folder = tmp_path / "other"
        shutil.copytree(second, other_folder)
        tensors = load_file(second / "model.safetensors")
        tensors[PLACED[kind]][5, 7] += 1.0
        save_file(tensors, other_folder / "model.safetensors", {"format": "pt"})
        other = export_checkpoint(other_folder, version=WeightVersion("run", 1))
        wrong = compare(other, observed(engine))
        assert wrong.status is VerdictStatus.MISMATCH
        assert {finding.fqn for finding in wrong.findings} == {PLACED[kind]}
        waived = VerifyRequest(new, (), replay_waived_because="no scores")
        found = Verifier(engine, "w0").verify(waived).verdict
        assert found.status is VerdictStatus.INCOMPLETE
        assert FindingCode.RECORDED in {finding.code for finding in found.findings}
        # With a replay that agrees, the same bytes under the same recording are a match, and the verdict says how.
        found = Verifier(engine, "w0").verify(VerifyRequest(new, (scored(engine, kind, second),)))
        assert found.replay is not None, found.verdict.reason
        assert found.replay.status is ReplayStatus.NO_POWER, found.replay.reason  # of a first version
        assert found.verdict.status is VerdictStatus.MATCH
        texts = {finding.code: finding.text for finding in found.verdict.findings}
        assert set(texts) == {FindingCode.RECORDED, FindingCode.REPLAY_NO_POWER}
        assert "agreed with the trainer" in texts[FindingCode.RECORDED]
