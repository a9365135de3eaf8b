"""Put a recorded map in place of missing rules: which residents may be bound by it, and how far it is believed.

A recording replaces an `Unbound` of a plain layer. In an architecture without a row in the family table it also replaces
what a rule guessed of checkpoint names, unless both say the same. Layers whose bytes change after the loader ran
(quantized, packed, shuffled) are never bound by a recording: it does not see that.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any, Final

from syncguard.layout.model import Binding, BindingSource, LogicalTensor, Padding, Shard, Unbound
from syncguard.layout.ops import Narrow, Select, Transpose, Unflatten
from syncguard.layout.recorded import (
    PIECES_MAX,
    UNKNOWN,
    ZERO,
    Contents,
    Strided,
    UnfollowedError,
    blocks_of,
    row_major,
)
from syncguard.spec import Box

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from syncguard.layout.model import ResidentTensor
    from syncguard.layout.ops import ViewOp
    from syncguard.layout.rules import Claims

LOADER_ZERO: Final = "recorded: the loader sets it to zero"
PLAIN_METHODS: Final = frozenset(
    {"NoneType", "UnquantizedLinearMethod", "UnquantizedEmbeddingMethod", "UnquantizedFusedMoEMethod"}
)
"""Quantization methods that leave what the loader wrote, unless one of `CHANGED_LATER` says otherwise."""
CHANGED_LATER: Final = (
    "use_intel_amx_backend",
    "use_flashinfer_trtllm_moe",
    "use_triton_kernels",
    "use_presharded_weights",
    "_mega_moe_weights_built",
)
"""Flags of layers whose bytes are rearranged after loading, or whose ranks read different files."""


@dataclass(frozen=True, slots=True)
class Recording:
    """What a loader did.

    Attributes:
        contents: Resident name → where its elements came from.
        sources: Shape of each checkpoint tensor.
        failed: Why there is no recording, empty when there is one.
    """

    contents: Mapping[str, Contents] = field(default_factory=dict)
    sources: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    failed: str = ""


def unrecordable(module: Any) -> str:
    """Return why a recording says nothing of a layer's bytes, empty when it does."""
    method = getattr(module, "quant_method", None)
    if type(method).__name__ not in PLAIN_METHODS or getattr(module, "scheme", None) is not None:
        return f"{type(method).__name__} changes what the loader wrote"
    flag = next((name for name in CHANGED_LATER if getattr(module, name, False)), "")
    if getattr(method, "w13_swiglu_interleaved", False):
        flag = "w13_swiglu_interleaved"
    if any(getattr(tensor, "is_shuffled", False) for tensor in module._parameters.values()):  # noqa: SLF001 - its own
        flag = "is_shuffled"
    return f"{flag}: changed after loading" if flag else ""


def apply_recording(
    recording: Recording,
    out: Claims,
    owners: Iterable[tuple[Any, Iterable[ResidentTensor]]],
    *,
    names_known: bool,
) -> None:
    """Bind by a recording what no rule binds.

    Args:
        recording: What the loader did.
        out: Claims of the rules; changed in place.
        owners: Each module with its own tensors.
        names_known: The architecture has a row in the family table, so that rules know checkpoint names.
    """
    unbound = {claim.resident: claim for claim in out.unbound}
    bound: dict[str, list[Binding]] = {}
    for binding in out.bindings:
        if not binding.alias:
            bound.setdefault(binding.resident, []).append(binding)
    settled = {claim.resident for claim in out.derived} | {claim.resident for claim in out.exempt}
    made: dict[str, tuple[list[Binding], list[Padding]]] = {}
    refused: dict[str, Unbound] = {}
    for module, tensors in owners:
        why_not = recording.failed or unrecordable(module)
        for resident in tensors:
            name = resident.name
            candidate = name in unbound or (not names_known and name in bound)
            if not candidate or name in settled or name in made or resident.alias_of or not prod(resident.shape):
                continue
            reason = why_not
            if not reason:
                try:
                    made[name] = recorded_claims(resident, recording)
                    continue
                except UnfollowedError as error:
                    reason = str(error)
            if name in unbound:
                was = unbound[name]
                refused[name] = Unbound(name, was.layer_class, f"{was.reason}; no recording: {reason}")
    made = {name: claims for name, claims in made.items() if name in unbound or _says(bound[name]) != _says(claims[0])}
    out.unbound[:] = [refused.get(claim.resident, claim) for claim in out.unbound if claim.resident not in made]
    out.bindings[:] = [claim for claim in out.bindings if claim.alias or claim.resident not in made]
    out.paddings[:] = [claim for claim in out.paddings if claim.resident not in made]
    for bindings, paddings in made.values():
        out.bindings += bindings
        out.paddings += paddings


