"""What the demo shows: a live table of steps while it works, then the verdicts that matter in full."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
from rich.console import Console, Group
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from syncguard.cli.demo.loop import StepResult
from syncguard.cli.output import findings_table
from syncguard.manifest.verdict import ReadinessState
from syncguard.replay import compare_scores
from syncguard.replay.record import A, ReplayRecord, State, b_key, c_key

_READINESS_STYLE: Final = {
    ReadinessState.READY: "bold green",
    ReadinessState.BLOCKED: "bold red",
    ReadinessState.PENDING: "bold yellow",
}
_MISSING: Final = "-"
_SIX_DECIMALS: Final = 1e-5


@dataclass(slots=True)
class Screen:
    """The live table.

    Attributes:
        title: Line above the table.
        out: Console.
        results: Steps that are done.
        now: What is going on.
    """

    title: str
    out: Console
    results: list[StepResult] = field(default_factory=list)
    now: str = ""
    _live: Live | None = None

    @contextmanager
    def live(self) -> Iterator[None]:
        """Redraw while the block runs; a pipe gets one line a step instead."""
        if not self.out.is_terminal:
            self.out.print(self.title, style="bold")
            yield
            self.out.print(steps_table(self.results))
            return
        with Live(console=self.out, refresh_per_second=8, get_renderable=self.draw) as live:
            self._live = live
            yield
            self.now = ""
        self._live = None

    def say(self, text: str) -> None:
        """Show what is going on."""
        self.now = text

    def add(self, result: StepResult) -> None:
        """Add a finished step."""
        self.results.append(result)
        if not self.out.is_terminal:
            self.out.print(f"{result.version}  {result.step.name}: {_summary(result)}")

    def draw(self) -> Group:
        """Return the table with a spinner below while something runs."""
        parts: list[Any] = [Text(self.title, style="bold"), steps_table(self.results)]
        if self.now:
            parts.append(Spinner("dots", text=Text(f" {self.now}", style="dim")))
        return Group(*parts)


def steps_table(results: Sequence[StepResult]) -> Table:
    """Return one row a step."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in (
        "version",
        "step",
        "what happens",
        "worker",
        "proven",
        "B-C MAE",
        "limit",
        "verdict",
        "push",
        "verify",
    ):
        table.add_column(name, justify="right" if name in {"proven", "B-C MAE", "limit", "push", "verify"} else "left")
    for result in results:
        outcome, replay = result.outcome, result.outcome.replay
        gap = replay.figure("B_new-C_new") if replay is not None else None
        coverage = outcome.verdict.coverage
        table.add_row(
            result.version.partition("@")[2].join(("T", "")),
            result.step.name,
            result.step.does,
            Text(outcome.readiness.state.value, style=_READINESS_STYLE[outcome.readiness.state]),
            f"{coverage.proven_tensors}/{coverage.manifest_tensors}",
            f"{gap.mae:.2g}" if gap is not None else _MISSING,
            f"{replay.limit_nats:.2g}" if replay is not None and replay.limit_nats is not None else _MISSING,
            Text("as expected", style="green") if not result.wrong else Text("; ".join(result.wrong), style="bold red"),
            f"{result.push_s:.2f} s",
            f"{result.verify_s:.2f} s",
        )
    return table


def _summary(result: StepResult) -> str:
    outcome = result.outcome
    gap = outcome.replay.figure("B_new-C_new") if outcome.replay is not None else None
    said = f"{result.step.does}: {outcome.readiness.state.value} ({outcome.verdict.reason})"
    said += f", MAE(B_new-C_new) {gap.mae:.3g} nat" if gap is not None else ""
    return said + (", as expected" if not result.wrong else f", NOT AS EXPECTED: {'; '.join(result.wrong)}")


def print_details(out: Console, results: Sequence[StepResult], *, shown: int) -> None:
    """Print the findings of blocked steps, and the A/B/C table of those with one."""
    for result in results:
        findings = result.outcome.verdict.findings
        if result.outcome.readiness.state is ReadinessState.BLOCKED:
            out.print()
            out.print(Text.assemble((f"{result.step.name}: ", "bold"), result.outcome.verdict.reason))
            out.print(findings_table(list(_telling(findings, shown))))
            if len(findings) > shown:
                out.print(f"… {len(findings)} findings in all, every one in the report", style="dim")
        if result.step.side or result.step.name in {"case 3", "start"}:
            table = scores_table(result)
            if table is not None:
                out.print()
                out.print(table)
            if result.diagnosis is not None:
                diagnosis = result.diagnosis
                side = f" on {diagnosis.side}" if diagnosis.side else ""
                out.print(
                    f"diagnosis: {diagnosis.kind.value}{side}: {diagnosis.reason}; look at {diagnosis.inspect_next}"
                )


