"""The `syncguard` command. Each command is a function in its own module; extras are imported when they run."""

from __future__ import annotations

import os
import sys
from importlib import metadata

import typer

from syncguard.cli.agent import agent
from syncguard.cli.audit import audit
from syncguard.cli.capture import capture
from syncguard.cli.demo.command import demo
from syncguard.cli.diagnose import diagnose
from syncguard.cli.diff import diff
from syncguard.cli.export import export
from syncguard.cli.gate import gate
from syncguard.cli.inside import inside
from syncguard.cli.layout import layout
from syncguard.cli.output import EXIT_CODES_HELP, print_error
from syncguard.cli.report import report
from syncguard.cli.study import study
from syncguard.errors import BadInputError, SyncguardError

app = typer.Typer(
    name="syncguard",
    help="Proves after each weight update that every rollout worker holds the weights that the trainer exported.",
    epilog=EXIT_CODES_HELP,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (agent, gate, export, audit, diff, layout, capture, diagnose, inside, study, report, demo):
    app.command(epilog=EXIT_CODES_HELP)(command)


def _version(value: bool) -> None:  # noqa: FBT001 - typer calls it so
    if value:
        typer.echo(metadata.version("syncguard"))
        raise typer.Exit


@app.callback()
def options(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),  # noqa: FBT001
) -> None:
    """Proves after each weight update that every rollout worker holds the weights that the trainer exported."""


def main() -> None:
    """Run the command line; every error is one line on stderr (or JSON with `--json`) and an exit code."""
    as_json = "--json" in sys.argv
    try:
        app()
    except SyncguardError as error:
        print_error(error, as_json=as_json)
        sys.exit(int(error.exit_code))
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except Exception as error:
        if os.environ.get("SYNCGUARD_TRACEBACK"):
            raise
        unexpected = BadInputError(
            "unexpected failure",
            found=f"{type(error).__name__}: {error}",
            todo="run again with SYNCGUARD_TRACEBACK=1 and report what it prints",
        )
        print_error(unexpected, as_json=as_json)
        sys.exit(2)


if __name__ == "__main__":
    main()
