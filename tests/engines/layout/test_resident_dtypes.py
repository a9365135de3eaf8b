"""Tensors that an engine holds in another dtype than the trainer has: cast before they are hashed, exactly or by name."""

from __future__ import annotations

import pytest
import torch
from layout_cases import Cell
from layout_checkpoints import CHECKPOINTS
from layout_pipeline import VERSION, Worker, manifest_of
from layout_ranks import Split
from test_single_element_corruption import one_bit_flipped

from syncguard.export.forms import forms_of
from syncguard.export.stream import ManifestBuilder
from syncguard.manifest.verdict import FindingCode, VerdictStatus

torch.set_num_threads(1)

WIDENED = {
    "glm4-moe": (".gate.weight", "e_score_correction_bias"),
    "gpt-oss": ("_proj_bias",),
    "deepseek-v3": ("e_score_correction_bias",),
    "qwen3-next": (".A_log",),
}
"""What SGLang keeps in float32 beside bfloat16 weights, by family."""


def loaded(cell, tmp_path, dtype):
    tensors = {name: tensor.to(dtype) for name, tensor in cell.export(tmp_path).items()}
    ranks = [cell.rank(tmp_path, *place) for place in cell.split.ranks]
    for rank in ranks:
        rank.load(tensors)
    return tensors, Worker(ranks)


def in_held_forms(worker, tensors):
    builder = ManifestBuilder(VERSION, forms=forms_of(layout for layout, _ in worker.observed))
    builder.add_many(tensors.items())
    return builder.build()


@pytest.mark.parametrize("name", WIDENED)
def test_bfloat16_exports_of_what_is_kept_in_float32_are_widened_exactly(name, tmp_path, record_property):
    family = CHECKPOINTS[name].family
    record_property("row", f"{family}|bfloat16 export, float32 kept by the engine|TP2|exact")
    tensors, worker = loaded(Cell(name, "bfloat16", Split(tp=2)), tmp_path, torch.bfloat16)
    plain = worker.verdict(manifest_of(tensors))
    assert plain.status is VerdictStatus.MISMATCH
    differ = [finding for finding in plain.findings if finding.code is FindingCode.DTYPE_DIFFERS]
    assert differ
    assert all(finding.fqn.endswith(WIDENED[name]) for finding in differ)
    manifest = in_held_forms(worker, tensors)
    assert f"{len(differ)} cast bfloat16 to float32 exactly" in manifest.source
    verdict = worker.verdict(manifest)
    assert verdict.status is VerdictStatus.MATCH, (verdict.reason, verdict.findings[:3])
    held = {binding.shard.tensor.fqn: binding.resident for binding in worker.observed[0][0].bindings}
    resident = worker.probes[0]._bind().tensors[held[differ[0].fqn]]
    with one_bit_flipped(resident, torch.Generator().manual_seed(1)):
        wrong = worker.verdict(manifest, again=0)
    assert wrong.status is VerdictStatus.MISMATCH


def test_a_float32_trainer_before_a_bfloat16_engine_is_rounded_as_the_engine_does_and_says_so(tmp_path):
    cell = Cell("llama", "bfloat16", Split(tp=2))
    tensors, worker = loaded(cell, tmp_path, torch.float32)
    assert worker.verdict(manifest_of(tensors)).status is VerdictStatus.MISMATCH
    manifest = in_held_forms(worker, tensors)
    assert f"{len(tensors)} cast float32 to bfloat16 rounded to nearest even" in manifest.source
    assert worker.verdict(manifest).status is VerdictStatus.MATCH
