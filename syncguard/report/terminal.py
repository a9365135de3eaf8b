"""The same verdict in a terminal: figures with their subtraction order, and a small plot."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from syncguard.errors import ExitCode
from syncguard.replay.compare import compare_scores
from syncguard.replay.explain import ADVICE, Diagnosis
from syncguard.replay.record import A, ScoreKey, b_key, c_key

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from syncguard.replay.record import ReplayRecord
    from syncguard.replay.scores import FloatArray

_BARS: Final = "▁▂▃▄▅▆▇█"
_STYLE: Final = {ExitCode.OK: "green", ExitCode.WARNING: "yellow", ExitCode.INCOMPLETE: "yellow"}
_WIDTH: Final = 27


_PAIRS: Final = (
    ("A-B", A, b_key(0, "old")),
    ("B-C", b_key(0, "old"), c_key(0, "old")),
    ("A-C", A, c_key(0, "old")),
    ("A-D", A, ScoreKey("D")),
    ("D-B", ScoreKey("D"), b_key(0, "old")),
    ("C'-C", ScoreKey("G"), c_key(0, "old")),
    ("B_new-C_new", b_key(0, "new"), c_key(0, "new")),
    ("B_new_warm-B_new", b_key(0, "new", "warm"), b_key(0, "new")),
    ("D_new-B_new", ScoreKey("D", "new"), b_key(0, "new")),
    ("B_new-B_old", b_key(0, "new"), b_key(0, "old")),
    ("C_new-C_old", c_key(0, "new"), c_key(0, "old")),
)


def pairs_of(record: ReplayRecord) -> list[tuple[str, FloatArray, FloatArray]]:
    """Return the comparisons that a record allows: label, left, right; first passes, of one score definition each."""
    known = record.at_one_state()
    found = []
    for label, left, right in _PAIRS:
        first, second = known.get(left), known.get(right)
        if first is not None and second is not None and known.definition_of(left) == known.definition_of(right):
            found.append((label, first, second))
    return found


def sparkline(values: FloatArray, *, width: int = _WIDTH, top: float | None = None) -> str:
    """Return bars of the largest value per column; a column is one token or several neighbours.

    Args:
        values: [tokens] non-negative numbers.
        width: Most columns.
        top: Value of a full bar; the largest value where None.
    """
    if values.size == 0:
        return ""
    columns = [part.max() for part in np.array_split(values, min(width, values.size))]
    full = top or max(columns)
    if full <= 0:
        return _BARS[0] * len(columns)
    return "".join(_BARS[min(len(_BARS) - 1, int(len(_BARS) * value / full))] for value in columns)


def figures_table(record: ReplayRecord) -> Table:
    """Return the differences of a record as a table with a plot of the absolute error by response position."""
    table = Table(box=None, pad_edge=False)
    for name, justify in (
        ("left-right", "left"),
        ("signed mean", "right"),
        ("MAE", "right"),
        ("p95", "right"),
        ("max", "right"),
    ):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    table.add_column("|error| by position", no_wrap=True)
    mask = record.loss_mask
    pairs = pairs_of(record) if mask.any() else []
    # One scale for all rows: what stands out in the table stands out in the plot.
    top = max((float(np.abs(left - right)[mask == 1].max()) for _, left, right in pairs), default=0.0)
    for label, left, right in pairs:
        found = compare_scores(left, right, mask, label)
        error = np.abs(left - right)[mask == 1]
        table.add_row(
            label,
            f"{found.signed_mean:+.6f}",
            f"{found.mae:.6f}",
            f"{found.p95:.6f}",
            f"{found.maximum:.6f}",
            Text(sparkline(error, top=top), style="cyan"),
        )
    return table


def print_diagnosis(out: Console, records: Sequence[ReplayRecord], diagnosis: Diagnosis) -> None:
    """Print a diagnosis: words first, then figures, the path taken, and what to do next."""
    style = _STYLE.get(diagnosis.exit_code, "red")
    names = ", ".join(record.record_id or "record" for record in records)
    title = f"[bold]{diagnosis.kind.value}[/]" + (f" on {diagnosis.side}" if diagnosis.side else "")
    words = Text.assemble(ADVICE[diagnosis.kind].meaning, "\n", (diagnosis.reason, "dim"))
    out.print(Panel(words, title=f"{title}  {names}", title_align="left", border_style=style))
    for record in records[:4]:
        out.print(figures_table(record))
    if len(records) > 4:  # noqa: PLR2004 - a screenful
        out.print(f"… and {len(records) - 4} more records", style="dim")
    for number, step in enumerate(diagnosis.path_taken, 1):
        out.print(Text(f"  {number}. {step}", style="dim"))
    out.print(Text.assemble(("inspect  ", "bold"), diagnosis.inspect_next))
    out.print(Text.assemble(("try next ", "bold"), diagnosis.next_experiment))
