"""Thousands of weight updates on the embedded engine: clean under random schedules, then with one fault each.

    python tests/bench/gate_soak.py --clean 10000 --faulty 10000 --seed 0

A schedule mixes what happens around a push: announcements or none, labels set early, pieces of a push inside a running
verification, requests that come too early, late or twice, polls and delayed answers inside any call, time that passes,
an engine that is silent beyond its lease, restarts of the engine or of the agent. Truth comes from the trainer's side of
the table: at each transition to READY, and after each update, the worker must hold bit for bit what READY claims, at
its label, in no open session. The exit code is 1 when READY was false, a clean update was blocked, or a fault missed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "engines"))

from soak_rig import KV_HEADS, LEASE_S, Rig

from syncguard.agent.core import Phase
from syncguard.agent.verify import VerifyRequest
from syncguard.engines.faults import Fault, FaultKind
from syncguard.engines.local import LocalEngine
from syncguard.errors import EngineError, SyncguardError, UnreachableError
from syncguard.manifest.verdict import FindingCode
from syncguard.replay import c_key, diagnose

HARMLESS = {
    FaultKind.UPDATE_KEEPS_CACHE: "the agent flushes itself",
    FaultKind.FLUSH_REFUSED: "the agent asks again",
    FaultKind.A_SHIFT: "readiness rests on B and C; the diagnosis must name A",
    FaultKind.STORAGE_MOVED: "no captured graph; the verdict must warn",
}


SHAPES = ({"tp": 1}, {"tp": 2, "graphs": True}, {"tp": 4}, {"tp": 2, "sparse": True})
ORDER = (0, 1, 3, 0, 1, 2, 0, 3)
"""Which shape each update is of; four ranks cost four times one."""


@dataclass
class Tally:
    """What happened."""

    updates: int = 0
    ready: int = 0
    false_ready: int = 0
    false_blocked: int = 0
    missed: Counter[str] = field(default_factory=Counter)
    caught: Counter[str] = field(default_factory=Counter)
    happened: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)


def one_update(rig: Rig, tally: Tally, fault: FaultKind | None) -> None:
    """One training step, a push with its schedule, its verification, and the truth."""
    worker, clean = rig.worker, fault is None
    fired_before = len(worker.faults.fired)
    record = captured(rig, fault)
    old_c = rig.c_scores(record)
    weights = rig.train()
    new_c = rig.c_scores(record)
    scored = record.with_scores(
        {c_key(0, "old"): old_c, c_key(1, "old"): old_c, c_key(0, "new"): new_c, c_key(1, "new"): new_c}
    )
    request = VerifyRequest(rig.manifest(), (scored,), rig.policy)
    before_the_push(rig, record, fault)
    push(rig, weights, request, fault)
    outcome = verified(rig, request, clean=clean)
    if clean:
        idle(rig)
    rig.agent.watcher.poll()
    fired = [report.fault.kind for report in worker.faults.fired[fired_before:]]
    judge(rig, tally, fault, fired, outcome)
    worker.faults.armed.clear()
    if not clean and rig.agent.state.phase is Phase.READY:
        flip_and_scrub(rig, tally)
    if rig.agent.state.phase is not Phase.READY:
        rig.mend(request)


def flip_and_scrub(rig: Rig, tally: Tally) -> None:
    """Flip a bit of a READY worker without an update: within one cycle a scrub must find it."""
    dice, name = rig.dice, "a bit flipped while READY, found within one cycle of scrubs"
    for _ in range(dice.randrange(20)):
        rig.agent.watcher.scrub()
    rig.worker.inject(
        Fault(FaultKind.ELEMENT_FLIP, rank=dice.randrange(rig.tp), index=(dice.randrange(8), dice.randrange(8)))
    )
    rig.agent.watcher.scrub()  # the first tells how many turns a cycle has
    for _ in range(int(rig.agent.watcher.scrub_progress()["turns"])):
        rig.agent.watcher.scrub()
    blocked = rig.agent.state.phase is Phase.BLOCKED and "a scrub found bytes" in rig.agent.state.message
    (tally.caught if blocked else tally.missed)[name] += 1


def captured(rig: Rig, fault: FaultKind | None):
    """The response that is replayed: that of the start, or one whose own scores were reported wrongly."""
    if fault is not FaultKind.A_SHIFT:
        return rig.record
    rig.worker.faults.arm(Fault(fault, nats=-0.1 - rig.dice.random()))
    return rig.agent.capture([3, 4, 5, 6], max_new_tokens=8, seed=rig.dice.randrange(1 << 30))


def before_the_push(rig: Rig, record, fault: FaultKind | None) -> None:
    """Restarts, the announcement, and the fault that is armed."""
    if fault is None and rig.rolled("engine restarted", 0.05):
        rig.worker.restart()  # the whole push follows
    if fault is None and rig.rolled("agent restarted", 0.03):
        rig.restart_agent()
    if fault is FaultKind.A_SHIFT or rig.rolled("announced", 0.9):
        with_old = fault is FaultKind.A_SHIFT or rig.rolled("old scores taken", 0.5)
        rig.agent.announce(rig.version, [record] if with_old else ())
    if rig.rolled("poll before the push", 0.3):
        rig.agent.watcher.poll()
    if fault is not None and fault is not FaultKind.A_SHIFT:
        LocalEngine(rig.worker).score([int(i) for i in record.input_ids], prompt_length=record.prompt_length)
        arm(rig, fault)


def verified(rig: Rig, request: VerifyRequest, *, clean: bool):
    """The requests that follow a push, and the outcome of the last."""
    if rig.rolled("poll after the push", 0.3):
        rig.agent.watcher.poll()
    if clean and rig.previous is not None and rig.rolled("request for the version before, late", 0.05):
        rig.agent.verify(rig.previous)
    outcome = rig.agent.verify(request)
    while rig.pending:
        rig.pending.popleft()()
    if clean and (rig.agent.state.phase is not Phase.READY or rig.rolled("verified twice", 0.05)):
        # A push that went on during the verification: READY must have waited for the next one.
        rig.did("verified again")
        outcome = rig.agent.verify(request)
    rig.previous = request
    return outcome


def idle(rig: Rig) -> None:
    """Let a READY worker be: time, scrubs, and now and then a silence that outlasts the lease."""
    agent = rig.agent
    if rig.rolled("time passed, with polls", 0.2):
        for _ in range(3):
            rig.clock.now_s += rig.dice.uniform(0.0, LEASE_S * 0.9)
            agent.watcher.poll()
    if rig.rolled("scrubbed", 0.1):
        for _ in range(rig.dice.randrange(1, 20)):
            agent.watcher.scrub()
    if rig.rolled("silent beyond the lease", 0.05):
        rig.worker.stop()
        agent.watcher.poll()
        rig.clock.now_s += LEASE_S * 1.1
        agent.watcher.poll()
        if agent.state.phase is Phase.READY:
            rig.false_ready.append(f"{rig.version} after its lease")
        rig.worker.resume()
        agent.watcher.poll()
        agent.watcher.reprove()


def judge(rig: Rig, tally: Tally, fault: FaultKind | None, fired: list[FaultKind], outcome) -> None:
    """Count one update against the truth."""
    agent, label = rig.agent, str(rig.version)
    is_ready = agent.state.phase is Phase.READY
    if is_ready and not rig.holds(label):
        rig.false_ready.append(f"{label} at the end")
    tally.updates += 1
    tally.ready += is_ready
    tally.false_ready += len(rig.false_ready)
    tally.notes += [f"FALSE READY {text} with {fault}" for text in rig.false_ready]
    rig.false_ready.clear()
    if fault is None:
        if not is_ready:
            tally.false_blocked += 1
            findings = agent.last.verdict.findings[:2] if agent.last else ()
            tally.notes.append(f"FALSE {agent.state.phase.value} at {label}: {agent.state.reason} {findings}")
        return
    if fault not in fired:
        tally.missed[f"{fault.value} (did not fire)"] += 1
        return
    name, right = fault.value, not is_ready
    if fault in HARMLESS and not (fault is FaultKind.STORAGE_MOVED and rig.graphs):
        name, right = f"{fault.value} (absorbed: {HARMLESS[fault]})", is_ready
    elif fault is FaultKind.STORAGE_MOVED:
        name = f"{fault.value} under a captured graph"
    if fault is FaultKind.A_SHIFT:
        right = right and diagnose(list(outcome.verification.records)).side == "A"
    if fault is FaultKind.STORAGE_MOVED:
        right = right and any(f.code is FindingCode.STORAGE_MOVED for f in outcome.verification.verdict.findings)
    (tally.caught if right else tally.missed)[name] += 1


def arm(rig: Rig, kind: FaultKind) -> None:
    """Arm one fault of a kind, somewhere."""
    dice, layer = rig.dice, "model.layers.0."
    names = [f"self_attn.{part}_proj" for part in "qkvo"]
    names += (
        [f"mlp.experts.{dice.randrange(4)}.up_proj", "mlp.gate"] if rig.sparse else ["mlp.gate_proj", "mlp.down_proj"]
    )
    fault = Fault(kind)
    if kind is FaultKind.SWAP:
        first, second = (
            ("mlp.experts.0.up_proj", "mlp.experts.3.gate_proj") if rig.sparse else ("mlp.gate_proj", "mlp.up_proj")
        )
        fault = Fault(kind, fqn=f"{layer}{first}.weight", other=f"{layer}{second}.weight")
    elif kind is FaultKind.DROP_TENSOR:
        fault = Fault(kind, fqn=f"{layer}{dice.choice(names)}.weight")
    elif kind is FaultKind.ELEMENT_FLIP:
        fault = Fault(kind, rank=dice.randrange(rig.tp), index=(dice.randrange(8), dice.randrange(8)))
    elif kind in (FaultKind.RANK_STALE, FaultKind.EXPERT_SLOT):
        fault = Fault(kind, rank=dice.randrange(rig.tp))
    if kind is FaultKind.FLUSH_IGNORED:
        # Harmless alone; with a cache that outlived the update, the first pass would be scored with old keys and values.
        rig.worker.faults.arm(Fault(FaultKind.UPDATE_KEEPS_CACHE))
    rig.worker.faults.arm(fault)


def push(rig: Rig, weights, request: VerifyRequest, fault: FaultKind | None) -> None:
    """Push in one of several ways; an engine that breaks is left as it is."""
    items, label, worker = list(weights.items()), str(rig.version), rig.worker
    rig.dice.shuffle(items)
    if rig.rolled("label set early", 0.05):
        worker.set_label(label)
    cut = rig.dice.randrange(1, len(items))
    try:
        # A second bucket would drop the cache that the first one kept.
        if fault is FaultKind.FLUSH_IGNORED or rig.rolled("pushed whole", 0.4):
            worker.push(items, label=label)
            return
        worker.begin_update()
        worker.update(items[:cut], label=label)
        if rig.rolled("poll between buckets", 0.3):
            rig.agent.watcher.poll()
        if fault is None and rig.rolled("request before the push was over", 0.1):
            rig.agent.verify(request)
            if rig.agent.state.phase is Phase.READY:
                rig.false_ready.append(f"{label} in the midst of its push")
        if fault is None and rig.rolled("rest of the push left for the verification", 0.15):
            rig.pending.append(lambda: worker.update(items[cut:], label=label))
            rig.pending.append(worker.end_update)
            return
        worker.update(items[cut:], label=label)
        worker.end_update()
    except (EngineError, UnreachableError):
        worker.set_label(label)


def kinds_for(rig: Rig) -> list[FaultKind]:
    """Fault kinds that this rig's worker can have."""
    impossible = set() if rig.sparse else {FaultKind.EXPERT_SLOT}
    impossible |= {FaultKind.RANK_STALE} if rig.tp == 1 else set()
    impossible |= {FaultKind.KV_REPLICA} if rig.tp <= KV_HEADS else set()
    return [kind for kind in FaultKind if kind not in impossible]


