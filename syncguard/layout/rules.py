"""The registry of rules: what the tensors of one live layer must equal, by the name of the layer's class.

A rule is a function of a `LayerView` that fills it with claims. It reads the layer's own attributes (group, sizes, flags),
never a command line, and compares the shape that it expects with the resident one: a difference is an `Unbound` with both
shapes, not a guess. Rules are found along the class's bases, most specific first. Attribute names are those of SGLang
0.5.23, which inherits them from vLLM; a class of another engine with the same names and attributes uses the same rules.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from syncguard.layout.model import (
    Binding,
    CanonicalForm,
    Derived,
    Dropped,
    Exempt,
    LogicalTensor,
    Padding,
    ResidentTensor,
    Shard,
    Unbound,
)
from syncguard.layout.ops import Narrow, shape_after
from syncguard.layout.published import recipe_of
from syncguard.spec import Box

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from syncguard.layout.families import Family
    from syncguard.layout.ops import ViewOp

RULES: dict[str, Callable[[LayerView], None]] = {}
"""Rule of each layer class, by class name."""


def rule(*class_names: str) -> Callable[[Callable[[LayerView], None]], Callable[[LayerView], None]]:
    """Register a rule for layer classes, by their names.

    Raises:
        ValueError: A class has a rule already.
    """

    def register(function: Callable[[LayerView], None]) -> Callable[[LayerView], None]:
        for name in class_names:
            if name in RULES:
                msg = f"two rules for {name}"
                raise ValueError(msg)
            RULES[name] = function
        return function

    return register


def rule_for(module: Any) -> tuple[str, Callable[[LayerView], None]] | None:
    """Return the class name with a rule that is nearest to the module's class, and the rule."""
    for base in type(module).__mro__:
        found = RULES.get(base.__name__)
        if found is not None:
            return base.__name__, found
    return None


