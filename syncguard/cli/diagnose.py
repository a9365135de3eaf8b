"""`syncguard diagnose`: what a record's scores point at, offline."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from syncguard.cli.output import console, print_json
from syncguard.replay import ReplayPolicy, load_many
from syncguard.replay import diagnose as diagnose_records
from syncguard.report.terminal import print_diagnosis


def diagnose(
    records: Annotated[list[Path], typer.Argument(metavar="RECORD...", help="Replay records of one worker.")],
    *,
    mae_limit: Annotated[float, typer.Option(help="Fixed limit of the mean absolute error, in nats.")] = 0.01,
    noise_factor: Annotated[float, typer.Option(help="Relative limit: this factor times the measured noise.")] = 3.0,
    pooled: Annotated[bool, typer.Option("--pooled", help="Judge all responses together, not one by one.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say where to look when log-probabilities disagree: 0 agreement, 1 ambiguous or no power, 10 a fault, 11 incomplete."""
    policy = ReplayPolicy(mae_limit_nats=mae_limit, noise_factor=noise_factor)
    loaded = [record for path in records for record in load_many(path)]
    groups = [loaded] if pooled else [[record] for record in loaded]
    found = [(group, diagnose_records(group, policy)) for group in groups]
    worst = max(int(diagnosis.exit_code) for _, diagnosis in found)
    if as_json:
        items = [{"records": [one.record_id for one in group], **diagnosis.as_dict()} for group, diagnosis in found]
        print_json({"diagnoses": items, "exit_code": worst})
    else:
        for group, diagnosis in found:
            print_diagnosis(console(), group, diagnosis)
    raise typer.Exit(worst)
