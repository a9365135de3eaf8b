"""The commands as real processes: start, closed doors, graceful end; and the status page in a real browser."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from simulated_engine import SimulatedEngine, manifest_of, record_of, weights_of

from syncguard.agent.host import Agent
from syncguard.agent.verify import VerifyRequest
from syncguard.agent.web import web_sources
from syncguard.cli.main import main
from syncguard.gate.client import AgentClient
from syncguard.rpc.web import WebServer
from syncguard.spec import WeightVersion

T = [weights_of(seed) for seed in range(2)]


class Daemon:
    """A `syncguard` process with JSON logs."""

    def __init__(self, *words: str, env: dict[str, str] | None = None) -> None:
        command = [sys.executable, "-m", "syncguard", *words, "--json"]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, **(env or {})}
        )
        self.lines: list[str] = []

    def serving(self) -> dict[str, object]:
        for line in self.process.stdout:
            self.lines.append(line)
            found = json.loads(line)
            if found.get("event") == "serving":
                return found
        raise AssertionError("".join(self.lines))

    def end(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        self.process.send_signal(number)
        rest, _ = self.process.communicate(timeout=30)
        return self.process.returncode, "".join(self.lines) + rest

    def __enter__(self) -> Daemon:  # noqa: PYI034 - no subclasses
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.communicate()


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_agent_without_its_engine_serves_not_ready_and_ends_gracefully(tmp_path: Path, number: int) -> None:
    words = ["agent", "--engine-url", f"http://127.0.0.1:{closed_port()}", "--worker", "w0", "--listen", "127.0.0.1:0"]
    words += ["--http-listen", "127.0.0.1:0", "--journal", str(tmp_path / "j.sqlite"), "--poll-interval-s", "0.1"]
    with Daemon(*words, env={"SYNCGUARD_ENGINE_KEY": "engine-key-never-logged"}) as daemon:
        told = daemon.serving()
        assert told["known_answers"] > 0
        with AgentClient(str(told["address"])) as client:
            deadline_s = time.monotonic() + 20
            while client.status(brief=True).readiness.reason != "engine_lost":
                assert time.monotonic() < deadline_s
            assert client.status().phase == "UNKNOWN"
        with grpc.insecure_channel(str(told["address"])) as channel:
            request = health_pb2.HealthCheckRequest(service="syncguard.rollout/w0")
            answer = health_pb2_grpc.HealthStub(channel).Check(request)
        assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING
        base = f"http://{told['http']}"
        assert httpx.get(f"{base}/livez").status_code == 200
        ready = httpx.get(f"{base}/readyz")
        assert ready.status_code == 503
        assert "engine_lost" in ready.text
        assert 'syncguard_ready{worker="w0"} 0.0' in httpx.get(f"{base}/metrics").text
        code, log = daemon.end(number)
    assert code == 0
    assert '"event": "stopped"' in log
    assert "engine-key-never-logged" not in log
    assert "Traceback" not in log


def test_a_gate_daemon_starts_decides_and_ends_gracefully() -> None:
    words = ["gate", f"127.0.0.1:{closed_port()}", "--listen", "127.0.0.1:0", "--http-listen", "127.0.0.1:0"]
    with Daemon(*words) as daemon:
        told = daemon.serving()
        ready = httpx.get(f"http://{told['http']}/readyz")
        assert ready.status_code == 503
        assert "no version was published" in ready.text
        code, log = daemon.end()
    assert code == 0
    assert "Traceback" not in log


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--listen", "0.0.0.0:0"], "off loopback without credentials"),
        (["--listen", "nonsense"], "HOST:PORT"),
        (["--tls-ca", "missing.crt"], "half of the TLS files"),
        (["--allow", "trainer=king"], "observe, verify or admin"),
        (["--token-file", "verify=missing"], "cannot read a secret"),
        (["--engine-key-file", "missing"], "cannot read the engine's key"),
        (["--http-listen", "nonsense"], "HOST:PORT"),
        (["--journal", "/proc/none/j.sqlite"], "cannot use the journal"),
    ],
)
def test_a_wrong_option_is_one_line_and_exit_code_2(words: list[str], text: str, monkeypatch, capsys) -> None:
    argv = ["syncguard", "agent", "--engine-url", "http://127.0.0.1:9", "--listen", "127.0.0.1:0", *words]
    monkeypatch.setattr(sys, "argv", argv)
    with pytest.raises(SystemExit) as raised:
        main()
    told = capsys.readouterr().err
    assert raised.value.code == 2
    assert text in " ".join(told.split())
    assert "Traceback" not in told


def browser() -> str:
    """A Chromium; the page is tested in a real browser or the test fails."""
    for name in ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome"):
        found = shutil.which(name)
        if found:
            return found
    raise AssertionError("no Chromium on this machine; install it (apt-get install chromium)")


def test_the_status_page_shows_fleet_timeline_verdict_and_figures_in_a_real_browser(tmp_path: Path) -> None:
    engine = SimulatedEngine(T[0], tp=2, label="run@0")
    hostile = "<img src=x onerror=alert(1)>"
    agent = Agent(engine, worker=hostile)
    agent.verify(VerifyRequest(manifest_of(T[0], "run@0"), (record_of(T[0], T[0]),)))
    agent.announce(WeightVersion("run", 1), [record_of(T[0])])
    engine.push(T[0], "run@1")
    agent.verify(VerifyRequest(manifest_of(T[1], "run@1"), (record_of(T[0], T[1]),)))
    server = WebServer("127.0.0.1:0", web_sources(agent))
    server.start()
    try:
        command = [browser(), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}"]
        command += ["--virtual-time-budget=3000", "--dump-dom", f"http://{server.address}/"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    finally:
        server.stop()
        agent.close()
    dom = done.stdout
    assert 'data-drawn="yes"' in dom, done.stderr[-2000:]
    assert "BLOCKED" in dom
    assert "layers.0.weight" in dom
    assert "holds the content of run@0" in dom
    assert "B_new-C_new" in dom
    assert "update_announced" in dom
    assert "&lt;img src=x onerror=alert(1)&gt;" in dom
    assert "<img" not in dom, "a worker's name became markup"
