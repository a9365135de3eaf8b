"""The rank probe: what it re-uses, what it notices, and that it lets nothing pass that it did not read."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from contract import PROMPT
from tiny_models import save_tiny_checkpoint

from syncguard.digest import DEFAULT_KEY_SEED
from syncguard.engines import rank_probe
from syncguard.engines.faults import Fault, FaultKind
from syncguard.engines.local import LocalWorker
from syncguard.errors import DigestInputError, ObservationRacedError


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_checkpoint(tmp_path_factory.mktemp("probe"))


@pytest.fixture
def worker(folder):
    return LocalWorker(folder, tp_size=2)


@pytest.fixture
def walks(monkeypatch):
    """Count the walks of models."""
    seen = []
    walk = rank_probe.walk_model
    monkeypatch.setattr(rank_probe, "walk_model", lambda *args, **kwargs: seen.append(1) or walk(*args, **kwargs))
    return seen


def test_a_layout_is_walked_once_and_used_across_updates_in_place(worker, walks):
    probe = worker.probes[0]
    for _ in range(3):
        probe.observe(DEFAULT_KEY_SEED)
        worker.update_from_disk(worker.folder)
    assert len(walks) == 1


def test_a_replaced_storage_is_read_where_it_is_now(worker, walks):
    probe = worker.probes[0]
    before = probe.observe(DEFAULT_KEY_SEED)
    norm = worker.ranks[0].model.norm.weight
    norm.data = norm.data + 1
    after = probe.observe(DEFAULT_KEY_SEED)
    assert len(walks) == 2
    assert after.layout_fingerprint == before.layout_fingerprint
    assert sum(a != b for a, b in zip(before.partials, after.partials, strict=True)) == 1
    assert after.moved == ("model.norm.weight",)


def test_replaced_storage_is_let_go_when_the_update_ends(worker):
    probe, norm = worker.probes[0], worker.ranks[0].model.norm.weight
    probe.observe(DEFAULT_KEY_SEED)
    probe.update_started()
    old = weakref.ref(norm.data.untyped_storage())
    norm.data = norm.data.clone()
    probe.update_finished()
    gc.collect()
    assert old() is None


def test_a_changed_layer_setting_is_walked_again(worker, walks):
    probe = worker.probes[0]
    probe.layout()
    worker.ranks[0].model.layers[0].self_attn.qkv_proj.use_presharded_weights = True
    assert [unbound.resident for unbound in probe.layout().unbound] == ["model.layers.0.self_attn.qkv_proj.weight"]
    assert len(walks) == 2


def test_a_setting_that_flips_back_and_forth_is_not_walked_each_time(worker, walks):
    probe, layer = worker.probes[0], worker.ranks[0].model.layers[0]
    for flag in (True, False) * 3:
        layer.used_fused_path = flag
        probe.layout()
    assert len(walks) == 2


def test_a_tensor_that_appears_beside_the_parameters_is_not_passed_over(worker):
    probe = worker.probes[0]
    probe.layout()
    worker.ranks[0].model.layers[0].mlp.cached = torch.ones(3)
    assert "model.layers.0.mlp.cached" in [unbound.resident for unbound in probe.layout().unbound]


@pytest.mark.parametrize("container", [list, dict, "quant_method"])
def test_a_tensor_that_appears_in_a_container_is_not_passed_over(worker, container):
    probe, layer = worker.probes[0], worker.ranks[0].model.layers[0].mlp.gate_up_proj
    before = probe.layout()
    if container == "quant_method":
        layer.quant_method.packed = torch.ones(3)
    else:
        layer.packed = [torch.ones(3)] if container is list else {"a": torch.ones(3)}
    assert probe.layout() != before


def test_padding_is_checked_to_the_bit_and_the_place_is_named(worker):
    assert all(check.ok for check in worker.probes[1].observe(DEFAULT_KEY_SEED).paddings)
    embedding = worker.ranks[1].model.embed_tokens
    embedding.weight.data[-1, 3] = -0.0
    wrong = [check for check in worker.probes[1].observe(DEFAULT_KEY_SEED).paddings if not check.ok]
    held = embedding.shard_indices.num_org_elements
    assert [(check.wrong_count, check.detail) for check in wrong] == [(1, f"first at ({95 - held}, 3)")]


def test_a_tied_head_is_digested_once_and_reported_under_both_names(tmp_path):
    tied = LocalWorker(save_tiny_checkpoint(tmp_path / "tied", tie_word_embeddings=True))
    untied = LocalWorker(save_tiny_checkpoint(tmp_path / "untied"))
    names = [binding.shard.tensor.fqn for binding in tied.probes[0].layout().bindings]
    read = tied.probes[0].observe(DEFAULT_KEY_SEED)
    partials = dict(zip(names, read.partials, strict=True))
    assert partials["lm_head.weight"] == partials["model.embed_tokens.weight"]
    head_bytes = untied.ranks[0].lm_head.weight.nbytes
    assert untied.probes[0].observe(DEFAULT_KEY_SEED).read_bytes - read.read_bytes == head_bytes


def test_sessions_nest_and_every_end_is_an_epoch(worker):
    probe = worker.probes[0]
    states = []
    for step in (probe.update_started, probe.update_started, probe.update_finished, probe.update_finished):
        step()
        states.append((probe.status().epoch, probe.status().updating))
    assert states == [(0, True), (0, True), (1, True), (2, False)]
    probe.update_finished()
    assert (probe.status().epoch, probe.status().updating) == (3, False)


def test_an_update_during_the_reading_discards_it(worker, monkeypatch):
    probe = worker.probes[0]
    digest = rank_probe.digest_jobs

    def raced(*args):
        probe.update_started()
        probe.update_finished()
        return digest(*args)

    monkeypatch.setattr(rank_probe, "digest_jobs", raced)
    with pytest.raises(ObservationRacedError, match="observe again"):
        probe.observe(DEFAULT_KEY_SEED)


def test_a_key_seed_that_is_too_short_is_refused(worker):
    with pytest.raises(DigestInputError):
        worker.probes[0].observe(b"short")


def test_two_probes_never_share_an_incarnation(folder):
    found = {probe.incarnation for _ in range(3) for probe in LocalWorker(folder, tp_size=2).probes}
    assert len(found) == 6


def test_every_one_of_hundreds_of_silent_flips_is_seen(worker):
    probe = worker.probes[0]
    last = probe.observe(DEFAULT_KEY_SEED).partials
    for index in range(200):
        worker.inject(Fault(FaultKind.ELEMENT_FLIP, rank=0, resident="model.norm.weight", index=(index % 64,)))
        now = probe.observe(DEFAULT_KEY_SEED).partials
        assert sum(a != b for a, b in zip(last, now, strict=True)) == 1
        last = now
    assert len(worker.faults.fired) == 200
    assert worker.score((*PROMPT, 7), prompt_length=len(PROMPT)).response_ids == (7,)
