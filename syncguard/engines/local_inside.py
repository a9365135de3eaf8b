"""Looking inside the embedded engine: points, routing and one operator's input, of one cold prefill of given ids."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from syncguard.engines.local_cache import KVCache
from syncguard.engines.local_model import forward_ranks
from syncguard.errors import EngineError
from syncguard.replay.inside import is_router
from syncguard.replay.intermediates import Capture, capturing, response_rows, save_operator

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    from syncguard.engines.local_worker import LocalWorker
    from syncguard.replay.record import ReplayRecord


def look_inside_local(
    worker: LocalWorker,
    record: ReplayRecord,
    names: Sequence[str],
    *,
    operator: str = "",
    operator_file: str | os.PathLike[str] = "",
) -> Capture:
    """Return what the named points hold while the engine prefills the record's ids with an empty cache.

    Outputs of several ranks are summed, as the next layer sees them; rank 0 speaks for the routers, which all ranks compute.

    Args:
        worker: The embedded worker; its prefix cache is left as it is.
        record: Record whose ids are run.
        names: Points, as `replay.intermediates` names them.
        operator: Point whose input and output are saved; none where empty.
        operator_file: Where they go.

    Raises:
        EngineError: The engine has no such point.
    """
    routers = [name for name in names if is_router(name)]
    wanted = [name for name in names if not is_router(name)]
    seen: set[str] = set()
    ids = torch.tensor(record.input_ids)

    with capturing(worker.ranks[0], routers) as kept, torch.no_grad():

        def observe(name: str, given: torch.Tensor, output: torch.Tensor) -> None:
            seen.add(name)
            if name in wanted:
                kept.add(name, response_rows(name, output, record.prompt_length))
            if operator and name == operator:
                save_operator(operator_file, name, {"input.0": given, "output": output})

        forward_ranks(worker.ranks, ids, [KVCache() for _ in worker.ranks], start=0, logits_from=0, observe=observe)
    unknown = [name for name in (*wanted, *filter(None, [operator])) if name not in seen]
    if unknown:
        raise EngineError("no such point", expected="names of the embedded model", found=", ".join(unknown[:3]))
    return kept
