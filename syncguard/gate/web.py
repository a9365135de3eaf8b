"""What a gate shows over HTTP: liveness, readiness, metrics, and the JSON behind its status page."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily

from syncguard.gate.readiness import Action
from syncguard.rpc.web import WebSources

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client.core import Metric

    from syncguard.gate.client import WorkerVerdict
    from syncguard.gate.controller import Gate
    from syncguard.gate.readiness import WorkerDecision

_FINDINGS_SHOWN: Final = 200


def web_sources(gate: Gate) -> WebSources:
    """Return the answers of the status server of a gate."""
    registry = CollectorRegistry()
    registry.register(_GateMetrics(gate))

    def ready() -> tuple[bool, str]:
        decision = gate.decision()
        return decision.action is Action.PROCEED, f"{decision.action.value}: {decision.reason}"

    def status() -> dict[str, Any]:
        decision = gate.decision()
        verdicts = {verdict.worker: verdict for verdict in gate.verdicts()}
        return {
            "now_s": time.time(),
            "decision": {"action": decision.action.value, "reason": decision.reason},
            "workers": [_worker(worker, verdicts.get(worker.worker)) for worker in decision.workers],
        }

    return WebSources("syncguard gate", lambda: (True, "serving"), ready, status, registry)


def _worker(decision: WorkerDecision, found: WorkerVerdict | None) -> dict[str, Any]:
    readiness = decision.readiness
    shown: dict[str, Any] = {
        "worker": decision.worker,
        "phase": decision.action.value,
        "readiness": {
            "state": readiness.state.value,
            "reason": readiness.reason,
            "message": readiness.message,
            "weight_version": readiness.weight_version,
            "since_s": readiness.since_s,
        },
    }
    if found is None:
        return shown
    findings = [
        {
            "code": finding.code.value,
            "severity": finding.severity.value,
            "fqn": finding.fqn,
            "box": finding.box,
            "rank": finding.rank,
            "resident": finding.resident,
            "text": finding.text,
        }
        for finding in found.verdict.findings[:_FINDINGS_SHOWN]
    ]
    shown["label"] = found.verdict.evidence.get("label", "")
    shown["verdict"] = {"status": found.verdict.status.value, "reason": found.verdict.reason, "findings": findings}
    if found.replay is not None:
        shown["replay"] = {
            "status": found.replay.status.value,
            "reason": found.replay.reason,
            "figures": [figure.as_dict() for figure in found.replay.figures],
        }
    return shown


class _GateMetrics:
    """Reads the gate when it is scraped."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    def collect(self) -> Iterator[Metric]:
        decision = self._gate.decision()
        action = GaugeMetricFamily("syncguard_gate_action", "1 for the current action.", labels=["action"])
        for each in Action:
            action.add_metric([each.value], float(decision.action is each))
        yield action
        ready = GaugeMetricFamily("syncguard_gate_ready_workers", "Workers that may serve the wanted version.")
        ready.add_metric([], len(decision.ready))
        yield ready
        total = GaugeMetricFamily("syncguard_gate_workers", "Workers of the gate.")
        total.add_metric([], len(decision.workers))
        yield total
