"""The worker's side of the demo: an engine, its agent on loopback gRPC, and the ways to push weights into it.

Two rigs with one interface: the embedded engine in this process, and a real SGLang server with its agent as a process
of its own, started by `syncguard agent` as a user would start it.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from syncguard.cli.demo.sglang_push import SglangPush
from syncguard.engines.sglang_launch import RunningServer, launch
from syncguard.errors import EngineError

if TYPE_CHECKING:
    import torch

    Weights = Mapping[str, torch.Tensor]


class PushPath(str, Enum):
    """How weights reach the worker."""

    DISK = "disk"
    """`/update_weights_from_disk`."""
    TENSORS = "tensors"
    """`/begin_weight_update`, `/update_weights_from_tensor`, `/end_weight_update`."""


class Rig(Protocol):
    """An engine with its agent."""

    description: str
    address: str
    tp: int

    def push_folder(self, folder: Path, label: str) -> None:
        """Let the worker load a checkpoint folder."""

    def push_tensors(self, weights: Weights, label: str, *, only: Collection[str] | None = None) -> None:
        """Send named tensors in one session, all or only some of them."""

    def push_but_one_rank(self, weights: Weights, label: str, *, rank: int, kept: Weights) -> None:
        """Send new tensors to every rank but one, which is given what it has."""

    def set_label(self, label: str) -> None:
        """Set the version label and nothing else."""

    def close(self) -> None:
        """Stop the agent and the engine."""


class LocalRig:
    """The embedded engine and its agent, both in this process; only the gRPC between them is real.

    Args:
        checkpoint: Folder that the worker starts from.
        tp: Tensor-parallel ranks.
        dtype: Canonical dtype of the resident weights.
    """

    def __init__(self, checkpoint: Path, *, tp: int, dtype: str) -> None:
        """Load the worker and serve its agent on a free port."""
        from syncguard.agent.host import Agent
        from syncguard.agent.service import AgentServer, ListenOptions
        from syncguard.agent.settings import AgentConfig
        from syncguard.engines.local import LocalEngine, LocalWorker

        self.tp = tp
        self.worker = LocalWorker(checkpoint, tp_size=tp, dtype=dtype)
        self._agent = Agent(LocalEngine(self.worker), worker="rollout-0", config=AgentConfig(poll_interval_s=0.2))
        self._server = AgentServer(self._agent, ListenOptions(address="127.0.0.1:0"))
        self._agent.start()
        self._server.start()
        self.address = self._server.address
        self.description = f"embedded engine, {tp} rank{'s' if tp > 1 else ''}, {dtype}"

    def push_folder(self, folder: Path, label: str) -> None:
        """Let the worker load a checkpoint folder."""
        self.worker.update_from_disk(folder, label=label)

    def push_tensors(self, weights: Weights, label: str, *, only: Collection[str] | None = None) -> None:
        """Send named tensors in one session, all or only some of them."""
        self.worker.push([(n, t) for n, t in weights.items() if only is None or n in only], label=label)

    def push_but_one_rank(self, weights: Weights, label: str, *, rank: int, kept: Weights) -> None:  # noqa: ARG002 - the fault keeps it
        """Push with one rank deaf."""
        from syncguard.engines.faults import Fault, FaultKind

        self.worker.faults.arm(Fault(FaultKind.RANK_STALE, rank=rank))
        self.push_tensors(weights, label)
        if FaultKind.RANK_STALE not in self.worker.faults.kinds_fired():
            raise EngineError("fault of the demo", expected="one rank stays behind", found="it did not fire")

    def set_label(self, label: str) -> None:
        """Set the version label and nothing else."""
        self.worker.set_label(label)

    def close(self) -> None:
        """Stop the agent and the engine."""
        self._server.stop(0.2)
        self._agent.close()
        self.worker.stop()


class SglangRig:
    """A real SGLang server and a `syncguard agent` process beside it.

    Args:
        checkpoint: Folder that the server starts from.
        tp: Tensor-parallel ranks.
        dtype: Canonical dtype of the resident weights.
        scratch: Folder for logs and the agent's journal.
        progress: Called with a short text while waiting.
    """

    def __init__(
        self, checkpoint: Path, *, tp: int, dtype: str, scratch: Path, progress: Callable[[str], None]
    ) -> None:
        """Start both; raises what the launch raises, and leaves nothing running then."""
        self.tp = tp
        self._closing = contextlib.ExitStack()
        try:
            server = self._closing.enter_context(
                launch(checkpoint, log_path=scratch / "sglang.log", tp=tp, dtype=dtype, progress=progress)
            )
            self._push = SglangPush(server.base_url, tp)
            self._closing.callback(self._push.close)
            progress("starting the agent")
            self.address = self._start_agent(server, scratch)
        except BaseException:
            self._closing.close()
            raise
        self.description = f"sglang, {tp} rank{'s' if tp > 1 else ''}, {dtype}, started in {server.start_s:.0f} s"

    def _start_agent(self, server: RunningServer, scratch: Path) -> str:
        log_path = scratch / "agent.log"
        command = [sys.executable, "-m", "syncguard", "agent", "--engine-url", server.base_url, "--worker", "rollout-0"]
        command += ["--listen", "127.0.0.1:0", "--journal", str(scratch / "agent.sqlite"), "--json"]
        with log_path.open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)  # noqa: S603 - our own command
        self._closing.callback(_end, process)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and process.poll() is None:
            for line in log_path.read_text(errors="replace").splitlines():
                with contextlib.suppress(ValueError, AttributeError):
                    address = json.loads(line).get("address")
                    if address:
                        return str(address)
            time.sleep(0.05)
        tail = log_path.read_text(errors="replace").strip().splitlines()[-3:]
        raise EngineError("start of the agent", expected="its address", found=" / ".join(tail), where=log_path)

    def push_folder(self, folder: Path, label: str) -> None:
        """Let the server load a checkpoint folder."""
        self._push.from_disk(folder, label)

    def push_tensors(self, weights: Weights, label: str, *, only: Collection[str] | None = None) -> None:
        """Send named tensors in one session, all or only some of them."""
        sent = {name: tensor for name, tensor in weights.items() if only is None or name in only}
        self._push.from_tensors([sent] * self.tp, label)

    def push_but_one_rank(self, weights: Weights, label: str, *, rank: int, kept: Weights) -> None:
        """Send every rank its payload; that of one rank holds the old content."""
        self._push.from_tensors([kept if r == rank else weights for r in range(self.tp)], label)

    def set_label(self, label: str) -> None:
        """Set the version label and nothing else."""
        self._push.set_label(label)

    def close(self) -> None:
        """Stop the agent and the server."""
        self._closing.close()


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(timeout=10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
