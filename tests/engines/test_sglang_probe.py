"""The probe inside a real SGLang server: what it counts, what it refuses, and what it lets pass."""

from __future__ import annotations

import base64
import pickle
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import torch
from safetensors.torch import load_file
from tiny_models import save_tiny_checkpoint

from syncguard.digest import DEFAULT_KEY_SEED
from syncguard.engines.sglang import SglangEngine
from syncguard.errors import EngineError, SpecVersionError, UnreachableError, UnsupportedError
from syncguard.export.checkpoint import export_checkpoint
from syncguard.manifest.compare import compare
from syncguard.manifest.model import WorkerObservation
from syncguard.manifest.verdict import FindingCode, VerdictStatus
from syncguard.spec import WeightVersion

pytestmark = pytest.mark.sglang


@pytest.fixture(params=[("qwen3", "float32", 1), ("qwen3", "bfloat16", 2), ("qwen3_moe", "float32", 2)], ids=str)
def served(request, serve):
    return serve(*request.param)


@pytest.fixture
def one_rank(serve):
    return serve()


def epochs(served):
    return [rank.epoch for rank in served.engine.status().ranks]


def observed(served):
    status = served.engine.status()
    return WorkerObservation(
        "worker-0",
        status.expected_ranks,
        served.engine.layouts(),
        served.engine.observe(DEFAULT_KEY_SEED),
        status.weight_version_label,
    )


def payloads(served, named):
    return [base64.b64encode(pickle.dumps(list(named.items()))).decode()] * served.tp


def test_every_rank_shows_the_checkpoint_that_was_loaded(served):
    served.load(served.checkpoint, "run@3")
    manifest = export_checkpoint(served.checkpoint, version=WeightVersion("run", 3))
    verdict = compare(manifest, observed(served))
    assert verdict.status is VerdictStatus.MATCH, [finding.text for finding in verdict.findings]
    assert not verdict.findings
    assert verdict.coverage.proven_tensors == len(manifest.entries)
    assert verdict.coverage.unbound_residents == 0
    assert len({rank.incarnation for rank in served.engine.status().ranks}) == served.tp


def test_another_checkpoint_is_a_mismatch_on_every_changed_tensor(served, tmp_path):
    kind = "qwen3_moe" if "experts" in " ".join(load_file(served.checkpoint / "model.safetensors")) else "qwen3"
    other = save_tiny_checkpoint(tmp_path / "other", kind, seed=9, dtype=getattr(torch, served.dtype))
    served.load(other, "run@4")
    manifest = export_checkpoint(served.checkpoint, version=WeightVersion("run", 4))
    held = export_checkpoint(other, version=WeightVersion("run", 4))
    differ = {a.fqn for a, b in zip(manifest.entries, held.entries, strict=True) if a.partial != b.partial}
    verdict = compare(manifest, observed(served))
    assert verdict.status is VerdictStatus.MISMATCH
    assert {finding.fqn for finding in verdict.findings} == differ
    assert compare(held, observed(served)).status is VerdictStatus.MATCH


def test_each_update_that_wrote_is_an_epoch_on_every_rank(served):
    start = epochs(served)
    served.load(served.checkpoint, "run@5")
    assert epochs(served) == [epoch + 1 for epoch in start]
    named = load_file(served.checkpoint / "model.safetensors")
    assert served.post("/begin_weight_update").status_code == 200
    assert all(rank.updating for rank in served.engine.status().ranks)
    assert all(rank.updating for rank in served.engine.observe(DEFAULT_KEY_SEED))
    served.post("/update_weights_from_tensor", serialized_named_tensors=payloads(served, named), weight_version="run@6")
    assert served.post("/end_weight_update").status_code == 200
    status = served.engine.status()
    assert not any(rank.updating for rank in status.ranks)
    assert [rank.epoch for rank in status.ranks] == [epoch + 3 for epoch in start]
    assert status.weight_version_label == "run@6"


