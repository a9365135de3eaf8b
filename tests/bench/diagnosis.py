"""Confusion matrix of the diagnosis: `python tests/bench/diagnosis.py [--records 500] [--embedded bfloat16]`.

Exits with 1 when a class is under 95 %.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
from lookalikes import CASES, make_record
from rich.console import Console
from rich.progress import track
from rich.table import Table

from syncguard.replay import Kind, ReplayRecord, diagnose

REQUIRED_SHARE = 0.95


def main() -> int:
    """Print the matrix, return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=500, help="records per class")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument(
        "--embedded", choices=("float32", "bfloat16"), help="records of the embedded engine of this dtype"
    )
    options = parser.parse_args()
    console = Console(width=150)
    source = f"embedded engine, {options.embedded}" if options.embedded else "synthetic, noise of 0.008 to 0.017 nat"
    table = Table("fault", "right", "answers (all)", title=f"{options.records} records per class: {source}")
    started, spent, worst, classes = time.perf_counter(), 0.0, 1.0, 0
    for case, right_answers, records in cases(options, console):
        found: Counter[str] = Counter()
        for record in records:
            begun = time.perf_counter()
            found[diagnose(record).kind.value] += 1
            spent += time.perf_counter() - begun
        right = sum(found[kind.value] for kind in right_answers) / options.records
        worst, classes = min(worst, right), classes + 1
        answers = ", ".join(f"{kind} {count}" for kind, count in found.most_common())
        table.add_row(case, f"[{'green' if right >= REQUIRED_SHARE else 'red'}]{right:.1%}[/]", answers)
    console.print(table)
    each = spent / (classes * options.records)
    console.print(
        f"{each * 1e3:.2f} ms a diagnosis; {time.perf_counter() - started:.0f} s in all; worst class {worst:.1%}"
    )
    return 0 if worst >= REQUIRED_SHARE else 1


def cases(options: argparse.Namespace, console: Console) -> Iterator[tuple[str, set[Kind], Iterator[ReplayRecord]]]:
    """Yield each class: its name, the right answers, its records."""
    if options.embedded is None:
        seeds = range(options.first_seed, options.first_seed + options.records)
        for case in track(CASES, description="diagnosing", console=console, transient=True):
            yield case, CASES[case][2], (make_record(case, seed) for seed in seeds)
        return
    from embedded_records import MAKERS, bases

    made = bases(options.embedded, options.records, seed=options.first_seed)
    real = list(
        track(made, total=options.records, description="generating and replaying", console=console, transient=True)
    )
    for case, (make, right) in MAKERS.items():
        rng = np.random.default_rng(options.first_seed)
        yield case, right, (make(base, rng) for base in real)


if __name__ == "__main__":
    sys.exit(main())
