"""fp8 blocks that SGLang requantizes to power-of-two scales for DeepGEMM: the exporter does the same from float32 scales."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from types import ModuleType
from unittest import mock

import pytest
import torch
from layout_cases import BLOCKS_OF_128, Cell
from layout_checkpoints import Checkpoint
from layout_pipeline import VERSION, Worker, manifest_of
from layout_ranks import Split
from test_single_element_corruption import one_bit_flipped

from syncguard.export.forms import forms_of
from syncguard.export.stream import ManifestBuilder
from syncguard.manifest.verdict import VerdictStatus

torch.set_num_threads(1)


@dataclass(frozen=True)
class PackedCell(Cell):
    """Sizes at which each rank's part of the columns is made of whole groups of four blocks."""

    @property
    def checkpoint(self) -> Checkpoint:
        sizes = BLOCKS_OF_128 | {"head_dim": 128, "intermediate_size": 1024, "moe_intermediate_size": 512}
        found = super().checkpoint
        return replace(found, changes=found.changes | sizes | {"num_hidden_layers": 1, "num_experts": 4})


def deep_gemm():
    """Return what SGLang's torch form of DeepGEMM's packing takes from that library: two roundings of sizes."""
    from sglang.srt.layers.quantization import fp8_utils

    package, utils, layout = (ModuleType(name) for name in ("deep_gemm", "deep_gemm.utils", "deep_gemm.utils.layout"))
    utils.align = lambda n, to: -(-n // to) * to
    utils.get_tma_aligned_size = lambda n, itemsize: -(-n // (16 // itemsize)) * (16 // itemsize)
    layout.get_mn_major_tma_aligned_packed_ue8m0_tensor = (
        fp8_utils._get_mn_major_tma_aligned_packed_ue8m0_tensor_torch_impl
    )
    package.utils, utils.layout = utils, layout
    return {"deep_gemm": package, "deep_gemm.utils": utils, "deep_gemm.utils.layout": layout}


def requantize(model):
    """Run SGLang's own requantization on every block-quantized layer, as its post-processing does on such a device."""
    from sglang.srt.layers.quantization.fp8_utils import requant_weight_ue8m0_inplace

    with mock.patch.dict(sys.modules, deep_gemm()):
        for module in model.modules():
            for prefix in ("", "w13_", "w2_"):
                scale = getattr(module, f"{prefix}weight_scale_inv", None)
                if scale is not None:
                    requant_weight_ue8m0_inplace(getattr(module, f"{prefix}weight"), scale, [128, 128])
                    scale.format_ue8m0 = True


CELLS = [
    PackedCell("qwen3", "fp8-block", Split()),
    PackedCell("qwen3", "fp8-block", Split(tp=2)),
    PackedCell("qwen3-moe", "fp8-block", Split(tp=2, ep=2)),
]


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_values_and_packed_scales_are_those_that_the_exporter_makes_of_float32_scales(cell, tmp_path, record_property):
    scheme = "fp8 block 128x128, requantized to UE8M0 scales"
    record_property("row", f"{cell.checkpoint.family}|{scheme}|{cell.split}|quantized")
    tensors = cell.export(tmp_path)
    ranks = [cell.rank(tmp_path, *place) for place in cell.split.ranks]
    for rank in ranks:
        rank.load(tensors)
        with rank.entered():
            requantize(rank.model)
    worker = Worker(ranks)
    for layout, _ in worker.observed:
        assert layout.unbound == ()
    assert worker.verdict(manifest_of(tensors)).status is VerdictStatus.MISMATCH
    builder = ManifestBuilder(VERSION, forms=forms_of(layout for layout, _ in worker.observed))
    builder.add_many(tensors.items())
    manifest = builder.build()
    assert "requantized to UE8M0 scales" in manifest.source
    verdict = worker.verdict(manifest)
    assert verdict.status is VerdictStatus.MATCH, (verdict.reason, verdict.findings[:3])
    layout, live = worker.observed[-1][0], dict(worker.probes[-1]._bind().tensors)
    claims = {binding.resident: binding.shard.tensor.fqn for binding in layout.bindings}
    generator = torch.Generator().manual_seed(5)
    for name in claims:
        if "_scale_inv" in name or live[name].dtype is torch.float8_e4m3fn:
            with one_bit_flipped(live[name], generator):
                wrong = worker.verdict(manifest, again=len(ranks) - 1)
            assert wrong.status is VerdictStatus.MISMATCH, name
    packed = {entry.fqn: entry for entry in manifest.entries}
    builder = ManifestBuilder(VERSION, forms=forms_of(layout for layout, _ in worker.observed))
    sent = ready_made(tensors, builder)
    builder.add_many(sent.items())
    assert {entry.fqn: entry.digest for entry in builder.build().entries} == {f: e.digest for f, e in packed.items()}


def ready_made(tensors, builder):
    """Return the export of a trainer that requantizes by itself: nothing may be done to it again."""
    from syncguard.export.quantize import ue8m0

    sent = dict(tensors)
    for name, scale in builder._forms._scale_of.items():
        sent[name], sent[scale] = ue8m0(tensors[name], tensors[scale], name)
    return sent
