"""How the ranks of later pipeline stages answer: through the store of their process group, since SGLang drops what they say.

SGLang 0.5.23 sends every request down the pipeline, and each stage runs it (`scheduler_pp_mixin.py`), yet only the first
stage's answer reaches the HTTP server. The first stage cannot wait for the others inside a request: it passes the request
on only after it has answered itself. So the others leave their answers under the request's nonce, and the first hands
them over when the agent asks again.
"""

from __future__ import annotations

from typing import Any, Final

ANSWER_KEY: Final = "syncguard"
"""Name of a rank's answer among the checksums of SGLang's own reply."""
KEPT: Final = 4
"""Requests of which a stage keeps its answer; older ones are deleted, whether they were collected or not."""


class StageBoard:
    """Answers of this rank that lie in the store, and the way to those of the others.

    Args:
        store: A `torch.distributed.Store`; the default group's, made by the engine, when None.
    """

    def __init__(self, store: Any = None) -> None:
        """Look for the store at its first use: a probe is installed before the process group is made."""
        self._store = store
        self._left: list[str] = []

    def leave(self, nonce: str, rank: int, role: str, text: str) -> None:
        """Leave an answer of this rank, of a later stage, for the first one."""
        store = self._the_store()
        key = _key(nonce, rank, role)
        store.set(key, text)
        self._left.append(key)
        while len(self._left) > KEPT:
            store.delete_key(self._left.pop(0))

    def collect(self, nonce: str, world_size: int, role: str) -> dict[str, str]:
        """Return what lies there under a nonce, as entries of a reply: `rankN.ROLE.syncguard` → answer."""
        store = self._the_store()
        found = {}
        for rank in range(world_size):
            key = _key(nonce, rank, role)
            if store.check([key]):  # getting a key that is not there would wait for it
                found[f"rank{rank}.{role}.{ANSWER_KEY}"] = store.get(key).decode()
        return found

    def _the_store(self) -> Any:
        if self._store is None:
            from torch.distributed import distributed_c10d

            self._store = distributed_c10d._get_default_store()  # noqa: SLF001 - torch has no public name for it
        return self._store


def _key(nonce: str, rank: int, role: str) -> str:
    return f"syncguard/{nonce}/{rank}/{role}"
