"""Agents as Ray actors, each on the node of its worker; needs the extra `ray`.

    agents = start_agents([RayWorker("rollout-0", "http://10.0.0.5:30000", node_id=...), ...], RayListen(...))
    gate = gate_of_actors(agents.values(), credentials=...)      # syncguard.gate.ray_fleet

Ray places the processes and tells their addresses, nothing else. Verdicts and readiness travel over the same gRPC as
without Ray, with the same certificates and roles; secrets are read from files of the actor's node and never pass through
Ray. Whoever may submit work to the Ray cluster may run code on its nodes, and so forge anything an agent could say:
protect the cluster itself (Ray's token authentication, a network of its own).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from syncguard.agent.host import Agent
from syncguard.agent.journal import Journal
from syncguard.agent.service import AgentServer, ListenOptions
from syncguard.agent.settings import AgentConfig
from syncguard.engines.base import EngineAdapter
from syncguard.engines.sglang import SglangEngine
from syncguard.errors import UsageError
from syncguard.rpc.credentials import TlsFiles, access_of, read_secret

Engine: TypeAlias = "str | Callable[[], EngineAdapter]"


@dataclass(frozen=True, slots=True)
class RayWorker:
    """One rollout worker.

    Attributes:
        name: Its name in verdicts, once in the fleet.
        engine: URL of its SGLang server as seen from its node, or a function that makes an adapter in the actor.
        node_id: Ray node on which the agent runs, that of the worker; empty for any.
        journal: SQLite journal on that node; None keeps it in memory.
    """

    name: str
    engine: Engine
    node_id: str = ""
    journal: Path | None = None


@dataclass(frozen=True, slots=True)
class RayListen:
    """How every agent listens and who may speak to it. All files are paths on the agents' nodes.

    Attributes:
        host: Address to bind; empty is the node's own with TLS, and 127.0.0.1 without.
        port: Port; 0 picks a free one, which changes when Ray restarts the actor.
        tls: Own files for mutual TLS; needed off loopback.
        names: `NAME=ROLE` of client certificates.
        token_files: `ROLE=FILE` of bearer tokens.
        engine_key_file: File with the engine's admin key; None for an engine without.
    """

    host: str = ""
    port: int = 0
    tls: TlsFiles | None = None
    names: tuple[str, ...] = ()
    token_files: tuple[str, ...] = ()
    engine_key_file: Path | None = None


@dataclass(frozen=True, slots=True)
class RayPlacement:
    """What Ray is asked for.

    Attributes:
        num_cpus: CPUs that each actor reserves.
        max_restarts: Restarts of an actor whose process died; -1 without end. A restarted agent knows nothing until the
            next verification, and is found again only at a fixed port.
        resources: Custom resources that each actor reserves.
    """

    num_cpus: float = 0.1
    max_restarts: int = 0
    resources: dict[str, float] = field(default_factory=dict)


class AgentActor:
    """The actor: one agent with its gRPC server. Derive from it to keep more beside the agent."""

    def __init__(self, worker: RayWorker, listen: RayListen | None = None, config: AgentConfig | None = None) -> None:
        """Connect to the engine, and serve.

        Raises:
            UsageError: The address cannot be bound, or is off loopback without TLS; or a file cannot be read.
        """
        options = listen if listen is not None else RayListen()
        rules = config if config is not None else AgentConfig()
        self.adapter, watch = _adapters(worker.engine, options, rules)
        self.agent = Agent(
            self.adapter, worker=worker.name, journal=Journal(worker.journal), config=rules, watch_adapter=watch
        )
        host = options.host or ("127.0.0.1" if options.tls is None else _node_address())
        access = access_of(options.names, options.token_files)
        try:
            self._server = AgentServer(self.agent, ListenOptions(f"{host}:{options.port}", options.tls, access))
        except Exception:
            self.agent.close()
            raise
        self.agent.start()
        self._server.start()

    def address(self) -> str:
        """Return `HOST:PORT` of the agent's gRPC server."""
        return self._server.address

    def stop(self) -> None:
        """Stop serving, and end the agent; readiness is not announced any more."""
        self._server.stop()
        self.agent.close()


def start_agents(
    workers: Sequence[RayWorker],
    listen: RayListen | None = None,
    *,
    config: AgentConfig | None = None,
    placement: RayPlacement | None = None,
    actor: type[AgentActor] = AgentActor,
) -> dict[str, Any]:
    """Start one agent a worker, and return the actor handles by worker name; the caller keeps them alive.

    Args:
        workers: The workers.
        listen: How the agents listen.
        config: Times and bounds of each agent.
        placement: What Ray is asked for.
        actor: The actor's class.

    Raises:
        UsageError: No workers, or one named twice.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    names = [worker.name for worker in workers]
    if not names or len(set(names)) != len(names):
        raise UsageError("workers of a Ray fleet", expected="one or more, each name once", found=names)
    rules = placement if placement is not None else RayPlacement()
    remote = ray.remote(actor)
    started = {}
    for worker in workers:
        options: dict[str, Any] = {
            "num_cpus": rules.num_cpus,
            "max_restarts": rules.max_restarts,
            "resources": dict(rules.resources),
        }
        if worker.node_id:
            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(worker.node_id, soft=False)
        started[worker.name] = remote.options(**options).remote(worker, listen, config)
    return started


def _adapters(engine: Engine, listen: RayListen, config: AgentConfig) -> tuple[EngineAdapter, EngineAdapter | None]:
    if not isinstance(engine, str):
        return engine(), None
    key = ""
    if listen.engine_key_file is not None:
        key = read_secret(listen.engine_key_file, what="the engine's key", least=1)
    return SglangEngine(engine, api_key=key), SglangEngine(engine, api_key=key, timeout_s=config.lease_s / 2)


def _node_address() -> str:
    import ray

    return str(ray.util.get_node_ip_address())
