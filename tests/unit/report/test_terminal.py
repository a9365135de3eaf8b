import io
import sys
from pathlib import Path

import numpy as np
from rich.console import Console

from syncguard.replay import diagnose
from syncguard.report import pairs_of, print_diagnosis, sparkline

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
from lookalikes import make_record


def printed(case: str, width: int = 100) -> str:
    out = Console(file=io.StringIO(), width=width)
    record = make_record(case, 3)
    print_diagnosis(out, [record], diagnose(record))
    return out.file.getvalue()


def test_the_terminal_says_the_same_as_the_diagnosis():
    text = printed("constant offset from position 1 (A)")
    for part in ("constant offset on A", "A-B", "1. do all paths", "inspect", "try next"):
        assert part in text


def test_the_terminal_stays_inside_80_columns():
    for case in ("stale weights", "one outlier"):
        assert max(map(len, printed(case, 80).splitlines())) <= 80


def test_a_plot_shows_the_largest_value_of_each_column():
    assert sparkline(np.array([0.0, 0.0, 1.0, 0.0])) == "▁▁█▁"
    assert sparkline(np.r_[np.zeros(99), 1.0], width=10) == "▁▁▁▁▁▁▁▁▁█"
    assert sparkline(np.zeros(3)) == "▁▁▁"
    assert sparkline(np.array([])) == ""
    assert sparkline(np.array([1.0, 2.0]), top=4.0) == "▃▅"


def test_only_comparisons_that_the_record_allows_are_shown():
    assert [label for label, _, _ in pairs_of(make_record("clean", 1))] == ["A-B", "B-C", "A-C"]
    assert "B_new_warm-B_new" in [label for label, _, _ in pairs_of(make_record("clean update", 1))]
