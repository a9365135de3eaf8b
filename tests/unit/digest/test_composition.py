"""Parts add up to the whole, and only a partition does."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from syncguard.digest import DigestJob, PartialDigest, engine_for, expected_coverage, finalize
from syncguard.digest.reference import NumpyEngine
from syncguard.errors import DigestInputError
from syncguard.spec import DTYPES, Box, dtype_named

RAW = {1: "uint8", 2: "uint16", 4: "uint32", 8: "uint64"}


def filled(shape, dtype, seed=0):
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize_bytes
    raw = np.random.default_rng(seed).integers(0, 256, size, np.uint8)
    return raw.view(RAW[dtype.itemsize_bytes]).reshape(shape)


def part(tensor, box):
    return tensor[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))]


def partials(tensor, dtype, boxes, engine=None):
    jobs = [DigestJob(part(tensor, box), dtype, tensor.shape, box) for box in boxes]
    return (engine or engine_for("cpu")).partials(jobs)


@st.composite
def partitions(draw, box, depth=3):
    """Cut a box at random places in random dimensions, so that cuts split words, rows and pages."""
    dimensions = [d for d, n in enumerate(box.sizes) if n > 1]
    if not depth or not dimensions or draw(st.booleans()):
        return [box]
    d = draw(st.sampled_from(dimensions))
    cut = draw(st.integers(1, box.sizes[d] - 1))
    left = Box(box.offsets, (*box.sizes[:d], cut, *box.sizes[d + 1 :]))
    right = Box(
        (*box.offsets[:d], box.offsets[d] + cut, *box.offsets[d + 1 :]),
        (*box.sizes[:d], box.sizes[d] - cut, *box.sizes[d + 1 :]),
    )
    return draw(partitions(left, depth - 1)) + draw(partitions(right, depth - 1))


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_any_partition_adds_up_to_the_whole(data):
    dtype = DTYPES[data.draw(st.sampled_from(list(DTYPES)))]
    shape = tuple(data.draw(st.lists(st.integers(1, 30), min_size=1, max_size=3)))
    tensor, whole = filled(shape, dtype), Box.whole(shape)
    boxes = data.draw(partitions(whole))
    (expected,) = NumpyEngine().partials([DigestJob(tensor, dtype, shape, whole)])
    assert sum(partials(tensor, dtype, boxes), PartialDigest.zero()) == expected


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_coverage_is_known_without_data_and_adds_up(data):
    dtype = DTYPES[data.draw(st.sampled_from(list(DTYPES)))]
    shape = tuple(data.draw(st.lists(st.integers(1, 300), min_size=0, max_size=4)))
    boxes = data.draw(partitions(Box.whole(shape)))
    parts = [expected_coverage(dtype, shape, box) for box in boxes]
    assert sum(parts, PartialDigest.zero()) == expected_coverage(dtype, shape)


def test_a_missing_part_of_zeros_shows_in_the_coverage_only():
    dtype = dtype_named("bfloat16")
    tensor = filled((8, 8), dtype)
    tensor[4:] = 0
    found = sum(partials(tensor, dtype, [Box((0, 0), (4, 8))]), PartialDigest.zero())
    (whole,) = partials(tensor, dtype, [Box.whole((8, 8))])
    assert found.data == whole.data
    assert (found.count, found.coverage) != (whole.count, whole.coverage)


@pytest.mark.parametrize(
    "boxes",
    [
        [Box((0, 0), (4, 8)), Box((0, 0), (4, 8))],
        [Box((0, 0), (8, 4)), Box((0, 3), (8, 4))],
        [Box((0, 0), (5, 8)), Box((4, 0), (3, 8))],
    ],
    ids=["duplicated shard, another missing", "columns off by one", "rows off by one"],
)
def test_the_right_count_of_the_wrong_elements_is_not_covered(boxes):
    dtype = dtype_named("float8_e4m3fn")
    parts = [expected_coverage(dtype, (8, 8), box) for box in boxes]
    found, whole = sum(parts, PartialDigest.zero()), expected_coverage(dtype, (8, 8))
    assert found.count == whole.count
    assert found.coverage != whole.coverage


def test_a_flattened_range_is_at_most_three_boxes():
    dtype, shape = dtype_named("float16"), (6, 7)
    tensor = filled(shape, dtype)
    boxes = [Box((1, 3), (1, 4)), Box((2, 0), (3, 7)), Box((5, 0), (1, 2))]  # elements 10 to 37
    rest = [Box((0, 0), (1, 7)), Box((1, 0), (1, 3)), Box((5, 2), (1, 5))]
    (whole,) = partials(tensor, dtype, [Box.whole(shape)])
    assert sum(partials(tensor, dtype, boxes + rest), PartialDigest.zero()) == whole


def test_experts_held_by_different_ranks_add_up_wherever_they_are_stored():
    dtype, shape = dtype_named("bfloat16"), (6, 5, 12)
    tensor = filled(shape, dtype)
    ranks = [tensor[[4, 0]].transpose(0, 2, 1).copy(), tensor[[1, 5, 3, 2]]]
    held = [(0, 0, 4), (0, 1, 0), (1, 0, 1), (1, 1, 5), (1, 2, 3), (1, 3, 2)]
    jobs = []
    for rank, slot, expert in held:
        view = ranks[rank][slot : slot + 1]
        view = view.transpose(0, 2, 1) if rank == 0 else view
        jobs.append(DigestJob(view, dtype, shape, Box((expert, 0, 0), (1, 5, 12))))
    (whole,) = partials(tensor, dtype, [Box.whole(shape)])
    assert sum(engine_for("cpu").partials(jobs), PartialDigest.zero()) == whole


def test_name_dtype_shape_and_seed_are_bound_in_the_digest_and_not_in_the_sums():
    partial = PartialDigest(12, 5, 7)
    base = {"fqn": "a", "dtype": dtype_named("bfloat16"), "shape": (3, 4)}
    others = [
        {**base, "fqn": "b"},
        {**base, "dtype": dtype_named("float16")},
        {**base, "shape": (4, 3)},
        {**base, "shape": (3, 4, 1)},
        {**base, "key_seed": b"\1" * 32},
    ]
    digests = [finalize(partial, **arguments) for arguments in (base, *others)]
    digests.append(finalize(PartialDigest(12, 5, 8), **base))
    assert len(set(digests)) == len(digests)
    assert {len(bytes.fromhex(digest)) for digest in digests} == {16}


@pytest.mark.parametrize("bad", [PartialDigest(-1, 0, 0), PartialDigest(0, 2**61 - 1, 0), PartialDigest(0, 0, -1)])
def test_sums_that_no_addition_gives_are_refused(bad):
    with pytest.raises(DigestInputError, match="not a partial digest"):
        finalize(bad, fqn="a", dtype=dtype_named("uint8"), shape=(1,))


def test_addition_is_modulo_p_and_subtraction_undoes_it():
    p = 2**61 - 1
    a, b = PartialDigest(3, p - 1, p - 2), PartialDigest(4, 5, 6)
    assert a + b == PartialDigest(7, 4, 4)
    assert a + b - b == a
    assert a + PartialDigest.zero() == a
