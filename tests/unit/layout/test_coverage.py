from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncguard.layout.coverage import ProblemKind, partition_problems, resident_problems
from syncguard.layout.model import (
    Binding,
    Derived,
    Exempt,
    LogicalTensor,
    Padding,
    RankIdentity,
    RankLayout,
    ResidentTensor,
    Role,
    Shard,
)
from syncguard.layout.ops import Narrow, Select, Transpose, Unflatten, apply_ops
from syncguard.layout.regions import regions_of
from syncguard.spec import Box


def counts(shape, boxes):
    held = np.zeros(shape, int)
    for box in boxes:
        held[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))] += 1
    return held


@st.composite
def shapes_and_boxes(draw):
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=0, max_size=3)))
    boxes = []
    for _ in range(draw(st.integers(0, 6))):
        offsets = tuple(draw(st.integers(0, n - 1)) for n in shape)
        boxes.append(Box(offsets, tuple(draw(st.integers(0, n - o)) for n, o in zip(shape, offsets, strict=True))))
    return shape, boxes


@st.composite
def tilings(draw):
    """Cut a tensor along random planes, over and over: always a partition."""
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    boxes = [Box.whole(shape)]
    for _ in range(draw(st.integers(0, 6))):
        index = draw(st.integers(0, len(boxes) - 1))
        box = boxes.pop(index)
        dim = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, box.sizes[dim]))
        for offset, size in ((0, at), (at, box.sizes[dim] - at)):
            offsets = tuple(o + offset if d == dim else o for d, o in enumerate(box.offsets))
            boxes.append(Box(offsets, tuple(size if d == dim else n for d, n in enumerate(box.sizes))))
    return shape, boxes


@given(shapes_and_boxes())
def test_boxes_are_a_partition_exactly_when_every_element_is_held_once(case):
    shape, boxes = case
    held = counts(shape, boxes)
    problems = partition_problems(shape, boxes)
    assert (problems == ()) == bool((held == 1).all())
    assert any(p.startswith("hole") for p in problems) <= bool((held == 0).any())
    assert any(p.startswith("overlap") for p in problems) <= bool((held > 1).any())


@given(tilings(), st.data())
def test_a_cut_up_tensor_is_a_partition_until_one_box_is_lost_or_doubled(case, data):
    shape, boxes = case
    assert partition_problems(shape, boxes) == ()
    full = [box for box in boxes if box.count]
    victim = data.draw(st.sampled_from(full))
    less = partition_problems(shape, [box for box in full if box is not victim])
    assert less
    assert all(problem.startswith("hole") for problem in less)
    assert any(str(victim) in problem for problem in partition_problems(shape, [*full, victim]))


def test_a_pinwheel_that_no_plane_separates_is_proven_and_its_hole_is_named():
    wheel = [Box((0, 0), (1, 2)), Box((0, 2), (2, 1)), Box((2, 1), (1, 2)), Box((1, 0), (2, 1))]
    assert partition_problems((3, 3), wheel) == ("hole [1:2, 1:2]",)
    assert partition_problems((3, 3), [*wheel, Box((1, 1), (1, 1))]) == ()


def test_a_box_outside_the_tensor_is_named():
    assert partition_problems((2, 2), [Box((0, 0), (2, 3))]) == ("outside (2, 2): box [0:2, 0:3]",)


def test_a_scalar_is_covered_by_one_box_and_by_nothing_less():
    assert partition_problems((), [Box((), ())]) == ()
    assert partition_problems((), []) == ("hole []",)


