"""The published vectors: every implementation here agrees with every file, and a wrong file is noticed."""

import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from syncguard.digest.__main__ import main

PUBLISHED = {
    "vectors-v1.json": "5fcf5dc42127b45b6f152c5b2efba8dd0b2ec0cbb7d76a311ebc4b97111ea441",
    "vectors-v2.json": "d35ec52dfc42e40fc93d56191714cafc62abe184fa4fef3ee7f1090aebc4b8f7",
    "vectors-v3-keyed.json": "3b2250bc4867952b4f774b62f173c0df79d7ed04da2b4e20439634721f713517",
}
FILES = sorted(Path(__file__).parent.glob("vectors-*.json"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_implementation_agrees_with_the_file(path, capsys):
    assert main([str(path)]) == 0, capsys.readouterr().out
    assert capsys.readouterr().out.endswith(" passed, 0 failed\n")


def test_the_program_prints_its_counts_and_exits_0():
    command = [sys.executable, "-m", "syncguard.digest", *map(str, FILES)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0
    assert re.fullmatch(r"engines: .*numpy\n[1-9]\d* passed, 0 failed\n", done.stdout)


@pytest.mark.parametrize("field", ["coverage", "data", "digest", "count"])
def test_one_wrong_value_fails_the_file(field, tmp_path, capsys):
    content = json.loads(FILES[0].read_text())
    value = content["cases"][2][field]
    content["cases"][2][field] = value + 1 if field == "count" else f"{int(value, 16) ^ 1:0{len(value)}x}"
    path = tmp_path / "wrong.json"
    path.write_text(json.dumps(content))
    assert main([str(path)]) == 10
    assert ", 0 failed" not in capsys.readouterr().out


def test_one_wrong_box_fails_the_file(tmp_path):
    content = json.loads(FILES[0].read_text())
    case = next(case for case in content["cases"] if case.get("boxes"))
    case["boxes"][0]["data"] = "0" * 16
    path = tmp_path / "wrong.json"
    path.write_text(json.dumps(content))
    assert main([str(path)]) == 10


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"algorithm": 3}'])
def test_what_is_not_a_vector_file_is_refused(text, tmp_path):
    path = tmp_path / "bad.json"
    path.write_text(text)
    assert main([str(path)]) == 2


def test_no_file_and_a_missing_file_are_usage_errors(tmp_path):
    assert main([]) == 2
    assert main([str(tmp_path / "none.json")]) == 2


def test_a_file_without_cases_proves_nothing(tmp_path):
    content = json.loads(FILES[0].read_text())
    content["cases"] = []
    path = tmp_path / "empty.json"
    path.write_text(json.dumps(content))
    assert main([str(path)]) != 0


def test_published_files_never_change():
    """Vectors are append-only: a new file is added here, an old line stays as it is."""
    assert {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in FILES} == PUBLISHED
