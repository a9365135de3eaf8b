"""How both daemons open their gRPC port: one pool, health, reflection, roles, and a clear error when it cannot be bound."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent import futures
from typing import Any, Final

import grpc
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from syncguard.errors import UsageError
from syncguard.rpc.credentials import Access, Role, RoleInterceptor, TlsFiles, check_listen, server_credentials
from syncguard.rpc.limits import SERVER_OPTIONS

THREADS: Final = 32
"""More than a service's watchers and long calls together, so that health, status and announcements are always answered."""


def make_server(service: str, access: Access, needed: Mapping[str, Role]) -> tuple[Any, Any]:
    """Return a gRPC server with health and reflection, and its health servicer; the service itself is added by the caller.

    Args:
        service: Full name of the service, for reflection.
        access: Which caller has which role.
        needed: Full method name → role that it needs.
    """
    server = grpc.server(
        futures.ThreadPoolExecutor(THREADS, thread_name_prefix="grpc"),
        interceptors=(RoleInterceptor(access, needed),),
        options=SERVER_OPTIONS,
    )
    servicer = health.HealthServicer(
        experimental_non_blocking=True, experimental_thread_pool=futures.ThreadPoolExecutor(1)
    )
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    reflection.enable_server_reflection((service, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    return server, servicer


def bind(server: Any, address: str, tls: TlsFiles | None) -> tuple[int, str]:
    """Bind a server and return its port and the address under which it is reached.

    Raises:
        UsageError: Off loopback without TLS, a TLS file that cannot be read, or an address that cannot be bound.
    """
    check_listen(address, tls)
    try:
        if tls is None:
            port = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, server_credentials(tls))
    except RuntimeError as error:
        raise UsageError(
            "cannot listen", found=error, where=address, todo="choose another port with --listen"
        ) from error
    return port, address if address.startswith("unix:") else f"{address.rpartition(':')[0]}:{port}"
