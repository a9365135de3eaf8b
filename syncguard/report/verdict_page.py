"""The report page: one self-contained HTML file, readable in light and dark, on a phone and on paper."""

from __future__ import annotations

import tempfile
from collections import Counter
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2

from syncguard.replay.diagnose import diagnose
from syncguard.report.page_model import (
    RECORDS_DRAWN,
    WIDE_FROM,
    record_model,
    record_row,
    run_rows,
    step_model,
    steps_of_records,
    timeline_plot,
)

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping, Sequence

    from syncguard.replay.record import ReplayRecord


@cache
def _template() -> jinja2.Template:
    source = resources.files("syncguard.report").joinpath("template.html.j2").read_text(encoding="utf-8")
    # Names of tensors, workers and messages come from elsewhere: everything is escaped but our own drawings.
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    return environment.from_string(source)


def render_report(
    verdicts: Sequence[Mapping[str, Any]],
    records: Sequence[ReplayRecord],
    title: str,
    decode: Callable[[int], str] | None = None,
) -> str:
    """Return one self-contained HTML page; it loads nothing and runs no script.

    Args:
        verdicts: One mapping per step and worker. Keys, all optional but `step`: `step` (label), `worker`, `version`,
            `readiness` (PENDING, READY, BLOCKED), `status` (MATCH, MISMATCH, …), `reason`, `message`, `expected` (what a
            demonstration planned, such as BLOCKED), `findings` (list of mappings with `kind`, `tensor`, `rank`, `box`,
            `message`, `next`), `replay` (`ReplayVerdict.as_dict()`), `timings` (name → seconds).
        records: Replay records, in the order in which they were taken; the first 12 are drawn, all are listed.
        title: Heading of the page.
        decode: Text of a token id, where a tokenizer is at hand.
    """
    steps = [step_model(step) for step in verdicts]
    measured = verdicts if any(step.get("replay") for step in verdicts) else steps_of_records(records)
    drawn = [record_model(one, decode, first=index == 0) for index, one in enumerate(records[:RECORDS_DRAWN])]
    index = [record_row(one, diagnose(one)) for one in records] if len(records) > 1 else []
    return _template().render(
        title=title,
        summary=_summary(steps, index or drawn),
        steps=steps,
        timeline=timeline_plot(measured),
        timeline_width=1040 if len(measured) > WIDE_FROM else 600,
        records=drawn,
        hidden_records=max(0, len(records) - RECORDS_DRAWN),
        record_index=index,
        run=run_rows(records),
    )


def _summary(steps: Sequence[Mapping[str, Any]], records: Sequence[Mapping[str, Any]]) -> str:
    parts = []
    if steps:
        counts = Counter(step["readiness"] for step in steps)
        parts.append(f"{len(steps)} verdicts: " + ", ".join(f"{n} {word}" for word, n in counts.most_common()) + ".")
    if records:
        kinds = Counter(record["kind"] for record in records)
        parts.append(
            f"{len(records)} replay records: " + ", ".join(f"{n} {word}" for word, n in kinds.most_common()) + "."
        )
    return " ".join(parts) or "Nothing was recorded."


def write_report(
    path: str | os.PathLike[str],
    *,
    title: str,
    steps: Sequence[Mapping[str, Any]],
    records: Sequence[ReplayRecord] = (),
    decode: Callable[[int], str] | None = None,
) -> Path:
    """Write the page to a file, whole or not at all.

    Args:
        path: Where the page goes.
        title: Heading of the page.
        steps: Verdicts; see `render_report`.
        records: Replay records.
        decode: Text of a token id, where a tokenizer is at hand.

    Returns:
        The path written.
    """
    target = Path(path)
    page = render_report(steps, records, title, decode)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=target.parent, delete=False, suffix=".part") as beside:
        try:
            beside.write(page)
            beside.close()
            Path(beside.name).chmod(0o644)
            return Path(beside.name).replace(target)
        except BaseException:
            Path(beside.name).unlink(missing_ok=True)
            raise
