"""Agents as Ray actors on a local cluster, gated from the driver: a real push, a stale worker, an actor that dies."""

from __future__ import annotations

import itertools
import os
import time
from pathlib import Path

import pytest
import ray
from ray._private import ray_constants
from tiny_models import save_tiny_checkpoint

from syncguard.agent.ray_actor import AgentActor, RayListen, RayWorker, start_agents
from syncguard.errors import UnreachableError, UsageError
from syncguard.export.checkpoint import export_checkpoint
from syncguard.gate.controller import Gate
from syncguard.gate.ray_fleet import addresses_of, gate_of_actors
from syncguard.gate.readiness import Action
from syncguard.manifest.verdict import FindingCode, ReadinessState
from syncguard.rpc.credentials import client_credentials
from syncguard.spec import WeightVersion

pytestmark = pytest.mark.timeout(600)
START_S = 240.0
"""A process that imports all of this takes seconds, and minutes on a machine that is busy."""
WAIVER = "the replay is tested elsewhere"


def worker_class():
    """The actor of these tests; made in a function, so that Ray sends it by value."""

    class Rollout(AgentActor):
        """An embedded worker with its agent."""

        def __init__(self, worker, listen=None, config=None):
            super().__init__(worker, listen, config)
            self.worker = self.adapter.worker

        def load(self, folder, label):
            self.worker.update_from_disk(folder, label=label)

        def set_label(self, label):
            self.worker.set_label(label)

        def process(self):
            return os.getpid(), ray.get_runtime_context().get_node_id()

    return Rollout


def embedded(folder):
    def engine():
        from syncguard.engines.local import LocalEngine, LocalWorker

        return LocalEngine(LocalWorker(folder))

    return engine


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        # The switch by which Ray keeps to loopback on other systems; its own files and token stay in our folder.
        patch.setattr(ray_constants, "ENABLE_RAY_CLUSTER", False)
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_AUTH_TOKEN", os.urandom(32).hex())
        patch.setenv("OMP_NUM_THREADS", "1")
        folder = tmp_path_factory.getbasetemp() / "r"  # sockets in it have at most 107 characters of path
        ray.init(
            num_cpus=2,
            include_dashboard=False,
            object_store_memory=80 << 20,
            log_to_driver=False,
            _node_ip_address="127.0.0.1",
            _temp_dir=str(folder),
        )
        yield ray.nodes()[0]["NodeID"]
        ray.shutdown()


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    return [save_tiny_checkpoint(tmp_path_factory.mktemp("checkpoints") / str(seed), seed=seed) for seed in (0, 1)]


@pytest.fixture(scope="module")
def actors(cluster, checkpoints):
    workers = [RayWorker(f"rollout-{i}", embedded(checkpoints[0]), node_id=cluster) for i in range(2)]
    return start_agents(workers, actor=worker_class())


@pytest.fixture
def gate(actors):
    with gate_of_actors(actors.values(), start_timeout_s=START_S, timeout_s=60.0) as made:
        yield made


VERSIONS = (WeightVersion("run", step) for step in itertools.count(1))


def push(gate, actors, folder, *, stale=()):
    version = next(VERSIONS)
    gate.before_push(version)
    ray.get(
        [
            actor.set_label.remote(str(version)) if name in stale else actor.load.remote(folder, str(version))
            for name, actor in actors.items()
        ]
    )
    return gate.after_push(export_checkpoint(folder, version=version), replay_waived_because=WAIVER)


def states(decision):
    return {worker.worker: worker.readiness.state for worker in decision.workers}


def test_each_agent_is_a_process_of_its_own_on_the_node_that_was_named(cluster, actors):
    found = ray.get([actor.process.remote() for actor in actors.values()])
    assert len({pid for pid, _ in found} | {os.getpid()}) == 3
    assert {node for _, node in found} == {cluster}


