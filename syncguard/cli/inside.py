"""`syncguard inside`: where, between embedding and logits, the engine and the trainer part on one record."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Final

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from syncguard.cli.engines import ADDRESS_HELP, embedded_folder, load_trainer
from syncguard.cli.output import console, print_json, progress_bar
from syncguard.errors import EngineError, ExitCode, RecordError, UsageError
from syncguard.replay import ReplayRecord, load_many
from syncguard.replay.inside import (
    ACROSS_ENGINES,
    InsideReport,
    RoutingGap,
    compare_routers,
    find_growth,
    join_ranks,
    locate,
)

Values = Mapping[str, Any]
_PASSES: Final = 4
"""Passes that narrowing down usually takes; more only make the bar wait."""


class _Engine:
    """The engine's side: points of one cold prefill, whatever engine it is."""

    def __init__(self, address: str, record: ReplayRecord, scratch: Path) -> None:
        self.record, self.scratch = record, scratch
        self.contradicted: set[str] = set()
        folder = embedded_folder(address)
        self.look: Callable[[Sequence[str], str], tuple[list[Values], list[Path]]]
        if folder is None:
            self.points, self.routers = self._of_server(address)
        else:
            self.points, self.routers = self._of_worker(folder)

    def __call__(self, names: Sequence[str]) -> Values:
        """Return the points of all ranks together."""
        joined, contradicted = join_ranks(self.look(names, "")[0])
        self.contradicted.update(contradicted)
        return joined

    def operator(self, name: str, target: Path) -> None:
        """Save the input of one operator, and its output summed over the ranks."""
        from syncguard.replay.reference import join_operators

        join_operators(self.look([self.points[0]], name)[1], target, name)

    def _of_server(self, url: str) -> tuple[Sequence[str], Sequence[str]]:
        from safetensors.numpy import load_file

        from syncguard.engines.sglang_inside import list_points, look_inside

        def look(names: Sequence[str], operator: str) -> tuple[list[Values], list[Path]]:
            answers = look_inside(url, self.record, names, operator=operator)
            try:
                return [load_file(answer.file) for answer in answers], [Path(a.operator_file) for a in answers]
            except OSError as error:
                raise EngineError(
                    "the captures of the ranks cannot be read here",
                    expected="SYNCGUARD_INSIDE_DIR on a folder that this machine sees too",
                    found=error,
                    todo="run this command on the server's machine, or share the folder",
                ) from error

        self.look = look
        listed = list_points(url)
        return listed.modules, listed.routers

    def _of_worker(self, folder: Path) -> tuple[Sequence[str], Sequence[str]]:
        from syncguard.engines.local import LocalWorker
        from syncguard.engines.local_inside import look_inside_local
        from syncguard.replay.intermediates import routers_of, usual_points

        worker = LocalWorker(folder)

        def look(names: Sequence[str], operator: str) -> tuple[list[Values], list[Path]]:
            file = self.scratch / "operator"
            kept = look_inside_local(worker, self.record, names, operator=operator, operator_file=file)
            return [kept.arrays()], [file]

        self.look = look
        return usual_points(worker.ranks[0]), routers_of(worker.ranks[0])


