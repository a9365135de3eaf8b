"""Every engine gives the integers of the definition, whatever the dtype, the place and the strides."""

import literal
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from syncguard.digest import DigestJob, PartialDigest, available_engines
from syncguard.digest.cpu import NumbaEngine
from syncguard.digest.reference import NumpyEngine
from syncguard.digest.torch_path import TorchEngine
from syncguard.spec import DTYPES, Box, dtype_named

ENGINES = available_engines()
RAW = {1: "uint8", 2: "uint16", 4: "uint32", 8: "uint64"}


def random_view(generator, sizes, itemsize, order, gaps):
    """Return an array of `sizes` whose memory runs in `order` of dimensions, with unused elements in between."""
    outer = [sizes[d] * gaps[d] for d in order]
    memory = generator.integers(0, 256, int(np.prod(outer, dtype=np.int64)) * itemsize + 8, np.uint8)
    block = memory[: int(np.prod(outer, dtype=np.int64)) * itemsize].view(RAW[itemsize]).reshape(outer)
    return block[tuple(slice(None, None, gaps[d]) for d in order)].transpose(np.argsort(order))


@st.composite
def jobs(draw):
    name = draw(st.sampled_from(list(DTYPES)))
    rank = draw(st.integers(0, 4))
    sizes = tuple(draw(st.integers(0 if rank < 4 else 1, 40 if rank < 3 else 9)) for _ in range(rank))
    before = tuple(draw(st.integers(0, 70)) for _ in range(rank))
    after = tuple(draw(st.integers(0, 3)) for _ in range(rank))
    shape = tuple(a + b + c for a, b, c in zip(before, sizes, after, strict=True))
    order = draw(st.permutations(range(rank)))
    gaps = tuple(draw(st.sampled_from((1, 1, 1, 2, 3))) for _ in range(rank))
    dtype = dtype_named(name)
    generator = np.random.default_rng(draw(st.integers(0, 1000)))
    view = random_view(generator, sizes, dtype.itemsize_bytes, order, gaps)
    return DigestJob(view, dtype, shape, Box(before, sizes), "w")


@given(st.lists(jobs(), min_size=1, max_size=4))
@settings(max_examples=60, deadline=None)
def test_every_engine_agrees_with_the_reference_on_any_box_and_any_strides(batch):
    expected = NumpyEngine().partials(batch)
    for engine in ENGINES:
        assert engine.partials(batch) == expected, engine.name


@given(jobs())
@settings(max_examples=15, deadline=None)
def test_the_reference_is_the_definition(job):
    small = tuple(min(n, 6) for n in job.box.sizes)
    view = job.view[tuple(slice(n) for n in small)]
    job = DigestJob(view, job.dtype, job.shape, Box(job.box.offsets, small))
    (found,) = NumpyEngine().partials([job])
    assert (found.count, found.coverage, found.data) == literal.partial(view, job.shape, job.box.offsets)


@pytest.mark.parametrize("itemsize", [1, 2, 4, 8])
@pytest.mark.parametrize("columns", [*range(1, 20), 31, 32, 33, 63, 64, 65, 127, 128, 129, 223, 224, 225, 257])
def test_rows_of_every_length_and_every_start_agree(columns, itemsize):
    generator = np.random.default_rng(columns)
    dtype = dtype_named(RAW[itemsize])
    memory = generator.integers(0, 256, (9, columns, itemsize), np.uint8).view(RAW[itemsize])[..., 0]
    batch = [
        DigestJob(view, dtype, (20, 300), Box((3, start), view.shape))
        for start in range(5)
        for view in (memory, memory.T.copy().T, memory[:3], memory[:, :1])
    ]
    assert NumbaEngine().partials(batch) == NumpyEngine().partials(batch)


