"""The adapter of the embedded engine: what an agent sees of a `LocalWorker` in its own process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncguard.engines.base import DecodeScoring, EngineStatus
from syncguard.engines.faults import FaultKind
from syncguard.engines.local_worker import LocalWorker
from syncguard.engines.rank_probe import probe_version
from syncguard.errors import UnreachableError, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from syncguard.engines.base import FlushResult, Generation, RankScrub, RankStatus, Scoring
    from syncguard.layout.model import RankLayout
    from syncguard.manifest.model import RankObservation

__all__ = ["LocalEngine", "LocalWorker"]


class LocalEngine:
    """The adapter of an embedded worker."""

    def __init__(self, worker: LocalWorker) -> None:
        """Adapt a worker that lives in this process."""
        self.worker = worker

    def status(self) -> EngineStatus:
        """Return identity, update epoch and label of every rank."""
        worker = self._live()
        ranks: tuple[RankStatus, ...] = tuple(probe.status() for probe in worker.probes)
        return EngineStatus(
            engine=f"embedded {probe_version()}",
            model=worker.folder.name,
            weight_version_label=worker.label,
            expected_ranks=len(worker.ranks),
            ranks=ranks,
            vocab_size=worker.config.vocab_size,
        )

    def layouts(self) -> Sequence[RankLayout]:
        """Return the layout of every rank, read from the live layers."""
        return [probe.layout() for probe in self._live().probes]

    def observe(self, key_seed: bytes) -> Sequence[RankObservation]:
        """Digest every rank's resident memory."""
        worker = self._live()
        observations: list[RankObservation] = []
        for index in range(len(worker.probes)):
            # Looked up again for each rank: the worker may have restarted since the last one.
            observations.append(worker.observe_rank(index, key_seed))
            fault = worker.faults.pending(FaultKind.RESTART_IN_OBSERVE)
            if fault is not None:
                worker.faults.fire(fault, f"restarted after rank {index} was read")
                worker.restart()
        return observations

    def scrub(self, key_seed: bytes, *, turn: int, budget_bytes: int) -> Sequence[RankScrub]:
        """Digest the bytes of every rank that are due in this turn."""
        worker = self._live()
        return [
            worker.scrub_rank(index, key_seed, turn=turn, budget_bytes=budget_bytes)
            for index in range(len(worker.probes))
        ]

    def flush(self) -> FlushResult:
        """Empty the prefix cache."""
        return self._live().flush()

    def generate(self, prompt_ids: Sequence[int], *, max_new_tokens: int, seed: int) -> Generation:
        """Generate one response at temperature 1 with no filter, recording A."""
        return self._live().generate(prompt_ids, max_new_tokens=max_new_tokens, seed=seed)

    def score(self, input_ids: Sequence[int], *, prompt_length: int, replica: int = 0) -> Scoring:
        """Score a saved response by prefill; there is one replica."""
        if replica:
            raise UsageError("a replica of the embedded engine", expected=0, found=replica)
        return self._live().score(input_ids, prompt_length=prompt_length)

    def generate_batch(
        self, prompts: Sequence[Sequence[int]], *, max_new_tokens: int, seed: int
    ) -> tuple[Generation, ...]:
        """Generate for several prompts; this engine runs one after the other, so their company changes nothing."""
        return tuple(
            self.generate(one, max_new_tokens=max_new_tokens, seed=seed + index) for index, one in enumerate(prompts)
        )

    def score_batch(self, items: Sequence[tuple[Sequence[int], int]]) -> tuple[Scoring, ...]:
        """Score several saved responses, one after the other."""
        return tuple(self.score(ids, prompt_length=prompt_length) for ids, prompt_length in items)

    def score_by_decode(self, input_ids: Sequence[int], *, prompt_length: int) -> DecodeScoring:
        """Score a saved response by incremental decode over the key/value cache."""
        scoring = self._live().score_by_decode(input_ids, prompt_length=prompt_length)
        return DecodeScoring(scoring, how="incremental decode, one saved id a step")

    def close(self) -> None:
        """Do nothing: there is no connection, and the worker goes on."""

    def _live(self) -> LocalWorker:
        if not self.worker.alive:
            raise UnreachableError("embedded worker does not answer", where=self.worker.folder.name, todo="restart it")
        return self.worker
