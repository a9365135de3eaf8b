"""Verdicts and readiness to and from `syncguard.v1`. An unspecified value never becomes a good one."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, Final

from syncguard.manifest.verdict import (
    Coverage,
    Finding,
    FindingCode,
    Readiness,
    ReadinessState,
    Severity,
    Verdict,
    VerdictStatus,
)
from syncguard.v1 import verdict_pb2

_STATUS: Final = {
    VerdictStatus.MATCH: verdict_pb2.VERDICT_STATUS_MATCH,
    VerdictStatus.MISMATCH: verdict_pb2.VERDICT_STATUS_MISMATCH,
    VerdictStatus.INCOMPLETE: verdict_pb2.VERDICT_STATUS_INCOMPLETE,
    VerdictStatus.UNSUPPORTED: verdict_pb2.VERDICT_STATUS_UNSUPPORTED,
}
_SEVERITY: Final = {
    Severity.MISMATCH: verdict_pb2.SEVERITY_MISMATCH,
    Severity.UNSUPPORTED: verdict_pb2.SEVERITY_UNSUPPORTED,
    Severity.INCOMPLETE: verdict_pb2.SEVERITY_INCOMPLETE,
    Severity.WARNING: verdict_pb2.SEVERITY_WARNING,
}
_READINESS: Final = {
    ReadinessState.PENDING: verdict_pb2.READINESS_STATE_PENDING,
    ReadinessState.READY: verdict_pb2.READINESS_STATE_READY,
    ReadinessState.BLOCKED: verdict_pb2.READINESS_STATE_BLOCKED,
}
_STATUS_BACK: Final = {number: status for status, number in _STATUS.items()}
_SEVERITY_BACK: Final = {number: severity for severity, number in _SEVERITY.items()}
_READINESS_BACK: Final = {number: state for state, number in _READINESS.items()}
_COVERAGE: Final = tuple(field.name for field in fields(Coverage))
_TEXTS: Final = ("text", "fqn", "box", "worker", "rank", "resident", "expected", "observed")


def verdict_to_proto(verdict: Verdict) -> Any:
    """Return the message of a verdict."""
    return verdict_pb2.Verdict(
        status=_STATUS[verdict.status],
        reason=verdict.reason,
        findings=[finding_to_proto(finding) for finding in verdict.findings],
        coverage=verdict_pb2.Coverage(**{name: getattr(verdict.coverage, name) for name in _COVERAGE}),
        evidence=verdict.evidence,
    )


def verdict_from_proto(message: Any) -> Verdict:
    """Return the verdict of a message; an unspecified status is INCOMPLETE."""
    told = message.coverage
    coverage = {name: getattr(told, name) for name in _COVERAGE}
    return Verdict(
        status=_STATUS_BACK.get(message.status, VerdictStatus.INCOMPLETE),
        reason=message.reason,
        findings=tuple(finding_from_proto(finding) for finding in message.findings),
        coverage=Coverage(**{**coverage, "uncovered": tuple(told.uncovered)}),
        evidence=dict(message.evidence),
    )


def finding_to_proto(finding: Finding) -> Any:
    """Return the message of a finding."""
    texts = {name: getattr(finding, name) for name in _TEXTS}
    return verdict_pb2.Finding(code=finding.code.value, severity=_SEVERITY[finding.severity], **texts)


def finding_from_proto(message: Any) -> Finding:
    """Return the finding of a message; an unknown severity is INCOMPLETE, an unknown code is unknown content."""
    known = {code.value for code in FindingCode}
    return Finding(
        code=FindingCode(message.code) if message.code in known else FindingCode.UNKNOWN_CONTENT,
        severity=_SEVERITY_BACK.get(message.severity, Severity.INCOMPLETE),
        **{name: getattr(message, name) for name in _TEXTS},
    )


def readiness_to_proto(readiness: Readiness) -> Any:
    """Return the message of a readiness."""
    return verdict_pb2.Readiness(
        state=_READINESS[readiness.state],
        reason=readiness.reason,
        message=readiness.message,
        weight_version=readiness.weight_version,
        since_s=readiness.since_s,
    )


def readiness_from_proto(message: Any) -> Readiness:
    """Return the readiness of a message; an unspecified state is PENDING."""
    return Readiness(
        state=_READINESS_BACK.get(message.state, ReadinessState.PENDING),
        reason=message.reason,
        message=message.message,
        weight_version=message.weight_version,
        since_s=message.since_s,
    )
