"""`kill -9` at every write of the journal: what was announced was journaled, and the next agent is not ready."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from simulated_engine import SimulatedEngine, manifest_of, record_of, weights_of

from syncguard.agent.core import Phase
from syncguard.agent.host import Agent
from syncguard.agent.journal import Journal
from syncguard.agent.verify import VerifyRequest
from syncguard.errors import VersionOrderError
from syncguard.manifest.verdict import FindingCode, ReadinessState
from syncguard.spec import WeightVersion

DRIVER = Path(__file__).with_name("agent_crash_driver.py")
T = [weights_of(seed) for seed in range(4)]


def live(folder: Path, *cases: str) -> list[tuple[int, list[str]]]:
    """Run the driver; return each life's exit code and what it announced."""
    command = [sys.executable, str(DRIVER), str(folder), *cases]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True)
    codes = [int(line) for line in done.stdout.split()]
    assert set(codes) <= {0, -signal.SIGKILL}, done.stderr
    return [(code, (folder / f"{case}.txt").read_text().splitlines()) for code, case in zip(codes, cases, strict=True)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> tuple[int, list[tuple[str, str, str]]]:
    """Number of writes and all transitions of a life without a crash."""
    folder = tmp_path_factory.mktemp("whole")
    ((code, lines),) = live(folder, "-1:before")
    assert code == 0
    journal = Journal(folder / "-1:before.sqlite")
    rows = [(t.phase, t.reason, t.version) for t in journal.transitions(1000)]
    journal.close()
    return int(lines[-1].split()[1]), rows


def test_the_undisturbed_life_holds_ready_and_blocked(whole) -> None:
    phases = [phase for phase, _, _ in whole[1]]
    assert phases.count("READY") == 3
    assert phases.count("BLOCKED") == 1
    assert whole[0] == len(whole[1]) + phases.count("READY"), "one write a transition, and one of the history a READY"


@pytest.mark.timeout(300)
def test_a_kill_at_any_write_leaves_a_prefix_and_an_agent_that_is_not_ready(whole, tmp_path: Path) -> None:
    writes, rows = whole
    cases = [f"{write}:{moment}" for write in range(writes) for moment in ("before", "after")]
    for case, (code, announced) in zip(cases, live(tmp_path, *cases), strict=True):
        assert code == -signal.SIGKILL, case
        journal = Journal(tmp_path / f"{case}.sqlite")
        found = [(t.phase, t.reason, t.version) for t in journal.transitions(1000)]
        assert found == rows[: len(found)], case
        # Whatever was announced is in the journal, in order.
        names = {
            "PENDING": {"UNKNOWN", "UPDATING", "INSTALLED", "VERIFYING"},
            "READY": {"READY"},
            "BLOCKED": {"BLOCKED"},
        }
        for line, (phase, reason, _) in zip(announced, found, strict=False):
            state, told = line.split()[:2]
            assert phase in names[state]
            assert told == reason
        assert len(announced) <= len(found), case
        agent = Agent(SimulatedEngine(T[0]), worker="w", journal=journal)
        assert agent.state.phase is Phase.UNKNOWN
        assert agent.readiness.state is ReadinessState.PENDING
        agent.close()


def test_after_a_crash_the_order_of_versions_and_the_past_are_known(whole, tmp_path: Path) -> None:
    last = max(i for i, (phase, _, version) in enumerate(whole[1]) if (phase, version) == ("READY", "run@1"))
    ready_before = sum(phase == "READY" for phase, _, _ in whole[1][: last + 1])
    case = f"{last + ready_before}:after"
    live(tmp_path, case)
    engine = SimulatedEngine(T[1], tp=2, label="run@2")
    agent = Agent(engine, worker="w", journal=Journal(tmp_path / f"{case}.sqlite"))
    with pytest.raises(VersionOrderError):
        agent.announce(WeightVersion("run", 0))
    outcome = agent.verify(VerifyRequest(manifest_of(T[2], "run@2"), (record_of(T[1], T[2]),)))
    assert outcome.readiness.state is ReadinessState.BLOCKED
    assert any(f.code is FindingCode.STALE and "run@1" in f.text for f in outcome.verification.verdict.findings)
    agent.close()
