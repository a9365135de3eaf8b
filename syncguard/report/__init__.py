"""One self-contained page and one terminal view of verdicts and replay records."""

from syncguard.report.verdict_page import render_report, write_report

__all__ = ["render_report", "write_report"]
