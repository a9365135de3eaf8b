"""A difference is narrowed down by partial digests alone, in logarithmically many rounds."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from syncguard.digest import DigestJob, PartialDigest, engine_for, grid_boxes, grid_partials, localize
from syncguard.errors import DigestInputError
from syncguard.spec import Box, dtype_named

DTYPE = dtype_named("bfloat16")


class Side:
    """Answers for one copy of a tensor, and counts the rounds and questions."""

    def __init__(self, tensor):
        self.tensor, self.rounds, self.questions = tensor, 0, 0

    def __call__(self, boxes):
        self.rounds += 1
        self.questions += len(boxes)
        jobs = [
            DigestJob(
                self.tensor[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))],
                DTYPE,
                self.tensor.shape,
                box,
            )
            for box in boxes
        ]
        return engine_for("cpu").partials(jobs)


def sides(shape, changed):
    right = np.random.default_rng(0).integers(0, 2**16, shape, np.uint16)
    wrong = right.copy()
    for index in changed:
        wrong[index] ^= 1
    return Side(right), Side(wrong)


def test_one_changed_element_is_found_in_log_rounds():
    expected, observed = sides((300, 500), [(217, 333)])
    assert localize(Box.whole((300, 500)), expected, observed) == [Box((217, 333), (1, 1))]
    assert observed.rounds <= 2 + math.ceil(math.log2(300)) + math.ceil(math.log2(500))
    assert observed.questions == observed.rounds


def test_equal_sides_differ_nowhere_after_one_question():
    expected, observed = sides((30, 50), [])
    assert localize(Box.whole((30, 50)), expected, observed) == []
    assert (expected.questions, observed.questions) == (1, 1)


@given(st.sets(st.tuples(st.integers(0, 3), st.integers(0, 19), st.integers(0, 24)), min_size=1, max_size=6))
@settings(max_examples=25, deadline=None)
def test_a_few_changes_are_all_found(changed):
    expected, observed = sides((4, 20, 25), changed)
    found = localize(Box.whole((4, 20, 25)), expected, observed)
    assert found == sorted(Box(index, (1, 1, 1)) for index in changed)


def test_many_changes_end_in_boxes_that_hold_all_of_them():
    changed = {(row, column) for row in range(64) for column in (3, 40)}
    expected, observed = sides((64, 64), changed)
    found = localize(Box.whole((64, 64)), expected, observed, limit=8)
    inside = {(r, c) for r, c in changed for box in found if box.intersect(Box((r, c), (1, 1))).count}
    assert inside == changed
    assert len(found) <= 16


def test_boxes_are_not_cut_below_the_smallest_size():
    expected, observed = sides((256, 256), [(100, 200)])
    (found,) = localize(Box.whole((256, 256)), expected, observed, smallest=(128, 32))
    assert found == Box((0, 192), (128, 32))


def test_a_scalar_is_its_own_place():
    expected, observed = Side(np.array(1, np.uint16)), Side(np.array(2, np.uint16))
    assert localize(Box((), ()), expected, observed) == [Box((), ())]


def test_grid_cells_add_up_to_their_box_and_show_the_changed_cell():
    expected, observed = sides((40, 30), [(17, 29)])
    box = Box((10, 5), (30, 25))
    cells = [
        grid_partials(engine_for("cpu"), side.tensor[10:, 5:], DTYPE, (40, 30), box, (4, 100))
        for side in (expected, observed)
    ]
    for side, found in zip((expected, observed), cells, strict=True):
        assert sum((partial for _, partial in found), PartialDigest.zero()) == side([box])[0]
    different = [cell for (cell, a), (_, b) in zip(*cells, strict=True) if a != b]
    assert different == [Box((17, 29), (7, 1))] or all(c.intersect(Box((17, 29), (1, 1))).count for c in different)
    assert len(different) == 1


def test_grids_cut_what_is_asked_and_never_into_nothing():
    assert grid_boxes(Box((0, 4), (5, 3)), (2, 9)) == [
        Box((0, 4), (2, 1)), Box((0, 5), (2, 1)), Box((0, 6), (2, 1)),
        Box((2, 4), (3, 1)), Box((2, 5), (3, 1)), Box((2, 6), (3, 1)),
    ]  # fmt: skip
    assert grid_boxes(Box((), ()), ()) == [Box((), ())]


@pytest.mark.parametrize("grid", [(2,), (0, 1), (-1, 1), (2**10, 2**10)])
def test_a_grid_that_is_none_is_refused(grid):
    with pytest.raises(DigestInputError, match="not a grid"):
        grid_boxes(Box((0, 0), (10**6, 10**6)), grid)
