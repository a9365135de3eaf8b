"""Which implementation runs where: the fastest one that works here, and a loud word when it is not the usual one.

On the CPU: numba, else torch when the process already has it, else numpy. On a GPU: Triton, else torch. Before an engine is given out it has
answered a few small tensors in every layout like the reference; one that cannot, or does not, is passed over. So a
broken compiler costs time and a warning, never a different result.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from syncguard.digest.partial import DigestJob
from syncguard.digest.reference import NumpyEngine
from syncguard.errors import IncompleteError, UnsupportedError
from syncguard.spec import Box, dtype_named

if TYPE_CHECKING:
    from syncguard.digest.partial import DigestEngine

_log = logging.getLogger(__name__)


@lru_cache(maxsize=8)
def engine_for(device: str = "cpu") -> DigestEngine:
    """Return the fastest engine for tensors on a device; warns when a fast path is missing.

    The first call compiles (seconds, once per machine and version: the result is cached on disk), so call it at the
    start of a process and not inside a request.

    Args:
        device: A torch device string; "cpu" also takes numpy arrays.

    Raises:
        UnsupportedError: Not "cpu", and there is no torch.
    """
    if device.split(":", maxsplit=1)[0] == "cpu":
        return _cpu_engine()
    return _device_engine(device)


def warm_up(device: str = "cpu") -> str:
    """Choose, compile and prove the engine of a device now; return its name."""
    return engine_for(device).name


def available_engines() -> list[DigestEngine]:
    """Return every engine that can run in this process, fastest first; imports what they need."""
    found: list[DigestEngine] = []
    has_torch = importlib.util.find_spec("torch") is not None
    if has_torch and importlib.util.find_spec("triton") is not None:
        from syncguard.digest.triton_path import usable

        found += [_triton_engine()] if usable("cuda") or usable("cpu") else []
    found += [_numba_engine()] if importlib.util.find_spec("numba") is not None else []
    found += [_torch_engine()] if has_torch else []
    return [*found, NumpyEngine()]


def _cpu_engine() -> DigestEngine:
    try:
        engine = _numba_engine()
        _prove(engine)
    except Exception as error:  # noqa: BLE001 - whatever breaks in a compiler, the answer is the slower engine
        slower: DigestEngine = _torch_engine() if "torch" in sys.modules else NumpyEngine()
        _log.warning(
            "SLOW DIGESTS: no numba path (%s: %s); using %s, about 10 to 100 times slower. Install syncguard[fast].",
            type(error).__name__,
            error,
            slower.name,
        )
        return slower
    return engine


def _device_engine(device: str) -> DigestEngine:
    slower = _torch_engine()
    try:
        from syncguard.digest.triton_path import usable

        if not usable(device):
            raise UnsupportedError("no Triton path for this device", expected="cuda", found=device)  # noqa: TRY301
        engine = _triton_engine()
        _prove(engine, device)
    except Exception as error:  # noqa: BLE001 - whatever breaks in a compiler, the answer is the slower engine
        _log.warning(
            "SLOW DIGESTS: no Triton path on %s (%s: %s); using torch operations, about 10 times slower.",
            device,
            type(error).__name__,
            error,
        )
        return slower
    return engine


def _triton_engine() -> DigestEngine:
    from syncguard.digest.triton_path import TritonEngine

    return TritonEngine()


def _numba_engine() -> DigestEngine:
    from syncguard.digest.cpu import NumbaEngine

    return NumbaEngine()


def _torch_engine() -> DigestEngine:
    try:
        from syncguard.digest.torch_path import TorchEngine
    except ImportError as error:
        raise UnsupportedError(
            "no digest for tensors outside host memory", expected="torch", found=error, todo="install syncguard[torch]"
        ) from error
    return TorchEngine()


def _prove(engine: DigestEngine, device: str = "cpu") -> None:
    """Compare an engine with the reference on every item size, in each layout; compiles what it has to.

    Raises:
        IncompleteError: One answer differs.
    """
    random = np.random.default_rng(1)
    jobs = []
    for name in ("uint8", "uint16", "uint32", "uint64"):
        dtype, shape, box = dtype_named(name), (70, 41, 83), Box((33, 2, 3), (3, 38, 77))
        memory = random.integers(0, 256, 4 * 39 * 80 * dtype.itemsize_bytes, np.uint8).view(name)
        for order in ((0, 1, 2), (0, 2, 1), (2, 1, 0)):
            sizes = [box.sizes[dimension] for dimension in order]
            block = memory[: 3 * 38 * 77].reshape(sizes)
            jobs.append(DigestJob(block.transpose(np.argsort(order)), dtype, shape, box, "self-test"))
    there = [replace(job, view=_moved(job.view, device)) for job in jobs]
    for job, expected, found in zip(jobs, NumpyEngine().partials(jobs), engine.partials(there), strict=True):
        if expected != found:
            raise IncompleteError(
                f"the {engine.name} digest differs from the reference",
                expected=expected,
                found=found,
                where=f"{job.dtype.name} strides {job.view.strides}",
                todo="report it",
            )


def _moved(view: Any, device: str) -> Any:
    """Return an array as a tensor of a device with the same strides; itself for the CPU."""
    if device == "cpu":
        return view
    import torch

    raw = torch.from_numpy(view.view(f"i{view.itemsize}" if view.itemsize > 1 else "u1"))
    return raw.to(device, memory_format=torch.preserve_format)
