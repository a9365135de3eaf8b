"""The scores that a replay verdict rests on, taken out of records and checked once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from syncguard.errors import ScoreError
from syncguard.replay.record import b_key, c_key
from syncguard.replay.scores import RAW, FloatArray, IntArray, ScoreDefinition, checked_scores, require_same_definition

if TYPE_CHECKING:
    from collections.abc import Sequence

    from syncguard.replay.record import ReplayRecord


@dataclass(frozen=True, slots=True, eq=False)
class ReplayEvidence:
    """Scores of one response (or several, joined) that a verdict rests on.

    Attributes:
        mask: [response] loss mask.
        b_new_cold: Passes of B at T1 after a confirmed flush; two or more.
        b_new_warm: Passes of B at T1 with a warm prefix cache; one or more.
        c_new: Passes of C at T1; two or more.
        a: Generation scores, at T0.
        b_old: Passes of B at T0, cold.
        c_old: Passes of C at T0.
        b_old_warm: Passes of B at T0 that really ran on a warm prefix cache; they measure what a warm cache changes while
            weights do not.
        b_definition: Distribution that A and B describe.
        c_definition: Distribution that C describes.
        positions: [response] response position of each score; 0, 1, 2 … where not given.
    """

    mask: IntArray
    b_new_cold: tuple[FloatArray, ...] = ()
    b_new_warm: tuple[FloatArray, ...] = ()
    c_new: tuple[FloatArray, ...] = ()
    a: FloatArray | None = None
    b_old: tuple[FloatArray, ...] = ()
    c_old: tuple[FloatArray, ...] = ()
    b_old_warm: tuple[FloatArray, ...] = ()
    b_definition: ScoreDefinition = RAW
    c_definition: ScoreDefinition = RAW
    positions: IntArray | None = None

    def __post_init__(self) -> None:
        """Check alignment and finiteness once, so that no later step needs to.

        Raises:
            ScoreError: Scores that do not line up with the mask or are not finite, or two definitions.
        """
        mask = np.asarray(self.mask, dtype=np.int64)
        put = object.__setattr__
        put(self, "mask", mask)
        if self.positions is None:
            put(self, "positions", np.arange(mask.size, dtype=np.int64))
        for name in ("b_new_cold", "b_new_warm", "c_new", "b_old", "c_old", "b_old_warm"):
            values = getattr(self, name)
            put(
                self,
                name,
                tuple(checked_scores(v, label=f"{name}[{i}]", count=mask.size) for i, v in enumerate(values)),
            )
        if self.a is not None:
            put(self, "a", checked_scores(self.a, label="a", count=mask.size))
        require_same_definition(self.b_definition, self.c_definition, label="B-C")

    @classmethod
    def from_record(cls, record: ReplayRecord) -> ReplayEvidence:
        """Take the evidence out of a record that was carried across an update."""
        cached = record.meta.get("cached_tokens", {})
        really_warm = {key for key in record.scores if cached.get(str(key), -1) != 0}
        return cls(
            mask=record.loss_mask,
            b_new_cold=record.passes("B", "new", "cold"),
            b_new_warm=record.passes("B", "new", "warm"),
            c_new=record.passes("C", "new"),
            a=next(iter(record.passes("A")), None),
            b_old=record.passes("B", "old", "cold"),
            c_old=record.passes("C", "old"),
            b_old_warm=tuple(
                record.scores[key]
                for key in sorted(really_warm)
                if (key.path, key.state, key.cache) == ("B", "old", "warm")
            ),
            b_definition=record.definition_of(b_key(0, "new")),
            c_definition=record.definition_of(c_key(0, "new")),
        )

    @classmethod
    def join(cls, parts: Sequence[ReplayEvidence]) -> ReplayEvidence:
        """Join several responses; a pass that one of them lacks is dropped from all."""
        if not parts:
            raise ScoreError("no evidence to join", expected="one response or more", found=0)

        def passes(name: str) -> tuple[FloatArray, ...]:
            return tuple(np.concatenate(each) for each in zip(*(getattr(part, name) for part in parts), strict=False))

        generated = [part.a for part in parts if part.a is not None]
        for part in parts[1:]:
            require_same_definition(parts[0].b_definition, part.b_definition, label="responses")
        return cls(
            mask=np.concatenate([part.mask for part in parts]),
            positions=np.concatenate([np.asarray(part.positions) for part in parts]),
            a=np.concatenate(generated) if len(generated) == len(parts) else None,
            b_definition=parts[0].b_definition,
            c_definition=parts[0].c_definition,
            **{name: passes(name) for name in ("b_new_cold", "b_new_warm", "c_new", "b_old", "c_old", "b_old_warm")},
        )
