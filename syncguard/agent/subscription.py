"""A subscriber's queue of readiness changes."""

from __future__ import annotations

import queue
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from syncguard.manifest.verdict import Readiness


@dataclass(slots=True)
class Subscription:
    """Readiness changes of one subscriber; a slow one loses old changes, never the newest."""

    changes: queue.Queue[Readiness] = field(default_factory=lambda: queue.Queue(maxsize=64))

    def put(self, readiness: Readiness) -> None:
        """Add a change."""
        # One producer at a time (the agent's state lock), so room made here stays until it is used.
        if self.changes.full():
            with suppress(queue.Empty):
                self.changes.get_nowait()
        self.changes.put_nowait(readiness)
