"""What both daemons do alike: options, logging, credentials, start and stop."""

from __future__ import annotations

import json
import logging
import signal
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from syncguard.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from syncguard.rpc.credentials import Access, TlsFiles

HttpListen = Annotated[
    str, typer.Option(metavar="HOST:PORT", help="/livez, /readyz, /metrics; the status page on loopback only.")
]
TlsAuthority = Annotated[Path | None, typer.Option(help="CA of the other side's certificates; needed off loopback.")]
TlsCertificate = Annotated[Path | None, typer.Option(help="Own certificate.")]
TlsKey = Annotated[Path | None, typer.Option(help="Its key.")]
Allowed = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME=ROLE", help="Role of a client certificate: observe, verify, admin."),
]
TokenFiles = Annotated[
    list[str] | None, typer.Option(metavar="ROLE=FILE", help="Bearer token of a client that gives a role.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Log as JSON lines.")]


def server_tls(ca: Path | None, cert: Path | None, key: Path | None) -> TlsFiles | None:
    """Return the TLS files of a server, None without any.

    Raises:
        UsageError: Only some of the three were named.
    """
    from syncguard.rpc.credentials import TlsFiles

    if ca is None or cert is None or key is None:
        if ca is cert is key is None:
            return None
        raise UsageError("half of the TLS files", expected="--tls-ca, --tls-cert and --tls-key together")
    return TlsFiles(cert, key, ca)


def server_access(allow: list[str] | None, token_files: list[str] | None) -> Access | None:
    """Return the roles of callers, None where the command line names none.

    Raises:
        UsageError: An unknown role, or a token that cannot be read.
    """
    from syncguard.rpc.credentials import access_of

    return access_of(allow or (), token_files or ())


def serve_until_signalled(
    say: Callable[..., None],
    fields: dict[str, Any],
    *,
    start: Iterable[Callable[[], object]],
    stop: Iterable[Callable[[], object]],
) -> None:
    """Start the parts of a daemon, wait for SIGTERM or SIGINT, and stop them, each in its order.

    Args:
        say: Logs an event.
        fields: What is said of the daemon once it serves.
        start: What to start.
        stop: What to stop; others hear first that nobody serves here any more.
    """
    signalled = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: signalled.set())
    for each in start:
        each()
    say("serving", **fields)
    signalled.wait()
    say("stopping")
    for each in stop:
        each()
    say("stopped")


def start_logging(*, as_json: bool) -> Callable[..., None]:
    """Log to standard output, as JSON lines or text, and return a function that says an event with its fields."""
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(_JsonLines() if as_json else logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    root = logging.getLogger("syncguard")
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)
    root.propagate = False

    def say(event: str, **fields: Any) -> None:
        text = " ".join(f"{name}={value}" for name, value in fields.items() if value != "")
        root.info(f"{event} {text}".strip(), extra={"event": event, "fields": fields})

    return say


class _JsonLines(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        fields = getattr(record, "fields", None)
        line: dict[str, Any] = {
            "time_s": round(time.time(), 3),
            "level": record.levelname.lower(),
            "event": getattr(record, "event", record.name.rpartition(".")[2]),
            "message": record.getMessage(),
        }
        return json.dumps({**line, **(fields if isinstance(fields, dict) else {})})
