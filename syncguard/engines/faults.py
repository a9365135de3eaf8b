"""Faults of a rollout worker as data: what goes wrong, where, and the proof that it did.

A plan is armed before the moment it concerns; each fault fires once and reports it, so a test that expects a block
can tell "not detected" from "never happened". Only the embedded engine acts on them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence


class FaultKind(str, Enum):
    """What goes wrong. Stream faults change what is loaded, resident faults what lies in memory afterwards."""

    SKIP_PUSH = "skip_push"
    """Nothing of the update arrives; label and epoch advance all the same."""
    TORN_PUSH = "torn_push"
    """The second half of the tensors never arrives."""
    RANK_STALE = "rank_stale"
    """One rank ignores the update."""
    SWAP = "swap"
    """Two tensors arrive under each other's names."""
    TRANSPOSE = "transpose"
    """A square tensor arrives transposed."""
    DROP_TENSOR = "drop_tensor"
    """One tensor never arrives."""
    PADDING_DIRT = "padding_dirt"
    """A padding row of the vocabulary is not zero."""
    ELEMENT_FLIP = "element_flip"
    """The lowest bit of one resident element is flipped."""
    KV_REPLICA = "kv_replica"
    """One rank's copy of a key head differs from the other copies."""
    EXPERT_SLOT = "expert_slot"
    """Two experts of a rank lie in each other's slots."""
    STORAGE_MOVED = "storage_moved"
    """A resident tensor is rebound to new storage of equal content; captured graphs would read the old one."""
    UNANNOUNCED = "unannounced"
    """Another update runs right after, of which nobody is told; it changes one element."""
    UPDATE_KEEPS_CACHE = "update_keeps_cache"
    """The update does not drop the prefix cache, whose keys and values stay those of the old weights."""
    FLUSH_REFUSED = "flush_refused"
    """A flush is refused and says so."""
    FLUSH_IGNORED = "flush_ignored"
    """A flush is confirmed and does nothing."""
    RESTART_IN_UPDATE = "restart_in_update"
    """The worker restarts from disk after half of the tensors; its session is lost."""
    RESTART_IN_OBSERVE = "restart_in_observe"
    """The worker restarts from disk after the first rank was read."""
    A_SHIFT = "a_shift"
    """Generation reports log-probabilities that are off by `nats` from response index `position` on (Case 1)."""


STREAM_FAULTS = frozenset(
    {FaultKind.SKIP_PUSH, FaultKind.TORN_PUSH, FaultKind.SWAP, FaultKind.TRANSPOSE, FaultKind.DROP_TENSOR}
)
RESIDENT_FAULTS = frozenset(
    {
        FaultKind.PADDING_DIRT,
        FaultKind.ELEMENT_FLIP,
        FaultKind.KV_REPLICA,
        FaultKind.EXPERT_SLOT,
        FaultKind.STORAGE_MOVED,
        FaultKind.UNANNOUNCED,
    }
)


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault.

    Attributes:
        kind: What goes wrong.
        rank: Tensor-parallel rank concerned; -1 is the last one that it can concern.
        fqn: Checkpoint name, for stream faults; empty chooses the first that fits.
        other: Second checkpoint name, for a swap.
        resident: Resident tensor, for resident faults; empty chooses the first that fits.
        index: Element of it; empty is the first (the last row for padding).
        slots: The two local expert slots to exchange.
        nats: Shift of scores, in nats.
        position: First response index that is shifted.
    """

    kind: FaultKind
    rank: int = -1
    fqn: str = ""
    other: str = ""
    resident: str = ""
    index: tuple[int, ...] = ()
    slots: tuple[int, int] = (0, 1)
    nats: float = -0.10
    position: int = 1


@dataclass(frozen=True, slots=True)
class Fired:
    """The report of a fault that happened: which one and what exactly it did."""

    fault: Fault
    detail: str


@dataclass(slots=True)
class FaultPlan:
    """Faults that are still to come, and those that fired, in order.

    Attributes:
        armed: Faults waiting for their moment.
        fired: Reports of those that happened.
    """

    armed: list[Fault] = field(default_factory=list)
    fired: list[Fired] = field(default_factory=list)

    def arm(self, *faults: Fault) -> None:
        """Add faults for the next moment that each concerns."""
        self.armed.extend(faults)

    def pending(self, *kinds: FaultKind) -> Fault | None:
        """Return the first armed fault of these kinds, which stays armed."""
        return next((fault for fault in self.armed if fault.kind in kinds), None)

    def fire(self, fault: Fault, detail: str) -> None:
        """Report that a fault happened; it is not armed any more."""
        self.armed.remove(fault)
        self.fired.append(Fired(fault, detail))

    def kinds_fired(self) -> list[FaultKind]:
        """Return the kinds that happened, in order."""
        return [report.fault.kind for report in self.fired]


class FaultyStream:
    """Passes the named tensors of one update session through the armed stream faults.

    Args:
        plan: The plan; faults fire as their tensors pass.
        expected: Tensors in a whole update, to know where its half is.
    """

    def __init__(self, plan: FaultPlan, expected: int) -> None:
        """Take over the stream faults that are armed at the start of the session."""
        self._plan = plan
        self._half = (expected + 1) // 2
        self._faults = [fault for fault in plan.armed if fault.kind in STREAM_FAULTS]
        self._held: dict[str, Any] = {}
        self._dropped: list[str] = []
        self.seen = 0

    def passed(self, named: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        """Yield what arrives of the tensors that were sent."""
        for name, tensor in named:
            arriving: Sequence[tuple[str, Any]] = [(name, tensor)]
            for fault in self._faults:
                arriving = [out for item in arriving for out in self._through(fault, *item)]
            self.seen += 1
            yield from arriving

    def finish(self) -> None:
        """Report the faults that drop tensors, now that it is known which."""
        for fault in self._faults:
            if fault in self._plan.armed and self._dropped:
                self._plan.fire(fault, f"dropped {len(self._dropped)}: {' '.join(self._dropped)}")

    def _through(self, fault: Fault, name: str, tensor: Any) -> list[tuple[str, Any]]:
        match fault.kind:
            case FaultKind.SKIP_PUSH:
                self._dropped.append(name)
                return []
            case FaultKind.TORN_PUSH if self.seen >= self._half:
                self._dropped.append(name)
                return []
            case FaultKind.DROP_TENSOR if name == fault.fqn:
                self._dropped.append(name)
                return []
            case FaultKind.TRANSPOSE if name == fault.fqn or (not fault.fqn and _square(tensor)):
                if fault in self._plan.armed:
                    self._plan.fire(fault, f"transposed {name}")
                    return [(name, tensor.T.contiguous())]
            case FaultKind.SWAP if name in (fault.fqn, fault.other):
                return self._swap(fault, name, tensor)
            case _:
                pass
        return [(name, tensor)]

    def _swap(self, fault: Fault, name: str, tensor: Any) -> list[tuple[str, Any]]:
        if not self._held:
            # The sender may re-use its buffer for the next tensors.
            self._held[name] = tensor.clone()
            return []
        ((first, held),) = self._held.items()
        self._held.clear()
        if fault in self._plan.armed:
            self._plan.fire(fault, f"swapped {first} and {name}")
        return [(first, tensor), (name, held)]


def _square(tensor: Any) -> bool:
    return bool(tensor.ndim == 2 and tensor.shape[0] == tensor.shape[1])  # noqa: PLR2004 - a matrix
