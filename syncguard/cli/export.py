"""`syncguard export`: a manifest from a safetensors folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from syncguard.cli.output import console, print_json, progress_bar
from syncguard.digest import DEFAULT_KEY_SEED
from syncguard.errors import UsageError
from syncguard.manifest.codec import save
from syncguard.manifest.model import ExemptPolicy
from syncguard.spec import WeightVersion


def key_seed_from(text: str) -> bytes:
    """Read a key seed option.

    Raises:
        UsageError: Not hex.
    """
    try:
        return bytes.fromhex(text) if text else DEFAULT_KEY_SEED
    except ValueError as error:
        raise UsageError(
            "key seed", expected="an even number of hex digits", found=error, where="--key-seed"
        ) from error


def exempt_from(text: str) -> ExemptPolicy:
    """Read an `--exempt` option.

    Raises:
        UsageError: Not `NAME=REASON`.
    """
    name, equals, reason = text.partition("=")
    if not equals or not name.strip() or not reason.strip():
        raise UsageError("exemption", expected="NAME=REASON", found=repr(text), where="--exempt")
    return ExemptPolicy(name.strip(), reason.strip())


def export(
    checkpoint: Annotated[
        Path, typer.Argument(metavar="CHECKPOINT", help="Folder with *.safetensors and config.json.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="Manifest file to write.")],
    weight_version: Annotated[
        str,
        typer.Option(
            metavar="RUN@STEP", help="Weight version of the checkpoint; the folder's name at step 0 if unset."
        ),
    ] = "",
    key_seed: Annotated[
        str, typer.Option(metavar="HEX", help="Key seed of the digests; the published default if unset.")
    ] = "",
    agent: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT", help="Agent of a worker: cast and quantize as that worker does before digesting."
        ),
    ] = "",
    exempt: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=REASON",
            help="Tensor that workers do not hold, such as a packed layer's weight_shape; always counted. Repeatable.",
        ),
    ] = None,
    tls_ca: Annotated[Path | None, typer.Option(help="CA certificate of the agent; without it, loopback only.")] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="Client certificate; goes with --tls-ca and --tls-key.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Key of the client certificate.")] = None,
    token_file: Annotated[Path | None, typer.Option(help="File that holds a bearer token.")] = None,
    timeout_s: Annotated[float, typer.Option(min=0.1, help="Seconds until the agent counts as unreachable.")] = 120.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,  # noqa: FBT002 - a flag
) -> None:
    """Digest every tensor of a safetensors folder into a manifest; the file appears whole or not at all."""
    from syncguard.export.checkpoint import export_checkpoint

    forms: dict[str, str] = {}
    if agent:
        from syncguard.gate.client import AgentClient
        from syncguard.rpc.credentials import client_credentials

        credentials = client_credentials(ca=tls_ca, cert=tls_cert, key=tls_key, token_file=token_file)
        with AgentClient(agent, credentials=credentials, timeout_s=timeout_s) as client:
            forms = client.forms()

    label = weight_version or f"{checkpoint.resolve().name.replace('@', '-') or 'checkpoint'}@0"
    version = WeightVersion.parse(label)
    seed = key_seed_from(key_seed)
    with progress_bar(f"digesting {checkpoint}", as_json=as_json) as bar:
        manifest = export_checkpoint(
            checkpoint,
            version=version,
            key_seed=seed,
            progress=lambda fraction: bar.update(bar.task_ids[0], completed=fraction),
            forms=forms,
            exempt=[exempt_from(text) for text in exempt or ()],
        )
    save(manifest, output)
    if as_json:
        print_json(
            {
                "manifest": str(output),
                "manifest_id": manifest.manifest_id,
                "weight_version": str(manifest.version),
                "tensors": len(manifest.entries),
                "bytes": manifest.total_bytes,
                "algorithm": manifest.algorithm,
                "source": manifest.source,
                "exit_code": 0,
            }
        )
        return
    console().print(
        f"{output}: {len(manifest.entries)} tensors, {manifest.total_bytes / 1e6:.1f} MB, {manifest.version}, "
        f"{manifest.algorithm}, id {manifest.manifest_id}, from {manifest.source}"
    )
