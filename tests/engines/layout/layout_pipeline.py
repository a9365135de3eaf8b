"""The whole way from a trainer's tensors to a verdict: manifest, in-rank probe, comparison."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from syncguard.digest import ALGORITHM, DEFAULT_KEY_SEED, DigestJob, engine_for, finalize
from syncguard.engines.rank_probe import RankProbe
from syncguard.manifest.codec import seal
from syncguard.manifest.compare import compare
from syncguard.manifest.model import Manifest, ManifestEntry, WorkerObservation
from syncguard.spec import Box, WeightVersion, dtype_named

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from layout_ranks import Rank

    from syncguard.manifest.verdict import Verdict

VERSION = WeightVersion("layout", 1)


def manifest_of(tensors: Mapping[str, torch.Tensor]) -> Manifest:
    """Return the sealed manifest of exported tensors."""
    jobs = []
    for name, tensor in tensors.items():
        shape = tuple(tensor.shape)
        jobs.append(DigestJob(tensor, dtype_named(str(tensor.dtype)), shape, Box.whole(shape), name))
    partials = engine_for("cpu").partials(jobs, key_seed=DEFAULT_KEY_SEED)
    entries = [
        ManifestEntry(
            job.fqn,
            job.dtype.name,
            job.shape,
            partial,
            finalize(partial, fqn=job.fqn, dtype=job.dtype, shape=job.shape),
        )
        for job, partial in zip(jobs, partials, strict=True)
    ]
    return seal(Manifest(VERSION, ALGORITHM, DEFAULT_KEY_SEED.hex(), tuple(entries)))


class Worker:
    """All ranks of one worker under probes."""

    def __init__(self, ranks: Sequence[Rank], record=None) -> None:
        self.ranks = ranks
        self.probes = [
            RankProbe(rank.identity, lambda rank=rank: rank.model, record=record(rank) if record else None)
            for rank in ranks
        ]
        self.observed = [self._observe(index) for index in range(len(ranks))]

    def _observe(self, index: int):
        with self.ranks[index].entered(), torch.inference_mode(False):
            return self.probes[index].layout(), self.probes[index].observe(DEFAULT_KEY_SEED)

    def verdict(self, manifest: Manifest, again: int | None = None) -> Verdict:
        """Judge what was observed; rank `again` is observed anew, the others as they were."""
        observed = list(self.observed)
        if again is not None:
            observed[again] = self._observe(again)
        return compare(
            manifest,
            WorkerObservation(
                worker="w0",
                expected_ranks=len(self.ranks),
                layouts=tuple({layout.fingerprint: layout for layout, _ in observed}.values()),
                ranks=tuple(ranks for _, ranks in observed),
                weight_version_label=str(VERSION),
            ),
        )
