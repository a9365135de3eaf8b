"""Stand-in for SGLang's kernel package on a machine without a GPU; for tests and the demo only.

The real `sgl_kernel` is a CUDA wheel that cannot be imported without a driver. With `SGLANG_USE_CPU_ENGINE=1`
SGLang 0.5.23 imports nine names ending in `_cpu` from it when its modules load (`kernels/ops/speculative/*`,
`kernels/ops/kvcache/cache_move.py`, `srt/mem_cache/allocation.py`). Only speculative decoding and paged allocation
call them; the plain serving path runs `forward_native`, as long as nothing is registered in `torch.ops.sgl_kernel`.
A kernel that is called all the same raises, so that no result can come from a made-up kernel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable


def __getattr__(name: str) -> Callable[..., NoReturn]:
    """Return a kernel that says its name when it is called; only for names that end in `_cpu`."""
    if not name.endswith("_cpu"):
        raise AttributeError(f"module {__name__!r} (stand-in without a GPU) has no attribute {name!r}")

    def absent(*_args: object, **_kwargs: object) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name}: the stand-in has no kernels; this path needs the real package")

    absent.__name__ = name
    return absent
