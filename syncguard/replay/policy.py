"""The words of a replay verdict: status, policy, power, and the verdict with its reason. Values only."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from syncguard.replay.compare import Difference, RepeatNoise


class ReplayStatus(str, Enum):
    """Outcome of a replay; only PASS is proof, and only of what this response can see."""

    PASS = "PASS"  # noqa: S105 - a status
    FAIL = "FAIL"
    NO_POWER = "NO_POWER"
    INCOMPLETE = "INCOMPLETE"
    UNSTABLE = "UNSTABLE"

    def __bool__(self) -> NoReturn:
        """Refuse: a status is compared by name, never by truth."""
        raise TypeError("a replay status has no truth value; compare it with ReplayStatus.PASS")


@dataclass(frozen=True, slots=True)
class ReplayPolicy:
    """What a replay must satisfy; data, shown in every verdict.

    Attributes:
        mae_limit_nats: Fixed limit of MAE(B_new - C_new).
        noise_factor: Relative limit = this factor times measured noise.
        noise_cap_nats: MAE(B_old - C_old) above which T0 was no agreement; it is then not taken for noise.
        repeat_limit_nats: MAE between repeat passes above which nothing can be concluded.
        resolution_nats: Smallest difference taken for real; float32 arithmetic moves scores by 1e-6 to 1e-5.
        power_factor: How many times above the quiet limit the change C_new - C_old must be to have power.
        follow_share: Smallest share of C's change that B must have made (1 followed it, 0 is stale).
        follow_tolerance: Distance of that share from 1 that is never taken for a partial update (measured: clean bfloat16
            updates lie within 0.045, half updates beyond 0.14).
        follow_errors: Standard errors of that share that its distance from 1 must exceed as well (clean: under 4.4).
        unexplained_share: Largest MAE(B_new - C_new), as a share of MAE(C_new - C_old), where both stand above noise.
        min_tokens: Fewest active tokens.
        outlier_share: Share of tokens of largest |B_new - C_new| that may be left out (named in the reason); for
            mixture-of-experts models, whose router flips move single tokens.
        require_warm: Whether a pass with a warm prefix cache must be there.
    """

    mae_limit_nats: float = 0.01
    noise_factor: float = 3.0
    noise_cap_nats: float = 0.05
    repeat_limit_nats: float = 0.05
    resolution_nats: float = 1e-5
    power_factor: float = 2.0
    follow_share: float = 0.5
    follow_tolerance: float = 0.08
    follow_errors: float = 6.0
    unexplained_share: float = 0.25
    min_tokens: int = 1
    outlier_share: float = 0.0
    require_warm: bool = True

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Power:
    """Whether the response can tell T1 from T0.

    Attributes:
        change_mae_nats: MAE(C_new - C_old), the gap that a stale worker would show; None where C_old is missing.
        needed_nats: Change needed to stand out from the noise.
        sees: Whether it does.
        followed: Share of C's change that B made: 1 followed, 0 stale; None where it cannot be told.
    """

    change_mae_nats: float | None
    needed_nats: float
    sees: bool
    followed: float | None


@dataclass(frozen=True, slots=True)
class ReplayVerdict:
    """A verdict with its reason, limits and figures.

    Attributes:
        status: The outcome.
        reason: One sentence.
        fingerprint: `""`, `constant offset`, `stale`, `partial update`, `trainer state`, `stale prefix cache`, `outlier` or
            `disagreement`.
        limit_nats: Limit that was used for MAE(B_new - C_new).
        fixed_limit_nats: The policy's fixed limit.
        relative_limit_nats: noise_factor times measured noise.
        limit_reason: Which of the two was used, and why.
        measured_noise_nats: Largest MAE of the repeats and, where T0 agreed, of B_old - C_old.
        power: Whether the response could show a stale worker.
        figures: All differences, each with its subtraction order.
        repeats: All repeat noises.
        policy: The policy applied.
    """

    status: ReplayStatus
    reason: str
    fingerprint: str = ""
    limit_nats: float | None = None
    fixed_limit_nats: float | None = None
    relative_limit_nats: float | None = None
    limit_reason: str = ""
    measured_noise_nats: float | None = None
    power: Power | None = None
    figures: tuple[Difference, ...] = ()
    repeats: tuple[RepeatNoise, ...] = ()
    policy: ReplayPolicy = ReplayPolicy()

    def __bool__(self) -> NoReturn:
        """Refuse: a verdict is read, never tested for truth."""
        raise TypeError("a replay verdict has no truth value; compare its status")

    def figure(self, label: str) -> Difference | None:
        """Return the difference of a subtraction order, or None."""
        return next((figure for figure in self.figures if figure.label == label), None)

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        values = asdict(self)
        values["status"] = self.status.value
        return values
