import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from syncguard.errors import RecordError, ScoreError, SpecVersionError
from syncguard.replay import A, ReplayRecord, ScoreDefinition, ScoreKey, b_key, c_key, load_many, save_many


def record(**changes) -> ReplayRecord:
    fields = {
        "input_ids": [5, 6, 7, 8, 9, 10],
        "prompt_length": 2,
        "mask": [1, 1, 0, 1],
        "scores": {A: [-1.0, -2.0, -3.0, -4.0], b_key(0, "old"): [-1.1, -2.1, -3.1, -4.1]},
        "sampling": {"temperature": 1.0, "top_k": -1},
        "worker": "w0",
        "model_revision": "m1",
        "tokenizer_revision": "t1",
        "versions": {"old": "run@0"},
        "record_id": "r0",
        "batch": ("r0", "r1"),
        "meta": {"note": "x"},
    }
    return ReplayRecord(**{**fields, **changes})


def assert_same(left: ReplayRecord, right: ReplayRecord) -> None:
    for name in ("input_ids", "mask", "positions", "segment_ids"):
        np.testing.assert_array_equal(getattr(left, name), getattr(right, name))
    assert left.scores.keys() == right.scores.keys()
    for key in left.scores:
        assert left.scores[key].tobytes() == right.scores[key].tobytes()
    for name in ("prompt_length", "definition", "definitions", "sampling", "worker", "model_revision", "tokenizer_revision",
                 "versions", "record_id", "batch", "call", "meta"):  # fmt: skip
        assert getattr(left, name) == getattr(right, name)


@pytest.mark.parametrize(
    ("key", "text"),
    [
        (A, "A"),
        (b_key(0, "old"), "B0.old.cold"),
        (ScoreKey("B", "new", "warm", 12), "B12.new.warm"),
        (c_key(1, "new"), "C1.new"),
        (ScoreKey("D", "old"), "D0.old"),
        (ScoreKey("G", "new"), "G0.new"),
    ],
)
def test_a_score_key_has_a_stable_text_form(key, text):
    assert str(key) == text
    assert ScoreKey.parse(text) == key


@pytest.mark.parametrize(
    "text", ["", "A0", "B0", "B0.old", "B.old.cold", "C0.old.cold", "C0", "A.new", "B0.old.hot", "B0.old.cold "]
)
def test_other_texts_are_no_score_keys(text):
    with pytest.raises(RecordError):
        ScoreKey.parse(text)


@pytest.mark.parametrize(
    "parts",
    [("A", "new", "", 0), ("A", "old", "", 1), ("B", "old", "", 0), ("C", "old", "warm", 0), ("X", "old", "", 0)],
)
def test_a_key_that_has_no_text_form_cannot_be_made(parts):
    with pytest.raises(RecordError):
        ScoreKey(*parts)


def test_a_record_survives_its_file_to_the_last_bit(tmp_path):
    one = record(definitions={"A": ScoreDefinition("behavior", top_k=4)}, call={"conversation": "c", "index": 2})
    one.save(tmp_path / "r.safetensors")
    assert_same(ReplayRecord.load(tmp_path / "r.safetensors"), one)


@settings(deadline=None)  # each example writes a file to the disk, which others use too
@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=4, max_size=4))
def test_any_finite_score_survives(tmp_path_factory, values):
    path = tmp_path_factory.mktemp("r") / "r.safetensors"
    record(scores={A: values}).save(path)
    assert ReplayRecord.load(path).scores[A].tobytes() == np.array(values).tobytes()


def test_the_same_record_gives_the_same_file(tmp_path):
    record().save(tmp_path / "a")
    record().save(tmp_path / "b")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_several_records_share_a_file_and_keep_their_order(tmp_path):
    several = [record(record_id=f"r{i}", scores={A: [-float(i)] * 4}) for i in range(11)]
    save_many(tmp_path / "r", several)
    assert [one.record_id for one in load_many(tmp_path / "r")] == [f"r{i}" for i in range(11)]
    with pytest.raises(RecordError, match=r"expected 1; found 11"):
        ReplayRecord.load(tmp_path / "r")


def test_a_second_a_is_an_error_and_the_first_stays():
    one = record()
    with pytest.raises(RecordError, match="scores A are already recorded"):
        one.with_scores({A: [-9.0] * 4})
    assert one.scores[A][0] == -1.0


def test_no_pass_is_ever_overwritten():
    with pytest.raises(RecordError, match=r"B0\.old\.cold"):
        record().with_scores({b_key(0, "old"): [-9.0] * 4})


