"""Weights that moved under captured graphs: proven in the new place, read in the old one. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncguard.manifest.verdict import Finding, FindingCode, Severity

if TYPE_CHECKING:
    from syncguard.engines.base import EngineStatus
    from syncguard.manifest.model import WorkerObservation


def moved_under_graphs(status: EngineStatus, observation: WorkerObservation) -> list[Finding]:
    """Return a mismatch for each tensor that a captured graph of its rank still reads at another address.

    Without captured graphs a moved tensor stays the warning that the comparison makes of it.
    """
    graphs = {rank.rank: rank.graphs for rank in status.ranks}
    return [
        Finding(
            FindingCode.STORAGE_MOVED,
            Severity.MISMATCH,
            f"lies elsewhere than when the {' and '.join(graphs[rank.rank])} graph was captured, which goes on reading the "
            "old bytes; let the update write in place, or capture the graph again",
            worker=observation.worker,
            rank=str(rank.rank),
            resident=name,
        )
        for rank in observation.ranks
        if graphs.get(rank.rank)
        for name in rank.moved
    ]
