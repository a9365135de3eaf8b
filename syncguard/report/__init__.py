"""One self-contained page and one terminal view of verdicts and replay records.

The page needs the `report` extra (Jinja2, matplotlib); the terminal view does not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from syncguard.report.terminal import figures_table, pairs_of, print_diagnosis, sparkline

if TYPE_CHECKING:
    from syncguard.report.verdict_page import render_report, write_report

__all__ = ["figures_table", "pairs_of", "print_diagnosis", "render_report", "sparkline", "write_report"]


def __getattr__(name: str) -> Any:
    """Import the page only where it is drawn."""
    if name in {"render_report", "write_report"}:
        from syncguard.report import verdict_page

        return getattr(verdict_page, name)
    raise AttributeError(name)