def test_adding_scores_makes_a_new_record():
    one = record()
    two = one.with_scores({c_key(0, "old"): [-1.0] * 4}, versions={"old": "run@0", "new": "run@1"})
    assert c_key(0, "old") not in one.scores
    assert two.versions["new"] == "run@1"
    assert [len(two.passes(*where)) for where in (("B", "old", "cold"), ("B", "old", "warm"), ("C", "old"))] == [
        1,
        0,
        1,
    ]


def test_nothing_in_a_record_can_be_changed_in_place():
    one = record()
    for array in (one.input_ids, one.mask, one.positions, one.scores[A]):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 3
    with pytest.raises(TypeError):
        one.scores[b_key(1, "old")] = np.zeros(4)
    with pytest.raises(TypeError):
        one.meta["note"] = "y"


def test_a_record_does_not_share_memory_with_what_it_was_made_of():
    values = np.array([-1.0, -2.0, -3.0, -4.0])
    one = record(scores={A: values})
    values[0] = 99
    assert one.scores[A][0] == -1.0


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"prompt_length": 0}, RecordError),
        ({"prompt_length": 6}, RecordError),
        ({"mask": [1, 1, 1]}, RecordError),
        ({"mask": [1, 1, 2, 1]}, RecordError),
        ({"mask": [1.0, 1.0, 0.5, 1.0]}, RecordError),
        ({"positions": [0, 1]}, RecordError),
        ({"input_ids": [5, 6, -1, 8, 9, 10]}, RecordError),
        ({"scores": {A: [-1.0]}}, ScoreError),
        ({"scores": {A: [-1.0, -2.0, float("nan"), -4.0]}}, ScoreError),
    ],
)
def test_parts_that_disagree_are_refused(changes, error):
    with pytest.raises(error):
        record(**changes)


def test_a_truncated_file_is_refused_wherever_it_ends(tmp_path):
    path = tmp_path / "r"
    record().save(path)
    whole = path.read_bytes()
    for end in (0, 1, 7, 8, 20, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:end])
        with pytest.raises(RecordError):
            load_many(path)


def test_a_flipped_bit_is_found_wherever_it_is(tmp_path):
    path = tmp_path / "r"
    record().save(path)
    whole = path.read_bytes()
    for at in range(8, len(whole), 7):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        with pytest.raises((RecordError, SpecVersionError)):
            load_many(path)


def rewritten(path, *, head=None, drop=None, add=None) -> None:
    """Write the file again with other metadata or tensors, as another program might."""
    raw = path.read_bytes()
    text = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])["__metadata__"]["syncguard"]
    tensors = load_file(path)
    tensors.pop(drop, None)
    tensors.update(add or {})
    save_file(tensors, path, {"syncguard": json.dumps({**json.loads(text), **(head or {})})})


def test_a_record_of_another_specification_is_refused_with_both_versions(tmp_path):
    record().save(tmp_path / "r")
    rewritten(tmp_path / "r", head={"spec_version": 99})
    with pytest.raises(SpecVersionError, match="expected 1; found 99"):
        load_many(tmp_path / "r")


@pytest.mark.parametrize("drop", ["0/input_ids", "0/mask", "0/scores/A"])
def test_a_missing_tensor_is_refused(tmp_path, drop):
    record().save(tmp_path / "r")
    rewritten(tmp_path / "r", drop=drop)
    with pytest.raises(RecordError):
        load_many(tmp_path / "r")


def test_a_surplus_tensor_is_refused(tmp_path):
    record().save(tmp_path / "r")
    rewritten(tmp_path / "r", add={"0/scores/B7.old.cold": np.zeros(4)})
    with pytest.raises(RecordError):
        load_many(tmp_path / "r")


def test_other_files_are_refused_by_name(tmp_path):
    (tmp_path / "text").write_text("hello")
    save_file({"x": np.zeros(2)}, tmp_path / "plain.safetensors")
    for name in ("text", "plain.safetensors", "missing"):
        with pytest.raises(RecordError, match=name):
            load_many(tmp_path / name)


def test_a_failed_save_leaves_the_old_file_and_nothing_beside_it(tmp_path):
    path = tmp_path / "r"
    record().save(path)
    before = path.read_bytes()
    with pytest.raises(RecordError, match="not JSON"):
        record(meta={"x": object()}).save(path)
    with pytest.raises(RecordError, match="not JSON"):
        record(meta={"x": float("nan")}).save(path)
    with pytest.raises(RecordError, match="nothing to save"):
        save_many(path, [])
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["r"]
