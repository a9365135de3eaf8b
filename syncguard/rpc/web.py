"""A small read-only HTTP server: `/livez`, `/readyz`, `/metrics`, and on loopback a status page with its JSON.

Nothing can be changed through it. Off loopback only the three endpoints that orchestrators need are served, because
the page names tensors and addresses.
"""

from __future__ import annotations

import json
import logging
import secrets
import socket
import sys
import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, Final

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from syncguard.errors import UsageError
from syncguard.rpc.credentials import is_loopback
from syncguard.rpc.status_page import status_page

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger("syncguard.web")
REQUEST_TIMEOUT_S: Final = 10.0
CONNECTIONS_MAX: Final = 64


@dataclass(frozen=True, slots=True)
class WebSources:
    """Where the server's answers come from; each is called per request, from several threads.

    Attributes:
        title: Title of the page.
        live: Whether the process does its work, and why not.
        ready: Whether traffic may come, and the reason.
        status: JSON of the status page.
        registry: Metrics.
    """

    title: str
    live: Callable[[], tuple[bool, str]]
    ready: Callable[[], tuple[bool, str]]
    status: Callable[[], dict[str, Any]]
    registry: CollectorRegistry


class WebServer:
    """The server; `start` serves in threads of its own.

    Args:
        address: `HOST:PORT`; port 0 picks a free one.
        sources: Where answers come from.

    Raises:
        UsageError: The address cannot be used.
    """

    def __init__(self, address: str, sources: WebSources) -> None:
        """Bind."""
        host, _, port = address.rpartition(":")
        host = host.strip("[]")
        if not host or not port.isascii() or not port.isdigit():
            raise UsageError("address of the status server", expected="HOST:PORT", found=repr(address))
        try:
            self._server = _Server((host, int(port)), sources, pages=is_loopback(address))
        except (OSError, OverflowError) as error:
            raise UsageError("cannot listen", found=error, where=address, todo="choose another address") from error
        self.address = f"{host}:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, name="web", daemon=True)

    def start(self) -> None:
        """Serve."""
        self._thread.start()

    def stop(self) -> None:
        """Stop serving and free the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, address: tuple[str, int], sources: WebSources, *, pages: bool) -> None:
        self.sources = sources
        self.pages = pages
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._slots = threading.BoundedSemaphore(CONNECTIONS_MAX)
        super().__init__(address, _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        # Slow clients must not cost a thread each without end.
        if not self._slots.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._slots.release()

    def handle_error(self, _request: Any, client_address: Any) -> None:
        log.debug("request from %s failed: %r", client_address, sys.exc_info()[1])


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    server_version = "syncguard"
    sys_version = ""
    timeout = REQUEST_TIMEOUT_S

    def do_GET(self) -> None:
        answers = {"/livez": self._live, "/readyz": self._ready, "/metrics": self._metrics}
        if self.server.pages:
            answers |= {"/": self._page, "/status.json": self._status}
        answer = answers.get(self.path.partition("?")[0])
        if answer is None:
            self._send(404, "text/plain; charset=utf-8", b"not found\n")
        else:
            answer()

    do_HEAD = do_GET  # noqa: N815 - named by the base class

    def _live(self) -> None:
        self._plain(*self.server.sources.live())

    def _ready(self) -> None:
        self._plain(*self.server.sources.ready())

    def _metrics(self) -> None:
        self._send(200, CONTENT_TYPE_LATEST, generate_latest(self.server.sources.registry))

    def _status(self) -> None:
        self._send(200, "application/json", json.dumps(self.server.sources.status(), allow_nan=False).encode())

    def _page(self) -> None:
        nonce = secrets.token_urlsafe(12)
        policy = f"default-src 'none'; connect-src 'self'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'"
        body = status_page(self.server.sources.title, nonce).encode()
        self._send(200, "text/html; charset=utf-8", body, {"Content-Security-Policy": policy})

    def _plain(self, good: bool, why: str) -> None:  # noqa: FBT001 - the pair that sources return
        self._send(200 if good else 503, "text/plain; charset=utf-8", f"{why}\n".encode())

    def _send(self, code: int, kind: str, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class names it so
        log.debug(format, *args)
