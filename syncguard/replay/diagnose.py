"""The decision map: from the scores of a record to the part to inspect, with the path taken. A pure function.

Repeats first, since nothing else means anything without them; then the A/B/C pattern at the state that generated the
response; then the update. Where two explanations fit, the answer is `ambiguous` with both, never a guess. A record
mailed by a colleague is enough: no engine and no trainer are asked.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

import numpy as np

from syncguard.errors import RecordError
from syncguard.replay.compare import Difference, describe_difference, measure_repeat_noise
from syncguard.replay.evidence import ReplayEvidence
from syncguard.replay.explain import Diagnosis, Kind, Side, conclude
from syncguard.replay.judge import judge_replay
from syncguard.replay.policy import ReplayPolicy, ReplayStatus
from syncguard.replay.record import A, ReplayRecord, ScoreKey, b_key, c_key
from syncguard.replay.shapes import PairView, Shape, missing_scores, strong_shape, weak_shape

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from syncguard.replay.record import Cache, ScorePath, State
    from syncguard.replay.scores import FloatArray

_FAINT: Final = 3.0  # an unstructured gap under this factor x the limit fits too many explanations
# Warm passes are no repeats of each other: the first may run on a cache that an update left behind.
_REPEATED: Final[tuple[tuple[ScorePath, State, Cache], ...]] = (
    ("B", "old", "cold"),
    ("C", "old", ""),
    ("D", "old", ""),
    ("B", "new", "cold"),
    ("C", "new", ""),
    ("D", "new", ""),
)
_FINGERPRINTS: Final[Mapping[str, tuple[Kind, Side]]] = {
    "stale": (Kind.STALE_WEIGHTS, "B"),
    "trainer state": (Kind.TRAINER_STATE, "C"),
    "stale prefix cache": (Kind.STALE_PREFIX_CACHE, "B"),
}


def diagnose(records: ReplayRecord | Sequence[ReplayRecord], policy: ReplayPolicy | None = None) -> Diagnosis:
    """Diagnose one record, or several responses of one worker and state together.

    Args:
        records: Records with at least two passes of B (cold) and C at one state; A is used where it is there.
        policy: Limits; the defaults where None.

    Returns:
        What the scores point at, the evidence, the path taken through the map, and what to try next.

    Raises:
        RecordError: No records.
    """
    several = [records] if isinstance(records, ReplayRecord) else list(records)
    if not several:
        raise RecordError("nothing to diagnose", expected="one record or more", found=0)
    return _Walk(several, policy if policy is not None else ReplayPolicy()).walk()


class _Walk:
    """One walk through the map; keeps the path taken and the figures seen."""

    def __init__(self, records: Sequence[ReplayRecord], policy: ReplayPolicy) -> None:
        self.records = [record.at_one_state() for record in records]
        self.policy = policy
        self.path: list[str] = []
        self.evidence: list[str] = []
        self.noise = 0.0
        self.noise_known = False
        self.faint = False
        self.limit = policy.mae_limit_nats

    def walk(self) -> Diagnosis:
        """Ask the questions in order; the first that has an answer ends the walk."""
        for question in (self._definitions, self._completeness, self._repeats):
            ended = question()
            if ended is not None:
                return ended
        old = self._generation_state() if self._passes("B", "old", "cold") else None
        # A faint gap without a shape is what T0 measures as noise between the engines; the update is judged against it.
        if old is not None and old.kind is not Kind.AGREEMENT and not self.faint:
            return old
        new = self._update() if self._passes("B", "new", "cold") and self._passes("C", "new") else None
        last = new if new is not None else old
        return last if last is not None else self._end(Kind.INCOMPLETE, detail="no state has both B and C")

    # ---- views over one response or several

    def _passes(self, path: ScorePath, state: State, cache: Cache = "") -> list[list[FloatArray]]:
        """Return per pass the scores of each response; only passes that all responses have."""
        return [
            list(values)
            for values in zip(*(record.passes(path, state, cache) for record in self.records), strict=False)
        ]

    def _difference(self, left: Sequence[FloatArray], right: Sequence[FloatArray], label: str) -> Difference:
        places = [np.flatnonzero(record.loss_mask) for record in self.records]
        delta = [(a - b)[at] for a, b, at in zip(left, right, places, strict=True)]
        found = describe_difference(np.concatenate(delta), np.concatenate(places), label=label)
        self.evidence.append(str(found))
        return found

    def _view(self, side: Side, suspect: Sequence[FloatArray], reference: Sequence[FloatArray]) -> PairView:
        first = self.records[0]
        temperature, experts = first.sampling.get("temperature", 1.0), first.meta.get("num_experts", 0)
        return PairView(
            suspect,
            reference,
            [record.loss_mask for record in self.records],
            side,
            self.noise,
            self.limit,
            float(temperature) if isinstance(temperature, int | float) and temperature > 0 else 1.0,
            experts if isinstance(experts, int) else 0,
            self.policy.mae_limit_nats,
            self.noise_known,
        )

    def _end(self, kind: Kind, side: Side = "", detail: str = "", candidates: tuple[str, ...] = ()) -> Diagnosis:
        found = conclude(kind, side, detail, tuple(self.evidence), tuple(self.path), candidates)
        return replace(found, limit_nats=self.limit)

    def _shaped(self, shape: Shape | None, side: Side) -> Diagnosis | None:
        return None if shape is None else self._end(shape.kind, side, shape.detail, shape.candidates)

    # ---- questions that come before any gap

    def _definitions(self) -> Diagnosis | None:
        self.path.append("do all paths score the same tokens, with one definition?")
        for record in self.records:
            a, b, c = (record.definition_of(key) for key in (A, b_key(0, "old"), c_key(0, "old")))
            if not a == b == c:
                side: Side = "A" if b == c else "C" if a == b else "B"
                return self._end(Kind.DEFINITION, side, f"A is {a}, B is {b}, C is {c}")
            d = record.definition_of(ScoreKey("D"))
            if d != b and record.passes("D", "old") + record.passes("D", "new"):
                return self._end(Kind.DEFINITION, "D", f"D is {d}, A and B are {b}")
            returned = record.meta.get("returned_ids", {})
            for path, ids in returned.items() if isinstance(returned, dict) else ():
                if list(ids) != record.response_ids.tolist():
                    wrong = next(
                        (i for i, (x, y) in enumerate(zip(ids, record.response_ids, strict=False)) if x != y), len(ids)
                    )
                    return self._end(
                        Kind.RETOKENIZED,
                        path if path in {"A", "B", "C"} else "",
                        f"{path} scored other ids from response position {wrong} on",
                    )
        return None

    def _completeness(self) -> Diagnosis | None:
        self.path.append("are there two passes of B and of C at one state?")
        active = sum(int(record.loss_mask.sum()) for record in self.records)
        states: tuple[State, ...] = ("old", "new")
        have = {state: (len(self._passes("B", state, "cold")), len(self._passes("C", state))) for state in states}
        if active and any(min(counts) > 1 for counts in have.values()):
            return None
        counts = ", ".join(f"{state}: {b} of B, {c} of C" for state, (b, c) in have.items())
        return self._end(Kind.INCOMPLETE, detail=f"{counts}, {active} active tokens")

    def _repeats(self) -> Diagnosis | None:
        self.path.append("do repeats agree?")
        mask = np.concatenate([record.loss_mask for record in self.records])
        worst = -1.0
        side: Side = "B"
        for path, state, cache in _REPEATED:
            passes = [np.concatenate(each) for each in self._passes(path, state, cache)]
            if len(passes) < 2:  # noqa: PLR2004 - a pair
                continue
            noise = measure_repeat_noise(passes, mask, ".".join(filter(None, (path, state, cache))))
            self.evidence.append(f"repeats of {noise.label}: MAE={noise.mae:.6f} max={noise.maximum:.6f}")
            if noise.mae > worst:
                worst, side = noise.mae, path  # type: ignore[assignment]
        self.noise = max(worst, 0.0)
        self.limit = max(self.policy.mae_limit_nats, self.policy.noise_factor * self.noise)
        if self.noise > self.policy.repeat_limit_nats:
            return self._end(Kind.UNSTABLE, side, f"repeats of {side} differ by MAE {self.noise:.4g} nat")
        return None

    # ---- the A/B/C pattern at the state that generated the response

    def _generation_state(self) -> Diagnosis:
        a, b, c = (
            next(iter(passes), None)
            for passes in (self._passes("A", "old"), self._passes("B", "old", "cold"), self._passes("C", "old"))
        )
        assert b is not None
        pairs: dict[str, float] = {}
        if c is not None:
            pairs["B-C"] = self._difference(b, c, "B-C").mae
        if a is not None:
            pairs["A-B"] = self._difference(a, b, "A-B").mae
        if a is not None and c is not None:
            pairs["A-C"] = self._difference(a, c, "A-C").mae
        self._learn_noise(pairs)
        bad = {label for label, mae in pairs.items() if mae >= self.limit}
        self.path.append(f"which pairs stand above {self.limit:.4g} nat? {', '.join(sorted(bad)) or 'none'}")
        missing = self._missing_scores(a, b, c)
        if missing is not None:
            return missing
        if not bad - {"A-C"}:  # two gaps within noise may add to one above it
            for found in (self._decode_alone("old"), self._training_forward()):
                if found is not None:
                    return found
            return self._end(Kind.AGREEMENT, detail=f"A-B and B-C are under {self.limit:.4g} nat")
        if a is not None and c is not None and {"A-B", "B-C"} <= bad:
            return self._suspect("B", b, "C", c) if "A-C" not in bad else self._several(a, b, c)
        if "B-C" in bad and c is not None:
            return self._suspect("C", c, "B", b)
        assert a is not None
        return self._suspect("A", a, "B", b)

    def _missing_scores(
        self, a: list[FloatArray] | None, b: list[FloatArray], c: list[FloatArray] | None
    ) -> Diagnosis | None:
        suspects: tuple[tuple[Side, list[FloatArray] | None, list[FloatArray] | None], ...] = (
            ("A", a, b),
            ("C", c, b),
            ("B", b, c),
        )
        for side, scores, other in suspects:
            if scores is not None and other is not None:
                found = self._shaped(missing_scores(self._view(side, scores, other)), side)
                if found is not None:
                    return found
        return None

    def _learn_noise(self, pairs: Mapping[str, float]) -> None:
        """The best agreeing pair measures noise across engines, which repeats of one engine do not show."""
        best = min(pairs.values(), default=0.0)
        if len(pairs) > 1 and best <= self.policy.noise_cap_nats:
            self.noise = max(self.noise, best)
        self.limit = max(self.policy.mae_limit_nats, self.policy.noise_factor * self.noise)

    def _training_forward(self) -> Diagnosis | None:
        g, c = self._passes("G", "old"), self._passes("C", "old")
        if not g or not c:
            return None
        self.path.append("does the gradient-enabled forward C' equal the frozen C?")
        gap = self._difference(g[0], c[0], "C'-C").mae
        return self._end(Kind.TRAINING_FORWARD, "C", f"C'-C is {gap:.4g} nat") if gap >= self.limit else None

    def _suspect(self, side: Side, suspect: list[FloatArray], other: Side, reference: list[FloatArray]) -> Diagnosis:
        self.path.append(f"{side} stands apart: what shape has {side}-{other}?")
        view = self._view(side, suspect, reference)
        shape = strong_shape(view) or weak_shape(view)
        split = (
            self._split(side) if side in {"A", "B"} and self._passes("A", "old") and self._passes("D", "old") else None
        )
        if shape is not None:
            words = f"{shape.detail}; {split.reason}" if split is not None else shape.detail
            return self._end(shape.kind, side, words, shape.candidates)
        gap = self._difference(suspect, reference, f"{side}-{other}").mae
        if split is not None:
            return split
        if gap < _FAINT * self.limit:
            return self._faint(gap, view)
        within = (
            " and C agree, so the prefill path" if side == "B" and other == "C" and self._passes("A", "old") else ""
        )
        said = f"MAE({side}-{other}) is {gap:.4g} nat, without a shape"
        if within:
            return self._end(Kind.DECODE_PATH, "B", f"{said}; A{within} stands apart, or the worker changed since A")
        return self._end(Kind.DECODE_PATH if side == "A" else Kind.CROSS_ENGINE, side, said)

    def _faint(self, gap: float, view: PairView) -> Diagnosis:
        self.faint = True
        fits: tuple[str, ...] = ("different numerics", "a small change of weights")
        if view.temperature != 1:
            fits = (*fits, f"a temperature of {view.temperature:g} on one side")
        return self._end(Kind.AMBIGUOUS, "", f"a gap of {gap:.4g} nat (limit {self.limit:.4g}) without a shape", fits)

    def _split(self, side: Side) -> Diagnosis:
        """Split a gap between generation and prefill: teacher-forced decode D equals A, or B, or neither."""
        self.path.append("does teacher-forced decode D equal A, or B?")
        a, b, d = (self._passes(*at)[0] for at in (("A", "old"), ("B", "old", "cold"), ("D", "old")))
        to_a, to_b = self._difference(a, d, "A-D").mae, self._difference(d, b, "D-B").mae
        said = f"A-D is {to_a:.4g} nat, D-B is {to_b:.4g} nat: "
        if to_a < self.limit <= to_b:
            made = "decode makes this each time, on its way to the score" if side == "A" else "decode repeats A"
            return self._end(Kind.DECODE_PATH, side, said + made)
        if to_b < self.limit <= to_a and side == "A":
            return self._end(
                Kind.EXTRACTION, "A", f"{said}decode does not make it again; A was altered after the engine"
            )
        if to_b < self.limit <= to_a:
            return self._end(Kind.CROSS_ENGINE, "B", f"{said}both replays left A and C; the worker changed since A")
        fits = (Kind.DECODE_PATH.value, Kind.EXTRACTION.value)
        return self._end(
            Kind.AMBIGUOUS, side, f"{said}decode equals {'both' if to_a < self.limit else 'neither'}", fits
        )

    def _decode_alone(self, state: State) -> Diagnosis | None:
        """Ask whether decode agrees with prefill at a state at which B and C agree; A is of the past and cannot tell."""
        d, b = self._passes("D", state), self._passes("B", state, "cold")
        if not d or not b:
            return None
        self.path.append("does teacher-forced decode D equal the prefill replay B?")
        label = "D-B" if state == "old" else "D_new-B_new"
        gap = self._difference(d[0], b[0], label).mae
        if gap < self.limit:
            return None
        said = f"{label} is {gap:.4g} nat"
        before = self._passes("B", "old", "cold") if state == "new" else []
        if before and self._difference(d[0], before[0], "D_new-B_old").mae < self.limit:
            said += "; decode scores as before the update while prefill follows it: captured graphs, or a decode worker that kept T0"
        return self._end(Kind.DECODE_PATH, "D", said)

    def _several(self, a: list[FloatArray], b: list[FloatArray], c: list[FloatArray]) -> Diagnosis:
        """No two paths agree: two faults, each with its own shape where it has one."""
        self.path.append("no two paths agree: which shapes have A-B and C-B?")
        shapes = [(side, strong_shape(self._view(side, scores, b))) for side, scores in (("A", a), ("C", c))]  # type: ignore[arg-type]
        named = [f"{shape.kind.value} on {side}" for side, shape in shapes if shape is not None]
        if not named:
            named = ["several faults", "three policy states", "several kernels with heavy tails"]
        elif len(named) == 1:
            named.append("another fault besides it")
        return self._end(Kind.AMBIGUOUS, "", "no two of A, B and C agree", tuple(named))

    # ---- the update

    def _update(self) -> Diagnosis | None:
        evidence = ReplayEvidence.join([ReplayEvidence.from_record(record) for record in self.records])
        verdict = judge_replay(evidence, replace(self.policy, require_warm=False))
        if verdict.status is ReplayStatus.INCOMPLETE:
            return None
        self.evidence.extend(map(str, verdict.figures))
        self.noise = max(self.noise, verdict.measured_noise_nats or 0.0)
        self.limit = max(self.limit, verdict.limit_nats or 0.0)
        self.noise_known = verdict.figure("B_old-C_old") is not None
        self.path.append(
            f"after the update: {verdict.status.value}{f', {verdict.fingerprint}' if verdict.fingerprint else ''}"
        )
        if verdict.status is ReplayStatus.UNSTABLE:
            return self._end(Kind.UNSTABLE, "B", verdict.reason)
        if verdict.status in {ReplayStatus.NO_POWER, ReplayStatus.PASS}:
            decode = self._decode_alone("new")
            if decode is not None:
                return decode
        if verdict.status is ReplayStatus.NO_POWER:
            return self._end(Kind.NO_POWER, detail=verdict.reason)
        if verdict.status is ReplayStatus.PASS:
            return self._end(Kind.AGREEMENT, detail=verdict.reason)
        return self._failed_update(verdict.fingerprint, verdict.reason)

    def _failed_update(self, fingerprint: str, reason: str) -> Diagnosis:
        b, c = self._passes("B", "new", "cold")[0], self._passes("C", "new")[0]
        view = self._view("C", c, b)
        known = _FINGERPRINTS.get(fingerprint)
        if fingerprint == "stale prefix cache" and known is not None:
            return self._end(*known, reason)
        self.path.append("what shape has C_new-B_new?")
        shaped = self._shaped(strong_shape(view), "C")
        if shaped is not None:
            return shaped
        if known is not None:
            return self._end(*known, reason)
        weak = weak_shape(view)
        # T0 agreed: a broad tail that begins with the update is the update.
        if weak is not None and not (fingerprint == "partial update" and weak.kind is Kind.TAIL):
            return self._end(weak.kind, "C", weak.detail, weak.candidates)
        if fingerprint == "partial update":
            return self._end(Kind.PARTIAL_UPDATE, "B", reason)
        gap = self._difference(b, c, "B_new-C_new").mae
        return self._faint(gap, view) if gap < _FAINT * self.limit else self._end(Kind.CROSS_ENGINE, "", reason)
