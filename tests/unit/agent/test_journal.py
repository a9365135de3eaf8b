"""The journal: what is read back, what is refused, and what a damaged file does."""

from __future__ import annotations

import sqlite3

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from syncguard.agent.journal import Journal, Remembered, Transition
from syncguard.digest import PartialDigest
from syncguard.errors import BadInputError, SpecVersionError, SyncguardError
from syncguard.manifest.model import KnownVersion
from syncguard.spec import Box, WeightVersion


def transition(reason: str = "verified", at_s: float = 1.0) -> Transition:
    return Transition(at_s, "READY", reason, "said", "run@1", "tp0/1 a#1", "VerifyFinished", '{"a": 1}')


def known(label: str) -> Remembered:
    partial = PartialDigest(24, 2**60, 2**61 - 2)
    version = KnownVersion(label, {"w": partial}, {("w", Box((0, 2), (4, 3))): partial})
    return Remembered(version, "00" * 32, "MLP61v1")


def test_what_was_written_is_read_back_after_a_reopening(tmp_path) -> None:
    journal = Journal(tmp_path / "j.sqlite")
    accepted = ((WeightVersion("run", 3), "m3"), (WeightVersion("other", 1), "n1"))
    journal.append(transition("first"))
    journal.append(transition("second"), accepted)
    journal.remember([known("run@3"), known("run@2")])
    journal.close()
    again = Journal(tmp_path / "j.sqlite")
    assert [t.reason for t in again.transitions()] == ["first", "second"]
    assert again.transitions(1) == (transition("second"),)
    assert again.accepted() == accepted
    assert again.known() == (known("run@3"), known("run@2"))


def test_known_versions_stay_bounded_and_in_order() -> None:
    journal = Journal(None)
    for step in range(6):
        journal.remember([known(f"run@{s}") for s in range(step, max(-1, step - 3), -1)])
    assert [r.known.label for r in journal.known()] == ["run@5", "run@4", "run@3"]


def test_a_second_agent_cannot_take_the_same_journal(tmp_path) -> None:
    first = Journal(tmp_path / "j.sqlite")
    with pytest.raises(BadInputError, match="no other agent holds"):
        Journal(tmp_path / "j.sqlite")
    first.close()
    Journal(tmp_path / "j.sqlite").close()


def test_a_journal_of_another_version_is_refused(tmp_path) -> None:
    db = sqlite3.connect(tmp_path / "j.sqlite")
    db.execute("PRAGMA user_version=99")
    db.close()
    with pytest.raises(SpecVersionError):
        Journal(tmp_path / "j.sqlite")


def test_a_file_that_is_no_database_is_refused_and_kept(tmp_path) -> None:
    path = tmp_path / "j.sqlite"
    path.write_bytes(b"this is not a database, but somebody's notes" * 100)
    with pytest.raises(BadInputError, match="move the file away"):
        Journal(path)
    assert path.read_bytes().startswith(b"this is not")


def test_a_folder_that_cannot_be_written_is_one_clear_error(tmp_path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(BadInputError, match="cannot use the journal"):
        Journal(tmp_path / "file" / "j.sqlite")


@settings(max_examples=40, deadline=None)
@given(place=st.integers(0, 10**6), value=st.integers(1, 255))
def test_a_flipped_byte_is_refused_or_harmless(tmp_path_factory, place: int, value: int) -> None:
    folder = tmp_path_factory.mktemp("journal")
    path = folder / "j.sqlite"
    journal = Journal(path)
    journal.append(transition(), ((WeightVersion("run", 3), "m3"),))
    journal.remember([known("run@3")])
    journal.close()
    data = bytearray(path.read_bytes())
    data[place % len(data)] ^= value
    path.write_bytes(data)
    try:
        damaged = Journal(path)
        damaged.accepted()
        damaged.known()
        damaged.transitions()
        damaged.close()
    except SyncguardError:
        pass