def test_a_refused_update_costs_no_epoch(one_rank):
    start = epochs(one_rank)
    named = {"model.norm.weight": torch.zeros(64)}
    refused = one_rank.post("/update_weights_from_tensor", serialized_named_tensors=payloads(one_rank, named))
    assert refused.status_code == 400
    assert one_rank.post("/end_weight_update").status_code == 400
    assert epochs(one_rank) == start
    assert not any(rank.updating for rank in one_rank.engine.status().ranks)


def test_a_failed_disk_update_is_an_epoch_since_it_may_have_written(one_rank, tmp_path):
    start = epochs(one_rank)
    failed = one_rank.post("/update_weights_from_disk", model_path=str(tmp_path / "none"), weight_version="run@7")
    assert failed.status_code == 400
    assert epochs(one_rank) == [epoch + 1 for epoch in start]


def test_the_checkers_own_reset_is_an_epoch_and_a_mismatch(one_rank):
    one_rank.load(one_rank.checkpoint, "run@8")
    start = epochs(one_rank)
    assert one_rank.post("/weights_checker", action="reset_tensors").status_code == 200
    assert epochs(one_rank) == [epoch + 1 for epoch in start]
    manifest = export_checkpoint(one_rank.checkpoint, version=WeightVersion("run", 8))
    verdict = compare(manifest, observed(one_rank))
    assert verdict.status is VerdictStatus.MISMATCH
    assert verdict.coverage.proven_tensors == 0
    assert FindingCode.PADDING_NOT_ZERO in {finding.code for finding in verdict.findings}
    one_rank.load(one_rank.checkpoint, "run@8")
    assert compare(manifest, observed(one_rank)).status is VerdictStatus.MATCH


def test_a_label_alone_is_no_epoch_and_no_content(one_rank):
    one_rank.load(one_rank.checkpoint, "run@9")
    start = epochs(one_rank)
    assert one_rank.post("/update_weight_version", new_version="run@10").status_code == 200
    assert epochs(one_rank) == start
    assert one_rank.engine.status().weight_version_label == "run@10"


def test_half_of_a_packed_tensor_is_named_by_its_logical_name(one_rank, tmp_path):
    one_rank.load(one_rank.checkpoint, "run@11")
    name = "model.layers.1.self_attn.k_proj.weight"
    named = {name: load_file(one_rank.checkpoint / "model.safetensors")[name] + 1}
    one_rank.post("/begin_weight_update")
    one_rank.post("/update_weights_from_tensor", serialized_named_tensors=payloads(one_rank, named))
    one_rank.post("/end_weight_update")
    manifest = export_checkpoint(one_rank.checkpoint, version=WeightVersion("run", 11))
    verdict = compare(manifest, observed(one_rank))
    assert [(f.fqn, f.resident) for f in verdict.findings] == [(name, "model.layers.1.self_attn.qkv_proj.weight")]
    one_rank.load(one_rank.checkpoint, "run@11")


def test_the_checkers_own_actions_still_work(one_rank):
    answer = one_rank.post("/weights_checker", action="checksum")
    assert answer.status_code == 200
    assert "model.norm.weight" in answer.json()["ranks"][0]["checksums"]
    assert one_rank.post("/weights_checker", action="no such action").status_code == 400


def test_a_request_of_another_specification_is_an_error_and_the_server_lives(one_rank):
    from syncguard.engines.probe_wire import decode_answer

    answer = one_rank.post("/weights_checker", action='syncguard.status:{"spec_version":99,"op":"status"}')
    text = answer.json()["ranks"][0]["checksums"]["syncguard"]
    with pytest.raises(SpecVersionError):
        decode_answer(text, "rank 0")
    assert one_rank.engine.status().ranks


