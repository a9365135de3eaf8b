"""What a verification is asked and what it gives back: values, and the outcomes of those that were never made."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from syncguard.errors import VersionOrderError
from syncguard.manifest.verdict import Finding, FindingCode, Severity, Verdict, VerdictStatus
from syncguard.replay import ReplayPolicy, ReplayRecord, ReplayVerdict

if TYPE_CHECKING:
    from syncguard.agent.events import Fence
    from syncguard.agent.replay_pass import Passes
    from syncguard.manifest.model import Manifest, WorkerObservation


@dataclass(frozen=True, slots=True)
class VerifyRequest:
    """What the trainer claims and how strictly it is judged.

    Attributes:
        manifest: Every exported tensor.
        records: Responses carried across the update, each with C_new (and C_old, A).
        policy: Limits of the replay.
        replay_waived_because: A named waiver of the replay; empty, a missing replay is INCOMPLETE.
    """

    manifest: Manifest
    records: tuple[ReplayRecord, ...] = ()
    policy: ReplayPolicy = field(default_factory=ReplayPolicy)
    replay_waived_because: str = ""


@dataclass(frozen=True, slots=True)
class Verification:
    """What one verification found.

    Attributes:
        fence: Fence that held from the first reading to the last; None when the engine changed or did not answer.
        verdict: Over digests, coverage, replay, flush and label together.
        replay: The replay's own verdict; None when none was made.
        records: The records with this worker's B scores.
        passes: The B passes, for the next update's B_old.
        observation: What the ranks showed.
        seconds: Seconds by step.
        raced: The engine changed meanwhile, so that another try may conclude.
    """

    fence: Fence | None
    verdict: Verdict
    replay: ReplayVerdict | None = None
    records: tuple[ReplayRecord, ...] = ()
    passes: Passes | None = None
    observation: WorkerObservation | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    raced: bool = False


class Cancelled(Exception):  # noqa: N818 - not an error: a newer request took over
    """The verification can no longer count."""


def gravest_code(verdict: Verdict) -> str:
    """Return the stable word for a verdict: `verified`, or the code of its gravest finding."""
    if verdict.status is VerdictStatus.MATCH:
        return "verified" if not verdict.findings else "verified_with_warnings"
    return verdict.findings[0].code.value if verdict.findings else verdict.status.value.lower()


def bounded(verdict: Verdict, limit: int) -> Verdict:
    """Return the verdict with at most `limit` findings, the gravest kept and the rest counted."""
    if len(verdict.findings) <= limit:
        return verdict
    return replace(
        verdict,
        findings=verdict.findings[:limit],
        evidence={**verdict.evidence, "findings_total": str(len(verdict.findings))},
    )


def given_up(worker: str, message: str) -> Verification:
    """Return the outcome of a verification that could no longer count."""
    text = f"the verification was given up: {message}"
    finding = Finding(FindingCode.UPDATE_RUNNING, Severity.INCOMPLETE, text, worker=worker)
    return Verification(None, Verdict(VerdictStatus.INCOMPLETE, text, (finding,)), raced=True)


def refused_manifest(worker: str, error: VersionOrderError) -> Verification:
    """Return the outcome for a manifest that is wrong, whatever the worker holds."""
    finding = Finding(
        FindingCode.VERSION_ORDER,
        Severity.MISMATCH,
        error.text(),
        worker=worker,
        expected=error.expected,
        observed=error.found,
    )
    return Verification(None, Verdict(VerdictStatus.MISMATCH, error.text(), (finding,)))
