from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from layout_cases import CELLS
from layout_pipeline import Worker, manifest_of

from syncguard.layout.ops import Narrow, Select, apply_ops, shape_after
from syncguard.layout.repack import Rearrange, split_chain
from syncguard.manifest.verdict import FindingCode, VerdictStatus

torch.set_num_threads(1)


@contextmanager
def one_bit_flipped(tensor, generator):
    """Flip the lowest bit of one element, in place, and put it back."""
    where = [int(torch.randint(n, (), generator=generator)) for n in tensor.shape]
    element = tensor.detach()
    for index in where:
        element = element[index]
    raw = element.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[element.element_size()])
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


@contextmanager
def one_padding_bit_flipped(tensor, padding):
    """Flip the lowest bit of the last element of a padding, wherever the kernel's order of bytes has put it."""
    front, rest = split_chain(padding.ops)
    raw = tensor.detach().view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()])
    (op,) = [op for op in front if isinstance(op, Rearrange)] or [None]
    dtype = raw.dtype if op is None else {8: torch.uint8, 16: torch.int16, 32: torch.int32}[op.to_bits]
    mark = torch.zeros(shape_after(tuple(tensor.shape), front), dtype=dtype)
    view = apply_ops(mark, rest)
    view[tuple(n - 1 for n in view.shape)] = 1
    if op is not None:
        mark = op.inverse(tuple(tensor.shape[tensor.dim() - op.dims :])).apply(mark).view(raw.dtype).reshape(raw.shape)
    raw.bitwise_xor_(mark)
    try:
        yield
    finally:
        raw.bitwise_xor_(mark)


PADDED = [cell for cell in CELLS if cell.scheme in {"nvfp4-padded", "nvfp4-marlin", "mxfp4-trtllm", "mxfp4-marlin"}]


@pytest.mark.parametrize("cell", PADDED, ids=str)
def test_one_flipped_bit_in_any_padding_of_a_kernel_is_caught_and_named(cell, exported):
    folder, tensors = exported(cell)
    ranks = [cell.rank(folder, *place) for place in cell.split.ranks]
    for rank in ranks:
        rank.load(tensors)
    manifest, worker = manifest_of(tensors), Worker(ranks)
    layout = worker.observed[-1][0]
    live = dict(worker.probes[-1]._bind().tensors)
    assert layout.paddings
    seen = set()
    for padding in layout.paddings:
        key = (padding.resident, tuple(op.dim for op in padding.ops if isinstance(op, (Narrow, Select))))
        if key in seen:
            continue
        seen.add(key)
        with one_padding_bit_flipped(live[padding.resident], padding):
            verdict = worker.verdict(manifest, again=len(ranks) - 1)
        found = {finding.resident for finding in verdict.findings if finding.code is FindingCode.PADDING_NOT_ZERO}
        assert verdict.status is VerdictStatus.MISMATCH, padding
        assert found == {padding.resident}, (padding, verdict.findings[:3])
    assert worker.verdict(manifest, again=len(ranks) - 1).status is VerdictStatus.MATCH
