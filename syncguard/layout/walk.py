"""Walk a live model and say for every tensor of it what it must equal, or that nobody knows.

The model is read by duck typing: modules have `_parameters`, `_buffers` and `_modules`, tensors have `data_ptr` and
`stride`. Nothing is copied and no engine is imported.
"""

from __future__ import annotations

import sys
from collections import deque
from dataclasses import dataclass, field, replace
from math import prod
from typing import TYPE_CHECKING, Any

from syncguard.errors import DigestInputError
from syncguard.layout import (
    attention,
    experts,
    fp4,
    fp4_experts,
    linear,
    moved_experts,
    mxfp4_experts,
    mxfp8,
    packed,
    packed_experts,
    vocab,
)
from syncguard.layout.families import UNKNOWN, Family, family_of
from syncguard.layout.model import Exempt, RankIdentity, RankLayout, ResidentTensor, Role, Unbound
from syncguard.layout.recording import Recording, apply_recording
from syncguard.layout.rules import Claims, LayerView, join, rule_for
from syncguard.spec import dtype_named

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

RULE_MODULES = (
    attention,
    experts,
    fp4,
    fp4_experts,
    linear,
    moved_experts,
    mxfp4_experts,
    mxfp8,
    packed,
    packed_experts,
    vocab,
)
"""Imported for the rules that they register."""

FOLLOWED = ("quant_method", "scheme", "kernel")
"""Attributes whose objects may keep weights outside the module (mxfp4 keeps its triton tensors there)."""
REGISTRIES = frozenset({"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"})
"""Where torch itself keeps the parts of a module."""
EMPTY_WHEN_UNUSED = frozenset(
    name
    for which in ("", "w13_", "w2_")
    for name in (
        f"{which}g_idx",
        f"{which}g_idx_sort_indices",
        f"{which}weight_g_idx",
        f"{which}qzeros",
        f"{which}weight_zero_point",
    )
)
"""Tensors of Marlin kernels that hold nothing without an activation order or zero points (`marlin_utils.py` 0.5.23:290)."""
COMMUNICATORS = frozenset({"GroupCoordinator"})
"""Process groups, whose tensors are what is sent between ranks (`distributed/parallel_state.py`, SGLang 0.5.23)."""
_OPAQUE_NAMED = 32
"""Objects named as out of sight for one model; more would hide the first."""


@dataclass(slots=True)
class _Place:
    """A module at one of its names."""

    fqn: str
    module: Any
    alias_of: str = ""
    tensors: dict[str, ResidentTensor] = field(default_factory=dict)


def walk_model(
    model: Any,
    *,
    rank: RankIdentity,
    architecture: str | None = None,
    placement: Callable[[int, int], int] | None = None,
    record: Callable[[Any], Recording] | None = None,
) -> tuple[RankLayout, dict[str, Any]]:
    """Return what a rank holds, sealed, and the live tensor of each resident name.

    Args:
        model: The live model of one rank.
        rank: Which rank speaks.
        architecture: Name of the model class, by default that of the live class.
        placement: `(layer_id, physical expert) -> logical expert`; by default SGLang's own live map when it has one.
        record: Records what the engine's loader does; asked where rules leave something unbound, or only guess checkpoint names.

    Returns:
        The sealed layout and `{resident name: live tensor}`. Each resident is bound, padding, derived, exempt, alias, or
        named in `unbound`.
    """
    architecture = architecture or type(model).__name__
    family = family_of(architecture)
    placement = placement or live_expert_placement()
    places, live = _places(model)
    residents = _mark_aliases(places, live)
    out = Claims()
    for place in places:
        _claim_place(place, family=family, model=model, residents=residents, live=live, placement=placement, out=out)
    if record is not None and (out.unbound or family is UNKNOWN):
        owners = [(place.module, place.tensors.values()) for place in places if not place.alias_of]
        apply_recording(record(model), out, owners, names_known=family is not UNKNOWN)
    layout = RankLayout(
        rank=rank,
        architecture=architecture,
        residents=tuple(residents.values()),
        bindings=tuple(out.bindings),
        paddings=tuple(out.paddings),
        derived=tuple(out.derived),
        exempt=tuple(out.exempt),
        unbound=tuple(out.unbound),
        uncovered=(*out.uncovered, *_out_of_sight(places, live)),
        dropped=tuple(out.dropped),
    )
    return layout.sealed(), live


def is_tensor(value: Any) -> bool:
    """Return whether a value has memory and strides, whatever library made it."""
    return hasattr(value, "data_ptr") and hasattr(value, "stride") and hasattr(value, "dtype")


def live_expert_placement() -> Callable[[int, int], int] | None:
    """Return SGLang's live physical-to-logical expert map (EPLB), None when this process has none.

    Source: `sglang/srt/eplb/expert_location.py` 0.5.23:62-91, `physical_to_logical_map_cpu[layer, physical]`.
    """
    module = sys.modules.get("sglang.srt.eplb.expert_location")
    if module is None:
        return None
    metadata = module.get_global_expert_location_metadata()
    if metadata is None:
        return None
    table: list[list[int]] = metadata.physical_to_logical_map_cpu.tolist()
    return lambda layer, physical: table[layer][physical]


