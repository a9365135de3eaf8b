"""Verdicts, findings and readiness: values with reasons, never truth values.

`bool(verdict)` raises, zero never means OK, and absence is INCOMPLETE.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from syncguard.errors import ExitCode


class VerdictStatus(Enum):
    """Outcome of a comparison, the more severe first when several apply: mismatch, unsupported, incomplete."""

    MATCH = "MATCH"
    MISMATCH = "MISMATCH"
    INCOMPLETE = "INCOMPLETE"
    UNSUPPORTED = "UNSUPPORTED"

    def __bool__(self) -> bool:
        """Refuse: a four-valued outcome in an `if` is how a false READY is born."""
        raise TypeError("a verdict has no truth value; compare it with VerdictStatus.MATCH")

    @property
    def exit_code(self) -> ExitCode:
        """Exit code of the commands that print it."""
        return {
            VerdictStatus.MATCH: ExitCode.OK,
            VerdictStatus.MISMATCH: ExitCode.MISMATCH,
            VerdictStatus.INCOMPLETE: ExitCode.INCOMPLETE,
            VerdictStatus.UNSUPPORTED: ExitCode.UNSUPPORTED,
        }[self]


class FindingCode(str, Enum):
    """Stable names of everything that can be wrong; the value is what users grep for."""

    STALE = "stale"
    SWAPPED = "swapped"
    REARRANGED = "rearranged"
    CAST = "cast"
    SCALE_STALE = "scale_stale"
    REPLICA_DIFFERS = "replica_differs"
    UNKNOWN_CONTENT = "unknown_content"
    PADDING_NOT_ZERO = "padding_not_zero"
    DERIVED_STALE = "derived_stale"
    EXEMPT_CHANGED = "exempt_changed"
    UNCHANGED = "unchanged"
    TORN = "torn"
    SHAPE_DIFFERS = "shape_differs"
    DTYPE_DIFFERS = "dtype_differs"
    VERSION_LABEL = "version_label"
    VERSION_ORDER = "version_order"
    MISSING_RANK = "missing_rank"
    DUPLICATE_RANK = "duplicate_rank"
    EPOCH_DIFFERS = "epoch_differs"
    INCARNATION_CHANGED = "incarnation_changed"
    UPDATE_RUNNING = "update_running"
    NOT_HELD = "not_held"
    HELD_TWICE = "held_twice"
    NOT_EXPORTED = "not_exported"
    NOT_COVERED = "not_covered"
    LAYOUT_UNKNOWN = "layout_unknown"
    STORAGE_MOVED = "storage_moved"
    EMPTY_RESIDENT = "empty_resident"
    UNBOUND = "unbound"
    RECORDED = "recorded"
    ALGORITHM_DIFFERS = "algorithm_differs"
    PROBE_VERSION = "probe_version"
    FLUSH_NOT_CONFIRMED = "flush_not_confirmed"
    REPLAY_MISMATCH = "replay_mismatch"
    REPLAY_STALE = "replay_stale"
    REPLAY_CACHE_STALE = "replay_cache_stale"
    REPLAY_UNSTABLE = "replay_unstable"
    REPLAY_NO_POWER = "replay_no_power"
    REPLAY_MISSING = "replay_missing"
    ENGINE_UNREACHABLE = "engine_unreachable"


class Severity(str, Enum):
    """What a finding does to the verdict."""

    MISMATCH = "mismatch"
    UNSUPPORTED = "unsupported"
    INCOMPLETE = "incomplete"
    WARNING = "warning"
    """Said, counted, and not a reason to block."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One difference, explained as far as the evidence goes.

    Attributes:
        code: Stable name.
        severity: Effect on the verdict.
        text: One sentence for people: what, where, and what to look at next.
        fqn: Logical tensor, empty when it concerns none.
        box: Box of it, as written by `str(Box)`.
        worker: Worker.
        rank: Rank, as written by `str(RankIdentity)`; empty when it concerns all.
        resident: Resident tensor.
        expected: What would have been right.
        observed: What was there.
    """

    code: FindingCode
    severity: Severity
    text: str
    fqn: str = ""
    box: str = ""
    worker: str = ""
    rank: str = ""
    resident: str = ""
    expected: str = ""
    observed: str = ""


@dataclass(frozen=True, slots=True)
class Coverage:
    """Both directions of coverage, in tensors, elements and bytes.

    Attributes:
        manifest_tensors: Tensors in the manifest.
        proven_tensors: Those covered exactly once per replica, with equal digests.
        exempt_tensors: Manifest tensors exempt by name: by the manifest, or by a rule since loading drops them.
        resident_tensors: Resident tensors over all ranks, aliases not counted.
        bound_residents: Resident tensors whose every element is bound or checked padding.
        derived_residents: Resident tensors derived and checked.
        exempt_residents: Resident tensors exempt by name.
        unbound_residents: Resident tensors without a rule.
        replicas: Boxes that were held by more than one rank and compared with each other.
        padding_elements: Padding elements checked.
        read_bytes: Bytes digested over all ranks.
        uncovered: State that is known to be out of sight, by name.
    """

    manifest_tensors: int = 0
    proven_tensors: int = 0
    exempt_tensors: int = 0
    resident_tensors: int = 0
    bound_residents: int = 0
    derived_residents: int = 0
    exempt_residents: int = 0
    unbound_residents: int = 0
    replicas: int = 0
    padding_elements: int = 0
    read_bytes: int = 0
    uncovered: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Verdict:
    """Outcome of comparing a worker with a manifest, with findings and evidence.

    Attributes:
        status: Outcome.
        reason: One sentence.
        findings: All differences and warnings, the gravest first.
        coverage: What was looked at.
        evidence: Named figures, such as digest algorithm, epoch, seconds.
    """

    status: VerdictStatus
    reason: str
    findings: tuple[Finding, ...] = ()
    coverage: Coverage = field(default_factory=Coverage)
    evidence: dict[str, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        """Refuse: compare `status` instead."""
        raise TypeError("a verdict has no truth value; compare verdict.status with VerdictStatus.MATCH")

    @property
    def exit_code(self) -> ExitCode:
        """Exit code: that of the status, or 1 for a match with warnings."""
        if self.status is VerdictStatus.MATCH and any(f.severity is Severity.WARNING for f in self.findings):
            return ExitCode.WARNING
        return self.status.exit_code


def status_of(findings: tuple[Finding, ...]) -> VerdictStatus:
    """Return the gravest status that the findings call for; MATCH only when none is graver than a warning."""
    severities = {finding.severity for finding in findings}
    for severity, status in (
        (Severity.MISMATCH, VerdictStatus.MISMATCH),
        (Severity.UNSUPPORTED, VerdictStatus.UNSUPPORTED),
        (Severity.INCOMPLETE, VerdictStatus.INCOMPLETE),
    ):
        if severity in severities:
            return status
    return VerdictStatus.MATCH


class ReadinessState(Enum):
    """Whether a worker may serve."""

    PENDING = "PENDING"
    READY = "READY"
    BLOCKED = "BLOCKED"

    def __bool__(self) -> bool:
        """Refuse: compare with ReadinessState.READY."""
        raise TypeError("readiness has no truth value; compare it with ReadinessState.READY")


@dataclass(frozen=True, slots=True)
class Readiness:
    """A worker's readiness with its reason.

    Attributes:
        state: PENDING, READY or BLOCKED.
        reason: Stable word, such as `verified`, `stale`, `update_announced`, `engine_restarted`.
        message: One sentence for people.
        weight_version: Version label that the readiness speaks of.
        since_s: Time of the transition, in seconds of the clock that the caller passed.
    """

    state: ReadinessState
    reason: str
    message: str
    weight_version: str = ""
    since_s: float = 0.0

    def __bool__(self) -> bool:
        """Refuse: compare `state` instead."""
        raise TypeError("readiness has no truth value; compare readiness.state with ReadinessState.READY")