def _telling(findings: Sequence[Any], shown: int) -> Iterator[Any]:
    """Yield some findings of each kind rather than many of the first."""
    codes = list(dict.fromkeys(finding.code for finding in findings))
    share = max(1, shown // max(1, len(codes)))
    for code in codes:
        yield from [finding for finding in findings if finding.code is code][:share]


def scores_table(result: StepResult) -> Table | None:
    """Return the differences of A, B and C of a step, each with its subtraction order."""
    record = result.record
    if record is None:
        return None
    record = record.at_one_state()
    table = Table(
        title=f"{result.step.name}: scores of the saved response, nats", title_justify="left", box=None, pad_edge=False
    )
    for name in ("difference", "signed mean", "MAE", "p95", "max", "position 0", "positions 1+"):
        table.add_column(name, justify="left" if name == "difference" else "right")
    for label, left, right in _pairs(record):
        difference = compare_scores(left, right, record.loss_mask, label)
        delta = abs(left - right)
        table.add_row(
            label,
            _nats(difference.signed_mean, "+"),
            *(_nats(value) for value in (difference.mae, difference.p95, difference.maximum)),
            _nats(delta[0]),
            _nats(delta[1:].mean()) if len(delta) > 1 else _MISSING,
        )
    return table


def _nats(value: float, sign: str = "") -> str:
    """Return six decimals, or an exponent where they would all be zero."""
    return f"{value:{sign}.6f}" if value == 0 or abs(value) >= _SIX_DECIMALS else f"{value:{sign}.1e}"


def _pairs(record: ReplayRecord) -> Iterator[tuple[str, Any, Any]]:
    states: tuple[State, ...] = ("old", "new")
    a = record.get(A)
    for state in states:
        b0, b1 = (record.get(b_key(i, state)) for i in (0, 1))
        c0, c1 = (record.get(c_key(i, state)) for i in (0, 1))
        suffix = "" if record.get(b_key(0, "new")) is None else f"_{state}"
        if state == "old":
            for label, left, right in ((f"A-B0{suffix}", a, b0), (f"A-C0{suffix}", a, c0)):
                if left is not None and right is not None:
                    yield label, left, right
        for label, left, right in (
            (f"B0-C0{suffix}", b0, c0),
            (f"B0-B1{suffix}", b0, b1),
            (f"C0-C1{suffix}", c0, c1),
        ):
            if left is not None and right is not None:
                yield label, left, right
    for path, key in (("B", b_key), ("C", c_key)):
        new, old = record.get(key(0, "new")), record.get(key(0, "old"))
        if new is not None and old is not None:
            yield f"{path}0_new-{path}0_old", new, old


def as_report_step(result: StepResult) -> dict[str, Any]:
    """Return a step for the report page and for `--json`."""
    outcome = result.outcome
    return {
        "step": f"{result.step.name}: {result.step.does}",
        "worker": outcome.worker,
        "version": result.version,
        "readiness": outcome.readiness.state.value,
        "status": outcome.verdict.status.value,
        "reason": outcome.verdict.reason,
        "message": outcome.readiness.message,
        "expected": result.step.expects.value,
        "as_expected": not result.wrong,
        "wrong": list(result.wrong),
        "findings": [
            {
                "kind": finding.code.value,
                "tensor": finding.fqn or finding.resident,
                "rank": finding.rank,
                "box": finding.box,
                "message": finding.text,
                "expected": finding.expected,
                "observed": finding.observed,
            }
            for finding in outcome.verdict.findings
        ],
        "replay": outcome.replay.as_dict() if outcome.replay is not None else None,
        "diagnosis": msgspec.to_builtins(result.diagnosis, enc_hook=str) if result.diagnosis is not None else None,
        "timings": {"push": result.push_s, "verify": result.verify_s, **outcome.seconds},
        "coverage": msgspec.to_builtins(outcome.verdict.coverage),
    }
