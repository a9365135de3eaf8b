"""Keys and values of the embedded engine: per request, and kept by token prefix across requests.

Kept entries are *not* tied to the weights that made them: after an update without a flush they are stale, exactly the
fault that the warm replay must show.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

_KEPT_REQUESTS: Final = 64


@dataclass(slots=True)
class KVCache:
    """Keys and values of one request on one rank: per layer `[tokens, kv heads, head_dim]`."""

    keys: list[torch.Tensor] = field(default_factory=list)
    values: list[torch.Tensor] = field(default_factory=list)

    def append(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Add a step's keys and values to a layer and return all of the layer's."""
        if layer == len(self.keys):
            self.keys.append(keys)
            self.values.append(values)
        else:
            self.keys[layer] = torch.cat((self.keys[layer], keys))
            self.values[layer] = torch.cat((self.values[layer], values))
        return self.keys[layer], self.values[layer]

    def head(self, tokens: int) -> KVCache:
        """Return the first tokens, sharing storage (nothing writes in place)."""
        return KVCache([k[:tokens] for k in self.keys], [v[:tokens] for v in self.values])


class PrefixCache:
    """The longest common token prefix of a new request with any kept one is re-used; oldest entries fall out."""

    def __init__(self, ranks: int) -> None:
        """Start empty."""
        self._ranks = ranks
        self._kept: OrderedDict[tuple[int, ...], list[KVCache]] = OrderedDict()

    def __len__(self) -> int:
        """Return the number of kept requests."""
        return len(self._kept)

    def match(self, ids: Sequence[int], *, limit: int) -> tuple[int, list[KVCache]]:
        """Return how many leading tokens are kept (at most `limit`) and their keys and values, one per rank."""
        best, source = 0, None
        for kept, caches in self._kept.items():
            length = _common(kept, ids, limit)
            if length > best:
                best, source = length, caches
        if source is None:
            return 0, [KVCache() for _ in range(self._ranks)]
        return best, [cache.head(best) for cache in source]

    def keep(self, ids: Sequence[int], caches: list[KVCache]) -> None:
        """Keep the keys and values of a finished request."""
        self._kept[tuple(ids)] = caches
        self._kept.move_to_end(tuple(ids))
        while len(self._kept) > _KEPT_REQUESTS:
            self._kept.popitem(last=False)

    def clear(self) -> None:
        """Forget everything."""
        self._kept.clear()


def _common(left: Sequence[int], right: Sequence[int], limit: int) -> int:
    length = 0
    for a, b in zip(left, right, strict=False):
        if a != b or length == limit:
            break
        length += 1
    return length
