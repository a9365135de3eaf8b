"""Thousands of weight updates on the embedded engine: clean under random schedules, then with one fault each.

    python tests/bench/gate_soak.py --clean 10000 --faulty 10000 --seed 0

A schedule mixes what happens around a push: polls or none, announcements or none, restarts of the engine or of the agent,
late manifests, repeated verifications, labels set early. The truth comes from the trainer's side of the table: a worker
may be READY only when what it holds is bit for bit what the manifest's weights are, at the label, in no open session.
The exit code is 1 when READY was false, a clean update was blocked, or a fault was missed.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "engines"))

from tiny_models import save_tiny_checkpoint, tiny_model

from syncguard.agent.core import Phase
from syncguard.agent.host import Agent, AgentConfig
from syncguard.agent.journal import Journal
from syncguard.agent.verify import VerifyRequest
from syncguard.engines.faults import Fault, FaultKind
from syncguard.engines.local import LocalEngine, LocalWorker
from syncguard.errors import EngineError, SyncguardError, UnreachableError
from syncguard.export.stream import ManifestBuilder
from syncguard.replay import ReplayRecord, c_key, response_scores_from_logits
from syncguard.spec import WeightVersion

CONFIG = {"hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 48, "head_dim": 16}
KV_HEADS = 2
HARMLESS = {
    FaultKind.UPDATE_KEEPS_CACHE: "the agent flushes itself",
    FaultKind.FLUSH_REFUSED: "the agent asks again",
}
SKIPPED = {
    FaultKind.EXPERT_SLOT: "needs a mixture of experts",
    FaultKind.A_SHIFT: "concerns generation only",
    FaultKind.STORAGE_MOVED: "same bytes; concerns captured graphs",
}


@dataclass
class Tally:
    """What happened."""

    updates: int = 0
    ready: int = 0
    false_ready: int = 0
    false_blocked: int = 0
    missed: Counter[str] = field(default_factory=Counter)
    caught: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)


class Rig:
    """A trainer whose weights move a little at each step, a worker, and its agent."""

    def __init__(self, folder: Path, seed: int, *, tp: int) -> None:
        self.random = random.Random(seed)
        self.folder = folder
        self.journal = folder / f"journal-{seed}.sqlite"
        save_tiny_checkpoint(folder, seed=seed, **CONFIG)
        self.model = tiny_model(seed=seed, **CONFIG)
        self.draw = torch.Generator().manual_seed(seed)
        self.worker = LocalWorker(folder, tp_size=tp, dtype="float32")
        self.run = f"run{seed}"
        self.step = 0
        self.held: dict[str, torch.Tensor] = self.export()
        self.previous: VerifyRequest | None = None
        self.agent = self.new_agent()
        self.worker.set_label(str(self.version))
        captured = self.agent.capture([3, 4, 5, 6], max_new_tokens=8, seed=seed)
        self.record = captured

    @property
    def version(self) -> WeightVersion:
        return WeightVersion(self.run, self.step)

    def new_agent(self) -> Agent:
        # One thread: polls happen where the schedule says.
        return Agent(
            LocalEngine(self.worker),
            worker="r0",
            journal=Journal(None),
            watch_adapter=LocalEngine(self.worker),
            config=AgentConfig(race_wait_s=0.0, lease_s=600.0),
        )

    def export(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in self.model.state_dict().items()}

    def train(self) -> None:
        with torch.no_grad():
            for parameter in self.model.parameters():
                noise = torch.randn(parameter.shape, generator=self.draw)
                parameter.add_(noise * 0.01)
        self.step += 1

    @torch.no_grad()
    def c_scores(self):
        ids = torch.tensor(self.record.input_ids.copy())[None]
        logits = self.model(ids).logits[0].double().numpy()
        return response_scores_from_logits(logits, self.record.input_ids, self.record.prompt_length)

    def manifest(self, weights):
        builder = ManifestBuilder(self.version)
        for name, tensor in weights.items():
            builder.add(name, tensor)
        return builder.build()

    def holds(self, weights) -> bool:
        """Whether the worker's bytes are these, without any digest of ours."""
        resident = resident_tensors(self.worker)
        expected = resident_tensors_of(weights, self.worker)
        return all(torch.equal(resident[name], expected[name]) for name in expected)


def resident_tensors(worker: LocalWorker) -> dict[str, torch.Tensor]:
    """Every resident tensor of every rank, by rank and name."""
    return {f"{i}/{n}": t for i, rank in enumerate(worker.ranks) for n, t in rank.state_dict().items()}


