"""The worker's side of the replay: prefill passes of saved responses, each after a confirmed flush.

A score is taken only for the saved ids, never from text, and only from this worker: B scores that arrive with a record
are another worker's or an older state's, so they are dropped.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import TYPE_CHECKING

from syncguard.errors import ScoreError
from syncguard.manifest.observed import TARGET
from syncguard.manifest.verdict import Finding, FindingCode, Severity
from syncguard.replay import ReplayEvidence, ReplayRecord, b_key, check_returned_ids, checked_scores
from syncguard.replay.packing import require_one_context

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from syncguard.engines.base import EngineAdapter, FlushResult
    from syncguard.layout.model import RankLayout
    from syncguard.replay.scores import FloatArray

FLUSH_ATTEMPTS = 5
FLUSH_WAIT_S = 0.1
"""SGLang 0.5.23 refuses a flush while requests are pending; short waits let them finish."""


def record_key(record: ReplayRecord) -> str:
    """Return the identity of a response: its ids and its prompt boundary, not its scores."""
    state = blake2b(record.input_ids.tobytes(), digest_size=16)
    state.update(record.prompt_length.to_bytes(8, "little"))
    return state.hexdigest()


VOCABULARY_LAYERS = frozenset({"VocabParallelEmbedding", "ParallelLMHead"})
"""Layer classes with a row for each token, whatever a family calls them (`vocab_parallel_embedding.py`, SGLang 0.5.23)."""


def vocabulary_of(layouts: Sequence[RankLayout]) -> int:
    """Return the vocabulary size that the input embedding shows; 0 where no rank holds one.

    An engine may learn it only while its layout is read, after the first status of a verification.
    """
    sizes = []
    for layout in layouts:
        if layout.rank.role != TARGET:
            continue  # a draft model may have another vocabulary
        by_token = {resident.name for resident in layout.residents if resident.layer_class in VOCABULARY_LAYERS}
        sizes += [
            binding.shard.tensor.shape[0]
            for binding in layout.bindings
            if binding.resident in by_token or binding.shard.tensor.fqn.endswith("embed_tokens.weight")
        ]
    return max(sizes, default=0)


@dataclass(frozen=True, slots=True)
class Passes:
    """B of several responses at one state of the weights.

    Attributes:
        label: Weight version label of the state.
        cold: Response → passes after a confirmed flush.
        warm: Response → passes with a warm prefix cache.
        findings: What went wrong: a flush that was not confirmed, or a cache that was not empty after it.
        warm_seen: The engine said that the warm passes did use the cache; False when it does not say.
        others: The passes of the further data-parallel replicas, in their order; these are of the first.
    """

    label: str
    cold: Mapping[str, tuple[FloatArray, ...]]
    warm: Mapping[str, tuple[FloatArray, ...]]
    findings: tuple[Finding, ...] = ()
    warm_seen: bool = False
    others: tuple[Passes, ...] = ()

    def of_replica(self, replica: int) -> Passes | None:
        """Return the passes of one replica, None where it has none."""
        of_all = (self, *self.others)
        return of_all[replica] if replica < len(of_all) else None


class ReplayRunner:
    """Takes passes over an adapter."""

    def __init__(
        self, adapter: EngineAdapter, *, worker: str, vocab_size: int, sleep: Callable[[float], object]
    ) -> None:
        """Keep the adapter; `sleep` waits between refused flushes, in seconds."""
        self._adapter = adapter
        self._worker = worker
        self._vocab_size = vocab_size
        self._sleep = sleep

    def take(
        self, records: Sequence[ReplayRecord], *, label: str, cold: int = 2, warm: int = 1, replicas: int = 1
    ) -> Passes:
        """Score each response `cold` times after a flush each, then `warm` times without one, on every replica.

        Args:
            records: The responses.
            label: Weight version label of the state.
            cold: Passes after a flush.
            warm: Passes without one.
            replicas: Data-parallel replicas; a request that names none would reach only one of them.

        Raises:
            RecordError: A packed record.
            UnsupportedError: A record of a call with an adapter or with images.
            ScoreError: Other ids came back, or a score is not finite.
            EngineError: The engine refused.
            UnreachableError: The engine did not answer.
        """
        require_one_context(records)
        first, *others = (
            self._take(records, label=label, cold=cold, warm=warm, replica=replica)
            for replica in range(max(1, replicas))
        )
        findings = tuple(dict.fromkeys(finding for one in (first, *others) for finding in one.findings))
        return replace(first, findings=findings, others=tuple(others))

    def _take(self, records: Sequence[ReplayRecord], *, label: str, cold: int, warm: int, replica: int) -> Passes:
        findings: list[Finding] = []
        colds: dict[str, tuple[FloatArray, ...]] = {}
        warms: dict[str, tuple[FloatArray, ...]] = {}
        used_cache = 0
        for record in records:
            key = record_key(record)
            taken = []
            for _ in range(cold):
                findings.extend(self.empty_cache())
                scores, cached = self._score(record, replica)
                if cached > 0:
                    findings.append(
                        self._unconfirmed(f"{cached} prompt tokens came from the prefix cache after a confirmed flush")
                    )
                taken.append(scores)
            colds[key] = tuple(taken)
            warm_passes = [self._score(record, replica) for _ in range(warm)]
            used_cache += sum(cached > 0 for _, cached in warm_passes)
            warms[key] = tuple(scores for scores, _ in warm_passes)
        distinct = tuple(dict.fromkeys(findings))
        return Passes(label, colds, warms, distinct, warm_seen=bool(records) and used_cache == warm * len(records))

    def empty_cache(self) -> tuple[Finding, ...]:
        """Flush the prefix cache, and return what keeps that from being believed; empty when it was confirmed."""
        flush = self._flush()
        if flush.confirmed:
            return ()
        return (self._unconfirmed(f"the engine did not confirm the flush: {flush.detail}"),)

    def _flush(self) -> FlushResult:
        result = self._adapter.flush()
        for _ in range(FLUSH_ATTEMPTS - 1):
            if result.confirmed:
                break
            self._sleep(FLUSH_WAIT_S)
            result = self._adapter.flush()
        return result

    def _score(self, record: ReplayRecord, replica: int) -> tuple[FloatArray, int]:
        ids = [int(i) for i in record.input_ids]
        if self._vocab_size and max(ids) >= self._vocab_size:
            raise ScoreError(
                "a saved id is outside the engine's vocabulary",
                expected=f"0..{self._vocab_size - 1}",
                found=max(ids),
                where=self._worker,
                todo="replay only responses that this model generated",
            )
        scoring = self._adapter.score(ids, prompt_length=record.prompt_length, replica=replica)
        check_returned_ids(record.response_ids, scoring.response_ids, self._vocab_size)
        scores = checked_scores(scoring.logprobs_nats, label="B", count=record.response_length)
        return scores, scoring.cached_tokens

    def _unconfirmed(self, text: str) -> Finding:
        return Finding(FindingCode.FLUSH_NOT_CONFIRMED, Severity.INCOMPLETE, text, worker=self._worker)


def with_passes(record: ReplayRecord, new: Passes, old: Passes | None, *, worker: str) -> ReplayRecord:
    """Return the record with this worker's B scores, and no other's.

    Args:
        record: As the trainer sent it, with A and C.
        new: Passes at the verified state.
        old: Passes at the state before the update, while that was verified.
        worker: Name of the worker.
    """
    key = record_key(record)
    bare = replace(record, scores={k: v for k, v in record.scores.items() if k.path != "B"})
    scores = {b_key(i, "new", "cold"): values for i, values in enumerate(new.cold.get(key, ()))}
    scores |= {b_key(i, "new", "warm"): values for i, values in enumerate(new.warm.get(key, ()))}
    versions = {**record.versions, "new": new.label}
    if old is not None and key in old.cold:
        scores |= {b_key(i, "old", "cold"): values for i, values in enumerate(old.cold[key])}
        versions["old"] = old.label
    return bare.with_scores(scores, versions=versions, worker=record.worker or worker)


def evidence_of(records: Sequence[ReplayRecord]) -> list[ReplayEvidence]:
    """Return the evidence of completed records."""
    return [ReplayEvidence.from_record(record) for record in records]