def test_an_update_of_all_workers_passes_the_gate(gate, actors, checkpoints):
    decision = push(gate, actors, checkpoints[1])
    assert decision.action is Action.PROCEED
    assert states(decision) == {"rollout-0": ReadinessState.READY, "rollout-1": ReadinessState.READY}


def test_one_stale_worker_is_refused_with_the_finding_that_names_it(gate, actors, checkpoints):
    assert push(gate, actors, checkpoints[1]).action is Action.PROCEED
    decision = push(gate, actors, checkpoints[0], stale=("rollout-1",))
    assert decision.action is not Action.PROCEED
    assert states(decision) == {"rollout-0": ReadinessState.READY, "rollout-1": ReadinessState.BLOCKED}
    (stale,) = [verdict for verdict in gate.verdicts() if verdict.worker == "rollout-1"]
    assert FindingCode.STALE in {finding.code for finding in stale.verdict.findings}


def wait_until_gone(pid: int, timeout_s: float = 60.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    stat = Path(f"/proc/{pid}/stat")
    while True:
        try:
            state = stat.read_text().rpartition(")")[2].split()[0]
        except OSError:
            return
        if state in "ZX":
            return
        assert time.monotonic() < deadline_s, f"process {pid} lives on"
        time.sleep(0.01)


def test_a_worker_whose_actor_died_is_not_ready(actors, checkpoints):
    mortal = start_agents([RayWorker("mortal", embedded(checkpoints[0]))], actor=worker_class())
    fleet = {"rollout-0": actors["rollout-0"], **mortal}
    with gate_of_actors(fleet.values(), start_timeout_s=START_S, timeout_s=60.0) as gate:
        assert push(gate, fleet, checkpoints[1]).action is Action.PROCEED
        pid, _ = ray.get(mortal["mortal"].process.remote())
        ray.kill(mortal["mortal"])  # returns before the process is gone
        wait_until_gone(pid)
        decision = gate.decision(refresh=True)
        assert decision.action is not Action.PROCEED
        assert states(decision) == {"rollout-0": ReadinessState.READY, "mortal": ReadinessState.PENDING}


def test_an_actor_that_cannot_start_is_an_error_that_says_why(cluster):
    def broken():
        raise RuntimeError("no engine here")

    started = start_agents([RayWorker("rollout-0", broken)])
    with pytest.raises(UnreachableError, match="no engine here"):
        addresses_of(started.values(), timeout_s=START_S)


def test_a_token_is_asked_for_and_never_passes_through_ray(cluster, checkpoints, tmp_path):
    token, wrong = tmp_path / "token", tmp_path / "wrong"
    token.write_text("0123456789abcdef0123")
    wrong.write_text("fedcba9876543210fedc")
    listen = RayListen(token_files=(f"verify={token}",))
    started = start_agents([RayWorker("rollout-0", embedded(checkpoints[0]))], listen)
    (address,) = addresses_of(started.values(), timeout_s=START_S)
    try:
        with Gate([address], credentials=client_credentials(token_file=wrong)) as refused:
            refused.before_push(next(VERSIONS))
            assert refused.decision().action is not Action.PROCEED
        assert "0123456789abcdef" not in repr(listen)
    finally:
        ray.get(started["rollout-0"].stop.remote())
        ray.kill(started["rollout-0"])


def test_an_agent_off_loopback_without_certificates_is_refused(cluster, checkpoints):
    started = start_agents([RayWorker("rollout-0", embedded(checkpoints[0]))], RayListen(host="0.0.0.0"))
    with pytest.raises(UnreachableError, match="refusing to listen off loopback"):
        addresses_of(started.values(), timeout_s=START_S)


@pytest.mark.parametrize("names", [[], ["rollout-0", "rollout-0"]])
def test_a_fleet_names_each_worker_once(names):
    with pytest.raises(UsageError, match="workers of a Ray fleet"):
        start_agents([RayWorker(name, "http://127.0.0.1:1") for name in names])
