"""Whether a replayed response proves an update: the verdict over B_new, C_new, their repeats, and T0.

Pure. The worker's score is B, the trainer's is C; `old` is the state T0 that was synchronized and verified, `new` is T1.

1. INCOMPLETE where a pass is missing.
2. UNSTABLE where repeats differ so much that nothing can be concluded.
3. FAIL for a constant offset; where B did not make the change that C made (stale, partial), or C did not make B's
   (trainer state); where the share of the change that B made is surely not all of it; and where a warm prefix cache scores differently from a cold one.
4. FAIL where MAE(B_new - C_new) reaches the limit: fixed, or relative to the measured noise if that is larger.
5. NO_POWER where a worker that kept T0 would have looked the same. 6. PASS.

Step 3 compares with the measured noise, not with the fixed limit: in float32 a stale worker can lie far under 0.01 nat.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np

from syncguard.replay.compare import Difference, describe_difference, measure_repeat_noise
from syncguard.replay.evidence import ReplayEvidence
from syncguard.replay.patterns import OFFSET_RESIDUAL_FACTOR, find_constant_offset, find_tail
from syncguard.replay.policy import Power, ReplayPolicy, ReplayStatus, ReplayVerdict

if TYPE_CHECKING:
    from collections.abc import Sequence

    from syncguard.replay.scores import FloatArray

_SETTLED: Final = (ReplayStatus.FAIL, ReplayStatus.UNSTABLE)
"""No response alone could make these better."""


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
    responses = [evidence] if isinstance(evidence, ReplayEvidence) else list(evidence)
    joined = evidence if isinstance(evidence, ReplayEvidence) else ReplayEvidence.join(responses)
    missing = _missing(joined, rules)
    if missing:
        return ReplayVerdict(ReplayStatus.INCOMPLETE, f"evidence is missing: {', '.join(missing)}", policy=rules)
    together = _Judgement(joined, rules)
    verdict = together.verdict()
    if len(responses) == 1 or verdict.status in _SETTLED:
        return verdict
    # A mean over many responses hides one that contradicts; the noise is that of all, which one alone measures badly.
    for number, response in enumerate(responses, 1):
        alone = _Judgement(response, rules, noise_floor=together.noise).verdict()
        if alone.status is ReplayStatus.FAIL:
            return replace(alone, reason=f"response {number} of {len(responses)}: {alone.reason}")
    return verdict


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


_SLOPE_TOKENS: Final = 16

_Outcome: TypeAlias = tuple[ReplayStatus, str, str]
"""Status, fingerprint, reason."""


class _Judgement:
    """The steps of one judgement, each on the values that the earlier ones left."""

    def __init__(self, evidence: ReplayEvidence, policy: ReplayPolicy, *, noise_floor: float = 0.0) -> None:
        self.evidence = evidence
        self.policy = policy
        self.active = evidence.mask == 1
        self.positions = np.asarray(evidence.positions)[self.active]
        self.b_new, self.c_new = evidence.b_new_cold[0], evidence.c_new[0]
        self.b_old = evidence.b_old[0] if evidence.b_old else None
        self.c_old = evidence.c_old[0] if evidence.c_old else None
        # Warm passes are no repeats of each other: the first may run on a cache that an update left behind.
        self.repeats = tuple(
            measure_repeat_noise(passes, evidence.mask, label)
            for label, passes in (
                ("B.new.cold", evidence.b_new_cold),
                ("C.new", evidence.c_new),
                ("B.old.cold", evidence.b_old),
                ("C.old", evidence.c_old),
            )
            if len(passes) > 1
        )
        self.base = self._difference("B_old-C_old", self.b_old, self.c_old)
        self.base_agrees = self.base is not None and self.base.mae <= policy.noise_cap_nats
        noises = [noise_floor, *(noise.mae for noise in self.repeats)]
        if self.base is not None and self.base_agrees:
            noises.append(self.base.mae)
        self.noise = max(noises)
        self.relative = policy.noise_factor * self.noise
        self.limit = max(policy.mae_limit_nats, self.relative)
        # Only T0 shows the noise between the two engines; unmeasured, it may be anything up to the limit.
        self.quiet = max(policy.resolution_nats, self.relative) if self.base_agrees else self.limit
        self.whole_gap = self._between("B_new-C_new", self.b_new, self.c_new)
        self.dropped = self._drop_outliers()
        self.gap = self._between(
            "B_new-C_new without outliers" if self.dropped else "B_new-C_new", self.b_new, self.c_new
        )
        self.change = self._difference("C_new-C_old", self.c_new, self.c_old)
        self.moved = self._difference("B_new-B_old", self.b_new, self.b_old)
        self.left_behind = self._difference("B_new-C_old", self.b_new, self.c_old)
        self.warm = [
            self._between(f"B_new_warm{i}-B_new_cold0", warm, self.b_new) for i, warm in enumerate(evidence.b_new_warm)
        ]
        self.generated = self._difference("A-B_old", evidence.a, self.b_old)

    def _drop_outliers(self) -> int:
        """Leave the policy's share of largest B_new-C_new out of every later step; return how many tokens."""
        count = int(self.policy.outlier_share * self.whole_gap.count)
        if count == 0 or self.whole_gap.mae < self.limit:
            return 0
        places = np.flatnonzero(self.active)
        order = np.argsort(np.abs(self.b_new - self.c_new)[places], kind="stable")
        self.active = self.active.copy()
        self.active[places[order[-count:]]] = False
        self.positions = np.asarray(self.evidence.positions)[self.active]
        return count

    def _between(self, label: str, left: FloatArray, right: FloatArray) -> Difference:
        return describe_difference((left - right)[self.active], self.positions, label=label)

    def _difference(self, label: str, left: FloatArray | None, right: FloatArray | None) -> Difference | None:
        return None if left is None or right is None else self._between(label, left, right)

    def _followed(self, b_new: FloatArray) -> float | None:
        """Least-squares slope of B's change on C's change: 1 followed, 0 stale; C_old stands in for a missing B_old."""
        if self.c_old is None:
            return None
        start = self.b_old if self.b_old is not None else self.c_old
        ours = (b_new - start)[self.active]
        theirs = (self.c_new - self.c_old)[self.active]
        energy = float(theirs @ theirs)
        return float(ours @ theirs) / energy if energy > 0 else None

    def power(self) -> Power:
        needed = self.policy.power_factor * self.quiet
        change = self.change.mae if self.change else None
        return Power(change, needed, change is not None and change >= needed, self._followed(self.b_new))

    def limit_reason(self) -> str:
        fixed, factor = self.policy.mae_limit_nats, self.policy.noise_factor
        if self.base is None:
            source = "repeats only, since T0 has no B_old and C_old"
        elif self.base_agrees:
            source = f"repeats and MAE(B_old-C_old) = {self.base.mae:.3g}"
        else:
            source = f"repeats only, since MAE(B_old-C_old) = {self.base.mae:.3g} is no agreement"
        chosen, verb = ("relative", "exceeds") if self.relative > fixed else ("fixed", "is not above")
        return f"{chosen} limit: {factor:g} * measured noise {self.noise:.3g} ({source}) {verb} the fixed {fixed:g}"

    def verdict(self) -> ReplayVerdict:
        power = self.power()
        outcome = (
            self._unsteady()
            or self._offset()
            or self._followed_update(power)
            or self._part_of_update(power)
            or self._cache(power)
        )
        status, fingerprint, reason = outcome if outcome is not None else self._agreement(power)
        figures = (
            self.whole_gap,
            self.gap if self.dropped else None,
            self.base,
            self.change,
            self.moved,
            self.left_behind,
            *self.warm,
            self.generated,
        )
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

    def _unsteady(self) -> _Outcome | None:
        unsteady = [noise for noise in self.repeats if noise.mae > self.policy.repeat_limit_nats]
        if not unsteady:
            return None
        worst = max(unsteady, key=lambda noise: noise.mae)
        said = f"repeats of {worst.label} differ by {worst.mae:.4g} nat (limit {self.policy.repeat_limit_nats:g})"
        return ReplayStatus.UNSTABLE, "", f"{said}: nothing can be concluded"

    def _offset(self) -> _Outcome | None:
        """A constant looks like a change of weights to every later step, so it is named first."""
        if self.gap.mae < self.limit:
            return None
        noise = max(self.limit, OFFSET_RESIDUAL_FACTOR * self.policy.mae_limit_nats)
        found = find_constant_offset((self.b_new - self.c_new)[self.active], self.positions, residual_nats=noise)
        if found is None:
            return None
        said = f"B_new-C_new is {found.offset_nats:+.4f} nat on every token from position {found.from_position} on"
        return ReplayStatus.FAIL, "constant offset", f"{said}: scores were altered after they were computed"

    def _followed_update(self, power: Power) -> _Outcome | None:
        """Stale, partial, or a trainer that scored with T0; judged against noise even under the fixed limit."""
        if self.gap.mae <= self.quiet or self.change is None or self.left_behind is None:
            return None
        moved_by = self.moved if self.moved is not None else self.left_behind
        change, moved, gap = self.change.mae, moved_by.mae, self.gap.mae
        if change <= self.quiet and moved >= power.needed_nats:
            said = f"B moved by {moved:.4g} nat ({moved_by.label}) and C only by {change:.4g} (C_new-C_old)"
            return ReplayStatus.FAIL, "trainer state", f"{said}: the trainer's scores are still those of T0"
        if not power.sees or power.followed is None:
            return None
        # Without B_old, C_old is its stand-in, which noise between the engines keeps apart from B.
        still = min(moved, self.left_behind.mae) <= self.quiet or (self.moved is None and moved < change / 4)
        if still and power.followed < self.policy.follow_share:
            said = f"C moved by {change:.4g} nat (C_new-C_old) and B only by {moved:.4g} ({moved_by.label}), noise {self.quiet:.4g}"
            return ReplayStatus.FAIL, "stale", f"{said}: the worker still scores as T0"
        if power.followed < self.policy.follow_share or gap > self.policy.unexplained_share * change:
            said = f"of the change C_new-C_old ({change:.4g} nat) B made {power.followed:.0%}; B_new-C_new is {gap:.4g} nat"
            partial = (ReplayStatus.FAIL, "partial update", f"{said}: part of the update is missing or wrong")
            return self._single_tokens() or partial  # a router's tie moves one token as far as half an update would
        return None

    def _single_tokens(self) -> _Outcome | None:
        """Single tokens that differ while the others agree are no state of the weights, whatever they do to the means."""
        if self.gap.mae < self.limit:
            return None
        delta = (self.b_new - self.c_new)[self.active]
        tail = find_tail(delta, limit_nats=self.limit, tolerance_nats=5 * self.limit)
        if tail is None:
            return None
        said = f"MAE(B_new-C_new) is {self.gap.mae:.4g} nat, limit {self.limit:.4g}"
        others = f"the others agree ({tail.body_mae:.4g} nat)"
        advice = "look at routing near ties; outlier_share allows for them in mixture-of-experts models"
        return ReplayStatus.FAIL, "outlier", f"{said}: {tail.count} single tokens differ, {others}; {advice}"

    def _part_of_update(self, power: Power) -> _Outcome | None:
        """Half of an update can move the scores by nearly all of it, with a gap under any limit that noise allows.

        Noise does not lean on the update: over all tokens, the share of C's change that B made is known far better than
        one score is.
        """
        if self.b_old is None or self.c_old is None or not (power.sees and self.base_agrees):
            return None
        ours, theirs = (self.b_new - self.b_old)[self.active], (self.c_new - self.c_old)[self.active]
        if ours.size < _SLOPE_TOKENS or power.followed is None:
            return None
        left = ours - power.followed * theirs
        error = float(np.sqrt(left @ left / (ours.size - 1) / (theirs @ theirs)))
        missing = abs(1 - power.followed)
        if missing <= self.policy.follow_tolerance or missing <= self.policy.follow_errors * error:
            return None
        said = f"B made {power.followed:.1%} of the change C_new-C_old, with a standard error of {error:.1%}"
        return ReplayStatus.FAIL, "partial update", f"{said}: part of the update is missing or wrong"

    def _warm_limit(self) -> float:
        """Return how far a warm pass may be from a cold one.

        Where T0 had a warm pass, one engine at one state has shown what a warm cache changes: much less than the gap
        between two engines, and keys and values of a short old prefix may change little more.
        """
        if self.b_old is None or not self.evidence.b_old_warm:
            return self.limit
        at_t0 = max(self._between("warm", warm, self.b_old).mae for warm in self.evidence.b_old_warm)
        repeats = max((noise.mae for noise in self.repeats if noise.label.startswith("B")), default=0.0)
        measured = self.policy.noise_factor * max(at_t0, repeats)
        return min(self.limit, max(self.policy.resolution_nats, measured, self.noise / 2))

    def _cache(self, power: Power) -> _Outcome | None:
        limit = self._warm_limit()
        for difference, scores in zip(self.warm, self.evidence.b_new_warm, strict=True):
            followed = self._followed(scores)
            lags = power.sees and followed is not None and followed < self.policy.follow_share
            if difference.mae >= limit or (lags and difference.mae > self.quiet):
                said = f"{difference.label} is {difference.mae:.4g} nat (limit {limit:.4g})"
                reason = f"{said}: the prefix cache holds keys and values of other weights"
                return ReplayStatus.FAIL, "stale prefix cache", reason
        return None

    def _agreement(self, power: Power) -> _Outcome:
        gap = self.gap.mae
        said = f"MAE(B_new-C_new) is {gap:.4g} nat, limit {self.limit:.4g}"
        if self.dropped:
            said += f", {self.dropped} outlier tokens left out by policy (worst {self.whole_gap.maximum:.4g})"
        if gap >= self.limit:
            if (tail := self._single_tokens()) is not None:
                return tail
            if self.base_agrees and power.sees:
                return (
                    ReplayStatus.FAIL,
                    "partial update",
                    f"{said}, and T0 agreed: part of the update is missing or wrong",
                )
            return ReplayStatus.FAIL, "disagreement", said
        if power.change_mae_nats is None:
            return ReplayStatus.NO_POWER, "", f"{said}; without B_old and C_old a stale worker might look the same"
        if not power.sees:
            change, needed = power.change_mae_nats, power.needed_nats
            why = f"the update moved the scores by {change:.4g} nat (C_new-C_old), {needed:.4g} needed"
            return ReplayStatus.NO_POWER, "", f"{said}; {why}: a stale worker would look the same"
        return ReplayStatus.PASS, "", f"{said}; a stale worker would show {power.change_mae_nats:.4g}"


def most_telling(
    evidence: Sequence[ReplayEvidence], count: int, policy: ReplayPolicy | None = None
) -> list[tuple[int, Power]]:
    """Return the responses on which a stale worker would show most, best first.

    Args:
        evidence: Candidates that hold B_new, C_new, B_old and C_old.
        count: How many to return at most.
        policy: Limits; the defaults where None.

    Returns:
        Index into `evidence` and its power; responses that cannot see a stale worker are left out.
    """
    rules = policy if policy is not None else ReplayPolicy()
    powers = [
        (index, _Judgement(one, rules).power()) for index, one in enumerate(evidence) if one.b_new_cold and one.c_new
    ]
    seeing = [(index, power) for index, power in powers if power.sees and power.change_mae_nats is not None]
    return sorted(seeing, key=lambda pair: -(pair[1].change_mae_nats or 0.0))[:count]
