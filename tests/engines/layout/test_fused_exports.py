"""Trainers that export all experts of a layer in one tensor, before an engine that is compared expert by expert."""

from __future__ import annotations

import pytest
import torch
from layout_cases import Cell
from layout_lossy import LossyCell
from layout_pipeline import VERSION, Worker, manifest_of
from layout_ranks import Split
from test_single_element_corruption import one_bit_flipped

from syncguard.export.forms import forms_of
from syncguard.export.stream import ManifestBuilder
from syncguard.manifest.verdict import VerdictStatus

torch.set_num_threads(1)


def fused(tensors):
    """Put the experts of each layer into `[E, 2I, H]` and `[E, H, I]`."""
    made, experts = {}, {}
    for name, tensor in tensors.items():
        prefix, mark, rest = name.partition(".experts.")
        if mark and rest.endswith(".weight"):
            expert, part, _ = rest.split(".")
            experts.setdefault(f"{prefix}.experts", {})[int(expert), part] = tensor
        else:
            made[name] = tensor
    for prefix, parts in experts.items():
        count = 1 + max(expert for expert, _ in parts)
        gate_up = [torch.cat([parts[e, "gate_proj"], parts[e, "up_proj"]]) for e in range(count)]
        made[f"{prefix}.gate_up_proj"] = torch.stack(gate_up)
        made[f"{prefix}.down_proj"] = torch.stack([parts[e, "down_proj"] for e in range(count)])
    return made


def in_held_forms(worker, tensors):
    builder = ManifestBuilder(VERSION, forms=forms_of(layout for layout, _ in worker.observed))
    builder.add_many(tensors.items())
    return builder.build()


@pytest.mark.parametrize("split", [Split(tp=2), Split(tp=2, ep=2)], ids=str)
def test_an_export_of_all_experts_in_one_tensor_is_compared_expert_by_expert(split, tmp_path, record_property):
    record_property("row", f"Qwen3.5-MoE|float32, all experts exported in one tensor|{split}|exact")
    cell = Cell("qwen3.5-moe", "float32", split)
    tensors = fused(cell.export(tmp_path))
    ranks = [cell.rank(tmp_path, *place) for place in split.ranks]
    for rank in ranks:
        rank.load(tensors)  # SGLang's own loader takes this form
    worker = Worker(ranks)
    assert worker.verdict(manifest_of(tensors)).status is VerdictStatus.INCOMPLETE
    manifest = in_held_forms(worker, tensors)
    verdict = worker.verdict(manifest)
    assert verdict.status is VerdictStatus.MATCH, (verdict.reason, verdict.findings[:3])
    assert "4 tensors of all experts split" in manifest.source
    w13 = worker.probes[-1]._bind().tensors["model.layers.1.mlp.experts.w13_weight"]
    with one_bit_flipped(w13, torch.Generator().manual_seed(2)):
        wrong = worker.verdict(manifest, again=len(ranks) - 1)
    assert wrong.status is VerdictStatus.MISMATCH
    assert ".layers.1.mlp.experts." in wrong.findings[0].fqn
    swapped = dict(tensors)
    name = "model.language_model.layers.1.mlp.experts.gate_up_proj"
    swapped[name] = torch.cat(swapped[name].chunk(2, dim=1)[::-1], dim=1)
    assert worker.verdict(in_held_forms(worker, swapped)).status is VerdictStatus.MISMATCH


def test_experts_in_one_tensor_are_split_and_then_quantized_as_the_engine_does(tmp_path):
    cell = LossyCell("qwen3-moe", "online-row", Split(tp=2))
    tensors = cell.export(tmp_path)
    ranks = [cell.rank(tmp_path, *place) for place in cell.split.ranks]
    for rank in ranks:
        rank.load(tensors)
    worker = Worker(ranks)
    manifest = in_held_forms(worker, fused(tensors))
    assert worker.verdict(manifest).status is VerdictStatus.MATCH
    assert "computed by fp8_per_tensor" in manifest.source