def _says(bindings: Iterable[Binding]) -> set[Any]:
    return {(binding.shard.tensor, binding.shard.box, binding.ops) for binding in bindings}


def recorded_claims(resident: ResidentTensor, recording: Recording) -> tuple[list[Binding], list[Padding]]:
    """Return the recorded claims on one resident tensor.

    Raises:
        UnfollowedError: The loader does not write all of it, or in a way that was not followed.
    """
    contents = recording.contents.get(resident.name)
    written = sum(piece.box.count for piece in contents.pieces) if contents is not None else 0
    if contents is not None and contents.view.sizes != resident.shape:
        msg = f"the loader makes {contents.view.sizes} of its {resident.shape}"
        raise UnfollowedError(msg)
    if contents is None or written != prod(resident.shape):
        msg = f"the loader writes {written} of its {prod(resident.shape)} elements"
        raise UnfollowedError(msg)
    bindings: list[Binding] = []
    paddings: list[Padding] = []
    for source, box, ops in claims_of(contents, dict(recording.sources)):
        if source == ZERO:
            paddings.append(Padding(resident.name, ops, 0, LOADER_ZERO))
            continue
        tensor = LogicalTensor(source, resident.dtype, recording.sources[source])
        bindings.append(Binding(Shard(tensor, box), resident.name, ops, source=BindingSource.RECORDED))
    return bindings, paddings


def claims_of(contents: Contents, sources: dict[str, tuple[int, ...]]) -> Iterator[tuple[str, Box, tuple[ViewOp, ...]]]:
    """Yield what each box of a resident tensor must equal: `(checkpoint name or ZERO, box of it, views that lead there)`.

    Args:
        contents: A resident tensor after the loader ran.
        sources: Shape of each checkpoint tensor.

    Raises:
        UnfollowedError: A piece was not followed, or is no box of its source.
    """
    count = 0
    for piece in contents.pieces:
        if piece.source == UNKNOWN:
            msg = f"{piece.box} came through an operation that is not followed"
            raise UnfollowedError(msg)
        if piece.source == ZERO:
            yield ZERO, piece.box, _narrowed(piece.box, contents.view.sizes)
            continue
        shape = sources[piece.source]
        if any(n > 1 and not stride for n, stride in zip(piece.box.sizes, piece.strides, strict=True)):
            msg = f"{piece.box} repeats elements of {piece.source}"
            raise UnfollowedError(msg)
        view = Strided(piece.offset, piece.box.sizes, piece.strides)
        for block in blocks_of(view, Strided(0, shape, row_major(shape))):
            count += 1
            if count > PIECES_MAX:
                msg = f"more than {PIECES_MAX} boxes"
                raise UnfollowedError(msg)
            held = Box(tuple(o + b for o, b in zip(piece.box.offsets, block.origin, strict=True)), block.sizes)
            yield piece.source, block.parent_box, _views(held, contents.view.sizes, block.axes, len(shape))


def _views(held: Box, shape: tuple[int, ...], axes: tuple[int | None, ...], source_dims: int) -> tuple[ViewOp, ...]:
    """Return the views from a resident tensor to a box in the dimensions of its source."""
    ops: list[ViewOp] = []
    spare = [d for d in range(source_dims) if d not in axes]
    order: list[int] = []  # the source's dimension of each dimension that is left
    for dim, axis in enumerate(axes):
        here = len(order)
        own = axis
        if own is None and spare:
            own = spare.pop(0)
        if own is None:
            ops.append(Select(here, held.offsets[dim]))
            continue
        if (held.offsets[dim], held.sizes[dim]) != (0, shape[dim]):
            ops.append(Narrow(here, held.offsets[dim], held.sizes[dim]))
        order.append(own)
    for place in range(len(order)):
        least = min(range(place, len(order)), key=order.__getitem__)
        if least != place:
            ops.append(Transpose(place, least))
            order[place], order[least] = order[least], order[place]
    sizes = {axis: held.sizes[dim] for dim, axis in enumerate(axes) if axis is not None}
    for own in sorted(spare):  # dimensions of 1 in the source that the resident tensor does not have
        place = sum(other < own for other in order)
        if place < len(order):
            ops.append(Unflatten(place, (1, sizes.get(order[place], 1))))
        else:
            ops.append(Unflatten(place - 1, (sizes.get(order[place - 1], 1), 1)))
        order.insert(place, own)
    return tuple(ops)


def _narrowed(box: Box, shape: tuple[int, ...]) -> tuple[ViewOp, ...]:
    return tuple(
        Narrow(dim, start, size)
        for dim, (start, size) in enumerate(zip(box.offsets, box.sizes, strict=True))
        if size != shape[dim]
    )
