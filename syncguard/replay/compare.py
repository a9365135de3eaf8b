"""Statistics over response-aligned scores: differences, repeat noise, and what they do to the objective.

Pure numpy. Every figure carries its subtraction order (`B-C` is B minus C). All values are nats unless they say so.
Per token A-C = A-B + B-C; the mean absolute errors do not add, since signed errors cancel.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from syncguard.errors import ScoreError
from syncguard.replay.scores import FloatArray, checked_scores

if TYPE_CHECKING:
    from collections.abc import Sequence

_WORST = 5


@dataclass(frozen=True, slots=True)
class WorstToken:
    """A token with a large difference.

    Attributes:
        position: Response position, from 0.
        difference: Left minus right, in nats.
    """

    position: int
    difference: float


@dataclass(frozen=True, slots=True)
class Difference:
    """How two paths disagree on the active tokens of one response, or of several joined ones.

    Attributes:
        label: Subtraction order, such as `B-C`.
        count: Active tokens.
        signed_mean: Mean of left minus right.
        mae: Mean absolute error.
        median: Median absolute error.
        p95: 95th percentile of the absolute error.
        p99: 99th percentile of the absolute error.
        maximum: Largest absolute error.
        first_mae: Absolute error at response position 0, which prompt prefill scores; None where masked.
        rest_mae: MAE of positions 1 and on, which decode scores; None where there are none.
        worst: Tokens of the largest absolute error, largest first.
    """

    label: str
    count: int
    signed_mean: float
    mae: float
    median: float
    p95: float
    p99: float
    maximum: float
    first_mae: float | None
    rest_mae: float | None
    worst: tuple[WorstToken, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        """Return one line, subtraction order first."""
        return f"{self.label} signed={self.signed_mean:+.6f} MAE={self.mae:.6f} max={self.maximum:.6f} n={self.count}"


def active_difference(
    left: npt.ArrayLike, right: npt.ArrayLike, mask: npt.ArrayLike, *, label: str
) -> tuple[FloatArray, npt.NDArray[np.intp]]:
    """Return left minus right on the active tokens, and the response positions of these tokens.

    Args:
        left: [response] scores.
        right: [response] scores.
        mask: [response], 1 where the token counts.
        label: Subtraction order, for errors.

    Raises:
        ScoreError: Lengths disagree, the mask is not binary or has no active token, or a score is not finite.
    """
    flags = np.atleast_1d(np.asarray(mask))
    first = checked_scores(np.atleast_1d(np.asarray(left, dtype=np.float64)), label=f"left of {label}")
    second = checked_scores(np.atleast_1d(np.asarray(right, dtype=np.float64)), label=f"right of {label}")
    if not first.shape == second.shape == flags.shape:
        raise ScoreError(
            f"{label} needs equally long scores and mask",
            expected=first.shape,
            found=f"{second.shape} and mask {flags.shape}",
            todo="align both sides to the response first",
        )
    if not np.isin(flags, (0, 1)).all() or not flags.any():
        raise ScoreError(
            f"{label} needs a binary mask with an active token", expected="0 and 1, some 1", found=np.unique(flags)[:8]
        )
    positions = np.flatnonzero(flags)
    return first[positions] - second[positions], positions


def compare_scores(left: npt.ArrayLike, right: npt.ArrayLike, mask: npt.ArrayLike, label: str) -> Difference:
    """Return the statistics of left minus right.

    Args:
        left: [response] scores in nats; a scalar is a response of one token.
        right: [response] scores of the same tokens.
        mask: [response], 1 where the token counts.
        label: Subtraction order, such as `A-B`.

    Raises:
        ScoreError: Lengths disagree, the mask is not binary or has no active token, or a score is not finite.
    """
    delta, positions = active_difference(left, right, mask, label=label)
    return describe_difference(delta, positions, label=label)


def describe_difference(delta: FloatArray, positions: npt.NDArray[np.intp], *, label: str) -> Difference:
    """Return the statistics of differences already taken.

    Args:
        delta: [tokens] left minus right.
        positions: [tokens] response position of each; several responses may be joined.
        label: Subtraction order.
    """
    error = np.abs(delta)
    order = np.argsort(-error, kind="stable")[:_WORST]
    first = positions == 0
    return Difference(
        label=label,
        count=int(delta.size),
        signed_mean=float(delta.mean()),
        mae=float(error.mean()),
        median=float(np.median(error)),
        p95=float(np.quantile(error, 0.95)),
        p99=float(np.quantile(error, 0.99)),
        maximum=float(error.max()),
        first_mae=float(error[first].mean()) if first.any() else None,
        rest_mae=float(error[~first].mean()) if not first.all() else None,
        worst=tuple(WorstToken(int(positions[i]), float(delta[i])) for i in order),
    )


@dataclass(frozen=True, slots=True)
class RepeatNoise:
    """How far repeat passes of one path move at one state, over all pairs of passes.

    Attributes:
        label: Path and state, such as `B.new.cold`.
        passes: Number of passes; under 2 nothing was measured.
        mae: Mean over the pairs of the pair's MAE.
        worst_pair_mae: Largest MAE of a pair.
        p99: 99th percentile of the absolute error over all pairs.
        maximum: Largest absolute error over all pairs.
        exact: Every pair agrees to the last bit.
    """

    label: str
    passes: int
    mae: float
    worst_pair_mae: float
    p99: float
    maximum: float
    exact: bool

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)


def measure_repeat_noise(passes: Sequence[npt.ArrayLike], mask: npt.ArrayLike, label: str) -> RepeatNoise:
    """Compare all pairs of repeat passes.

    Args:
        passes: Two or more [response] score arrays taken under the same conditions.
        mask: [response], 1 where the token counts.
        label: Path and state of the passes.

    Raises:
        ScoreError: Fewer than two passes, or passes that do not line up.
    """
    if len(passes) < 2:  # noqa: PLR2004 - a pair
        raise ScoreError(f"repeat noise of {label} needs two passes", expected=2, found=len(passes))
    errors = [np.abs(active_difference(a, b, mask, label=label)[0]) for a, b in combinations(passes, 2)]
    joined = np.concatenate(errors)
    return RepeatNoise(
        label=label,
        passes=len(passes),
        mae=float(np.mean([error.mean() for error in errors])),
        worst_pair_mae=float(max(error.mean() for error in errors)),
        p99=float(np.quantile(joined, 0.99)),
        maximum=float(joined.max()),
        exact=bool(joined.max() == 0),
    )


@dataclass(frozen=True, slots=True)
class ObjectiveEffect:
    """What a mismatch does to a ratio objective, with ratio = exp(train - rollout).

    Attributes:
        label: Subtraction order of the exponent, such as `C-A`.
        ratio_mean: Mean ratio; 1 without a mismatch.
        ratio_minimum: Smallest ratio.
        ratio_maximum: Largest ratio.
        k1: Mean of -log ratio, an unbiased estimate of KL(rollout ‖ train) that can be negative.
        k2: Mean of (log ratio)² / 2.
        k3: Mean of (ratio - 1) - log ratio, never negative.
        clip_share: Share of tokens outside [1 - clip_low, 1 + clip_high].
        effective_sample_share: (Σ ratio)² / (n Σ ratio²), 1 when all weights are equal.
    """

    label: str
    ratio_mean: float
    ratio_minimum: float
    ratio_maximum: float
    k1: float
    k2: float
    k3: float
    clip_share: float
    effective_sample_share: float

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)


def objective_effect(
    train: npt.ArrayLike,
    rollout: npt.ArrayLike,
    mask: npt.ArrayLike,
    *,
    label: str = "C-A",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> ObjectiveEffect:
    """Return ratio, KL estimates, clipping and effective sample size for scores of rollout samples.

    Args:
        train: [response] trainer scores.
        rollout: [response] scores of the policy that drew the tokens.
        mask: [response], 1 where the token counts.
        label: Subtraction order of the exponent.
        clip_low: Distance of the lower clip bound from 1.
        clip_high: Distance of the upper clip bound from 1.
    """
    log_ratio, _ = active_difference(train, rollout, mask, label=label)
    # A ratio that overflows is still reported, as the largest number; its logarithm is kept exact in k1 and k2.
    ratio = np.exp(np.minimum(log_ratio, 700.0))
    scaled = np.exp(log_ratio - log_ratio.max())
    return ObjectiveEffect(
        label=label,
        ratio_mean=float(ratio.mean()),
        ratio_minimum=float(ratio.min()),
        ratio_maximum=float(ratio.max()),
        k1=float(-log_ratio.mean()),
        k2=float((log_ratio**2).mean() / 2),
        k3=float((np.expm1(np.minimum(log_ratio, 700.0)) - log_ratio).mean()),
        clip_share=float(((ratio < 1 - clip_low) | (ratio > 1 + clip_high)).mean()),
        effective_sample_share=float(scaled.sum() ** 2 / (scaled.size * (scaled**2).sum())),
    )


@dataclass(frozen=True, slots=True)
class Interval:
    """A bootstrap interval.

    Attributes:
        estimate: Value on all responses.
        low: Lower end.
        high: Upper end.
        level: Coverage, such as 0.95.
        responses: Number of responses resampled.
    """

    estimate: float
    low: float
    high: float
    level: float
    responses: int


def bootstrap_mae(
    differences: Sequence[npt.ArrayLike], *, draws: int = 1000, level: float = 0.95, seed: int = 0
) -> Interval:
    """Return a percentile bootstrap of the MAE that resamples whole responses.

    Tokens of one response share its prefix, so resampling tokens would claim too much certainty.

    Args:
        differences: Per response, the [active tokens] differences.
        draws: Number of resamples.
        level: Coverage of the interval.
        seed: Seed of the resampling; the same input gives the same interval.

    Raises:
        ScoreError: No responses, or one without tokens.
    """
    errors = [np.abs(np.asarray(one, dtype=np.float64)) for one in differences]
    if not errors or any(error.size == 0 for error in errors):
        raise ScoreError("a bootstrap needs responses with active tokens", expected="1 or more", found=len(errors))
    sums = np.array([error.sum() for error in errors])
    counts = np.array([error.size for error in errors], dtype=np.float64)
    picks = np.random.default_rng(seed).integers(0, len(errors), size=(draws, len(errors)))
    means = sums[picks].sum(axis=1) / counts[picks].sum(axis=1)
    tail = (1 - level) / 2
    low, high = np.quantile(means, (tail, 1 - tail))
    return Interval(float(sums.sum() / counts.sum()), float(low), float(high), level, len(errors))
