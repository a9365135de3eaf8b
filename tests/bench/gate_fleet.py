"""A thousand agents gated by one process: publish → decision, and the memory of the gate.

    python tests/bench/gate_fleet.py --agents 1000 --tensors 400

The agents are simulated in a second process: real gRPC servers that read the whole manifest and answer MATCH.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import resource
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "agent"))


def agents(count: int, pipe: Connection) -> None:
    """Serve `count` agents until the pipe closes; sends their addresses."""
    import grpc.aio

    from syncguard.manifest.verdict import Readiness, ReadinessState, Verdict, VerdictStatus
    from syncguard.manifest.wire_verdict import readiness_to_proto, verdict_to_proto
    from syncguard.v1 import agent_service_pb2 as pb
    from syncguard.v1 import agent_service_pb2_grpc as rpc

    class Simulated(rpc.AgentServiceServicer):
        def __init__(self, number: int) -> None:
            self.name = f"r{number}"
            self.readiness = Readiness(ReadinessState.PENDING, "unknown", "said")

        async def GetStatus(self, _request, _context):  # noqa: N802
            return pb.GetStatusResponse(
                worker=self.name,
                engine="simulated",
                weight_version_label="run@1",
                expected_ranks=1,
                state=self.readiness.state.value,
                readiness=readiness_to_proto(self.readiness),
                incarnation=self.name,
                spec_version=1,
                lease_s=5.0,
                poll_interval_s=1.0,
            )

        async def AnnounceUpdate(self, requests, _context):  # noqa: N802
            async for _ in requests:
                pass
            self.readiness = Readiness(ReadinessState.PENDING, "update_announced", "said", "run@1")
            return pb.AnnounceUpdateResponse(readiness=readiness_to_proto(self.readiness), worker=self.name)

        async def Verify(self, requests, _context):  # noqa: N802
            announced = entries = 0
            async for request in requests:
                whole = request.whole
                announced = announced or request.header.entry_count or whole.header.entry_count
                entries += sum(len(chunk.fqn) for chunk in (request.entries, *whole.entries))
            status = VerdictStatus.MATCH if entries == announced else VerdictStatus.INCOMPLETE
            self.readiness = Readiness(ReadinessState.READY, "verified", "said", "run@1", time.time())
            yield pb.VerifyResponse(
                outcome=pb.VerifyResponse.Outcome(
                    worker=self.name,
                    verdict=verdict_to_proto(Verdict(status, "said")),
                    readiness=readiness_to_proto(self.readiness),
                )
            )

    async def serve() -> None:
        addresses, servers = [], []
        for number in range(count):
            server = grpc.aio.server()
            rpc.add_AgentServiceServicer_to_server(Simulated(number), server)
            addresses.append(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
            await server.start()
            servers.append(server)
        pipe.send(addresses)
        await asyncio.get_running_loop().run_in_executor(None, lambda: pipe.poll(None))
        await asyncio.gather(*(server.stop(0) for server in servers))

    asyncio.run(serve())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", type=int, default=1000)
    parser.add_argument("--tensors", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    near, far = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=agents, args=(options.agents, far), daemon=True)
    process.start()
    addresses = near.recv()

    from simulated_engine import manifest_of, weights_of

    from syncguard.gate.controller import Gate
    from syncguard.gate.readiness import Action

    manifest = manifest_of(weights_of(0, tensors=options.tensors), "run@1")
    print(f"{options.agents} agents, manifest of {options.tensors} tensors")
    with Gate(addresses) as gate:
        for number in range(options.rounds):
            began_s = time.perf_counter()
            gate.before_push("run@1")
            announced_s = time.perf_counter()
            decision = gate.after_push(manifest, replay_waived_because="benchmark")
            done_s = time.perf_counter()
            assert decision.action is Action.PROCEED, decision.reason
            assert len(decision.ready) == options.agents
            print(
                f"round {number}: announce {announced_s - began_s:.2f} s, publish to decision {done_s - announced_s:.2f} s"
            )
        peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(f"peak memory of the gate {peak_mb:.0f} MB")
    near.send("stop")
    process.join(timeout=30)
    return 0


if __name__ == "__main__":
    sys.exit(main())