def test_garbage_to_the_probe_is_an_error_and_the_server_lives(served):
    from syncguard.engines.probe_wire import decode_answer
    from syncguard.errors import SyncguardError

    for action in ("syncguard.", "syncguard.observe:", "syncguard.observe:{}", "syncguard.x:" + "[" * 5000):
        answer = served.post("/weights_checker", action=action)
        assert answer.status_code == 200
        with pytest.raises(SyncguardError):
            decode_answer(answer.json()["ranks"][0]["checksums"]["syncguard"], "rank 0")
    assert len(served.engine.status().ranks) == served.tp


def test_observing_under_another_key_gives_other_digests_of_the_same_content(served):
    first, second = (served.engine.observe(seed)[0] for seed in (DEFAULT_KEY_SEED, bytes(range(32))))
    assert first.layout_fingerprint == second.layout_fingerprint
    assert [p.count for p in first.partials] == [p.count for p in second.partials]
    assert all(a.data != b.data for a, b in zip(first.partials, second.partials, strict=True) if a.count and a.data)


def test_a_flush_while_a_request_runs_is_not_confirmed_and_says_why(one_rank):
    assert one_rank.engine.flush().confirmed
    request = {"input_ids": [5, 9], "sampling_params": {"max_new_tokens": 400, "ignore_eos": True}}
    with ThreadPoolExecutor(1) as pool:
        pending = pool.submit(one_rank.post, "/generate", **request)
        flushes = [one_rank.engine.flush()]
        while flushes[-1].confirmed and not pending.done():
            flushes.append(one_rank.engine.flush())
        assert pending.result().status_code == 200
    assert not flushes[-1].confirmed
    assert "failed" in flushes[-1].detail
    assert one_rank.engine.flush().confirmed


def test_scores_of_a_replay_are_those_of_the_generation_within_noise(served):
    served.load(served.checkpoint, "run@12")
    prompt = [5, 9, 17, 33]
    generated = served.engine.generate(prompt, max_new_tokens=16, seed=3)
    assert served.engine.flush().confirmed
    scored = served.engine.score([*prompt, *generated.response_ids], prompt_length=4)
    assert scored.cached_tokens == 0
    gap = max(abs(a - b) for a, b in zip(generated.logprobs_nats, scored.logprobs_nats, strict=True))
    assert gap < (1e-4 if served.dtype == "float32" else 0.5)
    warm = served.engine.score([*prompt, *generated.response_ids], prompt_length=4)
    assert warm.cached_tokens > 0


def test_the_last_id_of_the_vocabulary_is_reported_as_zero(one_rank):
    """Pins the quirk that the returned-id check must know (0.5.23)."""
    scored = one_rank.engine.score([5, 9, 129, 7], prompt_length=2)
    assert scored.response_ids == (0, 7)


class AsToNobody(httpx.HTTPTransport):
    """Asks the real server under another name, so that no plugin feels addressed."""

    def handle_request(self, request):
        body = request.read().replace(b"syncguard.", b"nobody.")
        headers = {k: v for k, v in request.headers.items() if k != "content-length"}
        return super().handle_request(httpx.Request(request.method, request.url, headers=headers, content=body))


def test_a_server_without_our_plugin_is_unsupported_by_name(one_rank):
    with (
        SglangEngine(one_rank.server.base_url, transport=AsToNobody()) as engine,
        pytest.raises(UnsupportedError, match="install syncguard in the engine"),
    ):
        engine.status()


def test_an_address_that_is_no_engine_is_an_engine_error(one_rank):
    with SglangEngine(f"{one_rank.server.base_url}/elsewhere") as engine, pytest.raises(EngineError):
        engine.status()


def test_an_engine_that_is_not_there_is_unreachable_in_one_line():
    from syncguard.engines.sglang_launch import free_port

    with (
        SglangEngine(f"http://127.0.0.1:{free_port()}", timeout_s=2) as engine,
        pytest.raises(UnreachableError) as caught,
    ):
        engine.status()
    assert "\n" not in str(caught.value)
    assert int(caught.value.exit_code) == 13
