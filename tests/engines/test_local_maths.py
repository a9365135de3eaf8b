"""The embedded engine computes what the trainer's model computes, in every split, and loads as an engine does."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from contract import PROMPT
from safetensors.torch import load_file, save_file
from tiny_models import save_tiny_checkpoint, tiny_model
from transformers import AutoModelForCausalLM

from syncguard.engines.local import LocalWorker
from syncguard.errors import CheckpointError, EngineError, UnsupportedError, UsageError

# As in SGLang 0.5.23, Qwen3-MoE leaves the head of a tied checkpoint unset: only the dense model is tied.
SPLITS = [
    *(("qwen3", tp, 1, tied) for tp in (1, 2, 4) for tied in (False, True)),
    *(("qwen3_moe", tp, ep, False) for tp, ep in ((1, 1), (2, 1), (4, 2))),
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    made = {}

    def get(kind, dtype="float32", **config):
        key = (kind, dtype, tuple(sorted(config.items())))
        if key not in made:
            folder = tmp_path_factory.mktemp("model")
            made[key] = save_tiny_checkpoint(folder, kind, dtype=getattr(torch, dtype), **config)
        return made[key]

    return get


def reference_scores(folder, ids, prompt_length):
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, prompt_length - 1 : -1].float()
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(ids[prompt_length:]).unsqueeze(1)).squeeze(1).numpy()


@pytest.mark.parametrize(("kind", "tp", "ep", "tied"), SPLITS)
def test_fp32_scores_equal_those_of_transformers_to_rounding(saved, kind, tp, ep, tied):
    folder = saved(kind, tie_word_embeddings=tied)
    worker = LocalWorker(folder, tp_size=tp, ep_size=ep)
    made = worker.generate(PROMPT, max_new_tokens=24, seed=2)
    ids = (*PROMPT, *made.response_ids)
    worker.flush()
    scored = worker.score(ids, prompt_length=len(PROMPT))
    reference = reference_scores(folder, ids, len(PROMPT))
    assert np.abs(reference - scored.logprobs_nats).mean() < 3e-6
    assert np.abs(reference - made.logprobs_nats).max() < 3e-5


def test_biases_are_packed_sharded_and_added_once(saved):
    folder = saved("qwen3", attention_bias=True)
    tensors = load_file(folder / "model.safetensors")
    for name in tensors:
        if name.endswith("bias"):
            tensors[name] = torch.linspace(-1, 1, tensors[name].numel())
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    ids = (*PROMPT, 7, 8, 9)
    scored = LocalWorker(folder, tp_size=2).score(ids, prompt_length=len(PROMPT))
    assert np.abs(reference_scores(folder, ids, len(PROMPT)) - scored.logprobs_nats).max() < 1e-5


def test_bf16_decode_and_prefill_differ_a_little_as_in_engines(saved):
    worker = LocalWorker(saved("qwen3", "bfloat16"), tp_size=2)
    made = worker.generate(PROMPT, max_new_tokens=32, seed=2)
    worker.flush()
    scored = worker.score((*PROMPT, *made.response_ids), prompt_length=len(PROMPT))
    difference = np.abs(np.subtract(made.logprobs_nats, scored.logprobs_nats))
    assert 1e-3 < difference.max() < 0.3


def test_warm_and_cold_scores_agree(saved):
    worker = LocalWorker(saved("qwen3"), tp_size=2)
    ids = (*PROMPT, 7, 8, 9, 10)
    cold, warm = (worker.score(ids, prompt_length=len(PROMPT)) for _ in range(2))
    assert (cold.cached_tokens, warm.cached_tokens) == (0, len(PROMPT) - 1)
    assert np.abs(np.subtract(cold.logprobs_nats, warm.logprobs_nats)).max() < 1e-5


def test_a_prefix_shared_with_another_request_is_used_only_as_far_as_it_is_equal(saved):
    worker = LocalWorker(saved("qwen3"))
    worker.score((5, 6, 7, 8, 9, 10), prompt_length=5)
    assert worker.score((5, 6, 70, 8, 9, 10), prompt_length=5).cached_tokens == 2
    assert worker.score((5, 6, 7, 8, 9, 10), prompt_length=5).cached_tokens == 4


def test_the_same_seed_generates_the_same_response_and_another_seed_another(saved):
    worker = LocalWorker(saved("qwen3"))
    first, again, other = (worker.generate(PROMPT, max_new_tokens=8, seed=seed) for seed in (4, 4, 5))
    assert first.response_ids == again.response_ids
    assert first.response_ids != other.response_ids


def test_resident_weights_are_packed_and_padded_as_in_sglang(saved):
    worker = LocalWorker(saved("qwen3"), tp_size=2)
    shapes = {name: tuple(p.shape) for name, p in worker.ranks[1].named_parameters()}
    assert shapes["model.layers.0.self_attn.qkv_proj.weight"] == (2 * 32 + 32 + 32, 64)
    assert shapes["model.layers.0.mlp.gate_up_proj.weight"] == (96, 64)
    assert shapes["model.embed_tokens.weight"] == (96, 64)  # 130 tokens, padded to 192 rows
    tensors = load_file(worker.folder / "model.safetensors")
    packed = worker.ranks[1].model.layers[0].self_attn.qkv_proj.weight
    q, k, v = (tensors[f"model.layers.0.self_attn.{part}_proj.weight"] for part in "qkv")
    assert torch.equal(packed, torch.cat([q[64:], k[32:], v[32:]]))
    assert not worker.ranks[1].model.embed_tokens.weight[130 - 96 :].any()


def test_names_without_a_place_are_dropped_as_in_the_engine_and_listed(saved):
    worker = LocalWorker(saved("qwen3"))
    worker.push([("model.layers.9.mlp.up_proj.weight", torch.zeros(1)), ("vision.weight", torch.zeros(1))])
    assert worker.ignored == ["model.layers.9.mlp.up_proj.weight", "vision.weight"]


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.0.self_attn.o_proj.weight",
        "model.layers.0.mlp.gate_proj.weight",
        "model.layers.0.mlp.down_proj.weight",
        "model.layers.0.input_layernorm.weight",
        "model.embed_tokens.weight",
        "lm_head.weight",
    ],
)
def test_a_tensor_of_another_shape_is_refused_by_name(saved, name):
    worker = LocalWorker(saved("qwen3"), tp_size=2)
    tensor = load_file(worker.folder / "model.safetensors")[name]
    with pytest.raises(EngineError, match=name):
        worker.push([(name, torch.cat([tensor, tensor]))])


def test_an_expert_of_another_shape_is_refused_by_name(saved):
    worker = LocalWorker(saved("qwen3_moe"))
    with pytest.raises(EngineError, match=r"experts\.1\.up_proj"):
        worker.push([("model.layers.0.mlp.experts.1.up_proj.weight", torch.zeros(3, 3))])


@pytest.mark.parametrize("call", ["update", "end_update"])
def test_update_calls_outside_a_session_are_refused(saved, call):
    worker = LocalWorker(saved("qwen3"))
    with pytest.raises(EngineError, match="begin the update first"):
        getattr(worker, call)(*([()] if call == "update" else []))


def test_a_failed_load_from_disk_ends_its_session(saved, tmp_path):
    worker = LocalWorker(saved("qwen3"))
    with pytest.raises(CheckpointError, match="without weights"):
        worker.update_from_disk(tmp_path)
    assert not any(probe.status().updating for probe in worker.probes)
    worker.update_from_disk(worker.folder)


@pytest.mark.parametrize("ids", [(), (130,), (-1,), tuple([1] * 513)])
def test_requests_that_the_model_cannot_run_are_refused(saved, ids):
    worker = LocalWorker(saved("qwen3"))
    with pytest.raises(EngineError, match="request refused"):
        worker.generate(ids, max_new_tokens=1, seed=0)


def test_a_worker_refuses_splits_and_models_that_it_cannot_hold(saved, tmp_path):
    folder = saved("qwen3")
    with pytest.raises(EngineError, match="sharded"):
        LocalWorker(folder, tp_size=3)
    with pytest.raises(UsageError, match="parallel sizes"):
        LocalWorker(folder, tp_size=2, ep_size=3)
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    with pytest.raises(UnsupportedError, match="LlamaForCausalLM"):
        LocalWorker(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        LocalWorker(tmp_path)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        LocalWorker(tmp_path / "nothing")


def test_a_truncated_file_is_refused_by_name(tmp_path):
    folder = save_tiny_checkpoint(tmp_path)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        LocalWorker(folder)


def test_the_config_is_read_with_the_expert_count_under_either_name(saved):
    assert LocalWorker(saved("qwen3_moe")).config.num_experts == 4
    assert tiny_model("qwen3_moe").config.num_experts == 4
