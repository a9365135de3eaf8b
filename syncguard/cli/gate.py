"""`syncguard gate`: the gate as a daemon over a fleet of agents."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

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


class ModeName(str, Enum):
    """How many workers must be ready."""

    ALL = "all"
    QUORUM = "quorum"
    BEST_EFFORT = "best-effort"


def gate(
    agents: Annotated[list[str], typer.Argument(metavar="HOST:PORT...", help="Addresses of the workers' agents.")],
    *,
    listen: Annotated[str, typer.Option(metavar="HOST:PORT", help="gRPC address.")] = "127.0.0.1:50050",
    http_listen: HttpListen = "",
    mode: Annotated[ModeName, typer.Option(help="How many workers must be ready.")] = ModeName.ALL,
    quorum: Annotated[int, typer.Option(min=1, help="Workers needed with --mode quorum.")] = 1,
    deadline_s: Annotated[float, typer.Option(min=0.1, help="Seconds after a publication when waiting ends.")] = 600.0,
    retries: Annotated[int, typer.Option(min=0, help="Pushes repeated for a worker at one version.")] = 1,
    quarantine_after: Annotated[int, typer.Option(min=1, help="Faulty versions in a row until quarantine.")] = 3,
    canary: Annotated[str, typer.Option(help="Worker that is verified before the others.")] = "",
    interval_s: Annotated[float, typer.Option(min=0.05, help="Seconds between two looks at all agents.")] = 1.0,
    smg_url: Annotated[str, typer.Option(metavar="URL", help="smg gateway whose pool follows readiness.")] = "",
    smg_worker: Annotated[
        list[str] | None, typer.Option(metavar="NAME=URL", help="The gateway's URL of a worker; needed with --smg-url.")
    ] = None,
    tls_ca: TlsAuthority = None,
    tls_cert: TlsCertificate = None,
    tls_key: TlsKey = None,
    allow: Allowed = None,
    token_file: TokenFiles = None,
    agent_token_file: Annotated[Path | None, typer.Option(help="Bearer token for the agents.")] = None,
    as_json: AsJson = False,
) -> None:
    """Gate a fleet: take publications, verify every worker, and tell who may serve, until SIGTERM or SIGINT."""
    from syncguard.digest import selftest
    from syncguard.gate.controller import Gate
    from syncguard.gate.readiness import GatePolicy, Mode
    from syncguard.gate.routing import SmgRouter
    from syncguard.gate.service import GateDaemon, GateListenOptions, GateServer
    from syncguard.gate.web import web_sources
    from syncguard.rpc.credentials import client_credentials
    from syncguard.rpc.web import WebServer

    say = start_logging(as_json=as_json)
    answers = selftest()
    policy = GatePolicy(
        mode=Mode(mode.value),
        quorum=quorum,
        deadline_s=deadline_s,
        retries=retries,
        quarantine_after=quarantine_after,
        canary=canary,
    )
    credentials = client_credentials(ca=tls_ca, cert=tls_cert, key=tls_key, token_file=agent_token_file)
    routers = [SmgRouter.of(smg_url, smg_worker or [])] if smg_url else []
    watch_s = interval_s if routers else 0.0
    fleet = Gate(agents, policy=policy, credentials=credentials, routers=routers, watch_interval_s=watch_s)
    daemon = GateDaemon(fleet, interval_s=interval_s)
    try:
        listening = GateListenOptions(listen, server_tls(tls_ca, tls_cert, tls_key), server_access(allow, token_file))
        server = GateServer(daemon, listening)
        web = [WebServer(http_listen, web_sources(fleet))] if http_listen else []
    except SyncguardError:
        fleet.close()
        raise
    serve_until_signalled(
        say,
        {
            "address": server.address,
            "http": web[0].address if web else "",
            "agents": len(agents),
            "known_answers": answers,
            "mode": mode.value,
        },
        start=[daemon.start, server.start, *(each.start for each in web)],
        stop=[server.stop, daemon.stop, *(each.stop for each in web), fleet.close],
    )
