"""Check any implementation of MLP61v1, in any language, against the vectors.

    python tests/conformance/run_implementation.py [--max-bytes N] VECTORS.json ... -- COMMAND [ARGUMENT ...]

The command is started once. It reads one JSON object per line: `key_seed` (hex), `name`, `dtype`, `itemsize`, `shape`,
`offsets`, `sizes`, and `bytes` (hex of the box's elements, row-major). For each it writes one line: `count`, `coverage`
and `data` (16 hex digits each) of the box, and `digest` (32 hex digits) of these sums under the name, dtype and shape. The
digest is compared where the box is the whole tensor. Prints `N passed, M failed, K skipped`; exits 0 only when all agree
and something was checked.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

from syncguard.digest.localize import window
from syncguard.digest.vectors import fill, read_vectors
from syncguard.errors import SyncguardError
from syncguard.spec import Box, dtype_named


def requests(vectors, max_bytes):
    """Yield (label, request, expected reply) per case and box; None as request for a case that is too large."""
    for case in vectors.cases:
        dtype, whole = dtype_named(case.dtype), Box.whole(case.shape)
        if whole.count * dtype.itemsize_bytes > max_bytes:
            yield f"{case.name} {whole}", None, None
            continue
        tensor = fill(case)
        parts = [(whole, case, True), *((Box(part.offsets, part.sizes), part, False) for part in case.boxes)]
        for box, sums, is_whole in parts:
            request = {
                "key_seed": vectors.key_seed,
                "name": case.name,
                "dtype": case.dtype,
                "itemsize": dtype.itemsize_bytes,
                "shape": case.shape,
                "offsets": box.offsets,
                "sizes": box.sizes,
                "bytes": (tensor[window(box, whole)] if box.sizes else tensor).tobytes().hex(),
            }
            expected = {"count": sums.count, "coverage": sums.coverage, "data": sums.data}
            yield f"{case.name} {box}", request, expected | ({"digest": case.digest} if is_whole else {})


def check(process, request, expected):
    """Ask the implementation; return what is wrong with its reply, or nothing."""
    process.stdin.write(json.dumps(request) + "\n")
    process.stdin.flush()
    line = process.stdout.readline()
    try:
        reply = json.loads(line)
        wrong = {name: reply.get(name) for name, value in expected.items() if reply.get(name) != value}
    except (ValueError, AttributeError):
        return f"reply {line[:80]!r} is not a JSON object"
    return f"expected {expected}, found {wrong}" if wrong else ""


def main(arguments):
    if "--" not in arguments:
        sys.stderr.write(__doc__)
        return 2
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--max-bytes", type=int, default=1 << 30)
    parser.add_argument("files", nargs="+", type=Path)
    options = parser.parse_args(arguments[: arguments.index("--")])
    command = arguments[arguments.index("--") + 1 :]
    passed = failed = skipped = 0
    try:
        files = [read_vectors(path) for path in options.files]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            for vectors in files:
                for label, request, expected in requests(vectors, options.max_bytes):
                    problem = "" if request is None else check(process, request, expected)
                    skipped += request is None
                    passed += request is not None and not problem
                    failed += bool(problem)
                    if problem:
                        print(f"FAILED {label}: {problem}")
            process.stdin.close()
    except (OSError, SyncguardError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    print(f"{passed} passed, {failed} failed, {skipped} skipped")
    return int(bool(failed) or not passed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