def resident_tensors_of(weights, like: LocalWorker) -> dict[str, torch.Tensor]:
    """What a fresh worker holds after these weights were loaded without a fault: the reference."""
    reference = resident_tensors_of.workers.setdefault(
        id(like), LocalWorker(like.folder, tp_size=len(like.ranks), dtype="float32")
    )
    reference.push(list(weights.items()))
    return resident_tensors(reference)


resident_tensors_of.workers = {}


def one_update(rig: Rig, tally: Tally, fault: FaultKind | None) -> None:
    """One training step, a push with its schedule, one verification, and the truth."""
    dice, worker = rig.random, rig.worker
    old_c = rig.c_scores()
    rig.train()
    weights, label, new_c = rig.export(), str(rig.version), rig.c_scores()
    record = rig.record.with_scores(
        {c_key(0, "old"): old_c, c_key(1, "old"): old_c, c_key(0, "new"): new_c, c_key(1, "new"): new_c}
    )
    if fault is None and dice.random() < 0.05:
        worker.restart()  # before the push; the whole push follows
    if fault is None and dice.random() < 0.03:
        rig.agent.close()
        rig.agent = rig.new_agent()
    agent = rig.agent
    if dice.random() < 0.9:
        agent.announce(rig.version, [rig.record] if dice.random() < 0.5 else ())
    maybe_poll(rig)
    fired_before = len(worker.faults.fired)
    if fault is not None:
        LocalEngine(worker).score([int(i) for i in rig.record.input_ids], prompt_length=rig.record.prompt_length)
        arm(worker, fault, dice)
    # A second bucket would drop the cache that the first one kept.
    push(rig, weights, label, dice, whole=fault is FaultKind.FLUSH_IGNORED)
    maybe_poll(rig)
    request = VerifyRequest(rig.manifest(weights), (record,))
    if fault is None and rig.previous is not None and dice.random() < 0.05:
        agent.verify(rig.previous)  # the request for the version before comes late
    for _ in range(2 if fault is None and dice.random() < 0.05 else 1):
        agent.verify(request)
    rig.previous = request
    agent.watcher.poll()
    fired = [report.fault.kind for report in worker.faults.fired[fired_before:]]
    judge(rig, tally, fault, fired, true=rig.holds(weights) and worker.label == label)
    worker.faults.armed.clear()
    if agent.state.phase is not Phase.READY:  # mend it, so that the next update starts from a verified state
        worker.restart()
        agent.announce(rig.version)
        worker.push(list(weights.items()), label=label)
        agent.verify(request)


def maybe_poll(rig: Rig) -> None:
    if rig.random.random() < 0.3:
        rig.agent.watcher.poll()


def judge(rig: Rig, tally: Tally, fault: FaultKind | None, fired: list[FaultKind], *, true: bool) -> None:
    """Count one update against the truth."""
    agent, label = rig.agent, str(rig.version)
    is_ready = agent.state.phase is Phase.READY
    tally.updates += 1
    tally.ready += is_ready
    tally.reasons[agent.state.reason] += 1
    if is_ready and not true:
        tally.false_ready += 1
        tally.notes.append(f"FALSE READY at {label} with {fault}")
    if fault is None:
        if not is_ready:
            tally.false_blocked += 1
            findings = agent.last.verdict.findings[:2] if agent.last else ()
            tally.notes.append(f"FALSE {agent.state.phase.value} at {label}: {agent.state.reason} {findings}")
    elif fault not in fired:
        tally.missed[f"{fault.value} (did not fire)"] += 1
    elif fault in HARMLESS:
        (tally.caught if is_ready else tally.missed)[f"{fault.value} (absorbed: {HARMLESS[fault]})"] += 1
    else:
        (tally.missed if is_ready else tally.caught)[fault.value] += 1


