import re
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from syncguard.replay import ReplayEvidence, ReplayRecord, judge_replay
from syncguard.report import render_report, verdict_page, write_report
from syncguard.report.page_model import finding_row, map_model, step_model, steps_of_records, tone_of

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
from lookalikes import make_record

VOID = {"meta", "link", "br", "img", "input", "hr", "path", "use", "rect", "line", "circle", "stop"}


class Page(HTMLParser):
    """Collects what matters: nesting, ids, texts, and anything that would load from elsewhere."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open, self.ids, self.links, self.loads, self.texts, self.wrong = [], [], [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        if "id" in values and self.open.count("svg") == 0 and tag != "svg":
            self.ids.append(values["id"])
        self.links += [values["href"]] if tag == "a" else []
        self.loads += [values[name] for name in ("src", "data") if name in values] + [tag] * (
            tag in {"script", "iframe", "link"}
        )
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        if tag not in VOID and (not self.open or self.open.pop() != tag):
            self.wrong.append(tag)

    def handle_data(self, data):
        self.texts.append(data)


def page(steps=(), records=(), title="Report", **options) -> Page:
    return Page(render_report(list(steps), list(records), title, **options))


def blocked_step(**changes):
    verdict = judge_replay(ReplayEvidence.from_record(make_record("stale weights", 3)))
    finding = {
        "code": "STALE",
        "fqn": "model.embed_tokens.weight",
        "rank": "tp 0/2",
        "box": "[0:8]",
        "text": "equals run@0",
    }
    return {
        "step": "case 3",
        "worker": "w0",
        "readiness": "BLOCKED",
        "findings": [finding],
        "replay": verdict.as_dict(),
        **changes,
    }


def test_the_page_is_well_formed_and_loads_nothing_from_elsewhere():
    found = page([blocked_step()], [make_record("stale weights", 3)])
    assert found.wrong == []
    assert found.open == []
    assert found.loads == []
    text = render_report([blocked_step()], [make_record("stale weights", 3)], "x")
    assert not re.findall(
        r"(?:url\(|@import|https?://)(?!#)(?!www\.w3\.org)", text.replace('url("#', "").replace("url(#", "")
    )


def test_every_link_in_the_page_has_its_target():
    found = page([blocked_step(), blocked_step(step="next")], [])
    assert {link.removeprefix("#") for link in found.links} <= set(found.ids)
    assert len(set(found.ids)) == len(found.ids)


def test_the_verdict_its_findings_and_its_figures_are_in_the_page_in_words():
    words = " ".join(page([blocked_step(timings={"digests": 0.0123})]).texts)
    for part in (
        "BLOCKED",
        "STALE",
        "model.embed_tokens.weight",
        "tp 0/2",
        "equals run@0",
        "B_new-C_new",
        "still scores as T0",
        "0.012 s",
    ):
        assert part in words


def test_a_record_shows_its_diagnosis_the_path_and_what_to_do_next():
    words = " ".join(page(records=[make_record("constant offset from position 1 (A)", 3)]).texts)
    for part in ("constant offset on A", "first-token handling", "from position 1 on", "Decision map", "k3"):
        assert part in words


@pytest.mark.parametrize("field", ["step", "worker", "message", "readiness"])
def test_texts_from_elsewhere_cannot_become_markup(field):
    text = render_report([blocked_step(**{field: "<script>alert(1)</script>"})], [], "<b>t</b>")
    assert "<script" not in text
    assert "<b>t" not in text


def test_the_text_of_a_token_is_shown_and_cannot_become_markup():
    text = render_report([], [make_record("one outlier", 3)], "x", lambda token_id: f"<i>{token_id}\n</i>")
    assert "<i>" not in text
    assert "&lt;i&gt;" in text


def test_colours_are_variables_so_that_one_drawing_serves_light_and_dark():
    text = render_report([], [make_record("clean", 3)], "x")
    drawings = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    assert len(drawings) == 4
    for drawing in drawings:
        assert not re.findall(r"#[0-9a-f]{6}\b", drawing.lower())
        assert "var(--" in drawing
    used = set(re.findall(r"var\(--([a-z-]+)\)", text))
    light, dark = re.findall(r":root \{(.*?)\}", text, re.DOTALL)
    assert used <= set(re.findall(r"--([a-z-]+):", light))
    assert set(re.findall(r"--([a-z-]+):", light)) == set(re.findall(r"--([a-z-]+):", dark))


def test_the_same_input_gives_the_same_page():
    one = [make_record("clean update", 4)]
    assert render_report([blocked_step()], one, "x") == render_report([blocked_step()], one, "x")


def test_many_records_are_listed_and_only_some_are_drawn(monkeypatch):
    monkeypatch.setattr(verdict_page, "RECORDS_DRAWN", 2)
    found = page(records=[make_record("clean", 2)] * 5)
    assert sum(text.startswith("Decision map") for text in found.texts) == 2
    assert any("3 more records" in text for text in found.texts)
    assert sum(text == "clean 2" for text in found.texts) == 7


def test_a_run_of_several_responses_is_summed_up_with_an_interval():
    text = render_report([], [make_record("clean", seed) for seed in (1, 2)], "x")
    assert "Over all 2 responses" in text
    assert text.count("interval of the MAE") == 1
    assert "Over all" not in render_report([], [make_record("clean", 1)], "x")


def test_a_timeline_is_drawn_once_two_updates_were_replayed():
    assert "Replay across updates" not in render_report([blocked_step()], [], "x")
    assert "Replay across updates" in render_report([blocked_step()] * 2, [], "x")
    assert "Replay across updates" in render_report([blocked_step()] * 9, [], "x")


def test_records_alone_give_a_timeline_of_the_versions_that_they_were_carried_to():
    def carried(version: int, case: str, seed: int):
        return replace(make_record(case, seed), versions={"old": f"run@{version - 1}", "new": f"run@{version}"})

    records = [carried(1, "clean update", 1), carried(1, "clean update", 2), carried(2, "stale weights", 3)]
    steps = steps_of_records([*records, make_record("clean", 1)])
    assert [(step["step"], step["replay"]["status"]) for step in steps] == [("run@1", "PASS"), ("run@2", "FAIL")]
    assert "Replay across updates" in render_report([], records, "x")
    assert "Replay across updates" not in render_report([], records[:2], "x")


def test_an_empty_report_says_so():
    assert "Nothing was recorded." in " ".join(page().texts)


def test_a_record_without_active_tokens_or_scores_is_still_shown():
    empty = ReplayRecord(input_ids=np.arange(6), prompt_length=2, mask=np.zeros(4, int), record_id="bare")
    words = " ".join(page(records=[empty]).texts)
    assert "bare" in words
    assert "incomplete" in words


@pytest.mark.parametrize(
    ("word", "tone"),
    [
        ("READY", "good"),
        ("BLOCKED", "bad"),
        ("PENDING", "warn"),
        ("", "warn"),
        ("maybe", "warn"),
        ("Readiness.READY", "good"),
        ("NO_POWER", "warn"),
        ("UNSTABLE", "warn"),
    ],
)
def test_only_known_good_words_are_green(word, tone):
    assert tone_of(word) == tone


def test_a_step_without_a_verdict_is_unknown_and_never_green():
    assert (step_model({"step": "x"})["readiness"], step_model({"step": "x"})["tone"]) == ("UNKNOWN", "warn")


def test_findings_of_verdict_json_and_of_a_demonstration_read_the_same():
    ours = finding_row(
        {"kind": "STALE", "tensor": "a.b", "rank": "0", "box": "[0:2]", "message": "old", "next": "look"}
    )
    theirs = finding_row({"code": "STALE", "fqn": "a.b", "rank": 0, "box": "[0:2]", "text": "old", "todo": "look"})
    assert ours == theirs


def test_the_map_marks_exactly_one_end_and_the_questions_asked_before_it():
    from syncguard.replay import diagnose

    for case, node in (("unstable B", 2), ("shift by one", 3), ("stale weights", 4), ("clean", 5), ("clean update", 5)):
        found = diagnose(make_record(case, 3))
        nodes = map_model(found)
        marked = [(i, end["name"]) for i, one in enumerate(nodes) for end in one["ends"] if end["css"] != "none"]
        assert marked == [(node, found.kind.value)]
        assert [i for i, one in enumerate(nodes) if "last" in one["css"]] == [node]
    assert nodes[4]["css"] == "asked"
    assert map_model(diagnose(make_record("clean", 3)))[4]["css"] == ""


def test_a_failed_write_keeps_the_old_page_and_leaves_nothing_beside_it(tmp_path):
    path = write_report(tmp_path / "r.html", title="x", steps=[], records=[])
    before = path.read_text()
    with pytest.raises(AttributeError):
        write_report(path, title="x", steps=[None], records=[])
    assert path.read_text() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["r.html"]
