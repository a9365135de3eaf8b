from __future__ import annotations

from itertools import pairwise
from math import prod

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from syncguard.layout.arrangements import (
    Packing,
    blocked_rows,
    marlin_bias,
    marlin_scales,
    marlin_weight,
    marlin_zero_points,
    shuffled_rows,
    shuffled_scales,
    swapped_rows,
    swapped_scales,
    swizzled_scales,
    widened_bias,
)
from syncguard.layout.coverage import ProblemKind, resident_problems
from syncguard.layout.model import (
    Binding,
    LogicalTensor,
    Padding,
    RankIdentity,
    RankLayout,
    ResidentTensor,
    Role,
    Shard,
)
from syncguard.layout.ops import Narrow, Select, apply_ops, shape_after
from syncguard.layout.repack import TABLES, Rearrange, Recode, split_chain
from syncguard.spec import Box

tiles = st.integers(1, 3)


@st.composite
def arrangements(draw):
    """Any named arrangement, with the resident shape that it reads."""
    rows, columns, flag = 128 * draw(tiles), 4 * draw(tiles), draw(st.booleans())
    k, n = 16 * draw(tiles), 128 * draw(tiles)
    packing, bits = draw(st.sampled_from(list(Packing))), draw(st.sampled_from([4, 8]))
    return draw(
        st.sampled_from(
            [
                (swizzled_scales(rows, columns), (rows, columns)),
                (shuffled_rows(rows, columns, gated=flag), (rows, columns)),
                (shuffled_scales(rows, columns, gated=flag), (rows, columns)),
                (swapped_rows(rows, columns, pairs=flag), (rows, columns)),
                (swapped_scales(rows, columns, pairs=flag), (rows, columns)),
                (blocked_rows(columns, rows, 4, gated=flag, bits=8), (columns, rows, 4)),
                (widened_bias(rows, pairs=flag), (rows,)),
                (marlin_weight(k, n, bits, packing), (k // 16, n * bits // 2)),
                (marlin_weight(k, n, 4, Packing.ROWS, 8, halves=flag), (k // 16, 2 * n)),
                (
                    marlin_scales(columns, n, grouped=True, outputs_first=True, fp4=flag, bits=8, halves=True),
                    (columns, n),
                ),
                (marlin_scales(columns, n, grouped=flag, outputs_first=not flag, bits=8), (columns, n)),
                (marlin_zero_points(columns, n, packing), (columns, n // 8)),
                (marlin_bias(n, 8, halves=flag), (n,)),
            ]
        )
    )


def integers(op, shape, seed):
    generator = np.random.default_rng(seed)
    kind = {8: np.uint8, 16: np.int16, 32: np.int32}[op.from_bits]
    limits = np.iinfo(kind)
    return generator.integers(limits.min, limits.max, shape, dtype=kind, endpoint=True)


@given(arrangements(), st.integers(0, 3))
def test_an_arrangement_and_its_inverse_give_every_bit_back(named, experts):
    op, shape = named
    lead = (experts,) if experts else ()
    memory = integers(op, (*lead, *shape), 1)
    there = op.apply(memory)
    assert there.shape == op.shape(memory.shape)
    back = op.inverse(shape).apply(there)
    assert back.dtype.itemsize == memory.dtype.itemsize
    assert np.array_equal(back.view(memory.dtype), memory)
    assert np.array_equal(np.asarray(op.apply(torch.from_numpy(memory))), there)


@given(arrangements(), st.data())
def test_pieces_of_an_arrangement_are_the_whole_one_after_the_other(named, data):
    op, shape = named
    memory = integers(op, shape, 2)
    cuts = sorted({0, op.leading, *data.draw(st.lists(st.integers(0, op.leading), max_size=3))})
    if op.leading == 1:
        return
    parts = []
    for start, stop in pairwise(cuts):
        part, piece = op.piece(memory, start, stop)
        parts.append(piece.apply(part))
    assert np.array_equal(np.concatenate(parts), op.apply(memory))


@given(arrangements(), st.data())
def test_one_flipped_bit_before_is_one_flipped_bit_after(named, data):
    op, shape = named
    memory = integers(op, shape, 3)
    altered = memory.copy()
    flat = altered.reshape(-1).view(np.uint8)
    flat[data.draw(st.integers(0, flat.size - 1))] ^= 1 << data.draw(st.integers(0, 7))
    unlike = op.apply(memory).view(np.uint8) ^ op.apply(altered).view(np.uint8)
    assert int(np.unpackbits(unlike.reshape(-1)).sum()) == 1


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_any_order_of_digits_is_a_bijection(digits, random):
    order = list(range(len(digits)))
    random.shuffle(order)
    flips = tuple(digit for digit in order if random.random() < 0.3)
    op = Rearrange(1, tuple(digits), tuple(order), (prod(digits),), 8, 8, 8, flips)
    memory = np.arange(prod(digits))
    assert sorted(op.apply(memory).tolist()) == memory.tolist()
    assert np.array_equal(op.inverse((prod(digits),)).apply(op.apply(memory)), memory)


@pytest.mark.parametrize(
    "op",
    [
        Rearrange(1, (2, 3), (0, 0), (6,)),
        Rearrange(1, (2, 3), (1, 0), (5,)),
        Rearrange(1, (2, 4), (1, 0), (8,)),
        Rearrange(1, (2, 3), (1, 0), (6,), flips=(2,)),
        Rearrange(1, (2, 3), (1, 0), (6,), unit_bits=5),
    ],
)
def test_what_drops_or_repeats_a_unit_is_no_arrangement(op):
    with pytest.raises(ValueError, match="no rearrangement"):
        op.shape((6,))


def test_every_table_of_bytes_is_a_bijection():
    for name, table in TABLES.items():
        assert sorted(table) == list(range(256)), name
        assert Recode(name).apply(np.arange(256, dtype=np.uint8)).tolist() == list(table)


SCALES = ResidentTensor("s", "uint8", (2, 128, 8), (1024, 8, 1), Role.PARAMETER, "FusedMoE")
BACK = swizzled_scales(128, 8)


def layout_of(*claims):
    bindings, paddings = [], []
    for ops, box in claims:
        if box is None:
            paddings.append(Padding("s", ops))
        else:
            bindings.append(Binding(Shard(LogicalTensor("t", "uint8", (2, 100, 6)), box), "s", ops))
    return RankLayout(RankIdentity(), "", (SCALES,), tuple(bindings), tuple(paddings))


def test_coverage_is_proven_through_an_arrangement():
    whole = [
        ((BACK, Narrow(1, 0, 100), Narrow(2, 0, 6)), Box((0, 0, 0), (2, 100, 6))),
        ((BACK, Narrow(1, 100, 28), Narrow(2, 0, 6)), None),
        ((BACK, Narrow(2, 6, 2)), None),
    ]
    assert resident_problems(layout_of(*whole)) == ()
    assert {problem.kind for problem in resident_problems(layout_of(*whole[:2]))} == {ProblemKind.HOLE}
    twice = resident_problems(layout_of(*whole, ((BACK, Select(0, 1), Narrow(1, 6, 2), Narrow(0, 0, 1)), None)))
    assert {problem.kind for problem in twice} == {ProblemKind.OVERLAP}


def test_claims_through_different_arrangements_of_one_tensor_are_not_proven():
    other = swapped_scales(128, 8, pairs=True)
    (problem,) = resident_problems(
        layout_of(
            ((BACK, Narrow(1, 0, 64), Narrow(2, 0, 6)), Box((0, 0, 0), (2, 64, 6))),
            ((other, Narrow(1, 64, 64)), None),
        )
    )
    assert problem.kind is ProblemKind.UNPROVABLE
    (raw,) = resident_problems(
        layout_of(((BACK, Narrow(1, 0, 64)), None), ((Narrow(1, 64, 64),), None)),
    )
    assert raw.kind is ProblemKind.UNPROVABLE


def test_a_view_before_bytes_are_moved_is_not_proven():
    chain = (Narrow(0, 0, 1), BACK)
    assert split_chain(chain) == (chain, ())
    (problem,) = resident_problems(layout_of((chain, None)))
    assert problem.kind is ProblemKind.UNPROVABLE


@given(arrangements(), st.integers(1, 3))
def test_shapes_of_chains_are_those_of_the_arrays(named, experts):
    op, shape = named
    memory = integers(op, (experts, *shape), 4)
    chain = (op, Select(0, experts - 1), Narrow(0, 0, 1))
    assert apply_ops(memory, chain).shape == shape_after(memory.shape, chain)
