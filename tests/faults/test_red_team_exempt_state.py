"""State that no manifest speaks of: exempt by name, yet what a forward reads. It must stay what it was at first."""

from __future__ import annotations

import pytest
import torch
from tiny_models import save_tiny_checkpoint

from syncguard.digest import DEFAULT_KEY_SEED
from syncguard.engines.local import LocalEngine, LocalWorker
from syncguard.export.checkpoint import export_checkpoint
from syncguard.manifest.compare import compare
from syncguard.manifest.model import WorkerObservation
from syncguard.manifest.verdict import FindingCode, VerdictStatus
from syncguard.spec import WeightVersion


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_checkpoint(tmp_path_factory.mktemp("exempt"))


@pytest.fixture(scope="module")
def manifest(folder):
    return export_checkpoint(folder, version=WeightVersion("run", 1))


@pytest.fixture
def worker(folder):
    worker = LocalWorker(folder, tp_size=2)
    worker.set_label("run@1")
    return worker


def verdict_of(worker, manifest, key_seed=DEFAULT_KEY_SEED):
    engine = LocalEngine(worker)
    status = engine.status()
    observation = WorkerObservation(
        "w",
        status.expected_ranks,
        tuple(engine.layouts()),
        tuple(engine.observe(key_seed)),
        status.weight_version_label,
    )
    return compare(manifest, observation)


def rotary_of(worker, rank=0):
    """The rotary cache of a rank: the module, its buffer's name, and the tensor."""
    for module in worker.ranks[rank].modules():
        for name, buffer in module.named_buffers(recurse=False):
            if "cos_sin" in name:
                return module, name, buffer
    raise AssertionError("no rotary cache")


def test_a_rotary_cache_that_was_lost_behind_the_saved_response_blocks_the_worker(worker, manifest):
    assert verdict_of(worker, manifest).status is VerdictStatus.MATCH
    _, name, cache = rotary_of(worker)
    cache[-1] = 0  # a position that no short saved response reaches
    verdict = verdict_of(worker, manifest)
    assert verdict.status is VerdictStatus.MISMATCH
    (finding,) = (f for f in verdict.findings if f.code is FindingCode.EXEMPT_CHANGED)
    assert finding.resident.endswith(name)
    assert finding.rank == "tp0/2"


def test_it_stays_blocked_until_the_bytes_are_back(worker, manifest):
    verdict_of(worker, manifest)
    *_, cache = rotary_of(worker)
    kept = cache.clone()
    cache.zero_()
    for _ in range(2):
        assert verdict_of(worker, manifest).status is VerdictStatus.MISMATCH
    cache.copy_(kept)
    assert verdict_of(worker, manifest).status is VerdictStatus.MATCH


def test_a_cache_that_only_moved_is_no_change(worker, manifest):
    verdict_of(worker, manifest)
    module, name, cache = rotary_of(worker)
    setattr(module, name, cache.clone())
    verdict = verdict_of(worker, manifest)
    assert verdict.status is VerdictStatus.MATCH
    assert FindingCode.EXEMPT_CHANGED not in {f.code for f in verdict.findings}


@pytest.mark.parametrize(
    "form", [lambda c: c.to(torch.bfloat16), lambda c: torch.cat([c, c[:2]])], ids=["cast", "grown"]
)
def test_a_cache_in_another_form_is_seen_for_the_first_time(worker, manifest, form):
    verdict_of(worker, manifest)
    module, name, cache = rotary_of(worker)
    setattr(module, name, form(cache))
    assert verdict_of(worker, manifest).status is VerdictStatus.MATCH
    getattr(module, name)[0] += 1
    assert verdict_of(worker, manifest).status is VerdictStatus.MISMATCH


def test_another_key_for_the_next_update_is_no_change(worker, folder):
    for seed in (b"a" * 32, b"b" * 32):
        keyed = export_checkpoint(folder, version=WeightVersion("run", 1), key_seed=seed)
        assert verdict_of(worker, keyed, seed).status is VerdictStatus.MATCH


def test_a_restarted_engine_starts_anew(worker, manifest):
    verdict_of(worker, manifest)
    rotary_of(worker)[2].zero_()
    assert verdict_of(worker, manifest).status is VerdictStatus.MISMATCH
    worker.restart()
    worker.set_label("run@1")
    assert verdict_of(worker, manifest).status is VerdictStatus.MATCH
