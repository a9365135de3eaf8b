"""The recorder that runs in a live rank: it agrees with the rules, binds what has none, and cannot write weights."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from layout_cases import CELLS, walk
from layout_pipeline import Worker, manifest_of
from layout_quantize import SCHEMES
from layout_ranks import Split
from layout_recorded import RECORDED, RecordedCell, named, recorder
from layout_witness import disagreements, element_numbers, record
from test_single_element_corruption import one_bit_flipped
from torch import nn

from syncguard.engines.loader_record import checkpoint_names, record_from_folder, record_loader
from syncguard.engines.rank_probe import RankProbe
from syncguard.layout.coverage import resident_problems
from syncguard.layout.model import BindingSource, LogicalTensor, RankIdentity
from syncguard.layout.ops import apply_ops
from syncguard.layout.recording import recorded_claims
from syncguard.layout.walk import walk_model
from syncguard.manifest.verdict import VerdictStatus

torch.set_num_threads(1)

PLAIN = [cell for cell in CELLS if cell.scheme not in SCHEMES]
RECORDED_CELLS = [RecordedCell(name, split) for name in RECORDED for split in (Split(), Split(tp=2))]


def element_map(bindings, paddings, numbers, shape):
    ids = np.full(shape, -9, np.int64)
    for binding in bindings:
        box = binding.shard.box
        due = numbers[binding.shard.tensor.fqn][
            tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))
        ]
        apply_ops(ids, binding.ops)[...] = due
    for padding in paddings:
        apply_ops(ids, padding.ops)[...] = -1
    return ids


@pytest.mark.parametrize("cell", PLAIN, ids=str)
def test_the_recorder_sees_what_the_rules_say_for_every_element_of_every_family(cell, exported):
    folder, tensors = exported(cell)
    rank = cell.rank(folder, *cell.split.ranks[-1])
    rank.load(tensors)
    layout, _ = walk(rank)
    recording = recorder(rank, tensors)(rank.model)
    assert recording.failed == ""
    numbers = element_numbers(tensors)
    for resident in layout.residents:
        ruled = [
            [claim for claim in claims if claim.resident == resident.name and not getattr(claim, "alias", False)]
            for claims in (layout.bindings, layout.paddings)
        ]
        if any(ruled) and not resident.alias_of:
            due = element_map(*ruled, numbers, resident.shape)
            got = element_map(*recorded_claims(resident, recording), numbers, resident.shape)
            assert np.array_equal(got, due), resident.name


@pytest.mark.parametrize("cell", RECORDED_CELLS, ids=str)
def test_a_recorded_map_is_where_the_loader_put_every_element(cell, exported, record_property):
    record_property("row", f"{cell.checkpoint.family}|float32|{cell.split}|recorded")
    folder, tensors = exported(cell)
    for place in cell.split.ranks:
        seen = record(tensors, lambda place=place: cell.rank(folder, *place), lambda rank: cell.walk(rank, tensors))
        assert seen.layout.unbound == ()
        assert resident_problems(seen.layout) == ()
        assert disagreements(seen) == []
        sources = {binding.source for binding in seen.layout.bindings}
        record_property("recorded", BindingSource.RECORDED in sources)


@pytest.mark.parametrize("cell", RECORDED_CELLS, ids=str)
def test_one_flipped_bit_under_a_recorded_map_is_caught_and_named(cell, exported, record_property):
    record_property("row", f"{cell.checkpoint.family}|float32|{cell.split}|recorded")
    folder, tensors = exported(cell)
    ranks = [cell.rank(folder, *place) for place in cell.split.ranks]
    for rank in ranks:
        rank.load(tensors)
    worker = Worker(ranks, record=lambda rank: recorder(rank, tensors))
    manifest = manifest_of(tensors)
    clean = worker.verdict(manifest)
    assert clean.status is VerdictStatus.MATCH, (clean.reason, clean.findings[:3])
    generator = torch.Generator().manual_seed(7)
    layout, live = worker.observed[-1][0], worker.probes[-1]._bind().tensors
    exempt = {entry.resident for entry in layout.exempt}
    claims = {}
    for binding in layout.bindings:
        claims.setdefault(binding.resident, set()).add(binding.shard.tensor.fqn)
    for resident in layout.residents:
        if resident.alias_of or resident.name in exempt:
            continue
        with one_bit_flipped(live[resident.name], generator):
            verdict = worker.verdict(manifest, again=len(ranks) - 1)
        assert verdict.status is VerdictStatus.MISMATCH, resident.name
        named_in = {finding.fqn or finding.resident for finding in verdict.findings}
        assert named_in & (claims.get(resident.name, set()) | {resident.name}), resident.name


def test_recording_leaves_every_byte_and_every_place_of_the_live_model_as_they_were(exported):
    cell = RecordedCell("persimmon", Split(tp=2))
    folder, tensors = exported(cell)
    rank = cell.rank(folder, 0, 1)
    rank.load(tensors)
    state = rank.model.state_dict(keep_vars=True)
    before = {name: (tensor.data_ptr(), tensor.detach().clone()) for name, tensor in state.items()}
    assert recorder(rank, tensors)(rank.model).failed == ""
    for name, (place, content) in before.items():
        assert state[name].data_ptr() == place
        assert torch.equal(state[name], content)
    assert all(tensor.device.type == "cpu" for tensor in rank.model.state_dict().values())


def test_the_loader_is_recorded_once_also_when_an_update_moves_the_storage():
    model, calls = Loaded(lambda self, weights: self.weight.copy_(weights["w"])), []

    def record(live):
        calls.append(live)
        return record_loader(live, {"w": LogicalTensor("w", "float32", (4, 3))})

    probe = RankProbe(RankIdentity(), lambda: model, record=record)
    first = probe.layout()
    model.weight = nn.Parameter(model.weight.clone(), requires_grad=False)
    assert probe.layout().bindings == first.bindings != ()
    model.weight = nn.Parameter(torch.zeros(2, 3), requires_grad=False)
    assert probe.layout().bindings == ()
    assert len(calls) == 1


class Loaded(nn.Module):
    """A model with one plain parameter and a loader of its own."""

    def __init__(self, load, rows=4):
        super().__init__()
        self.weight = nn.Parameter(torch.arange(rows * 3.0).reshape(rows, 3), requires_grad=False)
        self.load = load

    def load_weights(self, weights):
        self.load(self, dict(weights))


def recorded(load, shape=(4, 3), dtype="float32"):
    model = Loaded(load)
    before = model.weight.clone()
    recording = record_loader(model, {"w": LogicalTensor("w", dtype, shape)})
    assert torch.equal(model.weight, before)
    layout, _ = walk_model(model, rank=RankIdentity(), record=lambda _: recording)
    return recording, layout


def test_a_loader_that_would_write_live_memory_is_stopped_before_it_does():
    keeper = type("Keeper", (), {})()
    model = Loaded(lambda self, weights: self.keeper.live.copy_(weights["w"]))
    keeper.live, model.keeper = model.weight, keeper
    before = model.weight.clone()
    recording = record_loader(model, {"w": LogicalTensor("w", "float32", (4, 3))})
    assert "would write a tensor with memory" in recording.failed
    assert torch.equal(model.weight, before)


@pytest.mark.parametrize(
    ("load", "reason"),
    [
        (lambda self, weights: None, "writes 0 of its 12"),
        (lambda self, weights: self.weight[1:].copy_(weights["w"][1:]), "writes 9 of its 12"),
        (lambda self, weights: self.weight.copy_(weights["w"] + 1), "not followed"),
        (lambda self, weights: self.weight.copy_(weights["w"].to(torch.float8_e4m3fn)), "not followed"),
        (lambda self, weights: self.weight.copy_(weights["w"][:1]), "repeats elements"),
        (lambda self, weights: self.weight.copy_(weights["w"]).mul_(2), "not followed"),
        (lambda self, weights: self.weight.fill_(weights["w"][0, 0].item()), "Error"),
        (lambda self, weights: self.weight.view(torch.uint8).copy_(weights["w"].view(torch.uint8)), "item size"),
    ],
)
def test_what_a_loader_does_and_is_not_followed_stays_unbound_with_its_reason(load, reason):
    _, layout = recorded(load)
    assert layout.bindings == ()
    assert reason in layout.unbound[0].reason


@pytest.mark.parametrize(
    "load",
    [
        lambda self, weights: self.weight.copy_(weights["w"]),
        lambda self, weights: self.weight.copy_(torch.cat([weights["w"][:1], weights["w"][1:]])),
        lambda self, weights: self.weight.copy_(weights["w"].t().contiguous().t()),
        lambda self, weights: self.weight.copy_(weights["w"].reshape(2, 2, 3).clone().reshape(4, 3)),
        lambda self, weights: self.weight.zero_().copy_(weights["w"].to("cpu")),
        lambda self, weights: [self.weight[i].copy_(weights["w"][i]) for i in range(4)],
        lambda self, weights: setattr(self.weight, "data", weights["w"]),
        lambda self, weights: self.weight.copy_(nn.functional.pad(weights["w"], (1, 1))[:, 1:4]),
    ],
)
def test_copies_through_views_and_temporaries_are_followed(load):
    _, layout = recorded(load)
    assert layout.unbound == ()
    held = np.arange(12).reshape(4, 3)
    for binding in layout.bindings:
        assert binding.source is BindingSource.RECORDED
        box = binding.shard.box
        due = held[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))]
        assert np.array_equal(apply_ops(held, binding.ops), due)
    assert sum(binding.shard.box.count for binding in layout.bindings) == 12


def test_a_transposing_loader_is_read_transposed():
    _, layout = recorded(lambda self, weights: self.weight.copy_(weights["w"].t()), shape=(3, 4))
    (binding,) = layout.bindings
    assert binding.shard.tensor.shape == (3, 4)
    assert apply_ops(np.zeros((4, 3)), binding.ops).shape == (3, 4)


def test_what_is_quantized_is_never_bound_by_a_recording():
    model = Loaded(lambda self, weights: self.weight.copy_(weights["w"]))
    model.quant_method = type("AWQLinearMethod", (), {})()
    recording = record_loader(model, {"w": LogicalTensor("w", "float32", (4, 3))})
    layout, _ = walk_model(model, rank=RankIdentity(), record=lambda _: recording)
    assert layout.bindings == ()
    assert "AWQLinearMethod changes what the loader wrote" in layout.unbound[0].reason


def test_names_come_from_the_headers_of_the_checkpoint_and_a_missing_one_is_a_reason(exported, tmp_path):
    cell = RecordedCell("gpt2", Split())
    folder, tensors = exported(cell)
    assert checkpoint_names(str(folder)) == named(tensors)
    assert "0 safetensors files" in record_from_folder(Loaded(None), str(tmp_path)).failed


def test_a_recorded_layout_says_so_for_each_binding(exported):
    cell = RecordedCell("gpt2", Split())
    folder, tensors = exported(cell)
    rank = cell.rank(folder, 0, 0)
    rank.load(tensors)
    layout, _ = cell.walk(rank, tensors)
    recorded_names = {b.shard.tensor.fqn for b in layout.bindings if b.source is BindingSource.RECORDED}
    assert "transformer.h.0.attn.c_attn.weight" in recorded_names
    assert replace(layout, bindings=()).sealed().fingerprint != layout.fingerprint
