"""A small worker made of numpy arrays: real layouts, real digests, no engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from syncguard.digest import ALGORITHM, DEFAULT_KEY_SEED, DigestJob, PartialDigest, engine_for, finalize
from syncguard.layout.model import (
    Binding,
    LogicalTensor,
    Narrow,
    Padding,
    RankIdentity,
    RankLayout,
    ResidentTensor,
    Role,
    Shard,
)
from syncguard.layout.ops import apply_ops
from syncguard.manifest.codec import seal
from syncguard.manifest.model import CheckResult, Manifest, ManifestEntry, Part, RankObservation, WorkerObservation
from syncguard.spec import Box, WeightVersion, dtype_named

VOCAB, HIDDEN, ROWS = 10, 8, 12
PADDED = 16


def digest(array: np.ndarray, shape: tuple[int, ...], box: Box) -> PartialDigest:
    return engine_for("cpu").partials([DigestJob(array, dtype_named("float32"), shape, box)])[0]


def weights(seed: int) -> dict[str, np.ndarray]:
    """A column-parallel pair of one shape, a row-parallel tensor, a norm and an embedding."""
    rng = np.random.default_rng(seed)
    shapes = {
        "embed.weight": (VOCAB, HIDDEN),
        "up.weight": (ROWS, HIDDEN),
        "gate.weight": (ROWS, HIDDEN),
        "down.weight": (HIDDEN, ROWS),
        "norm.weight": (HIDDEN,),
    }
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def manifest_of(
    tensors: dict[str, np.ndarray], version: str, *, parts: dict[str, tuple[Box, ...]] | None = None, **changes: Any
) -> Manifest:
    entries = []
    for fqn, array in tensors.items():
        whole = digest(array, array.shape, Box.whole(array.shape))
        boxes = (parts or {}).get(fqn, ())
        entries.append(
            ManifestEntry(
                fqn,
                "float32",
                array.shape,
                whole,
                finalize(whole, fqn=fqn, dtype=dtype_named("float32"), shape=array.shape),
                tuple(Part(box, digest(cut(array, box), array.shape, box)) for box in boxes),
            )
        )
    manifest = Manifest(WeightVersion.parse(version), ALGORITHM, DEFAULT_KEY_SEED.hex(), tuple(entries))
    return seal(replace(manifest, **changes))


def cut(array: np.ndarray, box: Box) -> np.ndarray:
    return array[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))]


@dataclass
class Worker:
    """Two tensor-parallel ranks that hold packed, padded and replicated resident arrays."""

    tp: int = 2
    residents: list[dict[str, np.ndarray]] = field(default_factory=list)
    label: str = "run@1"
    epoch: int = 3

    @classmethod
    def loaded(cls, tensors: dict[str, np.ndarray], *, tp: int = 2, label: str = "run@1") -> Worker:
        worker = cls(tp, [{} for _ in range(tp)], label)
        for rank in range(tp):
            worker.load(tensors, rank)
        return worker

    def load(self, tensors: dict[str, np.ndarray], rank: int) -> None:
        held = self.residents[rank]
        rows, cols, vocab = ROWS // self.tp, ROWS // self.tp, PADDED // self.tp
        packed = [tensors[name][rank * rows : (rank + 1) * rows] for name in ("gate.weight", "up.weight")]
        embed = np.zeros((PADDED, HIDDEN), np.float32)
        embed[:VOCAB] = tensors["embed.weight"]
        held["gate_up.weight"] = np.concatenate(packed)
        held["down.weight"] = tensors["down.weight"][:, rank * cols : (rank + 1) * cols].copy()
        held["norm.weight"] = tensors["norm.weight"].copy()
        held["embed.weight"] = embed[rank * vocab : (rank + 1) * vocab].copy()

    def layout(self, rank: int) -> RankLayout:
        rows, vocab = ROWS // self.tp, PADDED // self.tp
        real = max(0, min(VOCAB - rank * vocab, vocab))

        def bind(fqn: str, shape: tuple[int, ...], box: Box, resident: str, *ops: Narrow) -> Binding:
            return Binding(Shard(LogicalTensor(fqn, "float32", shape), box), resident, ops)

        column = Box((rank * rows, 0), (rows, HIDDEN))
        bindings = (
            bind("gate.weight", (ROWS, HIDDEN), column, "gate_up.weight", Narrow(0, 0, rows)),
            bind("up.weight", (ROWS, HIDDEN), column, "gate_up.weight", Narrow(0, rows, rows)),
            bind("down.weight", (HIDDEN, ROWS), Box((0, rank * rows), (HIDDEN, rows)), "down.weight"),
            bind("norm.weight", (HIDDEN,), Box.whole((HIDDEN,)), "norm.weight"),
            bind(
                "embed.weight",
                (VOCAB, HIDDEN),
                Box((rank * vocab if real else 0, 0), (real, HIDDEN)),
                "embed.weight",
                Narrow(0, 0, real),
            ),
        )
        residents = tuple(
            ResidentTensor(name, "float32", array.shape, (1,), Role.PARAMETER, "Layer")
            for name, array in self.residents[rank].items()
        )
        padding = Padding("embed.weight", (Narrow(0, real, vocab - real),), reason="vocabulary padding")
        identity = RankIdentity(tp_rank=rank, tp_size=self.tp)
        return RankLayout(identity, "Tiny", residents, bindings, (padding,) if vocab > real else ()).sealed()

    def observe(self, **changes: Any) -> WorkerObservation:
        layouts = tuple(self.layout(rank) for rank in range(self.tp))
        ranks = tuple(self.observe_rank(layout) for layout in layouts)
        observation = WorkerObservation("worker-0", self.tp, layouts, ranks, self.label)
        return replace(observation, **changes)

    def observe_rank(self, layout: RankLayout) -> RankObservation:
        held = self.residents[layout.rank.tp_rank]
        partials = tuple(
            digest(apply_ops(held[b.resident], b.ops), b.shard.tensor.shape, b.shard.box) for b in layout.bindings
        )
        # By bits, as the probe does: -0.0 is not the padding that an engine writes.
        dirty = [int(np.count_nonzero(apply_ops(held[p.resident].view(np.uint32), p.ops))) for p in layout.paddings]
        paddings = tuple(CheckResult(count == 0, count) for count in dirty)
        return RankObservation(
            layout.rank,
            f"incarnation-{layout.rank.tp_rank}",
            self.epoch,
            updating=False,
            layout_fingerprint=layout.fingerprint,
            algorithm=ALGORITHM,
            key_seed_hex=DEFAULT_KEY_SEED.hex(),
            partials=partials,
            paddings=paddings,
        )


@pytest.fixture
def make_weights() -> Callable[[int], dict[str, np.ndarray]]:
    return weights


@pytest.fixture
def make_manifest() -> Callable[..., Manifest]:
    return manifest_of


@pytest.fixture
def make_worker() -> Callable[..., Worker]:
    return Worker.loaded
