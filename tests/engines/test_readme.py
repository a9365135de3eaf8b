"""What the README shows must run as it stands."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = (Path(__file__).parents[2] / "README.md").read_text()


@pytest.mark.timeout(300)
def test_the_example_of_the_readme_runs_and_is_short(tmp_path):
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(example.splitlines()) < 40
    (tmp_path / "example.py").write_text(example)
    done = subprocess.run(
        [sys.executable, "example.py"], cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split()[:3] for line in lines] == [[f"readme@{n}", "rollout-0", "READY"] for n in range(3)]
    assert "replay PASS" in lines[2]


def test_the_readme_leaves_no_place_unfilled():
    assert "<!--" not in README
