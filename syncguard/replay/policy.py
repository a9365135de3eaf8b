"""Whether a replayed response proves an update: the verdict over B_new, C_new, their repeats, and T0.

Pure. The worker's score is B, the trainer's is C; `old` is the state T0 that was synchronized and verified, `new` is T1.

1. Evidence complete? else INCOMPLETE.  2. Repeats steady? else UNSTABLE.
3. Prefix cache: warm B must equal cold B.  4. Stale or partial: B must have moved where C moved.
5. MAE(B_new - C_new) under the limit, fixed or relative to the measured noise.
6. Power: had the worker kept T0, would this response have shown it? If not, NO_POWER instead of PASS.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from syncguard.errors import ScoreError
from syncguard.replay.compare import Difference, RepeatNoise, describe_difference, measure_repeat_noise
from syncguard.replay.scores import RAW, FloatArray, IntArray, ScoreDefinition, checked_scores, require_same_definition

if TYPE_CHECKING:
    from collections.abc import Sequence

    from syncguard.replay.record import ReplayRecord


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
        noise_cap_nats: Noise above which T0 itself was not in agreement; the relative limit never uses more.
        repeat_limit_nats: MAE between repeat passes above which nothing can be concluded.
        resolution_nats: Smallest difference taken for real; float32 arithmetic moves scores by 1e-6 to 1e-5.
        power_factor: How many times above the quiet limit the change C_new - C_old must be to have power.
        follow_share: Smallest share of C's change that B must have made (1 followed it, 0 is stale).
        min_tokens: Fewest active tokens.
        outlier_share: Share of tokens of largest |B_new - C_new| that may be left out (named in the reason); for
            mixture-of-experts models, whose router flips move single tokens.
        require_warm: Whether a pass with a warm prefix cache must be there.
    """

    mae_limit_nats: float = 0.01
    noise_factor: float = 3.0
    noise_cap_nats: float = 0.1
    repeat_limit_nats: float = 0.05
    resolution_nats: float = 1e-5
    power_factor: float = 2.0
    follow_share: float = 0.5
    min_tokens: int = 1
    outlier_share: float = 0.0
    require_warm: bool = True

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)


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
        for name in ("b_new_cold", "b_new_warm", "c_new", "b_old", "c_old"):
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
        return cls(
            mask=record.loss_mask,
            b_new_cold=record.passes("B", "new", "cold"),
            b_new_warm=record.passes("B", "new", "warm"),
            c_new=record.passes("C", "new"),
            a=next(iter(record.passes("A")), None),
            b_old=record.passes("B", "old", "cold"),
            c_old=record.passes("C", "old"),
            b_definition=record.definitions.get("B", record.definition),
            c_definition=record.definitions.get("C", record.definition),
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
            **{name: passes(name) for name in ("b_new_cold", "b_new_warm", "c_new", "b_old", "c_old")},
        )


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
        fingerprint: `""`, `stale`, `partial update`, `stale prefix cache`, `outlier`, `disagreement`.
        limit_nats: Limit that was used for MAE(B_new - C_new).
        fixed_limit_nats: The policy's fixed limit.
        relative_limit_nats: noise_factor times measured noise.
        limit_reason: Which of the two was used, and why.
        measured_noise_nats: Largest of the repeat noises and the T0 disagreement (capped).
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


def judge_replay(
    evidence: ReplayEvidence | Sequence[ReplayEvidence], policy: ReplayPolicy | None = None
) -> ReplayVerdict:
    """Judge whether B_new is the same model as C_new.

    Args:
        evidence: One response, or several that are judged together.
        policy: Limits; the defaults where None.

    Raises:
        ScoreError: Evidence of different definitions, or several responses that cannot be joined.
    """
    rules = policy if policy is not None else ReplayPolicy()
    if not isinstance(evidence, ReplayEvidence):
        evidence = ReplayEvidence.join(list(evidence))
    missing = _missing(evidence, rules)
    if missing:
        return ReplayVerdict(ReplayStatus.INCOMPLETE, f"evidence is missing: {', '.join(missing)}", policy=rules)
    return _Judgement(evidence, rules).verdict()