def live_modules(model: Any) -> Iterator[tuple[str, Any, str]]:
    """Yield every module under each of its names: `(name, module, first name when it was met before)`.

    Registered modules come first, in torch's order, then those that only a plain attribute leads to (a list of layers, a
    module put into `__dict__`): torch does not list them, yet a forward can use them.
    """
    first: dict[int, str] = {}
    stack = [("", model)]
    unregistered: deque[tuple[str, Any]] = deque()
    while stack or unregistered:
        registered = bool(stack)
        fqn, module = stack.pop() if stack else unregistered.popleft()
        seen = first.get(id(module))
        if not registered and seen is not None:
            continue  # a reference to a layer is no second name of it
        yield fqn, module, "" if seen is None else seen or "(model)"
        if seen is not None:
            continue
        first[id(module)] = fqn
        children = [(join(fqn, key), child) for key, child in module._modules.items() if child is not None]  # noqa: SLF001
        stack.extend(reversed(children))
        unregistered.extend((join(fqn, local), leaf) for local, leaf in _attributes(module) if is_module(leaf))


def own_tensors(module: Any) -> Iterator[tuple[str, Any, Role]]:
    """Yield the tensors that a module itself holds: parameters, buffers, and those that its attributes lead to."""
    for table, role in ((module._parameters, Role.PARAMETER), (module._buffers, Role.BUFFER)):  # noqa: SLF001
        for local, tensor in table.items():
            if tensor is not None:
                yield local, tensor, role
    for local, leaf in _attributes(module):
        if is_tensor(leaf):
            yield local, leaf, Role.ATTRIBUTE


def is_module(value: Any) -> bool:
    """Return whether a value is a layer, whatever library made it."""
    return hasattr(value, "_modules") and hasattr(value, "_parameters") and not isinstance(value, type)


def _places(model: Any) -> tuple[list[_Place], dict[str, Any]]:
    places: list[_Place] = []
    live: dict[str, Any] = {}
    for fqn, module, alias_of in live_modules(model):
        place = _Place(fqn, module, alias_of)
        places.append(place)
        for wanted, tensor, role in own_tensors(module):
            local = wanted
            while local in place.tensors or (join(fqn, local) in live and not alias_of):
                local += "'"  # two ways to one name must not hide one of the tensors
            name = join(fqn, local)
            live[name] = tensor
            place.tensors[local] = _resident(name, tensor, role, type(module).__name__)
    return places, live


def _attributes(module: Any) -> Iterator[tuple[str, Any]]:
    """Yield tensors and modules that plain attributes lead to, with the way there as a name."""
    met: set[int] = set()
    for local, value in vars(module).items():
        if local not in REGISTRIES and type(value) not in _PLAIN:
            yield from _leaves(local, value, met, followed=local in FOLLOWED)


_PLAIN = frozenset({bool, int, float, str, type(None)})


def _leaves(name: str, value: Any, met: set[int], *, followed: bool) -> Iterator[tuple[str, Any]]:
    """Yield tensors and modules of a value: itself, those inside containers, and those of an object to be followed."""
    if is_tensor(value) or is_module(value):
        yield name, value
        return
    inner: Any = ()
    if isinstance(value, dict):
        inner = value.items()
    elif isinstance(value, (list, tuple, set, frozenset, deque)):
        inner = enumerate(value)
    elif followed and hasattr(value, "__dict__"):
        inner = vars(value).items()
    if not inner or id(value) in met:
        return
    met.add(id(value))
    of_object = followed and not isinstance(value, (dict, list, tuple, set, frozenset, deque))
    for key, item in inner:
        if type(item) not in _PLAIN:
            yield from _leaves(join(name, str(key)), item, met, followed=of_object and key in FOLLOWED)


def _out_of_sight(places: list[_Place], live: dict[str, Any]) -> Iterator[str]:
    """Name attributes whose objects hold tensors of their own, which are not followed and so not compared."""
    known = {int(tensor.data_ptr()) for tensor in live.values() if not _on_meta(tensor)}
    met: set[int] = set()
    named = 0
    for place in places:
        for local, value in vars(place.module).items():
            opaque = hasattr(value, "__dict__") and not (
                local in REGISTRIES or local in FOLLOWED or is_tensor(value) or is_module(value) or callable(value)
            )
            if not opaque or id(value) in met or type(value).__name__ in COMMUNICATORS:
                continue
            met.add(id(value))
            held = [
                leaf for inner, item in vars(value).items() for _, leaf in _leaves(inner, item, met, followed=False)
            ]
            own = [t for t in held if is_tensor(t) and not _on_meta(t) and int(t.data_ptr()) not in known]
            if own and named < _OPAQUE_NAMED:
                named += 1
                yield f"{join(place.fqn, local)}: {len(own)} tensors inside a {type(value).__name__}"


