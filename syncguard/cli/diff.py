"""`syncguard diff`: what changed between two manifests."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from syncguard.cli.output import console, print_json
from syncguard.errors import ExitCode, IncompleteError
from syncguard.manifest.codec import load
from syncguard.manifest.model import Manifest


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """One tensor that is not the same in two manifests.

    Attributes:
        fqn: Checkpoint name.
        kind: `added`, `removed`, `dtype`, `shape` or `content`.
        left: What the first manifest says.
        right: What the second says.
    """

    fqn: str
    kind: str
    left: str = ""
    right: str = ""


def differences(left: Manifest, right: Manifest) -> Iterator[TensorDifference]:
    """Yield the tensors that differ, sorted by name.

    Raises:
        IncompleteError: Made with different algorithms or keys, so that contents cannot be compared.
    """
    if (left.algorithm, left.key_seed_hex) != (right.algorithm, right.key_seed_hex):
        raise IncompleteError(
            "digests of two manifests",
            expected=f"{left.algorithm} with the same key seed",
            found=f"{right.algorithm}" + ("" if left.algorithm != right.algorithm else " with another key seed"),
            todo="export both with the same algorithm and key seed",
        )
    old = {entry.fqn: entry for entry in left.entries}
    new = {entry.fqn: entry for entry in right.entries}
    for fqn in sorted(old.keys() | new.keys()):
        if fqn not in new:
            yield TensorDifference(fqn, "removed", old[fqn].digest)
        elif fqn not in old:
            yield TensorDifference(fqn, "added", right=new[fqn].digest)
        elif old[fqn].dtype != new[fqn].dtype:
            yield TensorDifference(fqn, "dtype", old[fqn].dtype, new[fqn].dtype)
        elif old[fqn].shape != new[fqn].shape:
            yield TensorDifference(fqn, "shape", str(list(old[fqn].shape)), str(list(new[fqn].shape)))
        elif old[fqn].partial != new[fqn].partial:
            yield TensorDifference(fqn, "content", old[fqn].digest, new[fqn].digest)


def diff(
    left: Annotated[Path, typer.Argument(metavar="MANIFEST", help="The first manifest.")],
    right: Annotated[Path, typer.Argument(metavar="MANIFEST", help="The second manifest.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,  # noqa: FBT002 - a flag
) -> None:
    """Show which tensors differ between two manifests: 0 when none does, 10 when some do."""
    first, second = load(left), load(right)
    found = list(differences(first, second))
    code = ExitCode.MISMATCH if found else ExitCode.OK
    if as_json:
        print_json(
            {
                "left": {"weight_version": str(first.version), "manifest_id": first.manifest_id},
                "right": {"weight_version": str(second.version), "manifest_id": second.manifest_id},
                "same": len({e.fqn for e in first.entries} & {e.fqn for e in second.entries})
                - sum(d.kind not in {"added", "removed"} for d in found),
                "differences": found,
                "exit_code": int(code),
            }
        )
        raise typer.Exit(int(code))
    out = console()
    out.print(f"{first.version} ({len(first.entries)} tensors)  →  {second.version} ({len(second.entries)} tensors)")
    if found:
        table = Table(box=None, pad_edge=False)
        for name in ("tensor", "differs in", str(first.version), str(second.version)):
            table.add_column(name, overflow="fold")
        for row in found:
            table.add_row(row.fqn, row.kind, row.left, row.right)
        out.print(table)
    out.print(f"{len(found)} differ" if found else "no tensor differs")
    raise typer.Exit(int(code))
