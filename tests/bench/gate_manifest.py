"""A manifest of 100,000 tensors: encoded, sent over gRPC, checked and compared; and what an idle agent costs.

python tests/bench/gate_manifest.py --tensors 100000 --idle-s 20
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "agent"))

from simulated_engine import SimulatedEngine, manifest_of, weights_of

from syncguard.agent.host import Agent
from syncguard.agent.service import AgentServer, ListenOptions
from syncguard.agent.settings import AgentConfig
from syncguard.agent.verify import Verifier
from syncguard.gate.client import AgentClient, EncodedVerify
from syncguard.manifest.compare import compare
from syncguard.manifest.verdict import VerdictStatus


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, default=100_000)
    parser.add_argument("--idle-s", type=float, default=20.0)
    options = parser.parse_args()
    idle(options.idle_s)
    weights = weights_of(0, tensors=options.tensors, rows=1, columns=2)
    engine = SimulatedEngine(weights, label="run@0")
    manifest = manifest_of(weights, "run@0")
    observation = Verifier(engine, "w").observe(engine.status(), manifest.key_seed)
    # The simulated worker's own digests and layout are not what is measured.
    layouts, ranks = observation.layouts, observation.ranks
    engine.layouts = lambda: layouts
    engine.observe = lambda _seed: [replace(r, epoch=engine.epoch) for r in ranks]
    before_mb = peak_mb()
    agent = Agent(engine, worker="w")
    server = AgentServer(agent, ListenOptions("127.0.0.1:0"))
    server.start()
    with AgentClient(server.address) as client:
        began_s = time.perf_counter()
        message = EncodedVerify.of(manifest, replay_waived_because="benchmark")
        encoded_s = time.perf_counter()
        found = client.send(message)
        done_s = time.perf_counter()
    assert found.verdict.status is VerdictStatus.MATCH, found.verdict.reason
    server.stop(0)
    compare_began_s = time.perf_counter()
    compare(manifest, observation)
    compared_s = time.perf_counter() - compare_began_s
    size_mb = sum(map(len, message.parts)) / 1e6
    print(f"{options.tensors} tensors, {size_mb:.1f} MB on the wire")
    print(f"encode {encoded_s - began_s:.2f} s, send + check + compare + answer {done_s - encoded_s:.2f} s")
    print(
        f"of which compare {found.seconds['compare']:.2f} s (alone {compared_s:.2f} s); total {done_s - began_s:.2f} s"
    )
    print(f"peak memory {peak_mb():.0f} MB, {peak_mb() - before_mb:.0f} MB more than before")
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
