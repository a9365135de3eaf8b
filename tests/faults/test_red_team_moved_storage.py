"""Storage that moved: a graph captured at the start reads the old place, however often somebody looked since."""

from __future__ import annotations

import pytest
from tiny_models import save_tiny_checkpoint

from syncguard.digest import DEFAULT_KEY_SEED
from syncguard.engines.local import LocalWorker


@pytest.fixture
def worker(tmp_path):
    return LocalWorker(save_tiny_checkpoint(tmp_path))


def moved(worker):
    return worker.probes[0].observe(DEFAULT_KEY_SEED).moved


def test_a_second_look_does_not_use_up_the_warning(worker):
    assert moved(worker) == ()
    norm = worker.ranks[0].model.norm.weight
    norm.data = norm.data.clone()
    assert [moved(worker) for _ in range(3)] == [("model.norm.weight",)] * 3


def test_storage_that_is_back_in_its_place_is_no_warning(worker):
    norm = worker.ranks[0].model.norm.weight
    first = norm.data
    moved(worker)
    norm.data = first.clone()
    assert moved(worker) == ("model.norm.weight",)
    norm.data = first
    assert moved(worker) == ()


def test_a_restarted_engine_has_its_storage_where_it_is(worker):
    norm = worker.ranks[0].model.norm.weight
    moved(worker)
    norm.data = norm.data.clone()
    assert moved(worker)
    worker.restart()
    assert moved(worker) == ()
