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
from syncguard.layout.recorded import ZERO, Contents, UnfollowedError, claims_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from syncguard.layout.model import ResidentTensor
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
