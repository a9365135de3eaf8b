from __future__ import annotations

import pytest
import torch

from syncguard.digest import DEFAULT_KEY_SEED, DigestJob, PartialDigest, engine_for
from syncguard.engines import rank_scratch
from syncguard.engines.rank_scratch import ScratchReader
from syncguard.errors import UnsupportedError
from syncguard.layout.arrangements import Packing, marlin_weight, swizzled_scales
from syncguard.layout.model import Binding, LogicalTensor, Padding, Shard
from syncguard.layout.ops import Narrow, Select, Transpose
from syncguard.layout.repack import NVFP4_MARLIN_SCALE, Rearrange, Recode
from syncguard.spec import Box, dtype_named

BACK = swizzled_scales(256, 12)


def digest(tensor, shape, box, dtype="uint8"):
    (partial,) = engine_for("cpu").partials(
        [DigestJob(tensor, dtype_named(dtype), shape, box)], key_seed=DEFAULT_KEY_SEED
    )
    return partial


def stored(exported, back=BACK):
    """Three experts `[200, 10]` as a kernel keeps them: padded, swizzled."""
    padded = torch.zeros(3, 256, 12, dtype=torch.uint8)
    padded[:, :200, :10] = exported
    return back.inverse((256, 12)).apply(padded)


def claims(rows=200):
    bindings = [
        Binding(
            Shard(LogicalTensor(f"t{expert}", "uint8", (400, 10)), Box((100, 0), (rows, 10))),
            "s",
            (BACK, Select(0, expert), Narrow(0, 0, rows), Narrow(1, 0, 10)),
        )
        for expert in range(3)
    ]
    paddings = [
        Padding("s", (BACK, Narrow(1, rows, 256 - rows), Narrow(2, 0, 10))),
        Padding("s", (BACK, Narrow(2, 10, 2))),
    ]
    return bindings, paddings


@pytest.mark.parametrize("piece_bytes", [1, 256 * 12, 2 * 256 * 12, 1 << 20])
def test_pieces_of_any_size_give_the_digest_of_the_exported_elements(monkeypatch, piece_bytes):
    monkeypatch.setattr(rank_scratch, "PIECE_BYTES", piece_bytes)
    exported = torch.randint(0, 256, (3, 200, 10), dtype=torch.uint8)
    bindings, paddings = claims()
    reader = ScratchReader(bindings, paddings, {"s": stored(exported)})
    reading = reader.read(DEFAULT_KEY_SEED)
    due = [digest(expert, (400, 10), Box((100, 0), (200, 10))) for expert in exported]
    assert list(reading.partials) == due
    assert all(check.ok for check in reading.paddings)
    assert reader.read(DEFAULT_KEY_SEED) == reading
    assert reader.read_bytes == 3 * 256 * 12


@pytest.mark.parametrize("piece_bytes", [1, 1 << 20])
def test_one_wrong_byte_of_padding_is_counted_where_it_lies(monkeypatch, piece_bytes):
    monkeypatch.setattr(rank_scratch, "PIECE_BYTES", piece_bytes)
    bindings, paddings = claims()
    wrong = torch.zeros(3, 256, 12, dtype=torch.uint8)
    wrong[2, 230, 4] = 9
    memory = stored(torch.ones(3, 200, 10, dtype=torch.uint8)) + BACK.inverse((256, 12)).apply(wrong)
    clean, tail = ScratchReader(bindings, paddings, {"s": memory}).read(DEFAULT_KEY_SEED).paddings
    assert (clean.ok, clean.wrong_count, clean.detail) == (False, 1, "first at (2, 30, 4)")
    assert tail.ok


def test_nibbles_of_marlin_tiles_are_read_in_pieces_under_the_dtype_that_was_exported(monkeypatch):
    monkeypatch.setattr(rank_scratch, "PIECE_BYTES", 100)
    back = marlin_weight(64, 128, 4, Packing.ROWS, 8)
    exported = torch.randint(0, 256, (128, 32), dtype=torch.uint8)
    memory = back.inverse((4, 256)).apply(exported)
    assert memory.dtype == torch.int32
    binding = Binding(Shard(LogicalTensor("t", "uint8", (128, 32)), Box.whole((128, 32))), "s", (back,))
    (partial,) = ScratchReader([binding], [], {"s": memory}).read(DEFAULT_KEY_SEED).partials
    assert partial == digest(exported, (128, 32), Box.whole((128, 32)))
    memory[0, 0] ^= 1 << 30
    (altered,) = ScratchReader([binding], [], {"s": memory}).read(DEFAULT_KEY_SEED).partials
    assert altered != partial


def test_recoded_bytes_are_read_as_the_exported_ones():
    exported = torch.arange(128, dtype=torch.uint8).reshape(16, 8)
    table = torch.tensor([Recode(NVFP4_MARLIN_SCALE).apply(torch.arange(256, dtype=torch.uint8)).tolist()])[0]
    back = Rearrange(2, (8, 16), (1, 0), (16, 8))
    memory = torch.stack([(table == value).nonzero()[0, 0] for value in exported.reshape(-1)]).to(torch.uint8)
    memory = memory.reshape(16, 8).t().contiguous()
    chain = (back, Recode(NVFP4_MARLIN_SCALE))
    binding = Binding(Shard(LogicalTensor("t", "uint8", (16, 8)), Box.whole((16, 8))), "s", chain)
    (partial,) = ScratchReader([binding], [], {"s": memory}).read(DEFAULT_KEY_SEED).partials
    assert partial == digest(exported, (16, 8), Box.whole((16, 8)))
    assert partial != PartialDigest.zero()


def test_a_chain_that_cannot_be_cut_into_pieces_is_unsupported():
    memory = torch.zeros(3, 256, 12, dtype=torch.uint8)
    shard = Shard(LogicalTensor("t", "uint8", (12, 256)), Box.whole((12, 256)))
    with pytest.raises(UnsupportedError):
        ScratchReader([Binding(shard, "s", (BACK, Select(0, 0), Transpose(0, 1)))], [], {"s": memory})
