"""A TCP proxy that delays, cuts, or goes half-open while bytes flow through it."""

from __future__ import annotations

import contextlib
import socket
import threading
import time


class Proxy:
    """Forwards to `target`; `mode` may change at any time.

    Modes: `pass`; `delay` adds `delay_s` to each piece; `half_open` swallows everything and closes nothing; `refuse`
    closes what is open and what comes; `cut_after` closes a connection once it passed `limit_bytes` towards the target.
    """

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self.target = (host, int(port))
        self.mode = "pass"
        self.delay_s = 0.0
        self.limit_bytes = 0
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._closed = False
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Proxy:  # noqa: PYI034 - no subclasses
        return self

    def __exit__(self, *_: object) -> None:
        self._closed = True
        self._listener.close()
        self.cut()

    def cut(self) -> None:
        """Close every connection, both ends."""
        for pair in self._pairs:
            for end in pair:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
                end.close()
        self._pairs.clear()

    def _accept(self) -> None:
        while not self._closed:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            if self.mode == "refuse":
                near.close()
                continue
            try:
                far = socket.create_connection(self.target)
            except OSError:
                near.close()
                continue
            self._pairs.append((near, far))
            threading.Thread(target=self._pump, args=(near, far, True), daemon=True).start()
            threading.Thread(target=self._pump, args=(far, near, False), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, outward: bool) -> None:
        passed = 0
        with contextlib.suppress(OSError):
            while data := source.recv(16_384):
                if self.mode == "half_open":
                    continue
                if self.mode == "delay":
                    time.sleep(self.delay_s)
                passed += len(data)
                if self.mode == "cut_after" and outward and passed > self.limit_bytes:
                    break
                sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
