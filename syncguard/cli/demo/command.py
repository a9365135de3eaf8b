"""`syncguard demo`: the whole path on real parts, in a few minutes."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import closing
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from syncguard.cli.output import console, print_json
from syncguard.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from syncguard.cli.demo.loop import StepResult
    from syncguard.cli.demo.rigs import Rig


class Engine(str, Enum):
    """Which rollout engine the demo runs."""

    LOCAL = "local"
    SGLANG = "sglang"


class DemoDType(str, Enum):
    """Element type of export and residents."""

    FP32 = "fp32"
    BF16 = "bf16"


class DemoSize(str, Enum):
    """Size of the demo model."""

    TINY = "tiny"
    SMALL = "small"


class DemoPush(str, Enum):
    """Path of complete pushes."""

    DISK = "disk"
    TENSORS = "tensors"


_DTYPES = {DemoDType.FP32: "float32", DemoDType.BF16: "bfloat16"}
BF16_FIRST_LIMIT_NATS = 0.05
"""Limit of MAE(B-C) in bf16 where no earlier agreement was measured; after T0 the limit follows the measured noise."""


def demo(
    engine: Annotated[Engine, typer.Option(help="Embedded engine, or a real SGLang server.")] = Engine.LOCAL,
    tp: Annotated[
        int | None, typer.Option(min=1, max=8, help="Tensor-parallel ranks; embedded 2 and SGLang 1 if unset.")
    ] = None,
    dtype: Annotated[DemoDType, typer.Option(help="fp32 shows B-C near 1e-6; bf16 shows real noise.")] = DemoDType.FP32,
    size: Annotated[DemoSize, typer.Option(help="Size of the model.")] = DemoSize.TINY,
    push: Annotated[DemoPush, typer.Option(help="How complete pushes travel.")] = DemoPush.TENSORS,
    seed: Annotated[int, typer.Option(help="Seed of the initial weights.")] = 0,
    report: Annotated[Path, typer.Option(metavar="FILE", help="Report page to write.")] = Path("syncguard-demo.html"),
    record: Annotated[Path | None, typer.Option(metavar="FILE", help="Also save all replay records.")] = None,
    findings: Annotated[int, typer.Option(min=1, help="Findings to print for each blocked step.")] = 8,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,  # noqa: FBT002 - a flag
) -> None:
    """Train, push and prove: clean updates, a skipped one, a torn one, one stale rank, and altered scores.

    Exit code 0 when every step came out as it must, 10 when one did not.
    """
    ranks = tp or (2 if engine is Engine.LOCAL else 1)
    with tempfile.TemporaryDirectory(prefix="syncguard-demo-") as folder:
        results, description = _run(
            engine,
            tp=ranks,
            dtype=_DTYPES[dtype],
            size=size.value,
            push=push.value,
            seed=seed,
            scratch=Path(folder),
            as_json=as_json,
        )
    from syncguard.cli.demo.screen import as_report_step, print_details
    from syncguard.replay import save_many
    from syncguard.report import write_report

    records = [result.record for result in results if result.record is not None]
    steps = [as_report_step(result) for result in results]
    write_report(report, title=f"syncguard demo: {description}", steps=steps, records=records)
    if record is not None:
        save_many(record, records)
    wrong = [result for result in results if result.wrong]
    code = ExitCode.MISMATCH if wrong else ExitCode.OK
    if as_json:
        print_json({"engine": description, "report": str(report), "steps": steps, "exit_code": int(code)})
        raise typer.Exit(int(code))
    out = console()
    print_details(out, results, shown=findings)
    out.print()
    out.print(f"report: {report}")
    out.print(
        f"{len(results) - len(wrong)} of {len(results)} steps came out as they must",
        style="bold red" if wrong else "bold green",
    )
    raise typer.Exit(int(code))


def _run(
    engine: Engine, *, tp: int, dtype: str, size: str, push: str, seed: int, scratch: Path, as_json: bool
) -> tuple[list[StepResult], str]:
    try:
        from syncguard.cli.demo.trainer import Trainer
    except ModuleNotFoundError as error:
        raise UsageError(
            "the demo needs a trainer",
            expected="torch and transformers",
            found=error,
            todo="pip install syncguard[torch]",
        ) from error
    from syncguard.cli.demo.loop import RUN_ID, Loop
    from syncguard.cli.demo.rigs import PushPath
    from syncguard.cli.demo.screen import Screen
    from syncguard.gate.controller import Gate
    from syncguard.replay import ReplayPolicy

    trainer = Trainer(size=size, dtype=dtype, seed=seed, run_id=RUN_ID)  # type: ignore[arg-type]
    checkpoint = trainer.save_checkpoint(scratch / "T0")
    err = Console(stderr=True)
    with err.status("starting the engine") as status:
        rig = _rig(engine, checkpoint, tp=tp, dtype=dtype, scratch=scratch, progress=status.update)
    policy = ReplayPolicy()
    first = policy if dtype == "float32" else ReplayPolicy(mae_limit_nats=BF16_FIRST_LIMIT_NATS)
    screen = Screen(
        f"trainer: Transformers Qwen3 {size}; worker: {rig.description}", Console(stderr=True) if as_json else console()
    )
    with closing(rig), Gate([rig.address], replay_policy=policy) as gate:
        loop = Loop(trainer, rig, gate, scratch, PushPath(push), policy, first, screen.say)
        with screen.live():
            for result in loop.run():
                screen.add(result)
    return screen.results, rig.description


def _rig(
    engine: Engine, checkpoint: Path, *, tp: int, dtype: str, scratch: Path, progress: Callable[[str], None]
) -> Rig:
    from syncguard.cli.demo.rigs import LocalRig, SglangRig

    if engine is Engine.SGLANG:
        return SglangRig(checkpoint, tp=tp, dtype=dtype, scratch=scratch, progress=progress)
    return LocalRig(checkpoint, tp=tp, dtype=dtype)