def _resident(name: str, tensor: Any, role: Role, layer_class: str) -> ResidentTensor:
    shape = tuple(int(n) for n in tensor.shape)
    dtype = str(tensor.dtype).removeprefix("torch.")
    return ResidentTensor(
        name=name,
        dtype=dtype,
        shape=shape,
        strides=tuple(int(n) for n in tensor.stride()),
        role=role,
        layer_class=layer_class,
        storage_bytes=prod(shape) * int(tensor.element_size()),
    )


def _mark_aliases(places: list[_Place], live: dict[str, Any]) -> dict[str, ResidentTensor]:
    """Mark equal views of the same memory, and attributes whose memory lies inside that of parameters."""
    residents = {tensor.name: tensor for place in places for tensor in place.tensors.values()}
    owner: dict[tuple[Any, ...], str] = {}
    order = sorted(residents.values(), key=lambda tensor: tensor.role is Role.ATTRIBUTE)
    spans: list[tuple[int, int, str]] = []
    for tensor in order:
        if not tensor.storage_bytes or _on_meta(live[tensor.name]):
            continue
        start = int(live[tensor.name].data_ptr())
        key = (start, str(live[tensor.name].device), tensor.shape, tensor.strides, tensor.dtype)
        if key in owner:
            residents[tensor.name] = replace(tensor, alias_of=owner[key])
            continue
        owner[key] = tensor.name
        size = tensor.storage_bytes // prod(tensor.shape)
        extent = (1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.strides, strict=True))) * size
        if tensor.role is not Role.ATTRIBUTE:
            if extent == tensor.storage_bytes:  # dense, so that its extent is all its own
                spans.append((start, start + extent, tensor.name))
            continue
        spans.sort()
        within = _covering(spans, start, start + extent)
        if within:
            residents[tensor.name] = replace(tensor, alias_of=within)
    for place in places:
        place.tensors = {local: residents[tensor.name] for local, tensor in place.tensors.items()}
    return residents


def _on_meta(tensor: Any) -> bool:
    return getattr(getattr(tensor, "device", None), "type", "") == "meta"


def _covering(spans: list[tuple[int, int, str]], start: int, stop: int) -> str:
    """Return the first of the sorted spans that together cover `[start, stop)`, empty when they do not."""
    reach, first = start, ""
    for low, high, name in spans:
        if low > reach:
            break
        if high > reach:
            first = first or name
            reach = high
            if reach >= stop:
                return first
    return ""


def _claim_place(
    place: _Place,
    *,
    family: Family,
    model: Any,
    residents: dict[str, ResidentTensor],
    live: dict[str, Any],
    placement: Callable[[int, int], int] | None,
    out: Claims,
) -> None:
    alias = bool(place.alias_of)
    if alias and not hasattr(place.module, "shard_indices"):
        return  # a second name of a layer that no checkpoint knows; its tensors are marked as aliases
    own = {
        local: tensor
        for local, tensor in place.tensors.items()
        if tensor.name not in out.claimed and (alias or not tensor.alias_of)
    }
    for local, tensor in list(own.items()):
        reason = _unusable(tensor, live[tensor.name])
        if local in EMPTY_WHEN_UNUSED and not prod(tensor.shape):
            out.claimed.add(tensor.name)
            out.exempt.append(Exempt(tensor.name, "empty: a kernel wants one to be there"))
            del own[local]
        elif reason:
            out.claimed.add(tensor.name)
            out.unbound.append(Unbound(tensor.name, tensor.layer_class, reason))
            del own[local]
    found = rule_for(place.module)
    if not own and (found is None or not place.tensors):
        return
    view = LayerView(
        fqn=place.fqn,
        name=family.checkpoint_name(place.fqn),
        module=place.module,
        tensors=own,
        resident=residents,
        live=live,
        family=family,
        config=getattr(model, "config", None),
        placement=placement,
        alias=alias,
        out=out,
    )
    if found is None:
        view.refuse_rest(f"no rule for layer class {type(place.module).__name__}")
        return
    marks = (len(out.bindings), len(out.paddings))
    try:
        found[1](view)
    except (ValueError, TypeError, AttributeError, IndexError) as error:
        del out.bindings[marks[0] :], out.paddings[marks[1] :]
        for tensor in own.values():
            out.claimed.discard(tensor.name)
        view.refuse_rest(f"rule of {found[0]}: {error}")
        return
    if not alias:
        view.refuse_rest(f"rule of {found[0]} does not know this tensor")


def _unusable(resident: ResidentTensor, tensor: Any) -> str:
    """Return why a tensor cannot be read, empty when it can."""
    if _on_meta(tensor):
        return "on the meta device: its bytes are elsewhere"
    if not prod(resident.shape):
        return "has no element: the engine keeps its bytes elsewhere"
    try:
        dtype_named(resident.dtype)
    except DigestInputError as error:
        return str(error)
    return ""
