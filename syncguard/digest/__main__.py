"""`python -m syncguard.digest VECTORS.json ...`: checks vector files with every implementation that runs here."""

from __future__ import annotations

import sys
from pathlib import Path

from syncguard.digest.select import available_engines
from syncguard.digest.vectors import check_file
from syncguard.errors import ExitCode, SyncguardError

_USAGE = "usage: python -m syncguard.digest VECTORS.json ...\n"


def main(arguments: list[str]) -> int:
    """Check the files; print `N passed, M failed`; return 0 only when everything agreed."""
    if not arguments or arguments[0].startswith("-"):
        sys.stderr.write(_USAGE)
        return int(ExitCode.USAGE)
    engines = available_engines()
    passed = failed = 0
    try:
        for argument in arguments:
            for outcome in check_file(Path(argument), engines):
                passed, failed = passed + (not outcome.problem), failed + bool(outcome.problem)
                if outcome.problem:
                    sys.stdout.write(f"FAILED {outcome.name}: {outcome.problem}\n")
    except SyncguardError as error:
        sys.stderr.write(f"{error.code}: {error}\n")
        return int(error.exit_code)
    sys.stdout.write(f"engines: {' '.join(engine.name for engine in engines)}\n{passed} passed, {failed} failed\n")
    return int(ExitCode.OK if passed and not failed else ExitCode.MISMATCH)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
