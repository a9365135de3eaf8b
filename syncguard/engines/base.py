"""The adapter protocol: the few things that an agent asks of an inference engine.

Adapters are synchronous and may be called from one thread at a time. Each call answers from the *live* engine; nothing
is cached but layouts, which are named by their fingerprint.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from syncguard.digest import PartialDigest
from syncguard.layout.model import RankIdentity, RankLayout
from syncguard.manifest.model import RankObservation


@dataclass(frozen=True, slots=True)
class RankStatus:
    """The cheap part of an observation, for polling.

    Attributes:
        rank: The rank.
        incarnation: Identity of the rank's process.
        epoch: Finished weight updates since its start.
        updating: An update session is open.
        probe_version: Version of syncguard in the rank.
        flushes: Prefix caches that the rank emptied since its start; 0 when it does not count them.
        graphs: Kinds of captured graphs that the rank replays, such as `decode`; they read weights by address.
    """

    rank: RankIdentity
    incarnation: str
    epoch: int
    updating: bool
    probe_version: str
    flushes: int = 0
    graphs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ScrubSlice:
    """A run of rows of one binding, digested in a scrub.

    Attributes:
        binding: Index of the binding in the rank's layout.
        low: First row.
        high: One past the last.
        rows: Rows of the whole binding, so that `low == 0 and high == rows` is all of it.
        partial: Partial digest under the key that was asked for.
    """

    binding: int
    low: int
    high: int
    rows: int
    partial: PartialDigest


@dataclass(frozen=True, slots=True)
class RankScrub:
    """One turn of a rank's scrub.

    Attributes:
        rank: The rank.
        incarnation: As in `RankStatus`.
        epoch: As in `RankStatus`.
        updating: An update session is open; nothing was read.
        layout_fingerprint: Layout that `slices` index; empty when nothing was read.
        turns: Turns after which the rank has read all it holds.
        slices: Bindings that were read.
        wrong: Padding, derived and exempt state that is not as it must be, in words.
        moved: As in `RankObservation`; looked at in the first turn of a cycle.
        read_bytes: Bytes digested.
    """

    rank: RankIdentity
    incarnation: str
    epoch: int
    updating: bool
    layout_fingerprint: str = ""
    turns: int = 1
    slices: tuple[ScrubSlice, ...] = ()
    wrong: tuple[str, ...] = ()
    moved: tuple[str, ...] = ()
    read_bytes: int = 0


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """What a worker says of itself at one moment.

    Attributes:
        engine: Name and version, `sglang 0.5.23`.
        model: Model path or name.
        weight_version_label: The engine's own label: a claim, not evidence.
        expected_ranks: Ranks that the engine says it has.
        ranks: Ranks that answered.
        vocab_size: Size of the vocabulary, 0 when the engine does not say.
        replicas: Data-parallel replicas that serve requests of their own, each with its own prefix cache.
    """

    engine: str
    model: str
    weight_version_label: str
    expected_ranks: int
    ranks: tuple[RankStatus, ...]
    vocab_size: int = 0
    replicas: int = 1

    @property
    def fence(self) -> tuple[tuple[RankIdentity, str, int, bool], ...]:
        """What must be equal before and after a reading for it to be of one state."""
        return tuple(sorted((r.rank, r.incarnation, r.epoch, r.updating) for r in self.ranks))


@dataclass(frozen=True, slots=True)
class Generation:
    """One generated response with the scores recorded while generating (A).

    Attributes:
        response_ids: Token ids of the response.
        logprobs_nats: Raw model log-probability of each, in nats.
        weight_version_label: Label that the engine attached.
        settings: Sampling settings as sent.
    """

    response_ids: tuple[int, ...]
    logprobs_nats: tuple[float, ...]
    weight_version_label: str = ""
    settings: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Scoring:
    """Prefill scores of a given response (B).

    Attributes:
        response_ids: Ids as the engine returned them; the caller compares them with the saved ones.
        logprobs_nats: Log-probability of each response token, in nats.
        cached_tokens: Prompt tokens that came from the prefix cache, -1 when the engine does not say.
    """

    response_ids: tuple[int, ...]
    logprobs_nats: tuple[float, ...]
    cached_tokens: int = -1


@dataclass(frozen=True, slots=True)
class DecodeScoring:
    """Scores of a given response by incremental decode (D), or why this engine cannot give them.

    Attributes:
        scoring: The scores; None where the engine cannot.
        how: Path that computed them, for the record; empty where there are none.
        cannot: Why there are none; empty where there are some.
    """

    scoring: Scoring | None
    how: str = ""
    cannot: str = ""


@dataclass(frozen=True, slots=True)
class FlushResult:
    """Whether the engine confirmed that its prefix cache is empty.

    Attributes:
        confirmed: The engine said so.
        detail: Its words.
    """

    confirmed: bool
    detail: str


class EngineAdapter(Protocol):
    """One rollout worker.

    Every method raises `EngineError` when the engine refuses or breaks, `UnreachableError` when it does not answer,
    `UnsupportedError` when its probe is missing, and `SpecVersionError` when the probe speaks another version.
    """

    def status(self) -> EngineStatus:
        """Return identity, update epoch and label of every rank; cheap enough to poll each second."""

    def layouts(self) -> Sequence[RankLayout]:
        """Return the layout of every rank, read from the live layers."""

    def observe(self, key_seed: bytes) -> Sequence[RankObservation]:
        """Digest every rank's resident memory under a key seed."""

    def scrub(self, key_seed: bytes, *, turn: int, budget_bytes: int) -> Sequence[RankScrub]:
        """Digest the bytes of every rank that are due in this turn; a rank takes `turn` modulo its own `turns`."""

    def flush(self) -> FlushResult:
        """Empty the prefix cache and say whether the engine confirmed it."""

    def generate(self, prompt_ids: Sequence[int], *, max_new_tokens: int, seed: int) -> Generation:
        """Generate one response at temperature 1 with no filter, recording A."""

    def score(self, input_ids: Sequence[int], *, prompt_length: int, replica: int = 0) -> Scoring:
        """Score a saved response by prefill on one data-parallel replica; no new tokens."""

    def generate_batch(
        self, prompts: Sequence[Sequence[int]], *, max_new_tokens: int, seed: int
    ) -> Sequence[Generation]:
        """Generate for several prompts in one call, in their order; the seeds count up."""

    def score_batch(self, items: Sequence[tuple[Sequence[int], int]]) -> Sequence[Scoring]:
        """Score several saved responses (ids, prompt length) in one call, in their order."""

    def score_by_decode(self, input_ids: Sequence[int], *, prompt_length: int) -> DecodeScoring:
        """Score a saved response by teacher-forced incremental decode, each saved id in place of a sampled one.

        Optional: an engine that cannot says so in `DecodeScoring.cannot` and touches nothing.
        """

    def close(self) -> None:
        """Release connections; the engine itself goes on."""
