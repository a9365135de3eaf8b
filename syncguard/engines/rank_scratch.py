"""Digests of memory whose bytes a kernel keeps in another order: put back piece by piece into bounded scratch.

A piece is a run of experts, or a run of tiles of one; each is rearranged, digested under its place in the logical tensor, and
dropped before the next. Partial digests add up, so the answer is that of the whole. Nothing of the engine is written.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any, Final

from syncguard.digest import DigestJob, PartialDigest, engine_for
from syncguard.errors import UnsupportedError
from syncguard.layout.ops import Narrow, Select, apply_ops, shape_after
from syncguard.layout.padding import wrong_padding
from syncguard.layout.regions import Spans, box_of
from syncguard.layout.repack import Rearrange, split_chain
from syncguard.manifest.model import CheckResult
from syncguard.spec import Box, dtype_named

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from syncguard.layout.model import Binding, Padding
    from syncguard.layout.ops import ViewOp

PIECE_BYTES: Final = 8 << 20
"""Resident bytes put back at a time. Nibbles as bytes are twice that, and there are at most four such copies at once."""

MAX_UNCUT_BYTES: Final = 24 << 20
"""Largest part that may be put back at once where an arrangement cannot be cut: with copies less than 256 MB."""


@dataclass(slots=True)
class _Claim:
    """A box of the rearranged tensor, `held[d]` in each of its dimensions; `kept` are those that its view has."""

    held: Spans
    kept: tuple[int, ...]
    binding: Binding | None
    padding: Padding | None
    partial: PartialDigest = field(default_factory=PartialDigest.zero)
    wrong_count: int = 0
    first: tuple[int, ...] = ()


@dataclass(slots=True)
class _Group:
    """All claims on one resident tensor through one front of operations."""

    resident: str
    front: tuple[ViewOp, ...]
    claims: list[_Claim] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Reading:
    """What one pass over the memory gave: the partial digest of each binding, and the result of each padding."""

    partials: Sequence[PartialDigest]
    paddings: Sequence[CheckResult]


class ScratchReader:
    """The claims of a layout that need bytes to be moved, ready to be read as often as asked.

    Args:
        bindings: Those of the layout whose chain moves bytes.
        paddings: Likewise.
        tensors: Live tensor of each resident name.

    Raises:
        UnsupportedError: A chain that cannot be read in pieces.
    """

    def __init__(self, bindings: Sequence[Binding], paddings: Sequence[Padding], tensors: Mapping[str, Any]) -> None:
        """Group the claims by what has to be put back for them."""
        self._tensors = tensors
        self._groups: dict[tuple[str, tuple[ViewOp, ...]], _Group] = {}
        self._bindings = [self._add(claim.resident, claim.ops, claim, None) for claim in bindings]
        self._paddings = [self._add(claim.resident, claim.ops, None, claim) for claim in paddings]
        self.read_bytes = sum(
            int(tensors[group.resident].numel()) * int(tensors[group.resident].element_size())
            for group in self._groups.values()
        )

    def _add(self, resident: str, ops: tuple[ViewOp, ...], binding: Binding | None, padding: Padding | None) -> _Claim:
        front, rest = split_chain(ops)
        shape = shape_after(tuple(int(n) for n in self._tensors[resident].shape), front)
        for op in rest:
            if not isinstance(op, (Narrow, Select)):
                raise UnsupportedError("views after bytes were moved", found=op, where=resident)
        claim = _Claim(*box_of(shape, rest), binding, padding)
        self._groups.setdefault((resident, front), _Group(resident, front)).claims.append(claim)
        return claim

    def read(self, key_seed: bytes) -> Reading:
        """Put all back, piece by piece, and return what was read, in the order of the claims."""
        for claim in (*self._bindings, *self._paddings):
            claim.partial, claim.wrong_count, claim.first = PartialDigest.zero(), 0, ()
        for group in self._groups.values():
            live = self._tensors[group.resident].detach()
            for place, tensor in _pieces(live, group.front):
                _read_piece(group, tensor, place, key_seed)
        checks = [
            CheckResult(
                ok=not c.wrong_count, wrong_count=c.wrong_count, detail=f"first at {c.first}" if c.first else ""
            )
            for c in self._paddings
        ]
        return Reading([claim.partial for claim in self._bindings], checks)


def _pieces(live: Any, front: tuple[ViewOp, ...]) -> Iterator[tuple[Spans, Any]]:
    """Yield parts of what the front gives with their place in it, each from at most `PIECE_BYTES` where it can be cut."""
    last = next(index for index, op in enumerate(front) if isinstance(op, Rearrange))
    before, cut, after = front[:last], front[last], front[last + 1 :]
    if any(not hasattr(op, "table") for op in (*before, *after)) or not isinstance(cut, Rearrange):
        raise UnsupportedError("more than one rearrangement of the same bytes", found=front)
    shape = shape_after(tuple(int(n) for n in live.shape), front)
    lead = len(live.shape) - cut.dims
    if lead > 1:
        raise UnsupportedError("rearrangement below two dimensions", found=cut)
    outer = int(live.shape[0]) if lead else 1
    item_bytes = prod(int(n) for n in live.shape[lead:]) * int(live.element_size())
    count = max(1, PIECE_BYTES // max(1, item_bytes))
    whole = tuple((0, size) for size in shape[lead:])
    if cut.leading == 1 and item_bytes > MAX_UNCUT_BYTES:
        raise UnsupportedError("memory that cannot be put back in pieces", found=f"{item_bytes} bytes", where=cut)
    if count > 1 or item_bytes <= PIECE_BYTES or cut.leading == 1:
        for start in range(0, outer, count):
            stop = min(outer, start + count)
            part = live[start:stop] if lead else live
            yield ((start, stop),) * lead + whole, apply_ops(part, front)
        return
    step = max(1, cut.leading * PIECE_BYTES // item_bytes)
    for index in range(outer):
        one = apply_ops(live[index] if lead else live, before)
        for start in range(0, cut.leading, step):
            stop = min(cut.leading, start + step)
            part, op = cut.piece(one, start, stop)
            rows = (start * cut.rows_per_leading, stop * cut.rows_per_leading)
            tensor = apply_ops(op.apply(part), after)
            yield ((index, index + 1),) * lead + (rows, *whole[1:]), tensor[None] if lead else tensor


def _read_piece(group: _Group, tensor: Any, place: Spans, key_seed: bytes) -> None:
    jobs: list[DigestJob] = []
    owners: list[_Claim] = []
    for claim in group.claims:
        common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(claim.held, place, strict=True))
        if any(low >= high for low, high in common):
            continue
        view = tensor
        for dim in reversed(range(len(common))):
            low, high = common[dim][0] - place[dim][0], common[dim][1] - place[dim][0]
            index: Any = slice(low, high) if dim in claim.kept else low
            view = view[(slice(None),) * dim + (index,)]
        within = tuple(common[dim][0] - claim.held[dim][0] for dim in claim.kept)
        if claim.padding is not None:
            count, first = wrong_padding(view, claim.padding.value_byte)
            if count and not claim.first:
                claim.first = tuple(a + b for a, b in zip(first, within, strict=True))
            claim.wrong_count += count
        elif claim.binding is not None:
            shard = claim.binding.shard
            sizes = tuple(common[dim][1] - common[dim][0] for dim in claim.kept)
            box = Box(tuple(a + b for a, b in zip(shard.box.offsets, within, strict=True)), sizes)
            jobs.append(DigestJob(view, dtype_named(shard.tensor.dtype), shard.tensor.shape, box, shard.tensor.fqn))
            owners.append(claim)
    if not jobs:
        return
    device = getattr(getattr(tensor, "device", None), "type", "cpu")
    for claim, partial in zip(owners, engine_for(device).partials(jobs, key_seed=key_seed), strict=True):
        claim.partial = claim.partial + partial
