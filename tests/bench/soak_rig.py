"""A trainer, a worker and its agent for soak runs, with the truth about the worker from the trainer's side of the table.

The clock is the program's own, so that delays of seconds cost nothing. `World.moment` runs before each call of the
agent to its engine and rolls what else happens just then: a poll of the watcher, time, an answer that comes late, or
the next piece of a push that is still under way.
"""

from __future__ import annotations

import contextlib
import random
from collections import Counter, deque
from pathlib import Path

import torch
from tiny_models import save_tiny_checkpoint, tiny_model

from syncguard.agent.core import Phase
from syncguard.agent.host import Agent
from syncguard.agent.journal import Journal
from syncguard.agent.settings import AgentConfig
from syncguard.agent.verify import VerifyRequest
from syncguard.engines.local import LocalEngine, LocalWorker
from syncguard.errors import EngineError
from syncguard.export.stream import ManifestBuilder
from syncguard.manifest.verdict import ReadinessState
from syncguard.replay import ReplayPolicy, c_key, response_scores_from_logits
from syncguard.spec import WeightVersion

DENSE = {"hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 48, "head_dim": 16}
SPARSE = {**DENSE, "moe_intermediate_size": 16, "num_experts": 4}
KV_HEADS = 2
SCRUB_BYTES = 8 << 10
LEASE_S = 5.0
ROUTED = ReplayPolicy(outlier_share=0.13)
"""Where two experts score a token alike to the last bit (seen once in some 2,500 updates), worker and trainer may route it
differently with the same weights; policy for such models lets one token in eight be left out, and says so."""


class Clock:
    """Seconds of this run; looking takes a microsecond, so that no two looks are at one time."""

    def __init__(self) -> None:
        self.now_s = 1.0

    def __call__(self) -> float:
        self.now_s += 1e-6
        return self.now_s


class Meddled:
    """An adapter before whose every call something else may happen."""

    def __init__(self, engine: LocalEngine, moment) -> None:
        self._engine, self._moment = engine, moment

    def __getattr__(self, name: str):
        call = getattr(self._engine, name)

        def called(*args, **kwargs):
            self._moment()
            return call(*args, **kwargs)

        return called


class Rig:
    """A trainer whose weights move a little at each step, a worker, and its agent.

    Attributes:
        happened: How often each event of a schedule occurred.
        pending: Pieces of a push that run at later moments.
        false_ready: Transitions to READY at which the worker did not hold what READY claimed.
    """

    def __init__(self, folder: Path, seed: int, *, tp: int, sparse: bool = False, graphs: bool = False) -> None:
        self.dice = random.Random(seed)
        self.policy = ROUTED if sparse else ReplayPolicy()
        kind, config = ("qwen3_moe", SPARSE) if sparse else ("qwen3", DENSE)
        self.sparse, self.graphs, self.tp = sparse, graphs, tp
        folder.mkdir(parents=True, exist_ok=True)
        save_tiny_checkpoint(folder, kind, seed=seed, **config)
        self.model = tiny_model(kind, seed=seed, **config)
        self.draw = torch.Generator().manual_seed(seed)
        ep = tp if sparse else 1
        self.worker = LocalWorker(folder, tp_size=tp, ep_size=ep, dtype="float32", graphs=graphs)
        self.twin = LocalWorker(folder, tp_size=tp, ep_size=ep, dtype="float32")
        self.twin_holds = ""
        # A journal on disk in one kind of rig; an agent that restarts must then recover from it.
        self.journal = folder / "journal.sqlite" if tp == 1 else None
        self.clock = Clock()
        self.happened: Counter[str] = Counter()
        self.pending: deque = deque()
        self.late: tuple | None = None
        self.false_ready: list[str] = []
        self.run, self.step = f"run{seed}", 0
        self.exports = {str(self.version): self.export()}
        self.previous: VerifyRequest | None = None
        self.agent = self.new_agent()
        self.worker.set_label(str(self.version))
        self.record = self.agent.capture([3, 4, 5, 6], max_new_tokens=8, seed=seed)
        self.kickoff()

    @property
    def version(self) -> WeightVersion:
        return WeightVersion(self.run, self.step)

    def new_agent(self) -> Agent:
        # No threads: polls, scrubs and the end of a lease happen where the schedule says.
        agent = Agent(
            Meddled(LocalEngine(self.worker), self.moment),
            worker="r0",
            journal=Journal(self.journal),
            watch_adapter=LocalEngine(self.worker),
            config=AgentConfig(race_wait_s=0.0, lease_s=LEASE_S, scrub_bytes=SCRUB_BYTES),
            clock=self.clock,
        )
        agent.listen(self.on_readiness)
        return agent

    def restart_agent(self) -> None:
        self.agent.close()
        self.agent = self.new_agent()
        self.late = None

    def kickoff(self) -> None:
        """Prove T0."""
        scores = self.c_scores(self.record)
        record = self.record.with_scores({c_key(i, "new"): scores for i in range(2)})
        outcome = self.agent.verify(VerifyRequest(self.manifest(), (record,), self.policy))
        if self.agent.state.phase is not Phase.READY:
            raise SystemExit(f"T0 was not verified: {outcome.verification.verdict}")

    def moment(self) -> None:
        """Roll what else happens just before a call of the agent to its engine."""
        dice = self.dice
        if dice.random() < 0.10:
            self.did("time passed inside a call")
            self.clock.now_s += dice.uniform(0.0, 0.4)
        if dice.random() < 0.15 and self.worker.alive:
            self.did("poll inside a call")
            self.agent.watcher.poll()
        if self.late is not None and dice.random() < 0.3:
            self.did("answer delivered late")
            status, asked_s = self.late
            self.late = None
            self.agent.feed(status, asked_s)
        elif self.late is None and dice.random() < 0.05 and self.worker.alive:
            asked_s = self.clock()
            self.late = (LocalEngine(self.worker).status(), asked_s)
        if self.pending and dice.random() < 0.5:
            self.did("piece of a push inside a verification")
            self.pending.popleft()()

    def did(self, event: str) -> None:
        self.happened[event] += 1

    def rolled(self, event: str, chance: float) -> bool:
        """Whether an event of this chance happens now; counted where it does."""
        happens = self.dice.random() < chance
        if happens:
            self.did(event)
        return happens

    def export(self) -> dict[str, torch.Tensor]:
        """Every tensor under its checkpoint name; Transformers 5 keeps the experts of a layer in two fused tensors."""
        named = {}
        for name, tensor in self.model.state_dict().items():
            layer, _, fused = name.partition(".mlp.experts.")
            parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(fused, ())
            for expert in range(len(tensor) if parts else 0):
                for part, value in zip(parts, tensor[expert].chunk(len(parts)), strict=True):
                    named[f"{layer}.mlp.experts.{expert}.{part}.weight"] = value.clone()
            if not parts:
                named[name] = tensor.clone()
        return named

    def train(self) -> dict[str, torch.Tensor]:
        """Move every weight a little, and return what is exported."""
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=self.draw) * 0.01)
        self.step += 1
        weights = self.export()
        self.exports = {**dict(list(self.exports.items())[-1:]), str(self.version): weights}
        return weights

    @torch.no_grad()
    def c_scores(self, record):
        ids = torch.tensor(record.input_ids.copy())[None]
        logits = self.model(ids).logits[0].double().numpy()
        return response_scores_from_logits(logits, record.input_ids, record.prompt_length)

    def manifest(self):
        builder = ManifestBuilder(self.version)
        for name, tensor in self.exports[str(self.version)].items():
            builder.add(name, tensor)
        return builder.build()

    def holds(self, version: str) -> bool:
        """Whether the worker holds a version bit for bit, at its label, in no open session; no digest of ours is asked."""
        weights = self.exports.get(version)
        if weights is None or self.worker.label != version or any(p.status().updating for p in self.worker.probes):
            return False
        if self.twin_holds != version:
            self.twin.push(list(weights.items()))
            self.twin_holds = version
        resident, expected = resident_tensors(self.worker), resident_tensors(self.twin)
        return resident.keys() == expected.keys() and all(torch.equal(resident[n], expected[n]) for n in expected)

    def on_readiness(self, readiness) -> None:
        if readiness.state is ReadinessState.READY and not self.holds(readiness.weight_version):
            self.false_ready.append(f"{readiness.weight_version} {readiness.reason}")

    def mend(self, request: VerifyRequest) -> None:
        """Bring a worker that is not READY to the newest version, so that the next update starts from a verified state.

        A second push mends what a push writes; the rest (padding, moved storage, an open session) needs a restart.
        """
        self.worker.faults.armed.clear()
        self.pending.clear()
        items = list(self.exports[str(self.version)].items())
        for restart in (False, True):
            if restart:
                self.worker.restart()
            self.did("mended by a restart" if restart else "mended by a second push")
            self.agent.announce(self.version)
            with contextlib.suppress(EngineError):
                self.worker.push(items, label=str(self.version))
                self.agent.verify(request)
            if self.agent.state.phase is Phase.READY:
                return
        raise SystemExit(f"cannot be mended: {self.agent.state}")


def resident_tensors(worker: LocalWorker) -> dict[str, torch.Tensor]:
    """Every resident tensor of every rank, by rank and name."""
    return {f"{i}/{n}": t for i, rank in enumerate(worker.ranks) for n, t in rank.state_dict().items()}
