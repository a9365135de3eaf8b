"""Starting and ending an engine process: what is reported when it fails, and that nothing of it is left.

The programs started here are small ones under SGLang's module name, so that every way to fail takes a moment; the real
server is started by the tests in `tests/engines`.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from pathlib import Path
from textwrap import dedent

import pytest

from syncguard.engines.sglang_launch import READY_LINE, STANDINS_VARIABLE, free_port, installed_device, launch
from syncguard.errors import EngineError, ExitCode, UsageError

STANDINS = Path(__file__).parents[3] / "scripts" / "sglang-cpu"

READY = f"print({READY_LINE!r}, flush=True)"
SERVE = f"""
import signal, socket, sys
listening = socket.create_server(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])))
{READY}
"""


@pytest.fixture
def start(tmp_path):
    """Return a launcher of a program in place of `sglang.launch_server`."""
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text("{}")

    def run(program, **options):
        package = tmp_path / "programs" / "sglang"
        package.mkdir(parents=True)
        (package / "__init__.py").touch()
        (package / "launch_server.py").write_text(dedent(program))
        return launch(
            checkpoint,
            log_path=tmp_path / "server.log",
            device="cpu",
            standins=STANDINS,
            env_extra={"PYTHONPATH": str(package.parent)},
            **options,
        )

    return run


def gone(pid):
    """Return whether a process has ended; one that nobody reaped counts."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def gone_within(pid, seconds):
    deadline = time.monotonic() + seconds
    while not gone(pid) and time.monotonic() < deadline:
        os.sched_yield()
    return gone(pid)


def test_a_server_that_ends_is_reported_with_its_exit_code_and_last_lines(start):
    with pytest.raises(EngineError, match=r"server\.log: no such kernel; .*exit code 3") as caught:
        start("import sys; print('no such kernel', file=sys.stderr); sys.exit(3)")
    assert caught.value.exit_code is ExitCode.UNREACHABLE


def test_a_server_that_said_ready_and_ended_did_not_start(start):
    with pytest.raises(EngineError, match="exit code 0"):
        start(READY)


def test_a_server_that_never_serves_times_out_tells_progress_and_is_ended(start, tmp_path):
    heard = []
    program = f"import os, signal; print('pid', os.getpid(), flush=True); {READY}; signal.pause()"
    with pytest.raises(EngineError, match=r"pid \d+ .*; expected ready within 3 s"):
        start(program, timeout_s=3, progress=heard.append)
    assert heard[:2] == ["SGLang starts, 1 s", "SGLang starts, 2 s"]
    assert gone(int((tmp_path / "server.log").read_text().split()[1]))


def test_stopping_ends_ranks_that_outlive_their_server(start):
    program = f"""
import os, signal
rank = os.fork()
if rank == 0:
    signal.pause()
{SERVE}
print("rank", rank, flush=True)
signal.pause()
"""
    with start(program) as server:
        while not server.last_log_lines()[-1].startswith("rank"):
            os.sched_yield()
        rank = int(server.last_log_lines()[-1].split()[1])
        assert server.alive()
        assert not gone(rank)
    assert not server.alive()
    assert gone_within(rank, 10)
    server.stop()


def test_a_server_that_died_later_is_not_alive_and_keeps_its_log(start):
    with start(f"print('first words')\n{SERVE}\nsignal.pause()") as server:
        os.kill(server.pid, signal.SIGKILL)
        assert gone_within(server.pid, 10)
        assert not server.alive()
        assert server.last_log_lines() == ["first words", READY_LINE]


def test_two_ranks_get_a_list_of_processors_each_and_the_flags_of_a_machine_without_a_gpu(start):
    program = f"import os, sys; print(sys.argv[1:], os.environ['SGLANG_CPU_OMP_THREADS_BIND'], flush=True); {READY}"
    with pytest.raises(EngineError) as caught:
        start(program, tp=2, dtype="float32", extra_args=["--random-seed", "7"])
    where = caught.value.where
    for flag in ("'--tp', '2'", "'--device', 'cpu'", "'--dtype', 'float32'", "'--random-seed', '7'"):
        assert flag in where
    assert len(where.split("] ")[1].split(" ")[0].split("|")) == 2


def test_a_folder_without_a_checkpoint_is_refused_before_anything_starts(tmp_path):
    with pytest.raises(UsageError, match=r"config\.json"):
        launch(tmp_path, log_path=tmp_path / "log")
    assert not (tmp_path / "log").exists()


def test_standins_that_are_not_there_are_named(start, tmp_path, monkeypatch):
    (tmp_path / "checkpoint" / "config.json").write_text("{}")
    monkeypatch.setenv(STANDINS_VARIABLE, str(tmp_path / "nowhere"))
    with pytest.raises(UsageError, match=r"nowhere.*scripts/sglang-cpu"):
        launch(tmp_path / "checkpoint", log_path=tmp_path / "log", device="cpu")


def test_a_free_port_can_be_bound():
    with socket.socket() as server:
        server.bind(("127.0.0.1", free_port()))


def test_the_device_is_one_that_torch_has():
    import torch

    assert installed_device() == ("cuda" if torch.cuda.is_available() else "cpu")
