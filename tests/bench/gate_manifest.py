"""A manifest of 100,000 tensors: encoded, sent over gRPC, checked and compared; and what an idle agent costs.

The first comparison also proves what follows from the layout alone, which is kept for the updates after it.

python tests/bench/gate_manifest.py --tensors 100000 --idle-s 20
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "agent"))

import simulated_engine
from rich.console import Console
from rich.table import Table
from simulated_engine import SimulatedEngine, manifest_of, weights_of

from syncguard.agent.host import Agent
from syncguard.agent.service import AgentServer, ListenOptions
from syncguard.agent.settings import AgentConfig
from syncguard.agent.verify import Verifier
from syncguard.digest.select import engine_for
from syncguard.gate.client import AgentClient
from syncguard.gate.request import EncodedVerify
from syncguard.manifest.verdict import VerdictStatus


def peak_mb(*, reset: bool = False) -> float:
    """Return the highest resident memory since the last reset, as Linux counts it."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, default=100_000)
    parser.add_argument("--updates", type=int, default=5)
    parser.add_argument("--idle-s", type=float, default=20.0)
    options = parser.parse_args()
    idle(options.idle_s)
    simulated_engine.ENGINE = engine_for("cpu")  # the reference, which tests use, takes minutes
    weights = weights_of(0, tensors=options.tensors, rows=1, columns=2)
    engine = SimulatedEngine(weights, label="run@0")
    agent = Agent(engine, worker="w")
    server = AgentServer(agent, ListenOptions("127.0.0.1:0"))
    server.start()
    layouts = engine.layouts()
    table = Table("manifest", "encode s", "check + compare s", "of which compare s", "in all s")
    totals = []
    with AgentClient(server.address) as client:
        for step in range(1 + options.updates):
            if step:
                weights = weights_of(step, tensors=options.tensors, rows=1, columns=2)
                engine.push(weights, f"run@{step}")
            manifest = manifest_of(weights, f"run@{step}")
            ranks = Verifier(engine, "w").observe(engine.status(), manifest.key_seed).ranks
            # The simulated worker's own digests and layout are not what is measured.
            engine.layouts = lambda: layouts
            engine.observe = lambda _seed, ranks=ranks: [replace(r, epoch=engine.epoch) for r in ranks]
            if not step:
                before_mb = peak_mb(reset=True)
            began_s = time.perf_counter()
            message = EncodedVerify.of(manifest, replay_waived_because="benchmark")
            encoded_s = time.perf_counter()
            found = client.send(message)
            done_s = time.perf_counter()
            assert found.verdict.status is VerdictStatus.MATCH, found.verdict.reason
            del engine.observe
            totals.append(done_s - began_s)
            seconds = (encoded_s - began_s, done_s - encoded_s, found.seconds["compare"], totals[-1])
            table.add_row("first" if not step else f"update {step}", *(f"{value:.2f}" for value in seconds))
            if not step:
                size_mb, after_mb = sum(map(len, message.parts)) / 1e6, peak_mb()
    server.stop(0)
    Console().print(table)
    print(
        f"{options.tensors} tensors, {size_mb:.1f} MB on the wire; median of updates {median(totals[1:]):.2f} s in all"
    )
    print(f"peak memory of gate and agent in one process: {after_mb - before_mb:.0f} MB more than before the manifest")
    agent.close()
    return 0


def idle(seconds: float) -> None:
    """Print what an agent costs that only polls."""
    engine = SimulatedEngine(weights_of(0), label="run@0")
    agent = Agent(engine, worker="w", config=AgentConfig(poll_interval_s=1.0))
    server = AgentServer(agent, ListenOptions("127.0.0.1:0"))
    server.start()
    agent.start()
    time.sleep(1)
    began_s, used = time.perf_counter(), time.process_time()
    time.sleep(seconds)
    share = (time.process_time() - used) / (time.perf_counter() - began_s)
    print(f"idle agent: {100 * share:.2f} % of a core, {peak_mb():.0f} MB, torch loaded: {'torch' in sys.modules}")
    server.stop(0)
    agent.close()


if __name__ == "__main__":
    sys.exit(main())
