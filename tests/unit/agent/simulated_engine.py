"""A worker of a few numpy arrays behind the real adapter protocol: real layouts, real digests, scores that follow from
the weights. For tests of agent and gate that need thousands of updates, faults at every call, or a thousand workers.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from syncguard.digest import ALGORITHM, DEFAULT_KEY_SEED, DigestJob, finalize
from syncguard.digest.reference import NumpyEngine
from syncguard.engines.base import EngineStatus, FlushResult, Generation, RankScrub, RankStatus, Scoring, ScrubSlice
from syncguard.errors import UnreachableError
from syncguard.layout.model import Binding, LogicalTensor, RankIdentity, RankLayout, ResidentTensor, Role, Shard
from syncguard.manifest.codec import seal
from syncguard.manifest.model import Changed, Manifest, ManifestEntry, RankObservation
from syncguard.replay import A, ReplayRecord, c_key
from syncguard.spec import Box, WeightVersion, dtype_named

Weights = Mapping[str, np.ndarray]
F32 = dtype_named("float32")
ENGINE = NumpyEngine()
VOCAB = 100


def weights_of(seed: int, tensors: int = 3, rows: int = 4, columns: int = 6) -> dict[str, np.ndarray]:
    """Weights of one training step."""
    draw = np.random.default_rng(seed)
    return {f"layers.{i}.weight": draw.normal(size=(rows, columns)).astype(np.float32) for i in range(tensors)}


def scores_of(weights: Weights, ids: Sequence[int], prompt_length: int) -> np.ndarray:
    """Log-probabilities that follow from the weights, so that other weights give other scores."""
    total = float(sum(np.float64(value.sum()) for value in weights.values()))
    tokens = np.asarray(ids[prompt_length:], dtype=np.float64)
    return -1.0 - np.abs(np.sin(tokens * 0.37 + total))


def manifest_of(
    weights: Weights,
    version: WeightVersion | str,
    *,
    changed: Changed = Changed.UNKNOWN,
    key_seed: bytes = DEFAULT_KEY_SEED,
) -> Manifest:
    """The trainer's manifest."""
    target = WeightVersion.parse(version) if isinstance(version, str) else version
    entries = []
    jobs = [DigestJob(value, F32, value.shape, Box.whole(value.shape), fqn) for fqn, value in weights.items()]
    for (fqn, value), partial in zip(weights.items(), ENGINE.partials(jobs, key_seed=key_seed), strict=True):
        digest = finalize(partial, fqn=fqn, dtype=F32, shape=value.shape, key_seed=key_seed)
        entries.append(ManifestEntry(fqn, F32.name, value.shape, partial, digest, changed=changed))
    return seal(Manifest(target, ALGORITHM, key_seed.hex(), tuple(entries)))


def record_of(old: Weights, new: Weights | None = None, *, tokens: int = 8) -> ReplayRecord:
    """A saved response with A and C_old of `old`, and C_new of `new`."""
    ids = [7, 8, 9, *((13 * i) % (VOCAB - 2) for i in range(1, tokens + 1))]
    scores = {A: scores_of(old, ids, 3)}
    for state, weights in (("old", old), ("new", new)):
        if weights is not None:
            scores |= {c_key(i, state): scores_of(weights, ids, 3) for i in range(2)}
    return ReplayRecord(input_ids=ids, prompt_length=3, scores=scores)


