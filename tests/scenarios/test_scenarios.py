"""Scenario files: events and the transitions that must follow, as data.

A file is a list of blocks: a line with an event, `----`, and what follows from it. `SYNCGUARD_REWRITE=1 pytest
tests/scenarios` writes what really follows into the files; read the diff before you commit it.
"""

from __future__ import annotations

import os
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from syncguard.agent.core import AgentState, CoreConfig, step
from syncguard.agent.events import (
    Begin,
    Cancel,
    EngineLost,
    EngineSeen,
    EvidenceAgainst,
    Fence,
    Reproved,
    Scrubbed,
    Tick,
    UpdateAnnounced,
    VerifyFinished,
    VerifyRequested,
)
from syncguard.gate.readiness import FleetState, GatePolicy, Mode, WorkerState, decide
from syncguard.manifest.verdict import (
    Finding,
    FindingCode,
    Readiness,
    ReadinessState,
    Severity,
    Verdict,
    VerdictStatus,
)
from syncguard.spec import WeightVersion

HERE = Path(__file__).parent
REWRITE = os.environ.get("SYNCGUARD_REWRITE") == "1"


def fence(text: str) -> Fence:
    """`a#0,b#3`: incarnation and epoch of each rank."""
    parts = [part.split("#") for part in text.split(",")]
    return Fence(tuple((f"tp{i}/{len(parts)}", inc, int(epoch)) for i, (inc, epoch) in enumerate(parts)), len(parts))


class AgentScenario:
    """The agent's state machine, driven by lines."""

    def __init__(self) -> None:
        self.state = AgentState()
        self.now_s = 0.0
        self.config = CoreConfig(lease_s=5.0)

    def run(self, line: str) -> str:
        name, *words = shlex.split(line)
        options = dict(word.split("=", 1) for word in words if "=" in word)
        plain = [word for word in words if "=" not in word]
        if name == "wait":
            self.now_s += float(plain[0])
            return f"now {self.now_s:g}"
        if name == "scrub_lease":
            self.config = CoreConfig(lease_s=5.0, scrub_lease_s=float(plain[0]))
            return f"READY lasts {plain[0]} s without a scrub"
        event = {
            "seen": lambda: EngineSeen(fence(plain[0]), "updating" in plain, options.get("label", "run@0")),
            "lost": lambda: EngineLost("no answer"),
            "announce": lambda: UpdateAnnounced(WeightVersion.parse(plain[0]), options.get("rollback", "")),
            "verify": lambda: VerifyRequested(WeightVersion.parse(plain[0]), plain[1]),
            "finish": lambda: VerifyFinished(
                int(plain[0]),
                None if plain[1] == "none" else fence(plain[1]),
                VerdictStatus(plain[2]),
                plain[3],
                "said",
            ),
            "against": lambda: EvidenceAgainst(fence(plain[0]), plain[1], plain[2], "said"),
            "scrubbed": lambda: Scrubbed(fence(plain[0]), plain[1], self.now_s - float(options.get("ago", 0))),
            "reproved": lambda: Reproved(fence(plain[0]), plain[1], "said"),
            "tick": Tick,
        }[name]()
        before = self.state
        done = step(before, event, self.now_s, self.config)
        self.state = done.state
        said = [f"{done.state.phase.value} {done.state.reason}"]
        if done.state.version is not None:
            said[0] += f" {done.state.version}"
        if not done.transition:
            said[0] += f" (unchanged: {done.reason})"
        for effect in done.effects:
            if isinstance(effect, Begin):
                said.append(f"begin {effect.ticket.number}")
            elif isinstance(effect, Cancel):
                said.append(f"cancel {effect.ticket}: {effect.because}")
            else:
                said.append(f"refuse: {effect.what}; expected {effect.expected}; found {effect.found}")
        return "\n".join(said)


