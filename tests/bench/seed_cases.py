"""Cases 1, 2 and 3 of the method's source, clean / fault / fixed, on a real SGLang server: its figures beside ours.

    python tests/bench/seed_cases.py [--engine sglang|local] [--dtype fp32|bf16] [--tp 1] [--responses 8] [--tokens 128]

The source ran Qwen3-30B-A3B in bf16 on eight GPUs (two a worker) with its trainer split over eight; ours is a tiny random
Qwen3. So levels differ and the *pattern* must be the same: which of A-B, B-C and A-C rise, and which stay at their noise.
MAE in nats over all response tokens of a rollout. Exit code 10 when a pattern is not the expected one.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from syncguard.cli.demo.rigs import LocalRig, Rig, SglangRig
from syncguard.cli.demo.trainer import Trainer, balanced_rewards
from syncguard.export.stream import ManifestBuilder
from syncguard.gate.controller import Gate
from syncguard.replay import ReplayPolicy, ReplayRecord, b_key, c_key, diagnose
from syncguard.replay.record import A
from syncguard.spec import WeightVersion

OFFSET_NATS = 0.10
SOURCE = {
    ("case 1", "clean"): (0.009756, 0.009218, 0.009337),
    ("case 1", "fault"): (0.100791, 0.009306, 0.102758),
    ("case 1", "fixed"): (0.006772, 0.008432, 0.007703),
    ("case 2", "clean"): (0.009756, 0.009218, 0.009337),
    ("case 2", "fault"): (0.008086, 0.102164, 0.102420),
    ("case 2", "fixed"): (0.006334, 0.007119, 0.007712),
    ("case 3", "rollout 0"): (None, 0.009747, None),
    ("case 3", "rollout 1, push skipped"): (0.0, 10.951996, None),
    ("case 3", "rollout 2, sync resumed"): (None, 0.012223, None),
}
"""MAE of A-B, B-C, A-C as printed by the source; None where it prints none (A-B is "exactly zero" in the skipped rollout)."""
HIGH = {
    ("case 1", "fault"): (True, False, True),
    ("case 2", "fault"): (False, True, True),
    ("case 3", "rollout 1, push skipped"): (False, True, True),
}


@dataclass
class Run:
    """Trainer, worker and gate of the whole program."""

    trainer: Trainer
    rig: Rig
    gate: Gate
    responses: int
    tokens: int
    step: int = -1
    seed: int = 0

    def rollout(self, *, train: bool = False, push: bool = True) -> list[ReplayRecord]:
        """Bring (or not bring) a version to the worker, generate, and score three ways."""
        batch = self.generate() if train else []
        if train:
            self.trainer.train_step(batch, balanced_rewards(len(batch)))
        self.step += 1
        version, weights = WeightVersion("cases", self.step), self.trainer.export()
        self.gate.before_push(version)
        if push:
            self.rig.push_tensors(weights, str(version))
        else:
            self.rig.set_label(str(version))
        manifest = ManifestBuilder(version)
        manifest.add_many(weights.items())
        records = [self.with_c(record) for record in self.generate()]
        decision = self.gate.after_push(manifest.build(), records)
        verdicts = self.gate.verdicts()
        if len(verdicts) != 1:
            raise SystemExit(f"no verdict of the worker at {version}: {decision.reason}")
        return [record.at_one_state() for record in verdicts[0].records]

    def generate(self) -> list[ReplayRecord]:
        self.seed += self.responses
        prompts = [[5, 9, 17, 33], [64, 12, 100, 7, 41], [3, 77, 21], [90, 18, 54, 54, 8, 2]]
        return [self.gate.capture(prompts[i % len(prompts)], self.tokens, self.seed + i) for i in range(self.responses)]

    def with_c(self, record: ReplayRecord) -> ReplayRecord:
        first, second = self.trainer.score_twice(record)
        return record.with_scores({c_key(0, "new"): first, c_key(1, "new"): second})


def altered(records: list[ReplayRecord], keys: tuple, first: int) -> list[ReplayRecord]:
    """Return the records with 0.10 nat taken from stored scores."""
    changed = []
    for record in records:
        scores = {key: values.copy() for key, values in record.scores.items()}
        for key in keys:
            scores[key][first:] -= OFFSET_NATS
        changed.append(replace(record, scores=scores))
    return changed


def errors(records: list[ReplayRecord]) -> tuple[float, float, float]:
    """MAE of A-B0, B0-C0 and A-C0 over all tokens."""
    a, b, c = (
        np.concatenate([record.scores[key] for record in records]) for key in (A, b_key(0, "old"), c_key(0, "old"))
    )
    return tuple(float(np.abs(left - right).mean()) for left, right in ((a, b), (b, c), (a, c)))  # type: ignore[return-value]


def program(run: Run, say: Callable[[str], None]) -> list[tuple[str, str, list[ReplayRecord]]]:
    c_keys = (c_key(0, "old"), c_key(1, "old"))
    rows = []
    for name, keys, first in (("case 1", (A,), 1), ("case 2", c_keys, 0)):
        for kind in ("clean", "fault", "fixed"):
            say(f"{name}: {kind}")
            records = run.rollout()
            rows.append((name, kind, altered(records, keys, first) if kind == "fault" else records))
    for kind, train, push in (
        ("rollout 0", False, True),
        ("rollout 1, push skipped", True, False),
        ("rollout 2, sync resumed", True, True),
    ):
        say(f"case 3: {kind}")
        rows.append(("case 3", kind, run.rollout(train=train, push=push)))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("sglang", "local"), default="sglang")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="bf16")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--responses", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    options = parser.parse_args()
    dtype = {"fp32": "float32", "bf16": "bfloat16"}[options.dtype]
    out, policy = Console(), ReplayPolicy(mae_limit_nats=0.01 if options.dtype == "fp32" else 0.05)
    with tempfile.TemporaryDirectory() as folder, Console(stderr=True).status("starting") as status:
        trainer = Trainer(dtype=dtype, run_id="cases")
        checkpoint = trainer.save_checkpoint(Path(folder) / "T0")
        rig: Rig = (
            LocalRig(checkpoint, tp=options.tp, dtype=dtype)
            if options.engine == "local"
            else SglangRig(checkpoint, tp=options.tp, dtype=dtype, scratch=Path(folder), progress=status.update)
        )
        try:
            with Gate([rig.address], replay_policy=policy) as gate:
                rows = program(Run(trainer, rig, gate, options.responses, options.tokens), status.update)
        finally:
            rig.close()
    table = Table(title=f"{rig.description}; {options.responses} responses of {options.tokens} tokens", box=None)
    for name in ("case", "run", "A-B", "source", "B-C", "source", "A-C", "source", "diagnosis", "pattern"):
        table.add_column(name)
    noise = max(max(errors(records)) for _, kind, records in rows if kind in {"clean", "fixed", "rollout 0"})
    wrong = 0
    for name, kind, records in rows:
        found = errors(records)
        high = tuple(value > max(3 * noise, OFFSET_NATS / 2) for value in found)
        as_expected = high == HIGH.get((name, kind), (False, False, False))
        wrong += not as_expected
        said = diagnose(records, policy)
        cells = [
            text
            for value, theirs in zip(found, SOURCE[name, kind], strict=True)
            for text in (f"{value:.6f}" if value >= 1e-5 else f"{value:.1e}", "" if theirs is None else f"{theirs:.6f}")
        ]
        table.add_row(
            name, kind, *cells, f"{said.kind.value} {said.side}".strip(), "as expected" if as_expected else "NOT"
        )
    out.print(table)
    return 10 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
