"""Makes the modules beside this file importable by the tests of this folder, and writes the README's table.

`SYNCGUARD_LAYOUT_TABLE=FILE pytest tests/engines/layout` writes the table of what this run showed.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

_REPORTS: list[tuple[str, str, dict[str, object]]] = []


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or report.failed:
        _REPORTS.append((report.nodeid, report.outcome, dict(report.user_properties)))


def pytest_sessionfinish(session: pytest.Session) -> None:
    target = os.environ.get("SYNCGUARD_LAYOUT_TABLE")
    if target and not hasattr(session.config, "workerinput"):
        from layout_table import table

        Path(target).write_text(table(_REPORTS))


@pytest.fixture(scope="session")
def exported(tmp_path_factory):
    """Folder and tensors of a cell's checkpoint, written once for all splits; tests must not write into either."""
    made = {}

    def get(cell):
        key = (cell.name, cell.scheme)
        if key not in made:
            folder = tmp_path_factory.mktemp("-".join(key))
            made[key] = (folder, cell.export(folder))
        return made[key]

    return get
