from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from layout_cases import CELLS
from layout_pipeline import Worker, manifest_of

from syncguard.manifest.verdict import VerdictStatus

torch.set_num_threads(1)


@contextmanager
def one_bit_flipped(tensor, generator):
    """Flip the lowest bit of one element, in place, and put it back."""
    where = [int(torch.randint(n, (), generator=generator)) for n in tensor.shape]
    element = tensor.detach()
    for index in where:
        element = element[index]
    raw = element.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[element.element_size()])
    raw.bitwise_xor_(1)
    try:
        yield tuple(where)
    finally:
        raw.bitwise_xor_(1)


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_one_flipped_bit_in_any_resident_tensor_is_caught_and_named(cell, exported):
    folder, tensors = exported(cell)
    ranks = [cell.rank(folder, *place) for place in cell.split.ranks]
    for rank in ranks:
        rank.load(tensors)
    manifest = manifest_of(tensors)
    worker = Worker(ranks)
    clean = worker.verdict(manifest)
    assert clean.status is VerdictStatus.MATCH, (clean.reason, clean.findings[:3])
    generator = torch.Generator().manual_seed(7)
    for index in sorted({0, len(ranks) // 2, len(ranks) - 1}):
        rank = ranks[index]
        layout = worker.observed[index][0]
        exempt = {entry.resident for entry in layout.exempt}
        live = dict(worker.probes[index]._bind().tensors)
        claims = {}
        for binding in layout.bindings:
            claims.setdefault(binding.resident, set()).add(binding.shard.tensor.fqn)
        for resident in layout.residents:
            if resident.alias_of or resident.name in exempt:
                continue
            with one_bit_flipped(live[resident.name], generator) as where:
                verdict = worker.verdict(manifest, again=index)
            assert verdict.status is VerdictStatus.MISMATCH, (resident.name, where, rank.identity)
            named = {finding.fqn or finding.resident for finding in verdict.findings}
            assert named & (claims.get(resident.name, set()) | {resident.name}), (resident.name, verdict.findings[:3])
    assert worker.verdict(manifest, again=0).status is VerdictStatus.MATCH
