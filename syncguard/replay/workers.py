"""What a capture asks of a rollout worker: small protocols, so that any engine adapter fits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class Generated(Protocol):
    """A response and the scores recorded while generating it."""

    @property
    def response_ids(self) -> Sequence[int]:
        """Token ids."""

    @property
    def logprobs_nats(self) -> Sequence[float]:
        """Score of each, in nats."""

    @property
    def weight_version_label(self) -> str:
        """Label that the engine attached."""

    @property
    def settings(self) -> Mapping[str, float]:
        """Sampling settings as sent."""


class Rescored(Protocol):
    """Prefill scores of a saved response."""

    @property
    def response_ids(self) -> Sequence[int]:
        """Token ids as the engine returned them."""

    @property
    def logprobs_nats(self) -> Sequence[float]:
        """Score of each, in nats."""

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens taken from the prefix cache; -1 where the engine does not say."""


class Decoded(Protocol):
    """Scores by teacher-forced decode, or why there are none."""

    @property
    def scoring(self) -> Rescored | None:
        """The scores, None where the engine cannot."""

    @property
    def how(self) -> str:
        """Path that computed them."""

    @property
    def cannot(self) -> str:
        """Why there are none."""


class Flushed(Protocol):
    """Answer to a flush."""

    @property
    def confirmed(self) -> bool:
        """Whether the engine says that its prefix cache is empty."""

    @property
    def detail(self) -> str:
        """Its words."""


class RolloutWorker(Protocol):
    """The part of an engine adapter that a capture needs."""

    def generate(self, prompt_ids: Sequence[int], *, max_new_tokens: int, seed: int) -> Generated:
        """Generate one response at temperature 1 without filters."""

    def score(self, input_ids: Sequence[int], *, prompt_length: int) -> Rescored:
        """Score a saved response by prefill."""

    def flush(self) -> Flushed:
        """Empty the prefix cache."""


class DecodingWorker(RolloutWorker, Protocol):
    """A worker that may be able to decode saved ids."""

    def score_by_decode(self, input_ids: Sequence[int], *, prompt_length: int) -> Decoded:
        """Score a saved response by teacher-forced incremental decode."""


class BatchWorker(RolloutWorker, Protocol):
    """A worker that takes several samples in one call."""

    def generate_batch(
        self, prompts: Sequence[Sequence[int]], *, max_new_tokens: int, seed: int
    ) -> Sequence[Generated]:
        """Generate for several prompts in one call; the seeds count up."""

    def score_batch(self, items: Sequence[tuple[Sequence[int], int]]) -> Sequence[Rescored]:
        """Score several saved responses, (ids, prompt length) each, in one call."""
