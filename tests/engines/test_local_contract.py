"""The embedded engine keeps the contract of adapters in every form it has."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from contract import EngineContract, Rig
from tiny_models import save_tiny_checkpoint

from syncguard.engines.local import LocalEngine, LocalWorker


@dataclass(frozen=True)
class Form:
    kind: str = "qwen3"
    dtype: str = "float32"
    tp: int = 1
    ep: int = 1
    tied: bool = False

    def __str__(self):
        return f"{self.kind}-{self.dtype}-tp{self.tp}-ep{self.ep}{'-tied' * self.tied}"


FORMS = [
    Form(),
    Form(tied=True, tp=2),
    Form(dtype="bfloat16", tp=2),
    Form(tp=4),  # more ranks than kv heads
    Form(kind="qwen3_moe", tp=2),
    Form(kind="qwen3_moe", tp=4, ep=2, dtype="bfloat16"),
    Form(kind="qwen3_moe", tp=2, ep=2),
]


@pytest.fixture(scope="module", params=FORMS, ids=str)
def checkpoints(request, tmp_path_factory):
    form = request.param
    folder = tmp_path_factory.mktemp("checkpoints")
    return form, *(
        save_tiny_checkpoint(
            folder / f"seed-{seed}",
            form.kind,
            seed=seed,
            dtype=getattr(torch, form.dtype),
            tie_word_embeddings=form.tied,
        )
        for seed in (0, 1)
    )


class TestLocalEngine(EngineContract):
    @pytest.fixture
    def rig(self, checkpoints):
        form, first, second = checkpoints
        worker = LocalWorker(first, tp_size=form.tp, ep_size=form.ep)
        return Rig(
            adapter=LocalEngine(worker),
            first=first,
            second=second,
            load=lambda folder, label: worker.update_from_disk(folder, label=label),
            push=lambda named, label: worker.push(named.items(), label=label),
            restart=worker.restart,
            # fp32: rounding of sums. bf16: one ulp of a logit is 0.03 to 0.06, a router may flip on it.
            noise_nats=2e-5 if form.dtype == "float32" else 0.15 if form.kind == "qwen3" else 2.0,
            ranks=form.tp,
        )