class GateScenario:
    """The gate's decision, driven by lines."""

    def __init__(self) -> None:
        self.fleet = FleetState()
        self.policy = GatePolicy()
        self.now_s = 0.0

    def run(self, line: str) -> str:
        name, *words = shlex.split(line)
        return getattr(self, f"do_{name}")(*words)

    def do_policy(self, *words: str) -> str:
        kinds = {"mode": Mode, "canary": str, "quorum": int, "retries": int, "quarantine_after": int}
        changes = {key: kinds.get(key, float)(value) for key, value in (word.split("=", 1) for word in words)}
        self.policy = replace(self.policy, **changes)
        return "ok"

    def do_workers(self, *names: str) -> str:
        self.fleet = replace(self.fleet, workers=tuple(WorkerState(name) for name in names), lease_s=10.0)
        return "ok"

    def do_publish(self, label: str) -> str:
        self.fleet = replace(self.fleet, wanted=label, published_s=self.now_s)
        return "ok"

    def do_wait(self, seconds: str) -> str:
        self.now_s += float(seconds)
        return f"now {self.now_s:g}"

    def do_told(self, name: str, state: str, label: str) -> str:
        readiness = Readiness(ReadinessState(state), "said", f"{name} said so", label)
        return self._put(name, readiness=readiness, seen_s=self.now_s, unreachable="")

    def do_silent(self, name: str) -> str:
        return self._put(name, unreachable="no answer")

    def do_quarantine(self, name: str, why: str) -> str:
        return self._put(name, quarantined=why)

    def do_faults(self, name: str, count: str) -> str:
        return self._put(name, faults_in_row=int(count))

    def do_verdict(self, name: str, status: str, *findings: str) -> str:
        """Findings are `code:fqn:rank:observed`."""
        found = []
        for text in findings:
            code, fqn, rank, observed = (*text.split(":"), "", "", "")[:4]
            found.append(
                Finding(
                    FindingCode(code), Severity.MISMATCH, "said", fqn=fqn, rank=rank, observed=observed, worker=name
                )
            )
        old = next(w for w in self.fleet.workers if w.worker == name)
        verdict = Verdict(VerdictStatus(status), "said", tuple(found))
        match = verdict.status is VerdictStatus.MATCH
        self.do_told(name, "READY" if match else "BLOCKED", self.fleet.wanted)
        return self._put(name, verdict=verdict, attempts=old.attempts + 1)

    def do_decide(self) -> str:
        decision = decide(self.now_s, self.fleet, self.policy)
        lines = [f"{decision.action.value}: {decision.reason}"]
        lines += [f"  {w.worker} {w.readiness.state.value} {w.action.value}: {w.reason}" for w in decision.workers]
        lines += [f"  ! {f.resident} [{f.worker}] {f.text}" for f in decision.findings]
        return "\n".join(lines)

    def _put(self, name: str, **changes: object) -> str:
        assert any(worker.worker == name for worker in self.fleet.workers), name
        workers = tuple(replace(w, **changes) if w.worker == name else w for w in self.fleet.workers)
        self.fleet = replace(self.fleet, workers=workers)
        return "ok"


def blocks(text: str) -> list[tuple[str, str, str]]:
    """Return (comment, command, expected) of each block."""
    found = []
    for block in text.strip().split("\n\n"):
        lines = block.split("\n")
        comment = [line for line in lines if line.startswith("#")]
        rest = [line for line in lines if not line.startswith("#")]
        if not rest:
            found.append(("\n".join(comment), "", ""))
            continue
        command, _, *expected = [*rest, "----"] if len(rest) == 1 else rest
        found.append(("\n".join(comment), command, "\n".join(expected)))
    return found


FILES = sorted(HERE.glob("*/*.txt"))


def test_there_are_scenarios_for_agent_and_gate() -> None:
    assert {path.parent.name for path in FILES} == {"agent", "gate"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_scenario_goes_as_its_file_says(path: Path) -> None:
    scenario = AgentScenario() if path.parent.name == "agent" else GateScenario()
    written = []
    differences = []
    for comment, command, expected in blocks(path.read_text()):
        if not command:
            written.append(comment)
            continue
        actual = scenario.run(command)
        if actual != expected:
            differences.append(f"{command}\nexpected:\n{expected}\nfound:\n{actual}")
        written.append("\n".join([*([comment] if comment else []), command, "----", actual]))
    if REWRITE:
        path.write_text("\n\n".join(written) + "\n")
    else:
        assert not differences, "\n\n".join(differences)
