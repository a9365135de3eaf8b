"""The runner for foreign implementations, with one written from SPEC.md alone, and with broken ones."""

import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
LITERAL = HERE / "literal_implementation.py"


def run(*command, files=("vectors-v1.json",), max_bytes=20_000):
    paths = [str(HERE / name) for name in files]
    done = subprocess.run(
        [sys.executable, HERE / "run_implementation.py", "--max-bytes", str(max_bytes), *paths, "--", *command],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    return done.returncode, done.stdout


def test_an_implementation_written_from_the_specification_alone_agrees_with_every_file():
    files = [path.name for path in sorted(HERE.glob("vectors-*.json"))]
    code, out = run(sys.executable, LITERAL, files=files, max_bytes=10_000)
    assert code == 0, out
    passed = int(out.split()[-6])
    assert passed > 200, "most cases are small enough to be checked here"


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("2**61 - 1", "2**61 + 1"),
        ("2 ** (8 * (q % 4))", "1"),
        ("found[1][0] = found[3][0] = 1", "pass"),
        ("keys[::es]", "keys[::1]"),
        ("digest_size=16", "digest_size=32"),
        ("(2**56 - 1)) + 1", "(2**56 - 1)) + 0"),
    ],
)
def test_an_implementation_with_one_mistake_fails(right, wrong, tmp_path):
    text = LITERAL.read_text()
    assert right in text
    broken = tmp_path / "broken.py"
    broken.write_text(text.replace(right, wrong))
    code, out = run(sys.executable, broken, max_bytes=600)
    assert code == 1
    assert " 0 failed" not in out


@pytest.mark.parametrize("command", [["true"], [sys.executable, "-c", "print('no json')"], ["no-such-program"]])
def test_a_program_that_does_not_answer_fails(command):
    code, _ = run(*command, max_bytes=100)
    assert code != 0


def test_the_vectors_are_those_of_their_rules():
    script = HERE.parent.parent / "scripts" / "gen-vectors"
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stdout