def arm(worker: LocalWorker, kind: FaultKind, dice: random.Random) -> None:
    """Arm one fault of a kind, somewhere."""
    names = ("q_proj", "o_proj", "gate_proj", "down_proj")
    fqn = (
        f"model.layers.0.{'self_attn' if (pick := dice.choice(names)) in ('q_proj', 'o_proj') else 'mlp'}.{pick}.weight"
    )
    if kind is FaultKind.SWAP:
        fault = Fault(kind, fqn="model.layers.0.mlp.gate_proj.weight", other="model.layers.0.mlp.up_proj.weight")
    elif kind is FaultKind.DROP_TENSOR:
        fault = Fault(kind, fqn=fqn)
    elif kind is FaultKind.TRANSPOSE:
        fault = Fault(kind)
    elif kind is FaultKind.ELEMENT_FLIP:
        fault = Fault(kind, index=(dice.randrange(8), dice.randrange(8)))
    else:
        fault = Fault(kind)
    if kind is FaultKind.FLUSH_IGNORED:
        # Harmless alone; with a cache that outlived the update, the first pass would be scored with old keys and values.
        worker.faults.arm(Fault(FaultKind.UPDATE_KEEPS_CACHE))
    worker.faults.arm(fault)


def push(rig: Rig, weights, label: str, dice: random.Random, *, whole: bool) -> None:
    """Push in one of several ways; an engine that breaks is left as it is."""
    items = list(weights.items())
    dice.shuffle(items)
    try:
        if whole or dice.random() < 0.5:
            rig.worker.push(items, label=label)
            return
        rig.worker.begin_update()
        cut = dice.randrange(1, len(items))
        for bucket in (items[:cut], items[cut:]):
            rig.worker.update(bucket, label=label)
            if dice.random() < 0.3:
                rig.agent.watcher.poll()
        rig.worker.end_update()
    except (EngineError, UnreachableError):
        rig.worker.set_label(label)


def kinds_for(tp: int) -> list[FaultKind]:
    """Fault kinds that a dense worker of `tp` ranks can have."""
    single = ({FaultKind.RANK_STALE} if tp == 1 else set()) | ({FaultKind.KV_REPLICA} if tp <= KV_HEADS else set())
    return [kind for kind in FaultKind if kind not in SKIPPED and kind not in single]


def soak(clean: int, faulty: int, seed: int, folder: Path, *, say=lambda _text: None) -> tuple[Tally, Tally]:
    """Run both halves and return their tallies."""
    tallies = []
    for count, with_fault in ((clean, False), (faulty, True)):
        tally = Tally()
        rigs = [Rig(folder / f"{with_fault}-{tp}", seed + tp, tp=tp) for tp in (1, 2, 4)]
        for rig in rigs:
            kickoff(rig)
        began_s = time.monotonic()
        for number in range(count):
            rig = rigs[number % len(rigs)]
            kinds = kinds_for(len(rig.worker.ranks))
            one_update(rig, tally, kinds[(number // len(rigs)) % len(kinds)] if with_fault else None)
            if (number + 1) % 500 == 0:
                rate = (number + 1) / (time.monotonic() - began_s)
                say(
                    f"{'faulty' if with_fault else 'clean'} {number + 1}/{count}, {rate:.0f}/s, notes {len(tally.notes)}"
                )
        for rig in rigs:
            rig.agent.close()
        tallies.append(tally)
    return tallies[0], tallies[1]


def kickoff(rig: Rig) -> None:
    """Prove T0."""
    scores = rig.c_scores()
    record: ReplayRecord = rig.record.with_scores({c_key(i, "new"): scores for i in range(2)})
    outcome = rig.agent.verify(VerifyRequest(rig.manifest(rig.held), (record,)))
    if rig.agent.state.phase is not Phase.READY:
        raise SystemExit(f"T0 was not verified: {outcome.verification.verdict}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clean", type=int, default=10_000)
    parser.add_argument("--faulty", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        try:
            clean, faulty = soak(
                options.clean, options.faulty, options.seed, Path(folder), say=lambda text: print(text, flush=True)
            )
        except SyncguardError as error:
            print(error.code, error)
            return 2
    print(f"\n{'':10}{'updates':>9}{'ready':>8}{'false READY':>13}{'false BLOCKED':>15}{'missed':>8}")
    for name, tally in (("clean", clean), ("faulty", faulty)):
        missed = sum(tally.missed.values())
        print(f"{name:10}{tally.updates:>9}{tally.ready:>8}{tally.false_ready:>13}{tally.false_blocked:>15}{missed:>8}")
    for kind in sorted({*faulty.caught, *faulty.missed}):
        print(f"  {kind:60} caught {faulty.caught[kind]:>5}  missed {faulty.missed[kind]:>5}")
    for note in (*clean.notes, *faulty.notes)[:20]:
        print(note)
    return int(bool(clean.false_ready or clean.false_blocked or faulty.false_ready or sum(faulty.missed.values())))


if __name__ == "__main__":
    sys.exit(main())
