"""`syncguard diagnose`: what a record's scores point at, offline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.table import Table

from syncguard.cli.engines import load_trainer
from syncguard.cli.output import console, print_json, progress_bar
from syncguard.errors import UsageError
from syncguard.replay import (
    A,
    ReplayEvidence,
    ReplayPolicy,
    ReplayRecord,
    b_key,
    c_key,
    check_definition,
    load_many,
    most_telling,
    save_many,
)
from syncguard.replay import diagnose as diagnose_records
from syncguard.report.terminal import print_diagnosis

_CHECKED: Final = (("A", A), ("B", b_key(0, "old")), ("C", c_key(0, "old")))


def diagnose(
    records: Annotated[list[Path], typer.Argument(metavar="RECORD...", help="Replay records of one worker.")],
    *,
    mae_limit: Annotated[float, typer.Option(help="Fixed limit of the mean absolute error, in nats.")] = 0.01,
    noise_factor: Annotated[float, typer.Option(help="Relative limit: this factor times the measured noise.")] = 3.0,
    pooled: Annotated[bool, typer.Option("--pooled", help="Judge all responses together, not one by one.")] = False,
    check_definition_with: Annotated[
        Path | None,
        typer.Option(
            "--check-definition",
            help="Trainer checkpoint of the old state: do the scores fit log_softmax(z) or log_softmax(z/T) of its logits?",
        ),
    ] = None,
    temperature: Annotated[
        float, typer.Option(help="T of that check; 0 takes the record's sampling temperature.")
    ] = 0.0,
    keep_telling: Annotated[
        int, typer.Option(min=0, help="Keep this many responses on which a stale worker would show most, in --output.")
    ] = 0,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Record file of --keep-telling.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say where to look when log-probabilities disagree: 0 agreement, 1 ambiguous or no power, 10 a fault, 11 incomplete."""
    if bool(keep_telling) != (output is not None):
        raise UsageError(
            "telling responses", expected="--keep-telling N together with --output FILE", found="one of them"
        )
    policy = ReplayPolicy(mae_limit_nats=mae_limit, noise_factor=noise_factor)
    loaded = [record for path in records for record in load_many(path)]
    groups = [loaded] if pooled else [[record] for record in loaded]
    found, checks = [], []
    with progress_bar("diagnosing", as_json=as_json) as progress:
        task = progress.task_ids[0]
        progress.update(task, description="records", total=len(groups) + (len(loaded) if check_definition_with else 0))
        for group in groups:
            found.append((group, diagnose_records(group, policy)))
            progress.advance(task)
        if check_definition_with is not None:
            model = load_trainer(check_definition_with, "auto")
            for record in loaded:
                checks.append(_definitions_of(model, record, temperature))
                progress.advance(task)
    telling = _keep(loaded, keep_telling, policy, output) if output is not None else []
    worst = max(int(diagnosis.exit_code) for _, diagnosis in found)
    if as_json:
        items = [{"records": [one.record_id for one in group], **diagnosis.as_dict()} for group, diagnosis in found]
        print_json({"diagnoses": items, "definitions": checks, "telling": telling, "exit_code": worst})
    else:
        out = console()
        for group, diagnosis in found:
            print_diagnosis(out, group, diagnosis)
        if checks:
            _print_checks(out, checks)
        for one in telling:
            change, needed = one["change_mae_nats"], one["needed_nats"]
            out.print(f"kept {one['record']}: a stale worker would show {change:.4g} nat, needed are {needed:.4g}")
    raise typer.Exit(worst)


def _definitions_of(model: Any, record: ReplayRecord, temperature: float) -> dict[str, Any]:
    """Return, for each path of the old state, which formula of the trainer's own logits its scores fit."""
    from syncguard.replay.trainer import response_logits

    heated = temperature or float(record.sampling.get("temperature", 1.0))
    if heated == 1:
        raise UsageError(
            "a definition check at temperature 1",
            expected="--temperature T, other than 1",
            found="raw and temperature-adjusted scores are the same then",
            where=record.record_id or "record",
        )
    rows = response_logits(model, record)
    known = record.at_one_state()
    paths = {}
    for name, key in _CHECKED:
        scores = known.get(key)
        if scores is not None:
            found = check_definition(scores, rows, record.input_ids, record.prompt_length, temperature=heated)
            paths[name] = {**asdict(found), "stated": str(known.definition_of(key))}
    return {"record": record.record_id, "temperature": heated, "paths": paths}


def _keep(records: Sequence[ReplayRecord], count: int, policy: ReplayPolicy, output: Path) -> list[dict[str, Any]]:
    chosen = most_telling([ReplayEvidence.from_record(record) for record in records], count, policy)
    if chosen:
        save_many(output, [records[index] for index, _ in chosen])
    return [{"record": records[index].record_id, **asdict(power)} for index, power in chosen]


def _print_checks(out: Console, checks: Sequence[dict[str, Any]]) -> None:
    table = Table(box=None, pad_edge=False, title="which formula the scores fit", title_justify="left")
    for name in ("record", "path", "fits", "raw", "temperature", "divided", "stated"):
        table.add_column(name, justify="right" if name in {"raw", "temperature", "divided"} else "left")
    for check in checks:
        for path, found in check["paths"].items():
            errors = [f"{found['mae_nats'][form]:.6f}" for form in ("raw", "temperature", "divided")]
            table.add_row(check["record"], path, found["closest"], *errors, found["stated"])
    out.print(table)