@dataclass(slots=True)
class Claims:
    """What rules have claimed so far."""

    bindings: list[Binding] = field(default_factory=list)
    paddings: list[Padding] = field(default_factory=list)
    derived: list[Derived] = field(default_factory=list)
    exempt: list[Exempt] = field(default_factory=list)
    unbound: list[Unbound] = field(default_factory=list)
    uncovered: list[str] = field(default_factory=list)
    dropped: list[Dropped] = field(default_factory=list)
    claimed: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Span:
    """A range of one dimension: the part that is held of the whole.

    Attributes:
        start: First index held, in elements of the logical dimension.
        length: How many are held.
        total: Length of the logical dimension.
        padding: How many zeros the rank holds after them.
    """

    start: int
    length: int
    total: int
    padding: int = 0

    @property
    def held(self) -> int:
        """Resident length, padding included."""
        return self.length + self.padding

    @classmethod
    def whole(cls, total: int) -> Span:
        """Return the span of a dimension that is not split."""
        return cls(0, total, total)

    @classmethod
    def part(cls, total: int, rank: int, size: int, exported: int | None = None) -> Span:
        """Return part `rank` of `size` equal parts; the last may be cut short when the parts are rounded up.

        Args:
            total: Length that the engine splits.
            rank: Which part.
            size: Number of parts.
            exported: Length in the checkpoint, where the engine padded it to `total` with zeros.
        """
        length = -(-total // size)
        end = total if exported is None else exported
        start = min(rank * length, end)
        held = min(length, end - start)
        return cls(start, held, end, 0 if exported is None else length - held)


PADDED_FOR_SPLIT = "padded so that the ranks get equal parts"


@dataclass(slots=True)
class LayerView:
    """One live layer as a rule sees it.

    Attributes:
        fqn: Name of the module in the live model.
        name: The same place in the checkpoint, after the family's renames.
        module: The live module.
        tensors: Its own tensors that no rule of an outer layer has claimed, by local name.
        resident: Every resident tensor of the model, by its name: outer layers claim for inner ones through this.
        live: Live tensor of each resident name.
        family: Names of the model family.
        config: The model's own configuration, None when it has none.
        placement: Which logical expert a physical slot holds: `(layer_id, physical) -> logical`; None for identity.
        alias: The layer object was met before under another name (tied head): claims are aliases.
        out: Where claims go.
    """

    fqn: str
    name: str
    module: Any
    tensors: Mapping[str, ResidentTensor]
    resident: Mapping[str, ResidentTensor]
    live: Mapping[str, Any]
    family: Family
    config: Any
    placement: Callable[[int, int], int] | None
    alias: bool
    out: Claims

    def attr(self, name: str, default: Any = None) -> Any:
        """Return an attribute of the live module."""
        return getattr(self.module, name, default)

    def group(self) -> tuple[int, int]:
        """Return rank and size of the group that splits this layer.

        The live group where there is one (`tp_group.rank_in_group`; None means not split), else `tp_rank`, `tp_size`.
        """
        if hasattr(self.module, "tp_group"):
            return group_of(self.module.tp_group)
        return int(self.attr("tp_rank", 0)), int(self.attr("tp_size", 1))

    def tensor(self, local: str) -> ResidentTensor | None:
        """Return a tensor by its name relative to this layer, unless it is claimed or aliases another one."""
        found = self.tensors.get(local)
        if found is None:
            found = self.resident.get(join(self.fqn, local))
        if found is None or (found.name in self.out.claimed and not self.alias):
            return None
        return found

    def bind(
        self,
        resident: ResidentTensor,
        logical: str,
        shape: Sequence[int],
        box: Box,
        ops: Sequence[ViewOp] = (),
        *,
        dtype: str = "",
        alias: bool = False,
    ) -> None:
        """Claim that a view of a resident tensor equals a box of a logical one, of the same dtype unless one is given.

        An alias is a further name of elements that are claimed already.

        Raises:
            ValueError: The view does not have the sizes of the box; the walk turns this into `Unbound`.
        """
        got = shape_after(resident.shape, tuple(ops))
        if got != box.sizes or not box.inside(tuple(shape)):
            msg = f"a view of shape {got} of {resident.shape} cannot be {logical}{box} of {tuple(shape)}"
            raise ValueError(msg)
        self.out.claimed.add(resident.name)
        if not box.count:
            return
        tensor = LogicalTensor(logical, dtype or resident.dtype, tuple(shape))
        form = CanonicalForm.QUANTIZED if recipe_of(logical) is not None else CanonicalForm.BITWISE
        self.out.bindings.append(
            Binding(Shard(tensor, box), resident.name, tuple(ops), form, alias=self.alias or alias)
        )

    def bind_spans(
        self, resident: ResidentTensor, logical: str, spans: Sequence[Span], at: Sequence[int] | None = None
    ) -> None:
        """Claim a box given by one span a dimension, held at the resident offsets `at` (zeros by default)."""
        offsets = tuple(at) if at is not None else (0,) * len(spans)
        if len(spans) != len(resident.shape):
            msg = f"{resident.shape} does not have the {len(spans)} dimensions of {logical}"
            raise ValueError(msg)
        ops = tuple(
            Narrow(dim, offset, span.length)
            for dim, (offset, span, size) in enumerate(zip(offsets, spans, resident.shape, strict=True))
            if span.length != size
        )
        box = Box(tuple(span.start for span in spans), tuple(span.length for span in spans))
        self.bind(resident, logical, tuple(span.total for span in spans), box, ops)
        for dim, (offset, span) in enumerate(zip(offsets, spans, strict=True)):
            if span.padding:
                self.pad(resident, (Narrow(dim, offset + span.length, span.padding),), PADDED_FOR_SPLIT)

    def pad(self, resident: ResidentTensor, ops: Sequence[ViewOp], reason: str, *, value_byte: int = 0) -> None:
        """Claim that a view of a resident tensor holds `value_byte` in every byte."""
        self.out.claimed.add(resident.name)
        shape = shape_after(resident.shape, tuple(ops))
        if not self.alias and Box.whole(shape).count:
            self.out.paddings.append(Padding(resident.name, tuple(ops), value_byte, reason))

    def pad_tail(self, resident: ResidentTensor, dim: int, start: int, reason: str) -> None:
        """Claim that one dimension is zero from `start` on."""
        if start < resident.shape[dim]:
            self.pad(resident, (Narrow(dim, start, resident.shape[dim] - start),), reason)

    def derive(self, resident: ResidentTensor, rule_name: str, *sources: str, ops: Sequence[ViewOp] = ()) -> None:
        """Claim that a view of a resident tensor follows from others by a rule of `layout.derived`."""
        self.out.claimed.add(resident.name)
        self.out.derived.append(Derived(resident.name, rule_name, sources, tuple(ops)))

    def exempt(self, resident: ResidentTensor, reason: str) -> None:
        """Name a resident tensor that no update writes and no export holds."""
        self.out.claimed.add(resident.name)
        self.out.exempt.append(Exempt(resident.name, reason))

    def drop(self, fqn: str, reason: str) -> None:
        """Name a checkpoint tensor that loading drops, so that a manifest which has it is not incomplete for it."""
        if not self.alias:
            self.out.dropped.append(Dropped(fqn, reason))

    def refuse(self, resident: ResidentTensor, reason: str) -> None:
        """Say that there is no rule for a resident tensor."""
        self.out.claimed.add(resident.name)
        self.out.unbound.append(Unbound(resident.name, resident.layer_class, reason))

    def refuse_rest(self, reason: str) -> None:
        """Say that there is no rule for all own tensors that are not claimed yet."""
        for resident in self.tensors.values():
            if resident.name not in self.out.claimed and not resident.alias_of:
                self.refuse(resident, reason)


def group_of(group: Any) -> tuple[int, int]:
    """Return rank and size of a live process group; `(0, 1)` for None."""
    return (0, 1) if group is None else (int(group.rank_in_group), int(group.world_size))


def join(*parts: str) -> str:
    """Join the parts of a dotted name, leaving out empty ones."""
    return ".".join(part for part in parts if part)
