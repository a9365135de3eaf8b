"""Which workers the routers were told to use: each told once, and never while another call tells them something else."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence


class Router(Protocol):
    """Where readiness goes: a gateway, an orchestrator."""

    def admit(self, worker: str) -> None:
        """Let the worker serve.

        Raises:
            UnreachableError: The router did not answer or refused.
        """

    def remove(self, worker: str, because: str) -> None:
        """Stop new requests to the worker; those in flight go on.

        Raises:
            UnreachableError: The router did not answer or refused.
        """


class Admission:
    """What the routers were told of each worker.

    Args:
        routers: All are told the same, in order.
        addresses: Of the workers' agents.
        name_of: Returns the name by which routers know the worker of an agent.
    """

    def __init__(self, routers: Sequence[Router], addresses: Iterable[str], name_of: Callable[[str], str]) -> None:
        """Start with routers that were told nothing."""
        self.routers = tuple(routers)
        self._name_of = name_of
        # None: a router was being told when it failed, so that nobody knows.
        self._admitted: dict[str, bool | None] = dict.fromkeys(addresses)
        self._locks = {address: threading.RLock() for address in self._admitted}

    def held(self, address: str) -> threading.RLock:
        """Return the lock that keeps one worker's admission as it is."""
        return self._locks[address]

    def tell(self, address: str, *, ready: bool, because: str) -> None:
        """Tell the routers, unless they were told the same before.

        Raises:
            UnreachableError: A router did not answer or refused.
        """
        with self._locks[address]:
            if self._admitted[address] is ready or not self.routers:
                return
            self._admitted[address] = None
            name = self._name_of(address)
            for router in self.routers:
                if ready:
                    router.admit(name)
                else:
                    router.remove(name, because)
            self._admitted[address] = ready
