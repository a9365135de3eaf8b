"""A twin of a live model without memory: the same modules and attributes, every tensor on the meta device.

What an engine's loader does to the twin it would do to the model, and nothing of the model can be written through it.
"""

from __future__ import annotations

import functools
import types
from collections import deque
from typing import Any, Final

import torch

from syncguard.layout.walk import is_module, is_tensor, live_modules, own_tensors

META: Final = torch.device("meta")


def storage_id(tensor: torch.Tensor) -> int:
    """Return what tells storages apart where none has an address; good as long as the storage lives."""
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001 - torch has no public name for it


class Twin:
    """A model of the same modules whose tensors all lie on the meta device, sharing storage where the live ones do.

    Modules are new objects of the same class with the same attributes; tensors, containers, bound methods, closures and
    partial functions are made anew around them; everything else (configurations, process groups) is the live object, which the
    follower keeps from being written through.
    """

    def __init__(self, model: Any) -> None:
        """Copy the skeleton."""
        self._live = model
        self._memo: dict[int, Any] = {}
        self._kept: list[Any] = []
        self._storages: dict[int, torch.UntypedStorage] = {}
        self.model = self._of(model)

    def named(self) -> dict[str, torch.Tensor]:
        """Return the twin of each live tensor, by the names that the walk gives."""
        found: dict[str, torch.Tensor] = {}
        for fqn, module, alias_of in live_modules(self._live):
            for local, tensor, _ in own_tensors(module):
                name = f"{fqn}.{local}" if fqn else local
                if not alias_of and name not in found and id(tensor) in self._memo:
                    found[name] = self._memo[id(tensor)]
        return found

    def _of(self, value: Any) -> Any:
        if id(value) in self._memo:
            return self._memo[id(value)]
        made = self._made(value)
        self._memo[id(value)] = made
        self._kept.append(value)  # an id is only good while its object lives
        return made

    def _made(self, value: Any) -> Any:  # noqa: PLR0911 - one line a kind
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if is_module(value):
            return self._module(value)
        if isinstance(value, dict):
            return self._filled(value, {key: self._of(item) for key, item in value.items()})
        if isinstance(value, (list, tuple, set, frozenset, deque)):
            return self._sequence(value)
        if isinstance(value, types.MethodType):
            owner = value.__self__
            return types.MethodType(value.__func__, self._of(owner)) if _holds_weights(owner) else value
        if isinstance(value, functools.partial):
            return functools.partial(
                self._of(value.func),
                *(self._of(item) for item in value.args),
                **{key: self._of(item) for key, item in value.keywords.items()},
            )
        if isinstance(value, types.FunctionType) and value.__closure__:
            return self._function(value)
        return value

    def _function(self, value: types.FunctionType) -> Any:
        """Return the function with closed-over modules and tensors exchanged for their twins."""
        held = [_content(cell) for cell in value.__closure__ or ()]
        inner = [item if _leads_nowhere(item) else self._of(item) for item in held]
        if all(new is old for new, old in zip(inner, held, strict=True)):
            return value
        twin = types.FunctionType(
            value.__code__,
            value.__globals__,
            value.__name__,
            value.__defaults__,
            tuple(types.CellType(item) for item in inner),
        )
        twin.__kwdefaults__ = value.__kwdefaults__
        return twin

    def _module(self, module: Any) -> Any:
        twin: Any = object.__new__(type(module))
        self._memo[id(module)] = twin  # before its parts, which may lead back
        self._kept.append(module)
        for key, value in vars(module).items():
            twin.__dict__[key] = self._of(value)
        return twin

    def _filled(self, live: dict[Any, Any], items: dict[Any, Any]) -> Any:
        if all(items[key] is value for key, value in live.items()):
            return live if type(live) is not dict else dict(live)
        return (
            type(live)(items) if type(live).__init__ is dict.__init__ or type(live).__name__ == "OrderedDict" else items
        )

    def _sequence(self, live: Any) -> Any:
        items = [self._of(item) for item in live]
        if all(new is old for new, old in zip(items, live, strict=True)):
            return live if not isinstance(live, (list, deque)) else type(live)(live)
        return type(live)(*items) if hasattr(live, "_fields") else type(live)(items)

    def _tensor(self, live: torch.Tensor) -> torch.Tensor:
        storage = live.untyped_storage()
        twin_storage = self._storages.get(storage_id(live))
        if twin_storage is None:
            twin_storage = torch.UntypedStorage(storage.nbytes(), device=META)
            self._storages[storage_id(live)] = twin_storage
            self._kept.append(storage)
        base = torch.empty(0, dtype=live.dtype, device=META)
        base.set_(twin_storage, live.storage_offset(), live.size(), live.stride())
        twin: torch.Tensor = base
        if type(live) is not torch.Tensor:
            twin = torch.Tensor._make_subclass(type(live), base, False)  # noqa: SLF001 - as Parameter itself does
        self._memo[id(live)] = twin
        self._kept.append(live)
        for key, value in vars(live).items():
            twin.__dict__[key] = self._of(value)
        return twin


def _holds_weights(value: Any) -> bool:
    return is_module(value) or is_tensor(value)


def _leads_nowhere(value: Any) -> bool:
    """Return whether a closed-over value is plain; containers are not looked into unless they hold weights."""
    return not isinstance(value, (torch.Tensor, types.FunctionType, types.MethodType, functools.partial)) and not (
        is_module(value) or isinstance(value, (list, tuple, dict))
    )


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not bound yet
        return None
