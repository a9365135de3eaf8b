"""Confusion matrix of the diagnosis: `python tests/bench/diagnosis.py [--records 500]`.

Exits with 1 when a class is under 95 %.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from lookalikes import CASES, make_record
from rich.console import Console
from rich.progress import track
from rich.table import Table

from syncguard.replay import diagnose

REQUIRED_SHARE = 0.95


def main() -> int:
    """Print the matrix, return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=500, help="records per class")
    parser.add_argument("--first-seed", type=int, default=0)
    options = parser.parse_args()
    console = Console(width=150)
    table = Table("fault", "right", "answers (all)", title=f"{options.records} records per class")
    started, spent, worst = time.perf_counter(), 0.0, 1.0
    for case in track(CASES, description="diagnosing", console=console, transient=True):
        found: Counter[str] = Counter()
        for seed in range(options.first_seed, options.first_seed + options.records):
            record = make_record(case, seed)
            begun = time.perf_counter()
            found[diagnose(record).kind.value] += 1
            spent += time.perf_counter() - begun
        right = sum(found[kind.value] for kind in CASES[case][2]) / options.records
        worst = min(worst, right)
        answers = ", ".join(f"{kind} {count}" for kind, count in found.most_common())
        table.add_row(case, f"[{'green' if right >= REQUIRED_SHARE else 'red'}]{right:.1%}[/]", answers)
    console.print(table)
    each = spent / (len(CASES) * options.records)
    console.print(
        f"{each * 1e3:.2f} ms a diagnosis; {time.perf_counter() - started:.0f} s in all; worst class {worst:.1%}"
    )
    return 0 if worst >= REQUIRED_SHARE else 1


if __name__ == "__main__":
    sys.exit(main())