def inside(
    record: Annotated[Path, typer.Argument(metavar="RECORD", help="Replay record whose ids are run.")],
    *,
    engine: Annotated[str, typer.Option(help=ADDRESS_HELP)],
    trainer: Annotated[Path, typer.Option(help="Checkpoint folder of the trainer's state; Transformers.")],
    trainer_dtype: Annotated[str, typer.Option(help="Its dtype; auto takes the config's.")] = "auto",
    record_id: Annotated[str, typer.Option(help="Which record of the file; the first where empty.")] = "",
    floor: Annotated[
        float, typer.Option(min=0, help="Relative error that rounding explains; 0 takes that of the dtype.")
    ] = 0.0,
    point: Annotated[
        list[str] | None, typer.Option(help="Look at this point only, such as model.layers.7; repeatable, in order.")
    ] = None,
    at_once: Annotated[int, typer.Option(min=3, help="Most points of one pass over all layers.")] = 8,
    save_operator: Annotated[
        Path | None, typer.Option(help="Keep the input and output of the operator at which the sides part.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Narrow down where an engine and a trainer part: 0 all points agree, 10 they part, 11 or 12 it cannot be told.

    An SGLang server must run with SYNCGUARD_INSIDE_DIR set and without other traffic.
    """
    one = _chosen(record, record_id)
    if embedded_folder(engine) is None and not engine.startswith(("http://", "https://")):
        raise UsageError("engine address", expected="http://HOST:PORT or embedded:FOLDER", found=engine)
    with tempfile.TemporaryDirectory() as folder, progress_bar("looking inside", as_json=as_json) as progress:
        bar = progress.task_ids[0]
        model = load_trainer(trainer, trainer_dtype)
        from syncguard.replay.reference import own_error, trainer_points

        allowed = floor or _floor_of(model)
        side = _Engine(engine, one, Path(folder))
        progress.update(bar, completed=0.2)
        routing = _routing(side, model, one)

        def told(found: InsideReport) -> None:
            step = 0.2 + 0.8 / (_PASSES + 1)
            progress.update(bar, description=found.reason[:60], advance=step if found.end else 0.5)

        def trained(names: Sequence[str]) -> Values:
            return trainer_points(model, one, names)

        if point:
            reports = [find_growth(side(point), trained(point), point, floor=allowed)]
        else:
            reports = locate(side, trained, side.points, floor=allowed, at_once=at_once, on_pass=told)
        end = reports[-1].end
        own = None
        if end is not None and _replayable(end):
            file = save_operator or Path(folder) / "kept"
            side.operator(end, file)
            own = own_error(model, end, file, one)
        progress.update(bar, completed=1.0)
    parted = end is not None
    answer: dict[str, Any] = {
        "record": one.record_id,
        "parted": parted,
        "start": reports[-1].start,
        "end": end,
        "reason": reports[-1].reason,
        "floor": allowed,
        "passes": [found.as_dict() for found in reports],
        "routing": [asdict(gap) for gap in routing],
        "ranks_contradict": sorted(side.contradicted),
        "operator": None if own is None else {**asdict(own), "own_fault": own.relative > allowed},
        "operator_file": str(save_operator) if own is not None and save_operator is not None else "",
        "exit_code": int(ExitCode.MISMATCH if parted else ExitCode.OK),
    }
    if as_json:
        print_json(answer)
    else:
        _print(console(), answer, reports, routing)
    raise typer.Exit(answer["exit_code"])


def _chosen(path: Path, record_id: str) -> ReplayRecord:
    records = load_many(path)
    found = next((one for one in records if not record_id or one.record_id == record_id), None)
    if found is None:
        raise RecordError(
            "no such record", expected=", ".join(one.record_id for one in records[:5]), found=record_id, where=path
        )
    if np.unique(np.asarray(found.segment_ids)).size > 1:
        raise RecordError("a packed record", expected="one context", where=path, todo="give one of its samples")
    return found


def _floor_of(model: Any) -> float:
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    return ACROSS_ENGINES.get(dtype, ACROSS_ENGINES["float32"])


def _replayable(name: str) -> bool:
    from syncguard.replay.reference import has_reference

    return has_reference(name)


def _routing(side: _Engine, model: Any, record: ReplayRecord) -> tuple[RoutingGap, ...]:
    if not side.routers:
        return ()
    from syncguard.replay.reference import trainer_points

    return compare_routers(side(side.routers), trainer_points(model, record, side.routers), side.routers)


def _print(
    out: Console, answer: Mapping[str, Any], reports: Sequence[InsideReport], routing: Sequence[RoutingGap]
) -> None:
    for number, found in enumerate(reports, 1):
        table = Table(box=None, pad_edge=False, title=f"pass {number}", title_justify="left")
        for name in ("point", "relative error", "growth", "max", "at token"):
            table.add_column(name, justify="left" if name == "point" else "right")
        for point in found.points:
            style = "red" if point.name == found.end else ""
            cells = f"{point.relative:.2e}", f"{point.growth:.1f}", f"{point.maximum:.2e}", str(point.worst_token)
            table.add_row(point.name, *cells, style=style)
        out.print(table)
    if routing:
        table = Table(box=None, pad_edge=False, title="routing", title_justify="left")
        for name in ("experts", "tokens with other experts", "other order", "MAE of weights", "first token"):
            table.add_column(name, justify="left" if name == "experts" else "right")
        for gap in routing:
            first = "" if gap.first_flipped < 0 else str(gap.first_flipped)
            table.add_row(
                gap.name, f"{gap.flipped_share:.1%}", f"{gap.reordered_share:.1%}", f"{gap.weight_mae:.2e}", first
            )
        out.print(table)
    if answer["ranks_contradict"]:
        out.print(f"ranks hold different values at {', '.join(answer['ranks_contradict'])}", style="red")
    out.print(answer["reason"], style="red" if answer["parted"] else "green")
    own = answer["operator"]
    if own is not None:
        words = (
            "it computes otherwise on the same input" if own["own_fault"] else "it repeats on the same input: inherited"
        )
        out.print(f"{own['module']} on the engine's own input: relative error {own['relative']:.2e}; {words}")
    if answer["operator_file"]:
        out.print(f"input and output of the operator: {answer['operator_file']}")
