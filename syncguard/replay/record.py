"""The replay record: one model call's exact inputs and every score taken of its response.

A record is *one model call*. A conversation with tools, adapters or images is a list of records, each with what that
call really saw, linked by `call`; a flattened transcript would describe another event. Files: `record_file`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

import numpy as np

from syncguard.errors import RecordError
from syncguard.replay.scores import RAW, FloatArray, IntArray, ScoreDefinition, checked_scores

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    import numpy.typing as npt

ScorePath: TypeAlias = Literal["A", "B", "C", "D", "G"]
State: TypeAlias = Literal["old", "new"]
Cache: TypeAlias = Literal["", "cold", "warm"]

_KEY = re.compile(
    r"(?:A|(?P<path>[CDG])(?P<pass_>\d+)\.(?P<state>old|new)|B(?P<b>\d+)\.(?P<bs>old|new)\.(?P<c>cold|warm))"
)
FREE_FIELDS: Final = ("sampling", "versions", "call", "meta")


@dataclass(frozen=True, slots=True, order=True)
class ScoreKey:
    """Which scores: path, policy state, cache preparation and repeat pass.

    The text form is stable and names the tensors of a file: `A`, `B0.new.cold`, `B1.old.warm`, `C0.new`, `D0.old`.

    Attributes:
        path: `A` generation, `B` rollout prefill replay, `C` frozen trainer forward, `D` rollout teacher-forced
            decode, `G` gradient-enabled trainer forward (C').
        state: `old` is the policy state that generated the response, `new` the state after the update that the record
            was carried across. A is always `old`.
        cache: `cold` after a confirmed flush, `warm` with the prefix cache filled by the same ids; only for B.
        pass_: Repeat pass at one state, from 0.
    """

    path: ScorePath
    state: State = "old"
    cache: Cache = ""
    pass_: int = 0

    def __post_init__(self) -> None:
        """Refuse a key that has no text form."""
        if not _KEY.fullmatch(str(self)) or (
            self.path == "A" and (self.state, self.cache, self.pass_) != ("old", "", 0)
        ):
            raise RecordError(
                "not a score key",
                expected="A, B<pass>.<old|new>.<cold|warm>, or <C|D|G><pass>.<old|new>",
                found=repr((self.path, self.state, self.cache, self.pass_)),
                todo="give B a cache preparation, and only B",
            )

    @classmethod
    def parse(cls, text: str) -> ScoreKey:
        """Read a key back; `ScoreKey.parse(str(key)) == key` always holds.

        Raises:
            RecordError: The text names no score.
        """
        found = _KEY.fullmatch(text)
        if found is None:
            raise RecordError("not a score key", expected="such as A, B0.new.cold, C1.old", found=repr(text))
        if text == "A":
            return A
        if found["b"] is not None:
            return cls("B", found["bs"], found["c"], int(found["b"]))  # type: ignore[arg-type]
        return cls(found["path"], found["state"], "", int(found["pass_"]))  # type: ignore[arg-type]

    def __str__(self) -> str:
        """Return the text form."""
        if self.path == "A":
            return "A"
        return f"{self.path}{self.pass_}.{self.state}" + (f".{self.cache}" if self.cache else "")


A: Final = ScoreKey("A")
"""The scores recorded while generating: written once, never again."""


def b_key(pass_: int, state: State, cache: Cache = "cold") -> ScoreKey:
    """Return the key of a rollout prefill replay pass."""
    return ScoreKey("B", state, cache, pass_)


def c_key(pass_: int, state: State) -> ScoreKey:
    """Return the key of a frozen trainer forward pass."""
    return ScoreKey("C", state, "", pass_)


def _frozen_ints(values: npt.ArrayLike, name: str, length: int) -> IntArray:
    array = np.array(values)
    if array.ndim != 1 or array.size != length or (array.size and array.dtype.kind not in "iub"):
        raise RecordError(f"{name} of a record", expected=f"{length} integers", found=f"{array.dtype} {array.shape}")
    whole = array.astype(np.int64)
    whole.flags.writeable = False
    return whole


@dataclass(frozen=True, slots=True, eq=False)
class ReplayRecord:
    """Everything needed to score one response again, and the scores taken so far.

    Attributes:
        input_ids: int64 [length], prompt then response, exactly as the model saw them.
        prompt_length: Index of the first response token, 1 or more.
        mask: int64 [response], 1 where the token takes part in the objective.
        positions: int64 [length] position ids; 0, 1, 2 … where not given.
        segment_ids: int64 [length]; tokens attend only inside their segment (packing); all 0 where not given.
        scores: Score key → float64 [response], read-only.
        definition: Distribution that the scores describe.
        definitions: Path → definition, for paths that differ from `definition`.
        sampling: Sampling settings of the generation request.
        worker: Identity of the rollout worker.
        model_revision: Revision of model and config.
        tokenizer_revision: Revision of tokenizer and chat template.
        versions: State (`old`, `new`) → weight version label.
        record_id: Name of this record; unique in a batch.
        batch: Record ids that were scored in one call, in order; the composition that a repeat must keep.
        call: What else that model call saw: conversation, index, adapter, digests of images.
        meta: Free JSON values.
    """

    input_ids: IntArray
    prompt_length: int
    mask: IntArray | None = None
    positions: IntArray | None = None
    segment_ids: IntArray | None = None
    scores: Mapping[ScoreKey, FloatArray] = field(default_factory=dict)
    definition: ScoreDefinition = RAW
    definitions: Mapping[str, ScoreDefinition] = field(default_factory=dict)
    sampling: Mapping[str, Any] = field(default_factory=dict)
    worker: str = ""
    model_revision: str = ""
    tokenizer_revision: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    record_id: str = ""
    batch: tuple[str, ...] = ()
    call: Mapping[str, Any] = field(default_factory=dict)
    meta: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Copy, freeze and check every part.

        Raises:
            RecordError: Lengths disagree, the mask is not binary, or the boundary leaves no response.
            ScoreError: Scores do not line up with the response or are not finite.
        """
        ids = np.array(self.input_ids)
        length = int(ids.size)
        if not 1 <= self.prompt_length < length:
            raise RecordError(
                "a record needs a prompt and a response",
                expected=f"prompt_length in 1..{length - 1}",
                found=self.prompt_length,
                todo="keep the boundary that the engine used",
            )
        response = length - self.prompt_length
        put = object.__setattr__
        put(self, "input_ids", _frozen_ints(ids, "input_ids", length))
        put(
            self,
            "mask",
            _frozen_ints(np.ones(response, np.int64) if self.mask is None else self.mask, "mask", response),
        )
        put(
            self,
            "positions",
            _frozen_ints(range(length) if self.positions is None else self.positions, "positions", length),
        )
        put(
            self,
            "segment_ids",
            _frozen_ints([0] * length if self.segment_ids is None else self.segment_ids, "segment_ids", length),
        )
        if not np.isin(self.loss_mask, (0, 1)).all():
            raise RecordError(
                "the loss mask is not binary", expected="0 or 1", found=sorted(set(self.loss_mask.tolist()))
            )
        if int(self.input_ids.min()) < 0:
            raise RecordError(
                "negative token id", found=int(self.input_ids.min()), todo="save the real ids, not padding"
            )
        scores = {key: checked_scores(value, label=str(key), count=response) for key, value in self.scores.items()}
        put(self, "scores", MappingProxyType(scores))
        put(self, "batch", tuple(self.batch))
        put(self, "definitions", MappingProxyType(dict(self.definitions)))
        for name in FREE_FIELDS:
            put(self, name, MappingProxyType(dict(getattr(self, name))))

    @property
    def response_ids(self) -> IntArray:
        """int64 [response] ids of the response."""
        return self.input_ids[self.prompt_length :]

    @property
    def response_length(self) -> int:
        """Number of response tokens, masked ones included."""
        return int(self.input_ids.size) - self.prompt_length

    @property
    def loss_mask(self) -> IntArray:
        """int64 [response] mask, never None after construction."""
        assert self.mask is not None
        return self.mask

    def definition_of(self, key: ScoreKey) -> ScoreDefinition:
        """Return the definition of these scores."""
        return self.definitions.get(key.path, self.definition)

    def get(self, key: ScoreKey) -> FloatArray | None:
        """Return the scores of a key, or None where they were not taken."""
        return self.scores.get(key)

    def passes(self, path: ScorePath, state: State = "old", cache: Cache = "") -> tuple[FloatArray, ...]:
        """Return all repeat passes at one state, in the order of their pass numbers."""
        keys = sorted(key for key in self.scores if (key.path, key.state, key.cache) == (path, state, cache))
        return tuple(self.scores[key] for key in keys)

    def with_scores(self, scores: Mapping[ScoreKey, npt.ArrayLike], **changes: Any) -> ReplayRecord:
        """Return a record with more scores; evidence already there is never replaced.

        Args:
            scores: New scores by key.
            **changes: Other fields to set, such as `versions`.

        Raises:
            RecordError: A key is already in the record.
        """
        for key in scores:
            if key in self.scores:
                raise RecordError(
                    f"scores {key} are already recorded",
                    expected="a key that is not taken",
                    found=f"{self.response_length} saved scores",
                    where=self.record_id or "record",
                    todo="A is evidence of one generation; make a new record for a new one",
                )
        merged: dict[ScoreKey, Any] = {**self.scores, **scores}
        return replace(self, scores=merged, **changes)

    def at_one_state(self) -> ReplayRecord:
        """Return the record with its `new` scores as those of the generating state, where both labels name one version.

        A worker that replays a response of its present weights has no state before it: A, B and C are of one version.
        Labels are claims; should the weights differ all the same, A-B shows it. Otherwise the record itself is returned.
        """
        labels = self.versions.get("old", ""), self.versions.get("new", "")
        if not labels[0] or labels[0] != labels[1] or any(k.path != "A" and k.state == "old" for k in self.scores):
            return self
        moved = {key if key.path == "A" else replace(key, state="old"): value for key, value in self.scores.items()}
        return replace(self, scores=moved, versions={"old": labels[0]})

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the record alone to a file; see `save_many`."""
        from syncguard.replay.record_file import save_many

        save_many(path, [self])

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> ReplayRecord:
        """Read a file that holds exactly one record; see `load_many`."""
        from syncguard.replay.record_file import load_many

        records = load_many(path)
        if len(records) != 1:
            raise RecordError(
                "a file of several records", expected=1, found=len(records), where=path, todo="use load_many"
            )
        return records[0]
