"""`syncguard study`: how far the same saved responses move when the same workers, or a router, score them again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.table import Table

from syncguard.cli.engines import ADDRESS_HELP, open_engine
from syncguard.cli.output import console, print_json, progress_bar
from syncguard.engines.base import EngineAdapter
from syncguard.errors import ExitCode, UsageError
from syncguard.replay import ReplayRecord, RunStudy, load_many, study_run
from syncguard.replay.capture import require_flush
from syncguard.replay.packing import unpacked
from syncguard.replay.scores import FloatArray, check_returned_ids, checked_scores

UNKNOWN: Final = "unknown"
"""Worker of a router pass that no prefix cache betrays."""


def study(
    records: Annotated[
        list[Path], typer.Argument(metavar="RECORD...", help="Replay records; only their ids are used.")
    ],
    *,
    engine: Annotated[list[str], typer.Option(help=ADDRESS_HELP + " Repeatable: one for each worker.")],
    router: Annotated[str, typer.Option(help="URL of a router in front of these workers, such as smg.")] = "",
    passes: Annotated[int, typer.Option(min=2, help="Cold passes of each worker, and through the router.")] = 5,
    mae_limit: Annotated[
        float, typer.Option(help="Difference between workers that is never another state, in nats.")
    ] = 0.01,
    repeat_limit: Annotated[float, typer.Option(help="Repeat noise above which gaps cannot be read, in nats.")] = 0.05,
    noise_factor: Annotated[
        float, typer.Option(help="Factor on the noise within workers before they count as apart.")
    ] = 3.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure repeat noise within a worker, across workers and through a router, over all pairs of passes.

    Each pass follows a confirmed flush of every worker concerned. Intervals resample whole responses. Exit codes: 0 repeats
    agree, 10 repeats are unstable or workers hold different states.
    """
    if len(set(engine)) != len(engine):
        raise UsageError("workers of a study", expected="each once", found=", ".join(engine))
    samples = [one for path in records for record in load_many(path) for one in unpacked(record)]
    workers = {address: open_engine(address) for address in engine}
    front = open_engine(router) if router else None
    taken: dict[str, list[list[FloatArray]]] = {address: [] for address in engine}
    routed: list[list[FloatArray]] = []
    reached: Counter[str] = Counter()
    with progress_bar("scoring", as_json=as_json) as progress:
        steps = len(samples) * passes * (len(workers) + (front is not None))
        task = progress.task_ids[0]
        progress.update(task, description=f"{passes} passes of {len(samples)} responses", total=steps)

        def advance() -> None:
            progress.advance(task)

        for sample in samples:
            for address, worker in workers.items():
                taken[address].append(_passes(worker, {address: worker}, sample, passes, advance))
            if front is not None:
                routed.append(_passes(front, workers, sample, passes, advance, reached))
    for worker in (*workers.values(), *filter(None, [front])):
        worker.close()
    found = study_run(
        taken, [one.loss_mask for one in samples], router=routed, limit_nats=mae_limit, noise_factor=noise_factor
    )
    unstable = [
        group.name
        for group in found.groups
        if group.name.startswith("within") and group.interval.estimate > repeat_limit
    ]
    reason = _reason(found, unstable)
    code = ExitCode.MISMATCH if unstable or found.apart else ExitCode.OK
    if as_json:
        print_json(
            {
                **found.as_dict(),
                "unstable": unstable,
                "reached": dict(reached),
                "reason": reason,
                "exit_code": int(code),
            }
        )
    else:
        _print(found, reached, reason, bad=code is not ExitCode.OK)
    raise typer.Exit(int(code))


def _passes(
    engine: EngineAdapter,
    flushed: Mapping[str, EngineAdapter],
    sample: ReplayRecord,
    count: int,
    advance: Callable[[], None],
    reached: Counter[str] | None = None,
) -> list[FloatArray]:
    """Score one response several times, each time with every worker's prefix cache empty."""
    ids = sample.input_ids.tolist()
    found = []
    for _ in range(count):
        for address, worker in flushed.items():
            require_flush(worker, address)
        scored = engine.score(ids, prompt_length=sample.prompt_length)
        check_returned_ids(sample.response_ids, scored.response_ids, int(sample.input_ids.max()) + 1)
        found.append(checked_scores(scored.logprobs_nats, label="B", count=sample.response_length))
        if reached is not None:
            reached[_served_by(flushed, ids, sample.prompt_length)] += 1
        advance()
    return found


def _served_by(workers: Mapping[str, EngineAdapter], ids: list[int], prompt_length: int) -> str:
    """Return the worker that has the request in its prefix cache: all were empty before it."""
    warm = [a for a, worker in workers.items() if worker.score(ids, prompt_length=prompt_length).cached_tokens > 0]
    return warm[0] if len(warm) == 1 else UNKNOWN


def _reason(found: RunStudy, unstable: list[str]) -> str:
    if unstable:
        return f"repeats are unstable: {', '.join(unstable)}; gaps between paths cannot be read"
    if found.apart:
        return f"{', '.join(found.apart)}: apart beyond the noise within workers, so some hold another state"
    return f"repeats agree; noise within a worker is at most {found.within_nats:.6f} nat"


def _print(found: RunStudy, reached: Mapping[str, int], reason: str, *, bad: bool) -> None:
    out = console()
    table = Table(box=None, pad_edge=False)
    for name in ("pairs of passes", "pairs", "MAE, nats", "95 % over responses", "max"):
        table.add_column(name, justify="left" if name == "pairs of passes" else "right", overflow="fold")
    for group in found.groups:
        low, high = group.interval.low, group.interval.high
        value = "0, exact" if group.exact else f"{group.interval.estimate:.6f}"
        table.add_row(group.name, str(group.pairs), value, f"{low:.6f} to {high:.6f}", f"{group.maximum:.6f}")
    out.print(table)
    if reached:
        out.print(
            f"the router's requests reached {', '.join(f'{name}: {count}' for name, count in sorted(reached.items()))}"
        )
    out.print(reason, style="red" if bad else "green")
