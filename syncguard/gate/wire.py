"""Decisions to and from `syncguard.v1`. An unspecified action never becomes PROCEED."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from syncguard.gate.readiness import Action, Decision, WorkerDecision, WorkerState
from syncguard.manifest.wire_verdict import (
    finding_from_proto,
    finding_to_proto,
    readiness_from_proto,
    readiness_to_proto,
    verdict_to_proto,
)
from syncguard.v1 import gate_service_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Sequence

    from syncguard.manifest.verdict import Verdict

_FINDINGS_PER_WORKER: Final = 50
_ACTIONS: Final = {action: getattr(pb, f"GATE_ACTION_{action.value}") for action in Action}
_ACTIONS_BACK: Final = {number: action for action, number in _ACTIONS.items()}


def decision_to_proto(decision: Decision, workers: Sequence[WorkerState]) -> Any:
    """Return the message of a decision, each worker with the gravest findings of its verdict."""
    # By place: names may be shared.
    verdicts = [state.verdict for state in workers] if decision.workers else []
    return pb.Decision(
        action=_ACTIONS[decision.action],
        reason=decision.reason,
        weight_version=decision.weight_version,
        workers=[_worker_to_proto(*pair) for pair in zip(decision.workers, verdicts, strict=True)],
        findings=[finding_to_proto(finding) for finding in decision.findings],
    )


def _worker_to_proto(worker: WorkerDecision, verdict: Verdict | None) -> Any:
    message = pb.WorkerDecision(
        worker=worker.worker,
        readiness=readiness_to_proto(worker.readiness),
        action=_ACTIONS[worker.action],
        reason=worker.reason,
    )
    if verdict is not None:
        shown = replace(verdict, findings=verdict.findings[:_FINDINGS_PER_WORKER])
        message.verdict.CopyFrom(verdict_to_proto(shown))
    return message


def decision_from_proto(message: Any) -> Decision:
    """Return the decision of a message; an unspecified action is WAIT."""
    return Decision(
        action=_ACTIONS_BACK.get(message.action, Action.WAIT),
        reason=message.reason,
        weight_version=message.weight_version,
        workers=tuple(
            WorkerDecision(
                worker.worker,
                readiness_from_proto(worker.readiness),
                _ACTIONS_BACK.get(worker.action, Action.WAIT),
                worker.reason,
            )
            for worker in message.workers
        ),
        findings=tuple(finding_from_proto(finding) for finding in message.findings),
    )
