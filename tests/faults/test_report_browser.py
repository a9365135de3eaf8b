"""The report page in a real browser: nothing is loaded or logged, it fits a phone, and dark is dark."""

from __future__ import annotations

import html
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))
from lookalikes import make_record
from test_agent_daemon import browser

from syncguard.replay import ReplayEvidence, judge_replay
from syncguard.report import write_report

MEASURE = """
<script>
  const said = {
    width: document.documentElement.clientWidth, scroll: document.documentElement.scrollWidth,
    background: getComputedStyle(document.body).backgroundColor, text: getComputedStyle(document.body).color,
    resources: performance.getEntriesByType('resource').map(one => one.name),
    small: [...document.querySelectorAll('p, td, th, li, summary')].filter(one => one.offsetParent
      && parseFloat(getComputedStyle(one).fontSize) < 11).length,
  };
  parent.document.title = 'MEASURED' + JSON.stringify(said) + 'END';
</script></body>"""


def luminance(colour: str) -> float:
    red, green, blue = (int(part) for part in re.findall(r"\d+", colour)[:3])
    return (0.299 * red + 0.587 * green + 0.114 * blue) / 255


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    records = [make_record(case, 3) for case in ("stale weights", "decode apart from prefill", "clean update, decoded")]
    steps = []
    for index, record in enumerate(records):
        verdict = judge_replay(ReplayEvidence.from_record(make_record("clean update" if index else "stale weights", 3)))
        steps.append({"step": f"run@{index}", "worker": "w0", "readiness": "BLOCKED", "replay": verdict.as_dict()})
        assert record.record_id
    folder = tmp_path_factory.mktemp("report")
    path = write_report(
        folder / "report.html", title="Updates", steps=steps, records=records, decode=lambda i: f"tok{i}"
    )
    return path.read_text().replace("</body>", MEASURE)


def measured(page: str, folder: Path, *, width: int, dark: bool):
    """Show the page in a frame of this width, since a headless window is never narrower than 500 pixels."""
    outer = folder / "outer.html"
    outer.write_text(
        f"""<!doctype html><meta name="color-scheme" content="light dark">
        <iframe width={width} height=900 style="border:0" srcdoc="{html.escape(page, quote=True)}"></iframe>"""
    )
    command = [browser(), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}"]
    command += ["--window-size=1300,1000", f"--blink-settings=preferredColorScheme={0 if dark else 1}"]
    command += ["--enable-logging=stderr", "--dump-dom", outer.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    assert "CONSOLE" not in done.stderr, done.stderr[-2000:]
    return json.loads(re.search(r"MEASURED(.*?)END", done.stdout)[1])


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [390, 1200], ids=["phone", "desk"])
def test_the_page_fits_its_window_in_readable_letters_and_colours(page, tmp_path, width, dark):
    found = measured(page, tmp_path, width=width, dark=dark)
    assert width - 20 <= found["width"] <= width
    assert found["scroll"] <= found["width"], "the page scrolls sideways"
    assert found["resources"] == []
    assert found["small"] == 0
    background, text = luminance(found["background"]), luminance(found["text"])
    assert (background < 0.2 and text > 0.7) if dark else (background > 0.9 and text < 0.3)
