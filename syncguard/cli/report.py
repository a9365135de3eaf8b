"""`syncguard report`: records and verdicts as one self-contained page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from syncguard.cli.output import console, print_json, progress_bar
from syncguard.errors import BadInputError, UnsupportedError
from syncguard.replay import load_many


def report(
    records: Annotated[
        list[Path], typer.Argument(metavar="RECORD...", help="Replay records, in the order of the updates.")
    ],
    *,
    output: Annotated[Path, typer.Option("--output", "-o", help="Where the page goes.")] = Path("report.html"),
    verdicts: Annotated[
        list[Path] | None, typer.Option("--verdicts", help="JSON file with a verdict, or a list of them; repeatable.")
    ] = None,
    title: Annotated[str, typer.Option(help="Heading of the page.")] = "Weight update report",
    tokenizer: Annotated[Path | None, typer.Option(help="Tokenizer folder, to show the text of tokens.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Write one HTML file: verdicts in words, the decision map with the path taken, scores, tails and worst tokens."""
    try:
        from syncguard.report import write_report
    except ImportError as error:
        raise UnsupportedError(
            "a report page", expected="Jinja2 and matplotlib", found=error, todo="pip install 'syncguard[report]'"
        ) from error
    loaded = [record for path in records for record in load_many(path)]
    steps = [step for path in verdicts or [] for step in _verdicts(path)]
    with progress_bar("drawing", as_json=as_json) as progress:
        task = progress.task_ids[0]
        progress.update(task, description="drawing the report", total=None)
        written = write_report(output, title=title, steps=steps, records=loaded, decode=_decoder(tokenizer))
        progress.update(task, total=1, completed=1)
    if as_json:
        print_json(
            {"report": str(written), "bytes": written.stat().st_size, "records": len(loaded), "verdicts": len(steps)}
        )
    else:
        console().print(
            f"{written}  {written.stat().st_size / 1e6:.2f} MB, {len(loaded)} records, {len(steps)} verdicts"
        )


def _verdicts(path: Path) -> list[dict[str, Any]]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadInputError(
            "cannot read verdicts", expected="a JSON object or list", found=error, where=path
        ) from error
    items = found if isinstance(found, list) else [found]
    if not all(isinstance(item, dict) for item in items):
        raise BadInputError(
            "verdicts of a wrong form", expected="JSON objects", found=type(items[0]).__name__, where=path
        )
    return items


def _decoder(folder: Path | None) -> Any:
    if folder is None:
        return None
    from syncguard.report.token_text import decoder_of

    return decoder_of(folder)
