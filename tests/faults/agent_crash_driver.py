"""An agent that lives through three updates and is killed at a chosen journal write: run by the crash tests.

`python agent_crash_driver.py FOLDER [WRITE:before|after ...]` forks one life a case, with its journal and a file of what
it announced in the folder, and prints each life's exit code. WRITE -1 kills nothing. A process dies by SIGKILL, so
nothing is flushed, closed or rolled back.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "unit" / "agent"))

from simulated_engine import SimulatedEngine, manifest_of, record_of, weights_of

from syncguard.agent.host import Agent
from syncguard.agent.journal import Journal
from syncguard.agent.verify import VerifyRequest
from syncguard.spec import WeightVersion

T = [weights_of(seed) for seed in range(4)]


def live(path: Path, announced: int, kill_at: int, moment: str) -> None:
    journal = Journal(path)
    writes = 0

    def dying(method):
        def call(*args):
            nonlocal writes
            mine = writes
            writes += 1
            if mine == kill_at and moment == "before":
                os.kill(os.getpid(), signal.SIGKILL)
            method(*args)
            if mine == kill_at and moment == "after":
                os.kill(os.getpid(), signal.SIGKILL)

        return call

    journal.append, journal.remember = dying(journal.append), dying(journal.remember)
    engine = SimulatedEngine(T[0], tp=2, label="run@0")
    agent = Agent(engine, worker="w", journal=journal)
    agent.listen(lambda r: os.write(announced, f"{r.state.value} {r.reason} {r.weight_version}\n".encode()))
    agent.verify(VerifyRequest(manifest_of(T[0], "run@0"), (record_of(T[0], T[0]),)))
    for step in (1, 2, 3):
        agent.announce(WeightVersion("run", step), [record_of(T[step - 1])])
        # The second update does not arrive.
        engine.push(T[1] if step == 2 else T[step], f"run@{step}")
        agent.watcher.poll()
        agent.verify(VerifyRequest(manifest_of(T[step], f"run@{step}"), (record_of(T[step - 1], T[step]),)))
    os.write(announced, f"writes {writes}\n".encode())


def main(folder: Path, cases: list[str]) -> None:
    for case in cases:
        write, _, moment = case.partition(":")
        child = os.fork()
        if child == 0:
            announced = os.open(folder / f"{case}.txt", os.O_WRONLY | os.O_CREAT)
            live(folder / f"{case}.sqlite", announced, int(write), moment)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
