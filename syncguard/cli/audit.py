"""`syncguard audit`: compare what a worker holds now with a manifest, from outside the loop."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from syncguard.cli.output import FINDINGS_SHOWN, console, print_json, print_verdict, progress_bar, verdict_as_dict
from syncguard.manifest.codec import load


def audit(
    agent: Annotated[str, typer.Option(metavar="HOST:PORT", help="Address of the worker's agent.")],
    manifest: Annotated[Path, typer.Option(metavar="FILE", help="Manifest that the worker should hold.")],
    tls_ca: Annotated[Path | None, typer.Option(help="CA certificate of the agent; without it, loopback only.")] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="Client certificate; goes with --tls-ca and --tls-key.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Key of the client certificate.")] = None,
    token_file: Annotated[Path | None, typer.Option(help="File that holds a bearer token.")] = None,
    timeout_s: Annotated[float, typer.Option(min=0.1, help="Seconds until the agent counts as unreachable.")] = 120.0,
    findings: Annotated[int, typer.Option(min=0, help="Findings to print; --json lists all.")] = FINDINGS_SHOWN,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,  # noqa: FBT002 - a flag
) -> None:
    """Audit a running worker against a manifest: table and exit code; it never makes a worker ready."""
    from syncguard.gate.client import AgentClient
    from syncguard.rpc.credentials import client_credentials

    expected = load(manifest)
    credentials = client_credentials(ca=tls_ca, cert=tls_cert, key=tls_key, token_file=token_file)
    with (
        AgentClient(agent, credentials=credentials, timeout_s=timeout_s) as client,
        progress_bar(f"auditing {agent}", as_json=as_json) as bar,
    ):
        verdict = client.audit(
            expected, progress=lambda step, done: bar.update(bar.task_ids[0], description=step, completed=done)
        )
    if as_json:
        print_json({"agent": agent, "weight_version": str(expected.version), **verdict_as_dict(verdict)})
    else:
        print_verdict(console(), verdict, worker=verdict.evidence.get("worker", agent), shown=findings)
    raise typer.Exit(int(verdict.exit_code))
