"""Starts a real SGLang server for the demo and the tests, and ends exactly what it started.

On a machine whose torch has no CUDA the server runs on the CPU, which needs the flags below and the stand-ins of
`scripts/sglang-cpu` (an argument, `SYNCGUARD_SGLANG_STANDINS`, or a `.pth` file that `scripts/install --sglang` writes).
Nothing here is used beside a production server. Flags and log lines are those of SGLang 0.5.23.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from syncguard.errors import EngineError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import TracebackType

    from typing_extensions import Self

Device: TypeAlias = Literal["cpu", "cuda"]

QWEN3_ONLY_PACKAGE: Final = "sglang_qwen3_only"
"""Package among the stand-ins that spares each rank the import of some 200 model files (1.4 s of CPU time)."""

STANDINS_VARIABLE: Final = "SYNCGUARD_SGLANG_STANDINS"
"""Environment variable that names the folder of the stand-ins; read when no folder is given."""

READY_LINE: Final = "The server is fired up and ready to roll!"
"""What the server logs once it serves (`entrypoints/http_server.py`, SGLang 0.5.23)."""

_POLL_S: Final = 0.1
_GRACE_S: Final = 10.0
_LOG_TAIL_BYTES: Final = 64 * 1024
_LOG_LINES_SHOWN: Final = 15


@dataclass(slots=True)
class RunningServer:
    """A server that answered; a context manager that stops it.

    Attributes:
        base_url: `http://127.0.0.1:PORT`.
        port: TCP port on 127.0.0.1.
        tp: Number of tensor-parallel ranks.
        device: What the ranks compute on.
        log_path: Standard output and error of all its processes.
        start_s: Seconds from start to ready.
    """

    base_url: str
    port: int
    tp: int
    device: Device
    log_path: Path
    start_s: float
    _process: subprocess.Popen[bytes] = field(repr=False)

    @property
    def pid(self) -> int:
        """Process id of the HTTP server; also the id of the process group of all its ranks."""
        return self._process.pid

    def alive(self) -> bool:
        """Return whether the HTTP server process still runs."""
        return self._process.poll() is None

    def last_log_lines(self, count: int = _LOG_LINES_SHOWN) -> list[str]:
        """Return the last `count` non-empty lines of the log."""
        return _last_lines(self.log_path, count)

    def stop(self) -> None:
        """End the server and its ranks, which are its own process group, and nothing else; again does nothing."""
        _end_group(self._process)

    def __enter__(self) -> Self:
        """Return the server."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop the server, whatever happened."""
        self.stop()