@st.composite
def chains(draw):
    """A resident shape and a chain of views that fits it."""
    shape = tuple(draw(st.lists(st.sampled_from([1, 2, 3, 4, 6, 8]), min_size=1, max_size=3)))
    now, ops = shape, []
    for _ in range(draw(st.integers(0, 5))):
        if not now:
            break
        dim = draw(st.integers(0, len(now) - 1))
        kind = draw(st.sampled_from(["narrow", "select", "transpose", "unflatten"]))
        if kind == "narrow":
            start = draw(st.integers(0, now[dim]))
            op = Narrow(dim, start, draw(st.integers(0, now[dim] - start)))
        elif kind == "select" and now[dim]:
            op = Select(dim, draw(st.integers(0, now[dim] - 1)))
        elif kind == "unflatten":
            inner = draw(st.sampled_from([n for n in (1, 2, 3, 4) if now[dim] % n == 0]))
            op = Unflatten(dim, (now[dim] // inner, inner))
        else:
            op = Transpose(dim, draw(st.integers(0, len(now) - 1)))
        ops.append(op)
        now = op.shape(now)
    return shape, tuple(ops), now


@given(chains())
def test_the_shape_that_a_chain_promises_is_the_shape_of_its_view(case):
    shape, ops, promised = case
    assert apply_ops(np.zeros(shape), ops).shape == promised


@given(chains())
def test_the_region_of_a_chain_is_the_set_of_elements_that_its_view_shows(case):
    shape, ops, _ = case
    array = np.arange(int(np.prod(shape))).reshape(shape)
    seen = np.sort(apply_ops(array, ops).reshape(-1))
    try:
        grid, (boxes,) = regions_of(shape, [ops])
    except ValueError:
        return  # refused, hence never counted as covered
    refined = array.reshape(grid)
    held = [refined[tuple(slice(start, stop) for start, stop in box)].reshape(-1) for box in boxes]
    assert np.array_equal(np.sort(np.concatenate(held)) if held else np.array([], int), seen)


def resident(name="w", shape=(4, 6)):
    return ResidentTensor(name, "float32", shape, (shape[-1], 1), Role.PARAMETER, "Linear", storage_bytes=96)


def bound(fqn, box, shape, ops=(), name="w", alias=False):
    return Binding(Shard(LogicalTensor(fqn, "float32", shape), box), name, ops, alias=alias)


W = resident()


def layout(*bindings, residents=(W,), **claims):
    return RankLayout(RankIdentity(), "Tiny", residents, bindings, **claims)


WHOLE = bound("a", Box.whole((4, 6)), (4, 6))


def kinds(found):
    return [(problem.resident, problem.kind) for problem in resident_problems(found)]


def test_interleaved_rows_of_gate_and_up_cover_their_tensor():
    gate, up = ((Unflatten(0, (2, 2)), Select(1, index)) for index in (0, 1))
    both = [bound(n, Box.whole((2, 6)), (2, 6), ops) for n, ops in (("gate", gate), ("up", up))]
    assert resident_problems(layout(*both)) == ()
    assert kinds(layout(both[0])) == [("w", ProblemKind.HOLE)]


@pytest.mark.parametrize(
    ("found", "kind"),
    [
        (layout(), ProblemKind.HOLE),
        (layout(bound("a", Box.whole((3, 6)), (3, 6), (Narrow(0, 0, 3),))), ProblemKind.HOLE),
        (layout(WHOLE, WHOLE), ProblemKind.OVERLAP),
        (layout(WHOLE, paddings=(Padding("w", (Narrow(0, 3, 1),)),)), ProblemKind.OVERLAP),
        (layout(WHOLE, exempt=(Exempt("w", "no reason"),)), ProblemKind.OVERLAP),
        (layout(WHOLE, bound("b", Box.whole((1,)), (1,), name="v")), ProblemKind.UNKNOWN_RESIDENT),
        (layout(bound("a", Box.whole((4, 5)), (4, 6))), ProblemKind.BAD_VIEW),
        (layout(bound("a", Box((1, 0), (4, 6)), (4, 6))), ProblemKind.BAD_VIEW),
        (layout(residents=(resident(shape=(0, 6)),)), ProblemKind.EMPTY_RESIDENT),
        (
            layout(bound("a", Box.whole((0, 6)), (0, 6)), residents=(resident(shape=(0, 6)),)),
            ProblemKind.EMPTY_RESIDENT,
        ),
    ],
)
def test_a_resident_that_is_not_claimed_exactly_once_is_named_with_the_kind_of_problem(found, kind):
    assert kind in {problem.kind for problem in resident_problems(found)}


def test_padding_and_derived_views_complete_a_cover():
    top = bound("a", Box.whole((2, 6)), (2, 6), (Narrow(0, 0, 2),))
    pad = Padding("w", (Narrow(0, 2, 1),))
    copy = Derived("w", "repeats_row:0", ("w",), (Narrow(0, 3, 1),))
    assert resident_problems(layout(top, paddings=(pad,), derived=(copy,))) == ()


def test_an_alias_needs_no_claim_and_its_binding_counts_for_nothing():
    tied = replace(resident("head"), alias_of="w")
    assert (
        resident_problems(
            layout(WHOLE, bound("b", Box.whole((4, 6)), (4, 6), name="head", alias=True), residents=(resident(), tied))
        )
        == ()
    )
    lost = replace(tied, alias_of="nowhere")
    assert kinds(layout(WHOLE, residents=(resident(), lost))) == [("head", ProblemKind.UNKNOWN_RESIDENT)]
