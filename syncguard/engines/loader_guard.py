"""What a loader must not leave behind in a live model: state of objects that the twin shares with it.

A twin has modules, tensors and plain containers of its own, yet configurations, quantization methods and trackers are the
live objects. A loader that keeps a count or a tensor in one of them would leave it there, without memory, in an engine that
serves. So these are written down before the loader runs and put back after it, on the thread that also runs the engine.
"""

from __future__ import annotations

import types
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from syncguard.layout.walk import REGISTRIES, is_module, is_tensor, live_modules

if TYPE_CHECKING:
    from collections.abc import Iterator

_NO_STATE: Final = (
    type,
    types.ModuleType,
    types.FunctionType,
    types.MethodType,
    types.BuiltinFunctionType,
    bool,
    int,
    float,
    str,
    bytes,
    type(None),
)
_CONTAINERS: Final = (dict, list, set, deque)


@dataclass(slots=True)
class LiveState:
    """State of the objects that layers of a live model hold, as it was.

    Objects held by these in turn are looked at for their containers only: further away is what other threads may write.
    """

    _objects: list[tuple[Any, dict[str, Any]]]
    _containers: list[tuple[Any, Any]]

    @classmethod
    def of(cls, model: Any) -> LiveState:
        """Write down the state of a live model's own objects, by reference."""
        objects: list[tuple[Any, dict[str, Any]]] = []
        containers: list[tuple[Any, Any]] = []
        met: set[int] = set()
        for _, module, alias_of in live_modules(model):
            if alias_of:
                continue
            held = [value for key, value in vars(module).items() if key not in REGISTRIES]
            for value in _reached(held, met):
                if isinstance(value, _CONTAINERS):
                    containers.append((value, _copied(value)))
                    continue
                objects.append((value, dict(vars(value))))
                containers += [(item, _copied(item)) for item in vars(value).values() if isinstance(item, _CONTAINERS)]
        return cls(objects, containers)

    def put_back(self) -> None:
        """Put back what differs now."""
        for value, was in self._objects:
            now = vars(value)
            if not _same(now, was):
                now.clear()
                now.update(was)
        for container, was in self._containers:
            if _same(container, was):
                continue
            container.clear()
            (container.update if isinstance(container, (dict, set)) else container.extend)(was)


def _reached(held: list[Any], met: set[int]) -> Iterator[Any]:
    """Yield objects with state among values and inside containers of them, and the containers."""
    stack = list(held)
    while stack:
        value = stack.pop()
        if isinstance(value, _NO_STATE) or is_tensor(value) or is_module(value) or id(value) in met:
            continue
        if isinstance(value, (*_CONTAINERS, tuple, frozenset)):
            met.add(id(value))
            stack.extend(value.values() if isinstance(value, dict) else value)
            if isinstance(value, _CONTAINERS):
                yield value
        elif isinstance(getattr(value, "__dict__", None), dict):
            met.add(id(value))
            yield value


def _copied(container: Any) -> Any:
    kind = dict if isinstance(container, dict) else set if isinstance(container, set) else list
    return kind(container)


def _same(now: Any, was: Any) -> bool:
    if len(now) != len(was):
        return False
    if isinstance(now, dict):
        return all(key in was and was[key] is value for key, value in now.items())
    if isinstance(now, (set, frozenset)):
        return bool(now == was)
    return all(one is other for one, other in zip(now, was, strict=True))
