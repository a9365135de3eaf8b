"""How commands print: one table for verdicts, one line for errors, one JSON object for machines."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from syncguard.errors import SyncguardError
from syncguard.manifest.verdict import Finding, Severity, Verdict, VerdictStatus

EXIT_CODES_HELP: Final = (
    "Exit codes: 0 match or ready, 1 warning, 2 usage or crash, 10 mismatch, 11 incomplete, 12 unsupported, "
    "13 unreachable, 14 specification version."
)
FINDINGS_SHOWN: Final = 20

_STATUS_STYLE: Final = {
    VerdictStatus.MATCH: "bold green",
    VerdictStatus.MISMATCH: "bold red",
    VerdictStatus.INCOMPLETE: "bold yellow",
    VerdictStatus.UNSUPPORTED: "bold magenta",
}
_SEVERITY_STYLE: Final = {
    Severity.MISMATCH: "red",
    Severity.UNSUPPORTED: "magenta",
    Severity.INCOMPLETE: "yellow",
    Severity.WARNING: "cyan",
}


def console() -> Console:
    """Return a console on standard output."""
    return Console(highlight=False)


def print_json(value: Any) -> None:
    """Print one JSON object on standard output."""
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(value), indent=2).decode() + "\n")


def print_error(error: SyncguardError, *, as_json: bool) -> None:
    """Print an error: one line on standard error, or a JSON object on standard output."""
    if as_json:
        print_json({"error": error.as_dict(), "exit_code": int(error.exit_code)})
        return
    Console(stderr=True, highlight=False, soft_wrap=True).print(
        Text.assemble(("error ", "bold red"), (f"[{error.code}] ", "red"), error.text())
    )


def verdict_as_dict(verdict: Verdict) -> dict[str, Any]:
    """Return a verdict for `--json`."""
    return {
        "status": verdict.status.value,
        "reason": verdict.reason,
        "exit_code": int(verdict.exit_code),
        "coverage": msgspec.to_builtins(verdict.coverage),
        "findings": msgspec.to_builtins(verdict.findings),
        "evidence": verdict.evidence,
    }


def print_verdict(out: Console, verdict: Verdict, *, worker: str, shown: int = FINDINGS_SHOWN) -> None:
    """Print a verdict: status and reason, coverage in a table, findings in another."""
    out.print(Text.assemble((verdict.status.value, _STATUS_STYLE[verdict.status]), f"  {worker}  ", verdict.reason))
    coverage = verdict.coverage
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="dim")
    table.add_column()
    table.add_row("manifest", f"{coverage.proven_tensors} of {coverage.manifest_tensors} tensors proven")
    if coverage.exempt_tensors:
        table.add_row("", f"{coverage.exempt_tensors} exempt by name")
    table.add_row(
        "resident",
        f"{coverage.resident_tensors} tensors: {coverage.bound_residents} bound, {coverage.derived_residents} derived "
        f"and checked, {coverage.exempt_residents} exempt by name, {coverage.unbound_residents} without a rule",
    )
    table.add_row("replicas", f"{coverage.replicas} compared; {coverage.padding_elements} padding elements checked")
    table.add_row(
        "read", f"{coverage.read_bytes / 1e6:.1f} MB in {verdict.evidence.get('observe_s', '?')} s (slowest rank)"
    )
    if coverage.uncovered:
        table.add_row("not covered", ", ".join(coverage.uncovered))
    out.print(table)
    if verdict.findings:
        out.print(findings_table(verdict.findings[:shown]))
    if len(verdict.findings) > shown:
        out.print(f"… and {len(verdict.findings) - shown} more findings (--json lists all)", style="dim")


def findings_table(findings: tuple[Finding, ...] | list[Finding]) -> Table:
    """Return findings as a table, the gravest first as they come."""
    table = Table(box=None, pad_edge=False)
    for name in ("finding", "tensor or resident", "box", "rank", "what, and where to look"):
        table.add_column(name, overflow="fold")
    for finding in findings:
        sides = f" (expected {finding.expected}, found {finding.observed})" if finding.expected else ""
        table.add_row(
            Text(finding.code.value, style=_SEVERITY_STYLE[finding.severity]),
            finding.fqn or finding.resident,
            finding.box,
            finding.rank,
            finding.text + sides,
        )
    return table


@contextmanager
def progress_bar(what: str, *, as_json: bool) -> Iterator[Progress]:
    """Show progress on standard error while work goes on; silent for machines and pipes."""
    err = Console(stderr=True)
    columns = (TextColumn("[dim]{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"))
    with Progress(
        *columns, TimeElapsedColumn(), console=err, transient=True, disable=as_json or not err.is_terminal
    ) as bar:
        bar.add_task(what, total=1.0)
        yield bar
