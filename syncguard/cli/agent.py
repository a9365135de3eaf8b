"""`syncguard agent`: the daemon beside one rollout worker."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from syncguard.errors import SyncguardError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from syncguard.rpc.credentials import Access, TlsFiles

ENGINE_KEY_VARIABLE: Final = "SYNCGUARD_ENGINE_KEY"


def agent(
    engine_url: Annotated[str, typer.Option(metavar="URL", help="The worker's SGLang server.")],
    *,
    worker: Annotated[
        str, typer.Option(help="Name of the worker; by default its host and port, and this machine's name.")
    ] = "",
    listen: Annotated[str, typer.Option(metavar="HOST:PORT", help="gRPC address.")] = "127.0.0.1:50051",
    http_listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="/livez, /readyz, /metrics; the status page on loopback only.")
    ] = "",
    health_listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="A plain port with grpc.health.v1 alone, for probes without TLS.")
    ] = "",
    journal: Annotated[
        Path | None, typer.Option(help="SQLite journal; without it, history dies with the agent.")
    ] = None,
    engine_key_file: Annotated[
        Path | None, typer.Option(help=f"File with the server's admin key; or set {ENGINE_KEY_VARIABLE}.")
    ] = None,
    engine_timeout_s: Annotated[float, typer.Option(min=0.1, help="Seconds that one engine call may take.")] = 300.0,
    poll_interval_s: Annotated[
        float, typer.Option(min=0.01, help="An unannounced update revokes READY within this time.")
    ] = 1.0,
    lease_s: Annotated[
        float, typer.Option(min=0.05, help="READY ends this long after the engine's last answer.")
    ] = 5.0,
    tls_ca: Annotated[Path | None, typer.Option(help="CA of the clients; needed off loopback.")] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="The agent's certificate.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Its key.")] = None,
    allow: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=ROLE", help="Role of a client certificate: observe, verify, admin."),
    ] = None,
    token_file: Annotated[
        list[str] | None, typer.Option(metavar="ROLE=FILE", help="Bearer token that gives a role.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Log as JSON lines.")] = False,
) -> None:
    """Watch one worker, verify its updates, and serve its readiness until SIGTERM or SIGINT."""
    from syncguard.agent.host import Agent
    from syncguard.agent.journal import Journal
    from syncguard.agent.service import AgentServer
    from syncguard.agent.settings import AgentConfig
    from syncguard.agent.web import web_sources
    from syncguard.digest import selftest
    from syncguard.engines.sglang import SglangEngine
    from syncguard.rpc.web import WebServer

    say = start_logging(as_json=as_json)
    answers = selftest()
    key = _engine_key(engine_key_file)
    # A poll is two requests, one after the other: both together stay within the lease.
    watch_timeout_s = min(engine_timeout_s, lease_s / 2)
    host = Agent(
        SglangEngine(engine_url, api_key=key, timeout_s=engine_timeout_s),
        worker=worker or default_worker_name(engine_url),
        journal=Journal(journal),
        config=AgentConfig(poll_interval_s=poll_interval_s, lease_s=lease_s),
        watch_adapter=SglangEngine(engine_url, api_key=key, timeout_s=watch_timeout_s),
    )
    web = None
    try:
        listening = listen_options(listen, tls_ca, tls_cert, tls_key, allow, token_file)
        server = AgentServer(host, replace(listening, health_address=health_listen))
        web = WebServer(http_listen, web_sources(host)) if http_listen else None
    except SyncguardError:
        host.close()
        raise
    stop = stop_on_signals()
    host.start()
    server.start()
    if web is not None:
        web.start()
    say(
        "serving",
        worker=host.worker,
        address=server.address,
        http=web.address if web is not None else "",
        engine=engine_url,
        journal=str(journal) if journal is not None else "memory",
        known_answers=answers,
        poll_interval_s=poll_interval_s,
        lease_s=lease_s,
    )
    stop.wait()
    say("stopping", worker=host.worker)
    server.stop()
    if web is not None:
        web.stop()
    host.close()
    say("stopped", worker=host.worker)


def default_worker_name(engine_url: str) -> str:
    """Return `HOST:PORT@MACHINE`: every machine of a fleet may have its engine at the same loopback address."""
    return f"{engine_url.rpartition('//')[2].rstrip('/')}@{socket.gethostname()}"


def listen_options(
    listen: str,
    ca: Path | None,
    cert: Path | None,
    key: Path | None,
    allow: list[str] | None,
    token_files: list[str] | None,
) -> Any:
    """Return the `ListenOptions` that a daemon's command line asks for.

    Raises:
        UsageError: Half of the TLS files, an unknown role, or a token that cannot be read.
    """
    from syncguard.agent.service import ListenOptions

    return ListenOptions(listen, server_tls(ca, cert, key), server_access(allow, token_files))


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
    from syncguard.rpc.credentials import Access, Role, read_secret

    if not allow and not token_files:
        return None
    tokens = {}
    for text in token_files or ():
        role, equals, path = text.partition("=")
        if not equals:
            raise UsageError("token file", expected="ROLE=FILE", found=repr(text))
        tokens[read_secret(Path(path))] = Role.named(role)
    return Access.of(names=allow or (), tokens=tokens)


def _engine_key(path: Path | None) -> str:
    if path is None:
        return os.environ.get(ENGINE_KEY_VARIABLE, "")
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError("cannot read the engine's key", found=type(error).__name__, where=path) from error


def stop_on_signals() -> threading.Event:
    """Return an event that SIGTERM and SIGINT set."""
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    return stop


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
