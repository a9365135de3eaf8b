"""Which captured graphs an SGLang rank replays, and where its weights lay when each was captured.

A graph reads weights by address. An update that binds a parameter to new storage leaves it with the old bytes, which no
digest of the new storage and no prefill replay (prefill runs without graphs by default) would show. Source:
`model_executor/model_runner.py` of SGLang 0.5.23, `init_cuda_graphs` and the captures after it.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary, ref

from syncguard.engines.rank_probe import tensor_addresses

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

logger = logging.getLogger(__name__)

RUNNER: Final = "sglang.srt.model_executor.model_runner.ModelRunner"
GRAPH_CALLS: Final[Mapping[str, tuple[str, ...]]] = {
    f"{RUNNER}.init_cuda_graphs": ("decode", "prefill"),
    f"{RUNNER}.init_decode_cuda_graph": ("decode",),
    f"{RUNNER}.init_prefill_cuda_graph": ("prefill",),
    f"{RUNNER}._recapture_elastic_cuda_graphs": ("decode",),
}
"""The calls that capture graphs, with the kinds that each captures anew."""


class CapturedGraphs:
    """The graphs of each model runner of one process, by the runner's own `WeightChecker`."""

    def __init__(self, changed: Callable[[Any], None]) -> None:
        """Start without graphs; `changed` is called with a checker whose graphs were captured or dropped."""
        self._changed = changed
        self._held: WeakKeyDictionary[Any, dict[str, dict[str, int]]] = WeakKeyDictionary()

    def of(self, checker: Any) -> Mapping[str, Mapping[str, int]]:
        """Return the addresses of the weights at capture, by kind of graph; empty where none is replayed."""
        return self._held.get(checker, {})

    def hook(self, kinds: tuple[str, ...]) -> Callable[..., Any]:
        """Return the AROUND hook of a call that captures graphs of these kinds.

        The call may return early or break and leave the graphs of before, which then read where they read before.
        """

        def on_capture(original: Any, runner: Any, *args: Any, **kwargs: Any) -> Any:
            kept = {kind: _reference(_graphs_of(runner, kind)) for kind in kinds}
            try:
                return original(runner, *args, **kwargs)
            finally:
                try:
                    anew = tuple(kind for kind, before in kept.items() if before() is not _graphs_of(runner, kind))
                    self.note(runner, anew)
                except Exception:  # an engine must not break because it is watched
                    logger.exception("syncguard could not note a captured graph")

        return on_capture

    def note(self, runner: Any, kinds: tuple[str, ...]) -> None:
        """Take down what a model runner holds now; graphs of `kinds` were captured a moment ago."""
        checker = runner._weight_checker  # noqa: SLF001 - how SGLang reaches the model of this runner
        before = self._held.get(checker, {})
        now: dict[str, dict[str, int]] = {}
        for kind in ("decode", "prefill"):
            if _graphs_of(runner, kind) is None:
                continue  # runs layer by layer
            now[kind] = before[kind] if kind in before and kind not in kinds else tensor_addresses(runner.model)
        self._held[checker] = now
        self._changed(checker)


def _graphs_of(runner: Any, kind: str) -> Any:
    """Return what replays the graphs of a kind, None where a model runner has none."""
    found = getattr(runner, f"{kind}_cuda_graph_runner", None)
    return None if found is getattr(runner, "eager_runner", None) else found


def _reference(graphs: Any) -> Callable[[], Any]:
    """Return a way to the same object that does not keep the memory of its graphs."""
    try:
        return (lambda: None) if graphs is None else ref(graphs)
    except TypeError:  # takes no weak reference: then it counts as captured again
        return lambda: None
