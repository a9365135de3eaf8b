"""A real smg gateway in front of two real SGLang servers: who serves during an update, and what becomes of requests.

`smg` is the gateway of PyPI; `scripts/install --sglang` installs it. It is never skipped: without it this test fails.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "engines"))

from tiny_models import save_tiny_checkpoint

from syncguard.agent.host import Agent
from syncguard.agent.service import AgentServer, ListenOptions
from syncguard.agent.settings import AgentConfig
from syncguard.engines.sglang import SglangEngine
from syncguard.engines.sglang_launch import launch
from syncguard.export.checkpoint import export_checkpoint
from syncguard.gate.controller import Gate
from syncguard.gate.readiness import Action
from syncguard.gate.routing import SmgRouter
from syncguard.manifest.verdict import ReadinessState
from syncguard.spec import WeightVersion

STANDINS = Path(__file__).parents[2] / "scripts" / "sglang-cpu"
pytestmark = [pytest.mark.sglang, pytest.mark.timeout(1200)]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


@contextlib.contextmanager
def gateway(urls: list[str], log: Path):
    """A running smg process and its base URL."""
    beside = Path(sys.executable).with_name("smg")
    program = os.environ.get("SYNCGUARD_SMG") or (str(beside) if beside.exists() else shutil.which("smg"))
    assert program, "smg is not installed; run scripts/install --sglang"
    port = free_port()
    command = [program, "launch", "--host", "127.0.0.1", "--port", str(port), "--policy", "round_robin"]
    command += ["--worker-urls", *urls, "--prometheus-port", str(free_port())]
    command += [
        "--health-check-interval-secs",
        "1",
        "--health-failure-threshold",
        "1",
        "--health-success-threshold",
        "1",
    ]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
    base = f"http://127.0.0.1:{port}"
    try:
        deadline_s = time.monotonic() + 120
        while True:
            with contextlib.suppress(httpx.HTTPError):
                workers = httpx.get(f"{base}/workers").json()["workers"]
                if len(workers) == len(urls) and all(w["is_healthy"] for w in workers):
                    break
            assert process.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < deadline_s, log.read_text()[-3000:]
            time.sleep(0.2)
        yield base
    finally:
        process.terminate()
        process.wait(timeout=20)


class Traffic:
    """Requests through the gateway, without end, from several threads; each answer with its time."""

    def __init__(self, base: str) -> None:
        self.base = base
        self.answers: list[tuple[float, float, int, str]] = []
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(i,), daemon=True) for i in range(4)]

    def __enter__(self) -> Traffic:  # noqa: PYI034 - no subclasses
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _run(self, number: int) -> None:
        with httpx.Client(base_url=self.base, timeout=120, trust_env=False) as client:
            while not self._stop.is_set():
                began_s = time.time()
                answer = client.post(
                    "/generate",
                    json={
                        "input_ids": [3 + number, 4, 5],
                        "sampling_params": {"max_new_tokens": 24, "temperature": 1.0, "ignore_eos": True},
                    },
                )
                label = (
                    answer.json()["meta_info"].get("weight_version", "") if answer.status_code == 200 else answer.text
                )
                self.answers.append((began_s, time.time(), answer.status_code, str(label)))


def test_no_request_is_served_by_an_unverified_worker_and_none_is_lost(tmp_path: Path) -> None:  # noqa: PLR0915 - one story
    checkpoints = [save_tiny_checkpoint(tmp_path / f"T{step}", seed=step, dtype=torch.float32) for step in range(3)]
    with contextlib.ExitStack() as closing, ThreadPoolExecutor(2) as pool:
        starting = [
            pool.submit(
                launch,
                checkpoints[0],
                log_path=tmp_path / f"{i}.log",
                standins=STANDINS,
                dtype="float32",
                timeout_s=800,
            )
            for i in range(2)
        ]
        servers = [closing.enter_context(future.result()) for future in starting]
        urls = [server.base_url for server in servers]
        addresses = []
        for index, url in enumerate(urls):
            agent = Agent(
                SglangEngine(url),
                worker=f"r{index}",
                watch_adapter=SglangEngine(url),
                config=AgentConfig(poll_interval_s=0.5, lease_s=60.0),
            )
            closing.callback(agent.close)
            server = AgentServer(agent, ListenOptions("127.0.0.1:0"))
            server.start()
            closing.callback(server.stop, 0)
            agent.start()
            addresses.append(server.address)
        base = closing.enter_context(gateway(urls, tmp_path / "smg.log"))
        router = SmgRouter(base, {f"r{i}": url for i, url in enumerate(urls)}, wait_s=120)
        gate = closing.enter_context(Gate(addresses, routers=[router], verify_timeout_s=300))

        said: list[str] = []

        def push(url: str, step: int, label: str) -> None:
            body = {"model_path": str(checkpoints[step]), "weight_version": label}
            answer = httpx.post(f"{url}/update_weights_from_disk", json=body, timeout=300)
            assert answer.json()["success"], answer.text

        def manifest(step: int, label: str):
            return export_checkpoint(checkpoints[step], version=WeightVersion.parse(label))

        def update(names: list[str], step: int, label: str, *, arrives: bool = True) -> Action:
            gate.before_push(label, workers=names)
            for name in names:
                push(urls[int(name[1:])], step if arrives else 0, label)
            decision = gate.after_push(manifest(step, label), workers=names, replay_waived_because="gateway test")
            said.append(decision.reason)
            return decision.action

        assert update(["r0", "r1"], 0, "run@0") is Action.PROCEED, said
        with Traffic(base) as traffic:
            # One worker after the other, so that somebody serves all the time.
            began_s, ready_s = [], []
            for name in ("r0", "r1"):
                gate.before_push("run@1", workers=[name])
                began_s.append(time.time())
                push(urls[int(name[1:])], 1, "run@1")
                gate.after_push(manifest(1, "run@1"), workers=[name], replay_waived_because="gateway test")
                (readiness,) = [w.readiness for w in gate.workers() if w.worker == name]
                assert readiness.state is ReadinessState.READY
                ready_s.append(readiness.since_s)
            settled_s = time.time()
            while len([a for a in traffic.answers if a[0] > settled_s]) < 12:
                time.sleep(0.05)
        assert {status for _, _, status, _ in traffic.answers} == {200}, "a request was lost"
        labels = {label for _, _, _, label in traffic.answers}
        assert labels <= {"run@0", "run@1"}
        # Nobody served run@1 before the first worker was READY at it, and nobody run@0 once both had been taken out.
        assert min(began for began, _, _, label in traffic.answers if label == "run@1") >= ready_s[0]
        assert max(ended for _, ended, _, label in traffic.answers if label == "run@0") <= began_s[1]
        assert any(label == "run@0" for _, _, _, label in traffic.answers)
        # A push that does not arrive: the worker stays out, and the other one serves alone.
        assert update(["r0"], 2, "run@2", arrives=False) is not Action.PROCEED
        with httpx.Client(base_url=base, timeout=60, trust_env=False) as client:
            body = {"input_ids": [3, 4], "sampling_params": {"max_new_tokens": 2}}
            seen = [client.post("/generate", json=body).json()["meta_info"]["weight_version"] for _ in range(8)]
            listed = {w["url"] for w in client.get("/workers").json()["workers"] if w["is_healthy"]}
        assert set(seen) == {"run@1"}
        assert listed == {urls[1]}
        # It arrives, and the worker comes back.
        assert update(["r0"], 2, "run@2") is Action.WAIT, "r1 is ready at run@1 only"
        with httpx.Client(base_url=base, timeout=60, trust_env=False) as client:
            listed = {w["url"] for w in client.get("/workers").json()["workers"] if w["is_healthy"]}
        assert listed == set(urls)
