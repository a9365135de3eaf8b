"""`python -m syncguard.digest VECTORS.json ...`: checks vector files with every implementation that runs here."""

from __future__ import annotations

import sys
from pathlib import Path

from syncguard.digest.select import available_engines
from syncguard.digest.vectors import check_vectors, read_vectors
from syncguard.errors import ExitCode, SyncguardError

_USAGE = "usage: python -m syncguard.digest VECTORS.json ...\n"


def main(arguments: list[str]) -> int:
    """Check the files; print `N passed, M failed`; return 0 only when everything agreed."""
    if not arguments or arguments[0].startswith("-"):
        sys.stderr.write(_USAGE)
        return int(ExitCode.USAGE)
    try:
        files = [read_vectors(Path(argument)) for argument in arguments]
        engines = available_engines()
        outcomes = [outcome for vectors in files for outcome in check_vectors(vectors, engines)]
    except SyncguardError as error:
        sys.stderr.write(f"{error.code}: {error}\n")
        return int(error.exit_code)
    failed = [outcome for outcome in outcomes if outcome.problem]
    sys.stdout.writelines(f"FAILED {outcome.name}: {outcome.problem}\n" for outcome in failed)
    sys.stdout.write(f"engines: {' '.join(engine.name for engine in engines)}\n")
    sys.stdout.write(f"{len(outcomes) - len(failed)} passed, {len(failed)} failed\n")
    return int(ExitCode.MISMATCH if failed else ExitCode.OK)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