class SimulatedEngine:
    """The worker and its adapter in one.

    `before` is called with the name of each adapter call before it answers, `after` afterwards: faults go there.
    """

    def __init__(self, weights: Weights, *, tp: int = 1, label: str = "default") -> None:
        self.tp = tp
        self.label = label
        self.alive = True
        self.updating = False
        self.before: Callable[[str], None] = lambda _name: None
        self.after: Callable[[str], None] = lambda _name: None
        self.calls: list[str] = []
        self.flush_confirms = itertools.repeat(True)
        self.replicas = [None]  # weights by which a data-parallel replica scores; None for those that are observed
        self.cached_by: set[int] = set()
        self.restart(weights)
        self.label = label

    # --- what the trainer's side does ---

    def restart(self, weights: Weights | None = None) -> None:
        if weights is not None:
            self.disk = {fqn: value.copy() for fqn, value in weights.items()}
        self.shards = [
            {fqn: value[self._rows(value, rank)].copy() for fqn, value in self.disk.items()} for rank in range(self.tp)
        ]
        self.incarnations = [secrets.token_hex(4) for _ in range(self.tp)]
        self.epoch = 0
        self.label = "default"
        self.updating = False

    def begin(self) -> None:
        self.updating = True

    def end(self) -> None:
        self.updating = False
        self.epoch += 1

    def push(self, weights: Weights, label: str, *, ranks: Sequence[int] | None = None) -> None:
        self.begin()
        for rank in range(self.tp) if ranks is None else ranks:
            for fqn, value in weights.items():
                self.shards[rank][fqn][...] = value[self._rows(value, rank)]
        self.label = label
        self.end()

    def resident(self) -> dict[str, np.ndarray]:
        return {fqn: np.concatenate([shard[fqn] for shard in self.shards]) for fqn in self.shards[0]}

    def _rows(self, value: np.ndarray, rank: int) -> slice:
        size = value.shape[0] // self.tp
        return slice(rank * size, (rank + 1) * size)

    # --- the adapter ---

    def _enter(self, name: str) -> None:
        self.calls.append(name)
        self.before(name)
        if not self.alive:
            raise UnreachableError("simulated worker does not answer", where="simulated")

    def status(self) -> EngineStatus:
        self._enter("status")
        ranks = tuple(
            RankStatus(self._identity(rank), self.incarnations[rank], self.epoch, self.updating, "1")
            for rank in range(self.tp)
        )
        answer = EngineStatus("simulated 1", "arrays", self.label, self.tp, ranks, VOCAB, len(self.replicas))
        self.after("status")
        return answer

    def layouts(self) -> Sequence[RankLayout]:
        self._enter("layouts")
        answer = [self._layout(rank) for rank in range(self.tp)]
        self.after("layouts")
        return answer

    def observe(self, key_seed: bytes) -> Sequence[RankObservation]:
        self._enter("observe")
        answer = []
        for rank in range(self.tp):
            layout = self._layout(rank)
            jobs = [
                DigestJob(self.shards[rank][binding.resident], F32, binding.shard.tensor.shape, binding.shard.box)
                for binding in layout.bindings
            ]
            answer.append(
                RankObservation(
                    layout.rank,
                    self.incarnations[rank],
                    self.epoch,
                    self.updating,
                    layout.fingerprint,
                    ALGORITHM,
                    key_seed.hex(),
                    tuple(ENGINE.partials(jobs, key_seed=key_seed)),
                )
            )
        self.after("observe")
        return answer

    def scrub(self, key_seed: bytes, *, turn: int, budget_bytes: int) -> Sequence[RankScrub]:
        """One binding a turn, whatever the budget."""
        self._enter("scrub")
        answer = []
        for rank in range(self.tp):
            layout = self._layout(rank)
            at = turn % len(layout.bindings)
            binding = layout.bindings[at]
            view = self.shards[rank][binding.resident]
            job = DigestJob(view, F32, binding.shard.tensor.shape, binding.shard.box)
            (partial,) = ENGINE.partials([job], key_seed=key_seed)
            rows = view.shape[0]
            answer.append(
                RankScrub(
                    layout.rank,
                    self.incarnations[rank],
                    self.epoch,
                    self.updating,
                    layout.fingerprint,
                    len(layout.bindings),
                    (ScrubSlice(at, 0, rows, rows, partial),),
                    read_bytes=view.nbytes,
                )
            )
        self.after("scrub")
        return answer

    def flush(self) -> FlushResult:
        self._enter("flush")
        confirmed = next(self.flush_confirms)
        if confirmed:
            self.cached_by.clear()
        self.after("flush")
        return FlushResult(confirmed, "flushed" if confirmed else "requests are pending")

    def generate(self, prompt_ids: Sequence[int], *, max_new_tokens: int, seed: int) -> Generation:
        self._enter("generate")
        draw = np.random.default_rng(seed)
        ids = [int(i) for i in draw.integers(1, VOCAB - 1, size=max_new_tokens)]
        scores = scores_of(self.resident(), [*prompt_ids, *ids], len(prompt_ids))
        self.after("generate")
        return Generation(tuple(ids), tuple(scores), self.label)

    def score(self, input_ids: Sequence[int], *, prompt_length: int, replica: int = 0) -> Scoring:
        self._enter("score")
        weights = self.replicas[replica]
        scores = scores_of(self.resident() if weights is None else weights, input_ids, prompt_length)
        cached = prompt_length - 1 if replica in self.cached_by else 0
        self.cached_by.add(replica)
        self.after("score")
        return Scoring(tuple(input_ids[prompt_length:]), tuple(scores), cached)

    def close(self) -> None:
        self.calls.append("close")

    def _identity(self, rank: int) -> RankIdentity:
        return RankIdentity(tp_rank=rank, tp_size=self.tp)

    def _layout(self, rank: int) -> RankLayout:
        residents, bindings = [], []
        for fqn, shard in self.shards[rank].items():
            shape = (shard.shape[0] * self.tp, *shard.shape[1:])
            box = Box((rank * shard.shape[0], *(0 for _ in shard.shape[1:])), shard.shape)
            strides = (shard.shape[1], 1)
            residents.append(
                ResidentTensor(fqn, F32.name, shard.shape, strides, Role.PARAMETER, "Linear", "", shard.nbytes)
            )
            bindings.append(Binding(Shard(LogicalTensor(fqn, F32.name, shape), box), fqn))
        return RankLayout(self._identity(rank), "Simulated", tuple(residents), tuple(bindings)).sealed()