def soak(clean: int, faulty: int, seed: int, folder: Path, *, say=lambda _text: None) -> tuple[Tally, Tally]:
    """Run both halves and return their tallies."""
    tallies = []
    for count, with_fault in ((clean, False), (faulty, True)):
        tally = Tally()
        rigs = [Rig(folder / f"{with_fault}-{n}", seed + n, **shape) for n, shape in enumerate(SHAPES) if count]
        turns = [0] * len(rigs)
        began_s, said = time.monotonic(), 0
        for number in range(count):
            chosen = ORDER[number % len(ORDER)]
            rig, kinds = rigs[chosen], kinds_for(rigs[chosen])
            one_update(rig, tally, kinds[turns[chosen] % len(kinds)] if with_fault else None)
            turns[chosen] += 1
            if len(tally.notes) > said:
                say("\n".join(tally.notes[said:]))
                said = len(tally.notes)
            if (number + 1) % 500 == 0:
                rate = (number + 1) / (time.monotonic() - began_s)
                half = "faulty" if with_fault else "clean"
                say(f"{half} {number + 1}/{count}, {rate:.1f}/s, notes {len(tally.notes)}, missed {dict(tally.missed)}")
        for rig in rigs:
            tally.happened += rig.happened
            rig.agent.close()
        tallies.append(tally)
    return tallies[0], tallies[1]


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
        print(f"  {kind:80} caught {faulty.caught[kind]:>5}  missed {faulty.missed[kind]:>5}")
    for event, times in (clean.happened + faulty.happened).most_common():
        print(f"  {times:>7} x {event}")
    for note in (*clean.notes, *faulty.notes)[:20]:
        print(note)
    wrong = clean.false_ready or clean.false_blocked or faulty.false_ready or sum(faulty.missed.values())
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