def _missing(evidence: ReplayEvidence, policy: ReplayPolicy) -> list[str]:
    found = [
        f"{name} needs {need} pass{'es' if need > 1 else ''}, has {len(passes)}"
        for name, passes, need in (
            ("B_new cold", evidence.b_new_cold, 2),
            ("B_new warm", evidence.b_new_warm, 1 if policy.require_warm else 0),
            ("C_new", evidence.c_new, 2),
        )
        if len(passes) < need
    ]
    active = int((evidence.mask == 1).sum())
    if not np.isin(evidence.mask, (0, 1)).all():
        found.append("a binary loss mask")
    if active < max(1, policy.min_tokens):
        found.append(f"active tokens: needs {max(1, policy.min_tokens)}, has {active}")
    return found


class _Judgement:
    """The steps of one judgement, each on the values that the earlier ones left."""

    def __init__(self, evidence: ReplayEvidence, policy: ReplayPolicy) -> None:
        self.evidence = evidence
        self.policy = policy
        self.active = evidence.mask == 1
        self.positions = np.asarray(evidence.positions)[self.active]
        self.b_new, self.c_new = evidence.b_new_cold[0], evidence.c_new[0]
        self.b_old = evidence.b_old[0] if evidence.b_old else None
        self.c_old = evidence.c_old[0] if evidence.c_old else None
        self.repeats = tuple(
            measure_repeat_noise(passes, evidence.mask, label)
            for label, passes in (
                ("B.new.cold", evidence.b_new_cold),
                ("B.new.warm", evidence.b_new_warm),
                ("C.new", evidence.c_new),
                ("B.old.cold", evidence.b_old),
                ("C.old", evidence.c_old),
            )
            if len(passes) > 1
        )
        self.gap = self._difference("B_new-C_new", self.b_new, self.c_new)
        self.base = self._difference("B_old-C_old", self.b_old, self.c_old)
        self.change = self._difference("C_new-C_old", self.c_new, self.c_old)
        self.moved = self._difference("B_new-B_old", self.b_new, self.b_old)
        self.left_behind = self._difference("B_new-C_old", self.b_new, self.c_old)
        self.warm = [
            self._difference(f"B_new_warm{i}-B_new_cold", warm, self.b_new)
            for i, warm in enumerate(evidence.b_new_warm)
        ]
        self.generated = self._difference("A-B_old", evidence.a, self.b_old)
        self.repeat_noise = max((noise.mae for noise in self.repeats), default=0.0)
        noise = max(self.repeat_noise, self.base.mae if self.base else 0.0)
        self.noise = min(noise, policy.noise_cap_nats)
        self.relative = policy.noise_factor * self.noise
        self.limit = max(policy.mae_limit_nats, self.relative)
        self.quiet = max(policy.resolution_nats, self.relative)

    def _difference(self, label: str, left: FloatArray | None, right: FloatArray | None) -> Difference | None:
        if left is None or right is None:
            return None
        return describe_difference((left - right)[self.active], self.positions, label=label)

    def _followed(self, b_new: FloatArray) -> float | None:
        """Least-squares slope of B's change on C's change: 1 followed, 0 stale."""
        if self.b_old is None or self.c_old is None:
            return None
        ours = (b_new - self.b_old)[self.active]
        theirs = (self.c_new - self.c_old)[self.active]
        energy = float(theirs @ theirs)
        return float(ours @ theirs) / energy if energy > 0 else None

    def power(self) -> Power:
        needed = self.policy.power_factor * self.quiet
        change = self.change.mae if self.change else None
        return Power(change, needed, change is not None and change >= needed, self._followed(self.b_new))

    def limit_reason(self) -> str:
        fixed, noise = self.policy.mae_limit_nats, self.noise
        source = "repeats and |B_old-C_old|" if self.base else "repeats (no T0 scores to compare)"
        if self.relative > fixed:
            return f"relative limit: {self.policy.noise_factor:g} times measured noise {noise:.3g} of {source} exceeds {fixed:g}"
        return (
            f"fixed limit: {self.policy.noise_factor:g} times measured noise {noise:.3g} of {source} is below {fixed:g}"
        )

    def verdict(self) -> ReplayVerdict:
        power = self.power()
        status, reason, fingerprint = self._outcome(power)
        figures = (self.gap, self.base, self.change, self.moved, self.left_behind, *self.warm, self.generated)
        return ReplayVerdict(
            status=status,
            reason=reason,
            fingerprint=fingerprint,
            limit_nats=self.limit,
            fixed_limit_nats=self.policy.mae_limit_nats,
            relative_limit_nats=self.relative,
            limit_reason=self.limit_reason(),
            measured_noise_nats=self.noise,
            power=power,
            figures=tuple(figure for figure in figures if figure is not None),
            repeats=self.repeats,
            policy=self.policy,
        )

    def _outcome(self, power: Power) -> tuple[ReplayStatus, str, str]:
        unsteady = [noise for noise in self.repeats if noise.mae > self.policy.repeat_limit_nats]
        if unsteady:
            worst = max(unsteady, key=lambda noise: noise.mae)
            return (
                ReplayStatus.UNSTABLE,
                (
                    f"repeats of {worst.label} differ by {worst.mae:.4g} nat (limit {self.policy.repeat_limit_nats:g}): "
                    "nothing can be concluded"
                ),
                "",
            )
        return self._stale(power) or self._cache(power) or self._agreement(power)

    def _stale(self, power: Power) -> tuple[ReplayStatus, str, str] | None:
        assert self.gap is not None
        if not power.sees or power.followed is None or power.followed >= self.policy.follow_share:
            return None
        if self.gap.mae <= self.quiet:
            return None
        assert self.change is not None
        assert self.moved is not None
        assert self.left_behind is not None
        if self.moved.mae <= self.quiet or self.left_behind.mae <= self.quiet:
            return (
                ReplayStatus.FAIL,
                (
                    f"C moved by {self.change.mae:.4g} nat (C_new-C_old) and B only by {self.moved.mae:.4g} (B_new-B_old), within "
                    f"noise {self.quiet:.4g}: the worker still scores as T0"
                ),
                "stale",
            )
        return (
            ReplayStatus.FAIL,
            (
                f"B made only {power.followed:.0%} of the change C_new-C_old ({self.change.mae:.4g} nat), B_new-C_new is "
                f"{self.gap.mae:.4g}: part of the update is missing or wrong"
            ),
            "partial update",
        )

    def _cache(self, power: Power) -> tuple[ReplayStatus, str, str] | None:
        for index, (difference, scores) in enumerate(zip(self.warm, self.evidence.b_new_warm, strict=True)):
            assert difference is not None
            followed = self._followed(scores)
            lagging = power.sees and followed is not None and followed < self.policy.follow_share
            if difference.mae >= self.limit or (lagging and difference.mae > self.quiet):
                return (
                    ReplayStatus.FAIL,
                    (
                        f"warm pass {index} differs from cold by {difference.mae:.4g} nat (limit {self.limit:.4g}): the prefix cache "
                        "holds keys and values of other weights"
                    ),
                    "stale prefix cache",
                )
        return None

    def _agreement(self, power: Power) -> tuple[ReplayStatus, str, str]:
        assert self.gap is not None
        gap, dropped = self._trimmed_gap()
        said = f"MAE(B_new-C_new) is {gap:.4g} nat, limit {self.limit:.4g}"
        if dropped:
            said += f", {dropped} outlier tokens left out by policy (worst {self.gap.maximum:.4g})"
        if gap >= self.limit:
            typical = self.gap.median < self.limit / 2
            return ReplayStatus.FAIL, said, "outlier" if typical and self._tail_share() < 0.1 else "disagreement"  # noqa: PLR2004
        if power.change_mae_nats is None:
            return ReplayStatus.NO_POWER, f"{said}; without C_old it is unknown whether a stale worker would show", ""
        if not power.sees:
            return (
                ReplayStatus.NO_POWER,
                (
                    f"{said}; the update changed the scores by {power.change_mae_nats:.4g} nat (C_new-C_old), needed "
                    f"{power.needed_nats:.4g}: a stale worker would look the same"
                ),
                "",
            )
        return ReplayStatus.PASS, f"{said}; a stale worker would show {power.change_mae_nats:.4g}", ""

    def _trimmed_gap(self) -> tuple[float, int]:
        errors = np.sort(np.abs(self.b_new - self.c_new)[self.active])
        dropped = int(self.policy.outlier_share * errors.size)
        kept = errors[: errors.size - dropped]
        return float(kept.mean()), dropped if float(errors.mean()) >= self.limit else 0

    def _tail_share(self) -> float:
        errors = np.abs(self.b_new - self.c_new)[self.active]
        return float((errors >= self.limit).mean())