def launch(
    model_path: Path,
    *,
    log_path: Path,
    tp: int = 1,
    pp: int = 1,
    dtype: str = "bfloat16",
    port: int | None = None,
    device: Device | None = None,
    standins: Path | None = None,
    extra_args: Sequence[str] = (),
    env_extra: Mapping[str, str] | None = None,
    timeout_s: float = 400.0,
    progress: Callable[[str], None] = lambda _line: None,
) -> RunningServer:
    """Start a server and return once it serves.

    Args:
        model_path: Hugging Face folder of the checkpoint; a tokenizer is not needed.
        log_path: File that receives the log of all processes; replaced.
        tp: Tensor-parallel ranks.
        pp: Pipeline stages.
        dtype: Element type of the resident weights, as SGLang names it (`float32`, `bfloat16`).
        port: TCP port on 127.0.0.1; a free one by default.
        device: `cpu` or `cuda`; found out by default.
        standins: Folder of the stand-ins for a machine without a GPU.
        extra_args: More arguments of `sglang.launch_server`; the last one wins.
        env_extra: More environment variables of the server.
        timeout_s: Longest wait for readiness, in seconds.
        progress: Called with a short text about once a second while waiting.

    Raises:
        EngineError: The server ended or did not serve in time; it carries the last log lines.
        UsageError: The stand-ins or the checkpoint are not where they were said to be.
    """
    if not (model_path / "config.json").is_file():
        raise UsageError(
            "no checkpoint to serve",
            expected="a folder with config.json",
            found=str(model_path),
            todo="export one first",
        )
    device = device or installed_device()
    port = port or free_port()
    command = [
        sys.executable,
        "-m",
        "sglang.launch_server",
        *_arguments(model_path, port, tp, dtype, device),
        *(("--pp-size", str(pp)) if pp > 1 else ()),
        *extra_args,
    ]
    environment = os.environ | _environment(device, tp * pp, standins) | dict(env_extra or {})
    started = time.monotonic()
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with log_path.open("wb") as log:
        # Its own session: a signal to the group ends the ranks too, and Ctrl-C in the terminal reaches only the caller.
        process = subprocess.Popen(  # noqa: S603  # our own interpreter
            command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    try:
        _wait_until_ready(process, port, log_path, started, timeout_s, progress)
    except BaseException:
        _end_group(process)
        raise
    return RunningServer(
        base_url=f"http://127.0.0.1:{port}",
        port=port,
        tp=tp,
        device=device,
        log_path=log_path,
        start_s=time.monotonic() - started,
        _process=process,
    )


def installed_device() -> Device:
    """Return `cuda` when the installed torch sees a GPU, asked in a process of its own: this one stays without torch."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        if importlib.metadata.version("torch").endswith("+cpu"):
            return "cpu"
    asked = subprocess.run(
        [sys.executable, "-c", "import torch; print(torch.cuda.is_available())"],
        capture_output=True,
        text=True,
        check=False,
    )
    if asked.returncode != 0:
        raise EngineError(
            "torch does not load",
            expected="an environment that can run SGLang",
            found=(asked.stderr.strip().splitlines() or ["no message"])[-1],
            where=sys.executable,
            todo="run scripts/install --sglang",
        )
    return "cuda" if asked.stdout.strip() == "True" else "cpu"


def free_port() -> int:
    """Return a TCP port on 127.0.0.1 that was free just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _arguments(model_path: Path, port: int, tp: int, dtype: str, device: Device) -> list[str]:
    shared = ["--model-path", str(model_path), "--host", "127.0.0.1", "--port", str(port), "--tp", str(tp)]
    shared += ["--dtype", dtype, "--skip-tokenizer-init"]
    if device == "cuda":
        return shared
    return [
        *shared,
        *("--device", "cpu", "--attention-backend", "torch_native"),
        *("--disable-cuda-graph", "--disable-overlap-schedule"),
        # Else an idle scheduler spins on a whole core, which two cores cannot spare.
        "--sleep-on-idle",
        # Tiny models: without a bound the KV cache takes its share of the machine's memory.
        *("--mem-fraction-static", "0.3", "--max-total-tokens", "8192"),
    ]


def _environment(device: Device, ranks: int, standins: Path | None) -> dict[str, str]:
    if device == "cuda":
        return {}
    found = {"SGLANG_USE_CPU_ENGINE": "1"}
    if standins is None and (named := os.environ.get(STANDINS_VARIABLE)):
        standins = Path(named)
    if standins is not None:
        if not (standins / "sgl_kernel" / "__init__.py").is_file():
            raise UsageError(
                "no stand-ins for a machine without a GPU",
                expected="a folder with sgl_kernel/__init__.py",
                found=str(standins),
                todo=f"set {STANDINS_VARIABLE} to scripts/sglang-cpu of the checkout",
            )
        found["PYTHONPATH"] = os.pathsep.join(filter(None, [str(standins), os.environ.get("PYTHONPATH")]))
    if standins is not None or importlib.util.find_spec(QWEN3_ONLY_PACKAGE) is not None:
        found["SGLANG_EXTERNAL_MODEL_PACKAGE"] = QWEN3_ONLY_PACKAGE
    if ranks > 1:
        # One CPU list per rank; without it SGLang asserts that there is a NUMA node for each rank.
        cpus = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [*range(os.cpu_count() or 1)]
        found["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(str(cpus[rank % len(cpus)]) for rank in range(ranks))
    return found


def _wait_until_ready(
    process: subprocess.Popen[bytes],
    port: int,
    log_path: Path,
    started: float,
    timeout_s: float,
    progress: Callable[[str], None],
) -> None:
    ready = READY_LINE.encode()
    told_s = 0
    with log_path.open("rb") as log:
        kept = b""
        while True:
            ended = process.poll() is not None
            kept = (kept + log.read())[-_LOG_TAIL_BYTES:]
            waited_s = time.monotonic() - started
            # The line alone may be the last word of a server that ends.
            if not ended and ready in kept and _listens(port):
                return
            if ended or waited_s > timeout_s:
                raise EngineError(
                    "the SGLang server did not start",
                    expected=f"ready within {timeout_s:.0f} s",
                    found=f"exit code {process.returncode}" if ended else f"no answer after {waited_s:.0f} s",
                    where=f"{log_path}: " + " | ".join(_last_lines(log_path, _LOG_LINES_SHOWN)),
                    todo="read the log; scripts/install --sglang makes an environment that works",
                )
            if waited_s >= told_s + 1:
                told_s = int(waited_s)
                progress(f"SGLang starts, {told_s} s")
            time.sleep(_POLL_S)


def _listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


def _last_lines(path: Path, count: int) -> list[str]:
    with contextlib.suppress(FileNotFoundError), path.open("rb") as log:
        log.seek(max(0, path.stat().st_size - _LOG_TAIL_BYTES))
        lines = [line.strip() for line in log.read().decode(errors="replace").splitlines()]
        return [line for line in lines if line][-count:]
    return []


def _end_group(process: subprocess.Popen[bytes]) -> None:
    # First the server alone: it ends its ranks. A rank that ends first counts as a crash, which it examines for 5 s.
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_GRACE_S)
    # The group outlives its leader as long as a member does, so the number cannot belong to others by now.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(_GRACE_S)
