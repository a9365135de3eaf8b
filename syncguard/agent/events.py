"""What can happen to a worker, and what the state machine asks of its shell: values only, no IO."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from syncguard.engines.base import EngineStatus
    from syncguard.manifest.verdict import VerdictStatus
    from syncguard.spec import WeightVersion


@dataclass(frozen=True, slots=True)
class Fence:
    """Identity of one state of the engine's memory; equal fences mean that no update finished in between.

    Attributes:
        ranks: Per rank its name, incarnation and update epoch, sorted by name.
        expected_ranks: Ranks that the engine says it has.
    """

    ranks: tuple[tuple[str, str, int], ...]
    expected_ranks: int

    @classmethod
    def of(cls, status: EngineStatus) -> Fence:
        """Take the fence out of a status."""
        return cls(tuple(sorted((str(r.rank), r.incarnation, r.epoch) for r in status.ranks)), status.expected_ranks)

    def difference(self, other: Fence) -> str:
        """Return the stable word for what changed from here to `other`; empty when nothing did."""
        if self == other:
            return ""
        if (self.expected_ranks, [r[0] for r in self.ranks]) != (other.expected_ranks, [r[0] for r in other.ranks]):
            return "ranks_changed"
        if [r[1] for r in self.ranks] != [r[1] for r in other.ranks]:
            return "engine_restarted"
        return "update_unannounced"

    def __str__(self) -> str:
        """Return `tp0/1 1f3a#4`, one part a rank."""
        return ", ".join(f"{rank} {incarnation[:8]}#{epoch}" for rank, incarnation, epoch in self.ranks) or "no rank"


@dataclass(frozen=True, slots=True)
class EngineSeen:
    """A poll that the engine answered.

    Attributes:
        fence: What it showed.
        updating: An update session is open.
        label: The engine's own version label.
        asked_s: When it was asked, in seconds of the state machine's clock; a lease counts from there. None for now.
    """

    fence: Fence
    updating: bool
    label: str
    asked_s: float | None = None


@dataclass(frozen=True, slots=True)
class EngineLost:
    """A poll that the engine did not answer, or not in full."""

    why: str


@dataclass(frozen=True, slots=True)
class UpdateAnnounced:
    """The trainer is about to push; `rollback_because` names why the version may go back."""

    version: WeightVersion
    rollback_because: str = ""


@dataclass(frozen=True, slots=True)
class VerifyRequested:
    """The trainer says that a push is over and how the weights should look."""

    version: WeightVersion
    manifest_id: str


@dataclass(frozen=True, slots=True)
class VerifyFinished:
    """A verification is over.

    Attributes:
        ticket: The ticket under which it began.
        fence: Fence that held from its first to its last reading; None when the engine changed meanwhile.
        status: Status of the whole verdict, digest and replay together.
        reason: Stable word, such as `verified` or the code of the gravest finding.
        message: One sentence.
    """

    ticket: int
    fence: Fence | None
    status: VerdictStatus
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class EvidenceAgainst:
    """A scrub, or an audit by the very manifest that made the worker ready, found a difference under this fence.

    Attributes:
        fence: Where it was found.
        manifest_id: What had been proven.
        reason: Stable word.
        message: One sentence.
        doubt: Nothing is known to be wrong, but what was proven no longer speaks of what is there.
    """

    fence: Fence
    manifest_id: str
    reason: str
    message: str
    doubt: bool = False


@dataclass(frozen=True, slots=True)
class Reproved:
    """After a lapsed lease, a full comparison with the manifest that was proven before matched under this fence."""

    fence: Fence
    manifest_id: str
    message: str


@dataclass(frozen=True, slots=True)
class Scrubbed:
    """A scrub, or an audit by the very manifest that was proven, found nothing wrong under this fence.

    Attributes:
        fence: Where it was made.
        manifest_id: What had been proven.
        asked_s: When the engine was asked, in seconds of the state machine's clock.
    """

    fence: Fence
    manifest_id: str
    asked_s: float


@dataclass(frozen=True, slots=True)
class Tick:
    """Time went by; a lease may be over."""


Event: TypeAlias = (
    EngineSeen
    | EngineLost
    | UpdateAnnounced
    | VerifyRequested
    | VerifyFinished
    | EvidenceAgainst
    | Reproved
    | Scrubbed
    | Tick
)


@dataclass(frozen=True, slots=True)
class Ticket:
    """The one running verification; a newer one supersedes it."""

    number: int
    version: WeightVersion
    manifest_id: str


@dataclass(frozen=True, slots=True)
class Begin:
    """Start the verification of this ticket."""

    ticket: Ticket


@dataclass(frozen=True, slots=True)
class Cancel:
    """The verification of this ticket can no longer count; stop it when convenient."""

    ticket: int
    because: str


@dataclass(frozen=True, slots=True)
class Refuse:
    """The request is wrong, whatever the engine holds; parts of a `VersionOrderError`."""

    what: str
    expected: str
    found: str
    todo: str


Effect: TypeAlias = Begin | Cancel | Refuse
