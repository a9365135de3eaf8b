"""Real SGLang servers, one a configuration and paid once a session; a server that does not start fails its tests."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import torch
from tiny_models import save_tiny_checkpoint

from syncguard.engines.sglang import SglangEngine
from syncguard.engines.sglang_inside import DIRECTORY_VARIABLE
from syncguard.engines.sglang_launch import RunningServer, launch

STANDINS = Path(__file__).parents[2] / "scripts" / "sglang-cpu"


@dataclass(frozen=True)
class Served:
    """A server, its checkpoint, an adapter, and a plain client for its own interface."""

    server: RunningServer
    checkpoint: Path
    engine: SglangEngine
    http: httpx.Client
    dtype: str
    tp: int

    def post(self, path: str, **payload: object) -> httpx.Response:
        return self.http.post(path, json=payload)

    def load(self, checkpoint: Path, label: str) -> None:
        response = self.post("/update_weights_from_disk", model_path=str(checkpoint), weight_version=label)
        assert response.status_code == 200, response.text


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("sglang"):
            item.add_marker(pytest.mark.timeout(900))


@pytest.fixture(scope="session")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Served]]:
    """Return a function that gives the server of a configuration, started at its first use."""
    running: dict[tuple[str, str, int, int], Served] = {}
    with contextlib.ExitStack() as closing:

        def get(kind: str = "qwen3", dtype: str = "float32", tp: int = 1, pp: int = 1) -> Served:
            key = (kind, dtype, tp, pp)
            if key not in running:
                folder = tmp_path_factory.mktemp(f"{kind}-{dtype}-{tp}-{pp}")
                checkpoint = save_tiny_checkpoint(folder / "checkpoint", kind, seed=0, dtype=getattr(torch, dtype))
                log_path = folder / "server.log"
                inside = {DIRECTORY_VARIABLE: str(folder)} if dtype == "bfloat16" or kind != "qwen3" else {}
                server = launch(
                    checkpoint,
                    log_path=log_path,
                    dtype=dtype,
                    tp=tp,
                    pp=pp,
                    standins=STANDINS,
                    env_extra=inside,
                    timeout_s=600,
                )
                closing.enter_context(server)
                engine = closing.enter_context(SglangEngine(server.base_url))
                http = closing.enter_context(httpx.Client(base_url=server.base_url, timeout=300, trust_env=False))
                running[key] = Served(server, checkpoint, engine, http, dtype, tp)
            return running[key]

        yield get
