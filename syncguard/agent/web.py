"""What an agent shows over HTTP: liveness, readiness, metrics, and the JSON behind its status page."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from syncguard.agent.core import Phase
from syncguard.manifest.verdict import ReadinessState
from syncguard.rpc.web import WebSources

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client.core import Metric

    from syncguard.agent.host import Agent

_FINDINGS_SHOWN: Final = 200
_TIMELINE_SHOWN: Final = 50


def web_sources(agent: Agent) -> WebSources:
    """Return the answers of the status server of an agent."""
    registry = CollectorRegistry()
    registry.register(_AgentMetrics(agent))

    def ready() -> tuple[bool, str]:
        readiness = agent.readiness
        return (
            readiness.state is ReadinessState.READY,
            f"{readiness.state.value} {readiness.reason}: {readiness.message}",
        )

    return WebSources(
        title=f"syncguard agent of {agent.worker}",
        live=agent.live,
        ready=ready,
        status=lambda: {"now_s": agent.wall_s(), "workers": [_worker(agent)]},
        registry=registry,
    )


def _worker(agent: Agent) -> dict[str, Any]:
    agent.end_lease()
    state, last, engine = agent.state, agent.last, agent.engine
    readiness = state.readiness
    return {
        "worker": agent.worker,
        "phase": state.phase.value,
        "readiness": {
            "state": readiness.state.value,
            "reason": readiness.reason,
            "message": readiness.message,
            "weight_version": readiness.weight_version,
            "since_s": readiness.since_s,
        },
        "engine": engine.engine if engine is not None else "",
        "label": state.label,
        "fence": str(state.seen) if state.seen is not None else "",
        "poll_interval_s": agent.config.poll_interval_s,
        "lease_s": agent.config.lease_s,
        "scrub": agent.watcher.scrub_progress(),
        "seconds": dict(last.seconds) if last is not None else {},
        "verdict": {
            "status": last.verdict.status.value,
            "reason": last.verdict.reason,
            "evidence": last.verdict.evidence,
            "findings": [
                {
                    "code": finding.code.value,
                    "severity": finding.severity.value,
                    "fqn": finding.fqn,
                    "box": finding.box,
                    "rank": finding.rank,
                    "resident": finding.resident,
                    "text": finding.text,
                }
                for finding in last.verdict.findings[:_FINDINGS_SHOWN]
            ],
        }
        if last is not None
        else None,
        "replay": {
            "status": last.replay.status.value,
            "reason": last.replay.reason,
            "figures": [figure.as_dict() for figure in last.replay.figures],
        }
        if last is not None and last.replay is not None
        else None,
        "timeline": [
            {"at_s": t.at_s, "phase": t.phase, "reason": t.reason, "version": t.version, "message": t.message}
            for t in agent.journal.transitions(_TIMELINE_SHOWN)
        ],
    }


class _AgentMetrics:
    """Reads the agent when it is scraped; nothing is counted twice."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent

    def collect(self) -> Iterator[Metric]:
        agent = self._agent
        agent.end_lease()
        state = agent.state
        labels = [agent.worker]
        ready = GaugeMetricFamily("syncguard_ready", "1 while the worker may serve.", labels=["worker"])
        ready.add_metric(labels, float(state.phase is Phase.READY))
        yield ready
        phase = GaugeMetricFamily("syncguard_phase", "1 for the current phase.", labels=["worker", "phase"])
        for each in Phase:
            phase.add_metric([agent.worker, each.value], float(state.phase is each))
        yield phase
        since = GaugeMetricFamily(
            "syncguard_since_seconds", "Time of the last transition, in Unix seconds.", labels=["worker"]
        )
        since.add_metric(labels, state.since_s)
        yield since
        counts = CounterMetricFamily(
            "syncguard_transitions", "Transitions since the agent started.", labels=["worker", "phase", "reason"]
        )
        verdicts = CounterMetricFamily(
            "syncguard_verifications", "Verifications since the agent started.", labels=["worker", "status"]
        )
        for (to, reason), count in agent.transition_counts().items():
            counts.add_metric([agent.worker, to, reason], count)
        for status, count in agent.verdict_counts().items():
            verdicts.add_metric([agent.worker, status], count)
        yield counts
        yield verdicts
        last = agent.last
        seconds = GaugeMetricFamily(
            "syncguard_verification_seconds", "Seconds of the last verification by step.", labels=["worker", "step"]
        )
        for step, value in (last.seconds if last is not None else {}).items():
            seconds.add_metric([agent.worker, step], value)
        yield seconds
        if state.phase is Phase.READY:
            lease = GaugeMetricFamily("syncguard_lease_seconds", "Seconds left of the lease.", labels=["worker"])
            lease.add_metric(labels, agent.lease_left_s())
            yield lease
        scrub = GaugeMetricFamily(
            "syncguard_scrub_cycle_seconds",
            "Seconds in which scrubs read all resident bytes once; 0 before the first.",
            labels=["worker"],
        )
        scrub.add_metric(labels, agent.watcher.scrub_progress()["cycle_s"])
        yield scrub
