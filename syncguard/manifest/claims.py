"""What the layouts of a worker's ranks claim of each logical tensor: geometry, worked out once and kept.

Pure. A layout is frozen and lives through many updates, while partial digests change with each; so everything that
follows from layouts alone (which boxes tile a tensor, which are replicas, what is accounted for) is proven at the first
comparison and only looked up later.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod

import msgspec

from syncguard.layout.coverage import ResidentProblem, partition_problems, resident_problems
from syncguard.layout.model import BindingSource, CanonicalForm, RankLayout
from syncguard.layout.ops import shape_after
from syncguard.spec import Box

KEPT = 16
"""Workers (or states of one worker) whose claims are kept; an agent has one, a test many."""


class TensorClaim(msgspec.Struct, frozen=True, gc=False):
    """Which bindings hold a logical tensor, and whether they hold all of it.

    Attributes:
        dtype: Element type that all bindings give it; empty when they differ.
        shape: Full shape that all bindings give it.
        groups: For each box, the bindings that hold it, by their place in the list of all bindings of all ranks.
        tiles: The boxes cover each element exactly once.
        alias: Every binding is a second name of elements that are bound under another one.
        replicas: Bindings beyond the first of each box.
    """

    dtype: str
    shape: tuple[int, ...]
    groups: tuple[tuple[int, ...], ...]
    tiles: bool
    alias: bool
    replicas: int


@dataclass(frozen=True, slots=True)
class LayoutFacts:
    """What follows from one layout alone.

    Attributes:
        problems: Resident tensors that are not claimed exactly once.
        counts: Elements of each binding's box.
        resident_tensors: Resident tensors that are no alias.
        bound: Those of them that bindings claim, without problem ones.
        derived: Those that derived-state claims name.
        unbound: Those without a rule.
        padding_elements: Elements of padding claims.
        quantized: Bindings that compare the result of a published quantization.
        recorded: Bindings that were recorded from the engine's loader.
    """

    problems: tuple[ResidentProblem, ...]
    counts: tuple[int, ...]
    resident_tensors: int
    bound: int
    derived: int
    unbound: int
    padding_elements: int
    quantized: int
    recorded: int


@dataclass(frozen=True, slots=True)
class WorkerClaims:
    """What all layouts of a worker claim together.

    Attributes:
        layouts: The layouts, in the order of their ranks.
        facts: Of each layout.
        tensors: Claims by checkpoint name.
        dropped: Checkpoint tensors that loading drops, by the word of a rank's rules.
        starts: Where each layout's bindings begin in the list of all.
    """

    layouts: tuple[RankLayout, ...]
    facts: tuple[LayoutFacts, ...]
    tensors: dict[str, TensorClaim]
    dropped: frozenset[str]
    starts: tuple[int, ...]

    def place(self, index: int) -> tuple[int, int]:
        """Return the layout and the binding in it that an index of a `TensorClaim` means."""
        layout = bisect_right(self.starts, index) - 1
        return layout, index - self.starts[layout]


_KEPT: deque[WorkerClaims] = deque(maxlen=KEPT)


def claims_of(layouts: Sequence[RankLayout]) -> WorkerClaims:
    """Return what layouts claim together.

    Kept for the very same objects in the same order: to find out that layouts are equal costs as much as to prove them.
    """
    for kept in tuple(_KEPT):
        if len(kept.layouts) == len(layouts) and all(a is b for a, b in zip(kept.layouts, layouts, strict=True)):
            return kept
    claims = _claims(tuple(layouts))
    _KEPT.append(claims)
    return claims


def _facts(layout: RankLayout) -> LayoutFacts:
    problems = resident_problems(layout)
    own = {resident.name: resident for resident in layout.residents if not resident.alias_of}
    unbound = {claim.resident for claim in layout.unbound}
    bound = {binding.resident for binding in layout.bindings if binding.resident in own} - unbound
    return LayoutFacts(
        problems=problems,
        counts=tuple([prod(binding.shard.box.sizes) for binding in layout.bindings]),
        resident_tensors=len(own),
        bound=len(bound) - len({problem.resident for problem in problems}),
        derived=len({claim.resident for claim in layout.derived}),
        unbound=len(unbound),
        padding_elements=sum(
            prod(shape_after(own[p.resident].shape, p.ops)) for p in layout.paddings if p.resident in own
        ),
        quantized=sum(binding.form is CanonicalForm.QUANTIZED for binding in layout.bindings),
        recorded=sum(binding.source is BindingSource.RECORDED for binding in layout.bindings),
    )


def _claims(layouts: tuple[RankLayout, ...]) -> WorkerClaims:
    starts = tuple(accumulate((len(layout.bindings) for layout in layouts), initial=0))[: len(layouts)]
    bindings = [binding for layout in layouts for binding in layout.bindings]
    by_name: dict[str, list[int]] = {}
    for index, binding in enumerate(bindings):
        by_name.setdefault(binding.shard.tensor.fqn, []).append(index)
    tensors = {}
    for fqn, indices in by_name.items():
        first = bindings[indices[0]].shard.tensor
        one_form = all(bindings[index].shard.tensor == first for index in indices[1:])
        boxes: dict[Box, list[int]] = {}
        for index in indices:
            boxes.setdefault(bindings[index].shard.box, []).append(index)
        tensors[fqn] = TensorClaim(
            dtype=first.dtype if one_form else "",
            shape=first.shape,
            groups=tuple(tuple(group) for group in boxes.values()),
            tiles=one_form and _tiles(first.shape, tuple(boxes)),
            alias=all(bindings[index].alias for index in indices),
            replicas=len(indices) - len(boxes),
        )
    dropped = frozenset(named.fqn for layout in layouts for named in layout.dropped)
    return WorkerClaims(layouts, tuple(_facts(layout) for layout in layouts), tensors, dropped, starts)


def _tiles(shape: tuple[int, ...], boxes: tuple[Box, ...]) -> bool:
    if len(boxes) == 1 and boxes[0].sizes == shape and not any(boxes[0].offsets):
        return True  # most tensors of most ranks, and no geometry
    return not partition_problems(shape, boxes)
