"""Statistics over the responses of a run: per pair with intervals, and repeat noise within and across workers. Pure."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import combinations, product
from typing import TYPE_CHECKING, Any

import numpy as np

from syncguard.errors import ScoreError
from syncguard.replay.compare import Difference, Interval, active_difference, bootstrap_mae, describe_difference
from syncguard.replay.scores import require_same_definition

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

    from syncguard.replay.record import ReplayRecord, ScoreKey


@dataclass(frozen=True, slots=True)
class PairSummary:
    """One comparison over all responses of a run.

    Attributes:
        difference: Statistics over all active tokens.
        interval: Bootstrap of the MAE that resamples whole responses.
        per_response_mae: MAE of each response, in the order of the records.
    """

    difference: Difference
    interval: Interval
    per_response_mae: tuple[float, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)


def summarize_run(
    records: Sequence[ReplayRecord], left: ScoreKey, right: ScoreKey, label: str, *, seed: int = 0
) -> PairSummary:
    """Compare two paths over all responses of a run.

    Args:
        records: Responses; each must hold both scores.
        left: First operand.
        right: Second operand.
        label: Subtraction order, such as `B-C`.
        seed: Seed of the bootstrap.

    Raises:
        ScoreError: A record lacks one of the scores or has them in two definitions, or there are no records.
    """
    deltas, places = [], []
    for record in records:
        first, second = record.get(left), record.get(right)
        if first is None or second is None:
            missing = left if first is None else right
            raise ScoreError(f"{label} over a run", expected=f"{missing} in every record", where=record.record_id)
        require_same_definition(record.definition_of(left), record.definition_of(right), label=label)
        delta, positions = active_difference(first, second, record.loss_mask, label=label)
        deltas.append(delta)
        places.append(positions)
    interval = bootstrap_mae(deltas, seed=seed)
    joined = describe_difference(np.concatenate(deltas), np.concatenate(places), label=label)
    return PairSummary(joined, interval, tuple(float(np.abs(delta).mean()) for delta in deltas))


@dataclass(frozen=True, slots=True)
class RepeatStudy:
    """Repeat noise of one response scored several times by several workers.

    Attributes:
        within: Worker → mean over its own pairs of passes of the pair's MAE; only workers with two passes or more.
        across: Mean over pairs of passes of different workers; None with one worker.
        pairs: Number of pairs within and across.
    """

    within: Mapping[str, float]
    across: float | None
    pairs: tuple[int, int]


def study_repeats(passes: Mapping[str, Sequence[npt.ArrayLike]], mask: npt.ArrayLike) -> RepeatStudy:
    """Compare all pairs of passes of one response, within each worker and across workers.

    Args:
        passes: Worker (or `router`) → its passes, each [response].
        mask: [response], 1 where the token counts.

    Raises:
        ScoreError: No pair at all, or passes that do not line up.
    """

    def mae(a: npt.ArrayLike, b: npt.ArrayLike) -> float:
        return float(np.abs(active_difference(a, b, mask, label="repeat")[0]).mean())

    own = {name: [mae(a, b) for a, b in combinations(each, 2)] for name, each in passes.items()}
    foreign = [mae(a, b) for one, two in combinations(passes, 2) for a, b in product(passes[one], passes[two])]
    count = sum(map(len, own.values()))
    if count + len(foreign) == 0:
        raise ScoreError("a repeat study needs two passes", expected="2 or more", found=sum(map(len, passes.values())))
    within = {name: float(np.mean(values)) for name, values in own.items() if values}
    return RepeatStudy(within, float(np.mean(foreign)) if foreign else None, (count, len(foreign)))
