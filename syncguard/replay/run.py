"""Statistics over the responses of a run: per pair with intervals, and repeat noise within and across workers. Pure."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import combinations, product
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from syncguard.errors import ScoreError
from syncguard.replay.compare import Difference, Interval, active_difference, bootstrap_mae, describe_difference
from syncguard.replay.scores import require_same_definition

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

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
class StudyGroup:
    """Repeat noise of one way to reach a score, over all responses of a study.

    Attributes:
        name: `within WORKER`, `across workers`, `through the router`, or `router against workers`.
        pairs: Pairs of passes compared per response.
        interval: MAE over all pairs and responses; the bootstrap resamples whole responses.
        maximum: Largest absolute difference of a token, in nats.
        exact: Every pair agrees to the last bit.
    """

    name: str
    pairs: int
    interval: Interval
    maximum: float
    exact: bool


@dataclass(frozen=True, slots=True)
class RunStudy:
    """Repeat noise of a fleet.

    Attributes:
        groups: Every group that has a pair, in reading order.
        responses: Responses scored.
        within_nats: Largest MAE within one worker.
        apart: Groups across workers whose interval lies above all noise within workers: some hold another state.
    """

    groups: tuple[StudyGroup, ...]
    responses: int
    within_nats: float
    apart: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)


ACROSS: Final = "across workers"
ROUTER: Final = "through the router"
ROUTER_AGAINST: Final = "router against workers"


def study_run(
    workers: Mapping[str, Sequence[Sequence[npt.ArrayLike]]],
    masks: Sequence[npt.ArrayLike],
    *,
    router: Sequence[Sequence[npt.ArrayLike]] = (),
    limit_nats: float = 0.01,
    noise_factor: float = 3.0,
    seed: int = 0,
) -> RunStudy:
    """Compare all pairs of passes: within each worker, across workers, and through a router.

    Args:
        workers: Worker → per response its passes, each [response] scores.
        masks: Per response [response], 1 where the token counts.
        router: Per response the passes that a router handed to some worker.
        limit_nats: Difference between workers that never counts as another state.
        noise_factor: Factor on the upper end of the noise within workers that does not either.
        seed: Seed of the bootstraps.

    Raises:
        ScoreError: No pair at all, or passes that do not line up.
    """
    groups: list[StudyGroup] = []

    def add(name: str, pairs_of: Callable[[int], Iterable[tuple[npt.ArrayLike, npt.ArrayLike]]]) -> None:
        errors, count = [], 0
        for index, mask in enumerate(masks):
            found = [active_difference(a, b, mask, label=name)[0] for a, b in pairs_of(index)]
            count = max(count, len(found))
            if found:
                errors.append(np.concatenate(found))
        if errors:
            top = max(float(np.abs(error).max()) for error in errors)
            groups.append(StudyGroup(name, count, bootstrap_mae(errors, seed=seed), top, top == 0))

    for name, passes in workers.items():
        add(f"within {name}", lambda index, passes=passes: combinations(passes[index], 2))  # type: ignore[misc]
    inside = list(groups)
    add(
        ACROSS,
        lambda index: (
            pair for one, two in combinations(workers, 2) for pair in product(workers[one][index], workers[two][index])
        ),
    )
    if router:
        add(ROUTER, lambda index: combinations(router[index], 2))
        add(ROUTER_AGAINST, lambda index: (pair for w in workers for pair in product(router[index], workers[w][index])))
    if not groups:
        raise ScoreError("a repeat study needs two passes", expected="2 or more", found="no pair")
    noise = max((group.interval.high for group in inside), default=0.0)
    allowed = max(limit_nats, noise_factor * noise)
    apart = tuple(g.name for g in groups if g not in inside and g.interval.low > allowed)
    return RunStudy(tuple(groups), len(masks), max((g.interval.estimate for g in inside), default=0.0), apart)
