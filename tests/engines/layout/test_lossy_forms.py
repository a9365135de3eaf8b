"""Forms that lose information: the exporter computes what the engine computed, and every bit of the result is compared."""

from __future__ import annotations

import pytest
import torch
from layout_checkpoints import CHECKPOINTS
from layout_lossy import FORMS, LOSSY, LossyCell
from layout_pipeline import VERSION, Worker, manifest_of
from layout_ranks import Split
from test_single_element_corruption import one_bit_flipped

from syncguard.export.forms import forms_of
from syncguard.export.stream import ManifestBuilder
from syncguard.layout.coverage import resident_problems
from syncguard.layout.model import CanonicalForm
from syncguard.manifest.verdict import FindingCode, VerdictStatus

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def exported_as(tmp_path_factory):
    made = {}

    def get(cell):
        key = (cell.name, cell.form)
        if key not in made:
            folder = tmp_path_factory.mktemp("-".join(key))
            made[key] = (folder, cell.export(folder))
        return made[key]

    return get


def loaded(cell, exported_as):
    folder, tensors = exported_as(cell)
    ranks = [cell.rank(folder, *place) for place in cell.split.ranks]
    for rank in ranks:
        rank.load(tensors)
    return tensors, Worker(ranks)


def manifest_for(worker, tensors):
    builder = ManifestBuilder(VERSION, forms=forms_of(layout for layout, _ in worker.observed))
    builder.add_many(tensors.items())
    return builder.build()


@pytest.mark.parametrize("cell", LOSSY, ids=str)
def test_the_result_of_the_same_quantization_is_compared_bit_for_bit(cell, exported_as, record_property):
    record_property("row", f"{CHECKPOINTS[cell.name].family}|{FORMS[cell.form].name}|{cell.split}|quantized")
    tensors, worker = loaded(cell, exported_as)
    for layout, _ in worker.observed:
        assert layout.unbound == ()
        assert resident_problems(layout) == ()
        assert CanonicalForm.QUANTIZED in {binding.form for binding in layout.bindings}
    manifest = manifest_for(worker, tensors)
    verdict = worker.verdict(manifest)
    assert verdict.status is VerdictStatus.MATCH, (verdict.reason, verdict.findings[:4])
    assert int(verdict.evidence["quantized_bindings"]) > 0
    assert "computed by " in manifest.source
    generator = torch.Generator().manual_seed(7)
    for index in sorted({0, len(worker.ranks) - 1}):
        layout, live = worker.observed[index][0], dict(worker.probes[index]._bind().tensors)
        exempt = {entry.resident for entry in layout.exempt}
        claims = {}
        for binding in layout.bindings:
            claims.setdefault(binding.resident, set()).add(binding.shard.tensor.fqn)
        for resident in layout.residents:
            if resident.alias_of or resident.name in exempt:
                continue
            with one_bit_flipped(live[resident.name], generator):
                wrong = worker.verdict(manifest, again=index)
            assert wrong.status is VerdictStatus.MISMATCH, resident.name
            named = {finding.fqn or finding.resident for finding in wrong.findings}
            assert named & (claims.get(resident.name, set()) | {resident.name}), resident.name


@pytest.mark.parametrize("form", ["requantized", "online-row"])
def test_an_export_without_the_workers_forms_is_never_a_match(form, exported_as):
    tensors, worker = loaded(LossyCell("llama", form, Split()), exported_as)
    verdict = worker.verdict(manifest_of(tensors))
    assert verdict.status is VerdictStatus.INCOMPLETE
    assert {FindingCode.NOT_HELD, FindingCode.NOT_EXPORTED} <= {finding.code for finding in verdict.findings}


@pytest.mark.parametrize("form", ["requantized", "online-row", "online-tensor"])
def test_a_worker_that_kept_the_old_values_is_stale_also_in_a_quantized_form(form, exported_as):
    tensors, worker = loaded(LossyCell("llama", form, Split(tp=2)), exported_as)
    name = "model.layers.1.self_attn.k_proj.weight"
    moved = dict(tensors)
    moved[name] = (tensors[name].float() * -1).to(tensors[name].dtype)
    verdict = worker.verdict(manifest_for(worker, moved))
    assert verdict.status is VerdictStatus.MISMATCH
    assert all(name in finding.fqn for finding in verdict.findings if finding.fqn)


def test_a_scale_that_was_not_sent_is_found_in_the_values_that_were_made_with_it(exported_as):
    cell = LossyCell("llama", "requantized", Split())
    tensors, worker = loaded(cell, exported_as)
    scale = "model.layers.0.self_attn.q_proj.weight_scale"
    verdict = worker.verdict(manifest_for(worker, tensors | {scale: tensors[scale] * 0.5}))
    assert verdict.status is VerdictStatus.MISMATCH
    assert any("q_proj.weight#" in finding.fqn for finding in verdict.findings)
