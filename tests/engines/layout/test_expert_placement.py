from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from layout_cases import Cell
from layout_pipeline import Worker, manifest_of
from layout_ranks import Rank, Split
from layout_witness import disagreements, record

from syncguard.layout.coverage import partition_problems, resident_problems
from syncguard.layout.walk import walk_model
from syncguard.manifest.verdict import FindingCode, VerdictStatus

torch.set_num_threads(1)

CELL = Cell("qwen3-moe", "float32", Split(tp=2, ep=2, redundant=4))
"""8 logical experts in 12 physical slots, 6 a rank."""

PHYSICAL_TO_LOGICAL = torch.tensor([[3, 1, 0, 3, 5, 2, 7, 6, 4, 0, 1, 7], [0, 1, 2, 3, 4, 5, 6, 7, 7, 7, 2, 0]])


@pytest.fixture
def placed(monkeypatch):
    """SGLang's own placement metadata, made from a physical-to-logical map as EPLB makes it."""
    from sglang.srt.eplb import expert_location
    from sglang.srt.layers.moe.fused_moe_triton import layer as fused_moe  # before the patch: it imports by name

    def everywhere(layer, logical, require_global_experts=False):
        return (PHYSICAL_TO_LOGICAL[layer] == logical).nonzero().flatten().tolist()

    metadata = SimpleNamespace(
        physical_to_logical_map_cpu=PHYSICAL_TO_LOGICAL,
        num_logical_experts=8,
        logical_to_all_physical=everywhere,
    )
    monkeypatch.setattr(expert_location, "get_global_expert_location_metadata", lambda: metadata)
    monkeypatch.setattr(fused_moe, "get_global_expert_location_metadata", lambda: metadata)
    return metadata


def test_redundant_experts_are_bound_where_the_live_map_put_them(placed, tmp_path):
    tensors = CELL.export(tmp_path)
    for tp_rank in range(2):
        seen = record(
            tensors,
            lambda tp_rank=tp_rank: CELL.rank(tmp_path, 0, tp_rank),
            lambda rank: walk_model(rank.model, rank=rank.identity),
        )
        assert disagreements(seen) == []
        for layer in range(2):
            held = [
                int(shard.tensor.fqn.split(".")[5])
                for shard in seen.layout.shards()
                if shard.tensor.fqn.startswith(f"model.layers.{layer}.")
                and shard.tensor.fqn.endswith("down_proj.weight")
            ]
            assert held == PHYSICAL_TO_LOGICAL[layer][6 * tp_rank : 6 * tp_rank + 6].tolist()


def test_one_stale_replica_of_a_redundant_expert_is_caught_although_another_is_right(placed, tmp_path):
    tensors = CELL.export(tmp_path)
    ranks = [CELL.rank(tmp_path, 0, tp_rank) for tp_rank in range(2)]
    for rank in ranks:
        rank.load(tensors)
    worker = Worker(ranks)
    manifest = manifest_of(tensors)
    assert worker.verdict(manifest).status is VerdictStatus.MATCH
    ranks[1].model.model.layers[1].mlp.experts.w2_weight.data[3].add_(1)  # physical 9 of layer 1: logical 7 again
    verdict = worker.verdict(manifest, again=1)
    assert verdict.status is VerdictStatus.MISMATCH
    assert {finding.fqn for finding in verdict.findings} == {"model.layers.1.mlp.experts.7.down_proj.weight"}


def test_a_wrong_placement_map_does_not_pass(placed, tmp_path):
    tensors = CELL.export(tmp_path)
    ranks = [CELL.rank(tmp_path, 0, tp_rank) for tp_rank in range(2)]
    for rank in ranks:
        rank.load(tensors)
    placed.physical_to_logical_map_cpu = PHYSICAL_TO_LOGICAL.flip(1)
    verdict = Worker(ranks).verdict(manifest_of(tensors))
    assert verdict.status is VerdictStatus.MISMATCH
    assert FindingCode.DERIVED_STALE not in {finding.code for finding in verdict.findings}


@pytest.mark.parametrize(
    ("name", "module", "cls"),
    [
        ("glm4-moe", "glm4_moe", "Glm4MoeForCausalLM"),
        ("deepseek-v3", "deepseek_v2", "DeepseekV3ForCausalLM"),
    ],
)
def test_a_shared_expert_that_is_fused_beside_the_routed_ones_is_bound_on_every_rank(
    name, module, cls, tmp_path, monkeypatch
):
    # Fusion is off on a CPU for want of kernels; its layout does not depend on them.
    monkeypatch.setattr(
        f"sglang.srt.models.{module}.{cls}.shared_experts_fusion_disable_reason", staticmethod(lambda *_: None)
    )
    cell = Cell(name, "float32", Split(tp=2, ep=2))
    tensors = cell.export(tmp_path)
    boxes = defaultdict(set)
    for tp_rank in range(2):
        seen = record(
            tensors,
            lambda tp_rank=tp_rank: cell.rank(tmp_path, 0, tp_rank),
            lambda rank: walk_model(rank.model, rank=rank.identity),
        )
        assert seen.layout.unbound == ()
        assert disagreements(seen) == []
        assert resident_problems(seen.layout) == ()
        experts = [resident for resident in seen.layout.residents if resident.name.endswith("experts.w2_weight")]
        assert {resident.shape[0] for resident in experts} == {5}
        for shard in seen.layout.shards():
            boxes[shard.tensor.fqn].add(shard.box)
    lost = {fqn for fqn in tensors if partition_problems(tuple(tensors[fqn].shape), sorted(boxes[fqn]))}
    assert lost == set()


def test_experts_whose_up_projection_stands_first_are_bound_in_that_order(tmp_path):
    cell = Cell("qwen3-moe", "bfloat16", Split(tp=2))
    tensors = cell.export(tmp_path)
    for tp_rank in range(2):
        seen = record(
            tensors,
            lambda tp_rank=tp_rank: Rank(
                tmp_path, cell.split, 0, tp_rank, dtype="bfloat16", moe_runner_backend="flashinfer_cutlass"
            ),
            lambda rank: walk_model(rank.model, rank=rank.identity),
        )
        assert seen.layout.unbound == ()
        assert resident_problems(seen.layout) == ()
        assert disagreements(seen) == []
        up = next(b for b in seen.layout.bindings if b.shard.tensor.fqn.endswith("experts.0.up_proj.weight"))
        assert up.ops[1].start == 0
