"""`syncguard agent`: the daemon beside one rollout worker."""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Final

import typer

from syncguard.cli.daemon import (
    Allowed,
    AsJson,
    HttpListen,
    TlsAuthority,
    TlsCertificate,
    TlsKey,
    TokenFiles,
    serve_until_signalled,
    server_access,
    server_tls,
    start_logging,
)
from syncguard.errors import SyncguardError

ENGINE_KEY_VARIABLE: Final = "SYNCGUARD_ENGINE_KEY"
_MIB: Final = 1 << 20


def agent(
    engine_url: Annotated[str, typer.Option(metavar="URL", help="The worker's SGLang server.")],
    *,
    worker: Annotated[
        str, typer.Option(help="Name of the worker; by default its host and port, and this machine's name.")
    ] = "",
    listen: Annotated[str, typer.Option(metavar="HOST:PORT", help="gRPC address.")] = "127.0.0.1:50051",
    http_listen: HttpListen = "",
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
    scrub_interval_s: Annotated[
        float, typer.Option(min=0.0, help="Seconds between two scrubs of a READY worker; 0 for none.")
    ] = 1.0,
    scrub_mib: Annotated[
        int, typer.Option(min=1, help="MiB that each rank digests in a scrub; all it holds are read in turn.")
    ] = 128,
    tls_ca: TlsAuthority = None,
    tls_cert: TlsCertificate = None,
    tls_key: TlsKey = None,
    allow: Allowed = None,
    token_file: TokenFiles = None,
    as_json: AsJson = False,
) -> None:
    """Watch one worker, verify its updates, and serve its readiness until SIGTERM or SIGINT."""
    from syncguard.agent.host import Agent
    from syncguard.agent.journal import Journal
    from syncguard.agent.service import AgentServer, ListenOptions
    from syncguard.agent.settings import AgentConfig
    from syncguard.agent.web import web_sources
    from syncguard.digest import selftest
    from syncguard.engines.sglang import SglangEngine
    from syncguard.rpc.credentials import read_secret
    from syncguard.rpc.web import WebServer

    say = start_logging(as_json=as_json)
    answers = selftest()
    key = os.environ.get(ENGINE_KEY_VARIABLE, "")
    if engine_key_file is not None:
        key = read_secret(engine_key_file, what="the engine's key", least=1)
    config = AgentConfig(
        poll_interval_s=poll_interval_s,
        lease_s=lease_s,
        scrub_interval_s=scrub_interval_s,
        scrub_bytes=scrub_mib * _MIB,
        scrub_lease_s=max(AgentConfig().scrub_lease_s, 10 * scrub_interval_s),
    )
    # A poll is two requests, one after the other: both together stay within the lease.
    watch_timeout_s = min(engine_timeout_s, lease_s / 2)
    host = Agent(
        SglangEngine(engine_url, api_key=key, timeout_s=engine_timeout_s),
        worker=worker or default_worker_name(engine_url),
        journal=Journal(journal),
        config=config,
        watch_adapter=SglangEngine(engine_url, api_key=key, timeout_s=watch_timeout_s),
    )
    try:
        listening = ListenOptions(listen, server_tls(tls_ca, tls_cert, tls_key), server_access(allow, token_file))
        server = AgentServer(host, replace(listening, health_address=health_listen))
        web = [WebServer(http_listen, web_sources(host))] if http_listen else []
    except SyncguardError:
        host.close()
        raise
    serve_until_signalled(
        say,
        {
            "worker": host.worker,
            "address": server.address,
            "http": web[0].address if web else "",
            "engine": engine_url,
            "journal": str(journal) if journal is not None else "memory",
            "known_answers": answers,
            "poll_interval_s": poll_interval_s,
            "lease_s": lease_s,
            "scrub_interval_s": scrub_interval_s,
            "scrub_mib": scrub_mib,
        },
        start=[host.start, server.start, *(each.start for each in web)],
        stop=[server.stop, *(each.stop for each in web), host.close],
    )


def default_worker_name(engine_url: str) -> str:
    """Return `HOST:PORT@MACHINE`: every machine of a fleet may have its engine at the same loopback address."""
    return f"{engine_url.rpartition('//')[2].rstrip('/')}@{socket.gethostname()}"
