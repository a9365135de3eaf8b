"""A real SGLang server keeps the same contract as the embedded engine."""

from __future__ import annotations

import base64
import pickle

import pytest
import torch
from contract import EngineContract, Rig, flushed
from tiny_models import save_tiny_checkpoint

pytestmark = pytest.mark.sglang


@pytest.fixture(scope="module", params=[("qwen3", "float32", 1), ("qwen3", "bfloat16", 2)], ids=str)
def served(request, serve):
    return serve(*request.param)


@pytest.fixture(scope="module")
def second(served, tmp_path_factory):
    return save_tiny_checkpoint(tmp_path_factory.mktemp("second"), seed=1, dtype=getattr(torch, served.dtype))


class TestSglangEngine(EngineContract):
    @pytest.fixture
    def rig(self, served, second):
        def push(named, label):
            payload = base64.b64encode(pickle.dumps(list(named.items()))).decode()
            for path, request in (
                ("/begin_weight_update", {}),
                (
                    "/update_weights_from_tensor",
                    {"serialized_named_tensors": [payload] * served.tp, "weight_version": label},
                ),
                ("/end_weight_update", {}),
            ):
                response = served.post(path, **request)
                assert response.status_code == 200, response.text

        served.load(served.checkpoint, "run@0")
        return Rig(
            adapter=served.engine,
            first=served.checkpoint,
            second=second,
            load=served.load,
            push=push,
            restart=None,
            noise_nats=2e-5 if served.dtype == "float32" else 0.15,
            ranks=served.tp,
            forces=served.dtype == "bfloat16",  # the other one runs as an ordinary server does
        )

    def test_each_rank_counts_the_flush_that_it_did(self, rig: Rig):
        flushed(rig.adapter)  # until it is idle
        before = {rank.rank: rank.flushes for rank in rig.adapter.status().ranks}
        assert rig.adapter.flush().confirmed
        after = {rank.rank: rank.flushes for rank in rig.adapter.status().ranks}
        assert after == {rank: count + 1 for rank, count in before.items()}
        assert len(after) == rig.ranks
