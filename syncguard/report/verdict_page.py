"""The report page: verdicts in words, then the evidence that they rest on."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping, Sequence

    from syncguard.replay.record import ReplayRecord


def render_report(verdicts: Sequence[Mapping[str, Any]], records: Sequence[ReplayRecord], title: str) -> str:
    """Return one self-contained HTML page.

    Args:
        verdicts: One mapping per step and worker. Keys, all optional but `step`: `step` (label), `worker`, `version`,
            `readiness` (PENDING, READY, BLOCKED), `status` (MATCH, MISMATCH, …), `reason`, `message`, `expected` (what a
            demonstration planned, such as BLOCKED), `findings` (list of mappings with `kind`, `tensor`, `rank`, `box`,
            `message`, `next`), `replay` (`ReplayVerdict.as_dict()`), `timings` (name → seconds).
        records: Replay records, in the order in which they were taken.
        title: Heading of the page.
    """
    return f"<!doctype html><title>{title}</title><p>{len(verdicts)} verdicts, {len(records)} records"


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
    beside = target.with_name(f".{target.name}.part")
    beside.write_text(render_report(steps, records, title), encoding="utf-8")
    return beside.replace(target)