@pytest.mark.parametrize("start", [65535 * 4, 65536 * 4 - 3, 65536 * 4, 65536 * 4 + 1])
@pytest.mark.parametrize("itemsize", [1, 2, 4, 8])
def test_columns_and_rows_agree_on_both_sides_of_a_table(start, itemsize, engine):
    generator = np.random.default_rng(start)
    dtype = dtype_named(RAW[itemsize])
    wide = generator.integers(0, 256, (5, 150, itemsize), np.uint8).view(RAW[itemsize])[..., 0]
    shape = (65536 + 200, 65536 * 8 + 1000)
    batch = [
        DigestJob(wide, dtype, shape, Box((65530, start // itemsize), wide.shape)),
        DigestJob(wide.T, dtype, shape, Box((65536 - 77, start // itemsize), wide.T.shape)),
        DigestJob(wide.T.copy(), dtype, shape, Box((65536 * 1 - 3, start // itemsize), wide.T.shape)),
    ]
    expected = [PartialDigest(*literal.partial(job.view, shape, job.box.offsets)) for job in batch]
    assert engine.partials(batch) == expected


def test_a_row_longer_than_one_table_agrees():
    generator = np.random.default_rng(5)
    view = generator.integers(0, 256, (5, 65536 * 4 + 70), np.uint8)
    dtype = dtype_named("uint8")
    batch = [
        DigestJob(part, dtype, (8, 10**7), Box((2, start), part.shape))
        for part in (view, view[:1], view[:, 5:-9])
        for start in (0, 1, 65536 * 4 - 2)
    ]
    assert NumbaEngine().partials(batch) == NumpyEngine().partials(batch)


def test_threads_do_not_change_the_result():
    generator = np.random.default_rng(6)
    view = generator.integers(0, 2**16, (4097, 1500), np.uint16)
    dtype = dtype_named("bfloat16")
    wide = generator.integers(0, 2**16, 7_000_001, np.uint16)
    batch = [
        DigestJob(view, dtype, view.shape, Box.whole(view.shape)),
        DigestJob(view.T, dtype, view.T.shape, Box.whole(view.T.shape)),
        DigestJob(wide, dtype, wide.shape, Box.whole(wide.shape)),
    ]
    assert NumbaEngine(threads=3).partials(batch) == NumbaEngine(threads=1).partials(batch)
    assert NumbaEngine(threads=1).partials(batch) == NumpyEngine().partials(batch)


@pytest.mark.parametrize("name", DTYPES)
def test_torch_tensors_of_every_dtype_hash_like_their_bytes(name, engine):
    dtype = dtype_named(name)
    raw = np.random.default_rng(7).integers(0, 2 if name == "bool" else 256, (6, 10 * dtype.itemsize_bytes), np.uint8)
    array = raw.view(RAW[dtype.itemsize_bytes])
    tensor = torch.from_numpy(raw).view(getattr(torch, name))
    assert tensor.shape == (6, 10)
    views = [
        (array, tensor),
        (array.T, tensor.T),
        (array[1:, ::3], tensor[1:, ::3]),
        (array[2:2], tensor[2:2]),
        (array[3], tensor[3]),
        (array[3, 4], tensor[3, 4]),
    ]
    for plain, torched in views:
        job = DigestJob(torched, dtype, tuple(torched.shape), Box.whole(tuple(torched.shape)))
        (found,) = engine.partials([job])
        assert (found.count, found.coverage, found.data) == literal.partial(plain, plain.shape, (0,) * plain.ndim)


def test_packed_4_bit_tensors_are_bytes(engine):
    packed = torch.arange(12, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    job = DigestJob(packed, dtype_named("uint8"), (12,), Box.whole((12,)))
    plain = DigestJob(np.arange(12, dtype=np.uint8), dtype_named("uint8"), (12,), Box.whole((12,)))
    assert engine.partials([job]) == engine.partials([plain])


def test_expanded_views_are_read_as_what_they_show(engine):
    row = torch.arange(5, dtype=torch.float32)
    shown = DigestJob(row.expand(4, 5), dtype_named("float32"), (4, 5), Box.whole((4, 5)))
    held = DigestJob(row.expand(4, 5).contiguous(), dtype_named("float32"), (4, 5), Box.whole((4, 5)))
    assert engine.partials([shown]) == engine.partials([held])


def test_other_seeds_give_other_sums_on_which_all_engines_agree():
    seed = bytes(range(32))
    view = np.random.default_rng(8).integers(0, 256, (4, 9), np.uint8)
    job = DigestJob(view, dtype_named("uint8"), (4, 9), Box.whole((4, 9)))
    expected = PartialDigest(*literal.partial(view, (4, 9), (0, 0), literal.tables(seed)))
    for engine in ENGINES:
        assert engine.partials([job], key_seed=seed) == [expected]
        assert engine.partials([job]) != [expected]


def test_no_jobs_give_no_partials(engine):
    assert engine.partials([]) == []


def test_the_torch_engine_reads_numpy_arrays_that_are_read_only():
    view = np.arange(20, dtype=np.uint16).reshape(4, 5)
    view.setflags(write=False)
    job = DigestJob(view, dtype_named("bfloat16"), (4, 5), Box.whole((4, 5)))
    assert TorchEngine().partials([job]) == NumpyEngine().partials([job])


@pytest.mark.parametrize("shape", [(700, 2048), (3, 300_001), (1_400_000,)])
def test_tensors_of_many_blocks_agree_whatever_the_blocks(shape, engine):
    view = np.random.default_rng(9).integers(2**15, 2**16, shape, np.uint16)
    jobs = [DigestJob(v, dtype_named("bfloat16"), v.shape, Box.whole(v.shape)) for v in (view, view.T)]
    assert engine.partials(jobs) == NumbaEngine(threads=1).partials(jobs)
