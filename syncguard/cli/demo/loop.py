"""The demo's loop: real optimizer steps, pushes that go well or wrong on purpose, and the verdict after each.

Each step says beforehand what must come out; the demo fails when something else does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from syncguard.cli.demo.rigs import PushPath, Rig
from syncguard.cli.demo.trainer import Trainer, balanced_rewards
from syncguard.export.stream import ManifestBuilder
from syncguard.gate.client import WorkerVerdict
from syncguard.gate.controller import Gate
from syncguard.manifest.model import Manifest
from syncguard.manifest.verdict import FindingCode, ReadinessState
from syncguard.replay import Diagnosis, ReplayPolicy, ReplayRecord, c_key, diagnose
from syncguard.replay.record import A
from syncguard.spec import WeightVersion

if TYPE_CHECKING:
    import torch

    from syncguard.spec import Box

    Weights = Mapping[str, torch.Tensor]

RUN_ID = "demo"
PROMPT_IDS = (5, 9, 17, 33, 64, 12)
RESPONSE_LENGTH = 48
"""Tokens; enough for the tails to show."""
OFFSET_NATS = 0.10
"""What Cases 1 and 2 subtract from stored scores."""


@dataclass(frozen=True, slots=True)
class Step:
    """One step with what must come of it.

    Attributes:
        name: Short name.
        does: What happens, in words.
        expects: Readiness that must follow.
        codes: Finding codes that must be among the findings.
        side: Side that the diagnosis must name, for steps that alter scores: `A` or `C`.
    """

    name: str
    does: str
    expects: ReadinessState
    codes: frozenset[FindingCode] = frozenset()
    side: str = ""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What came of a step.

    Attributes:
        step: The step.
        version: Weight version label.
        outcome: Verdict, replay and readiness of the worker.
        wrong: What is not as the step expects; empty when all is.
        diagnosis: Three-way diagnosis of the record.
        push_s: Seconds of the push.
        verify_s: Seconds of the verification, as the trainer saw them.
        stale: Tensors named stale.
        held_back: Tensors that the step held back on purpose and that differ from what the worker had.
    """

    step: Step
    version: str
    outcome: WorkerVerdict
    wrong: tuple[str, ...] = ()
    diagnosis: Diagnosis | None = None
    push_s: float = 0.0
    verify_s: float = 0.0
    stale: frozenset[str] = frozenset()
    held_back: frozenset[str] = frozenset()

    @property
    def record(self) -> ReplayRecord | None:
        """The record with this step's scores."""
        return self.outcome.record


@dataclass(slots=True)
class Loop:
    """Trainer, worker and gate of one run.

    Attributes:
        trainer: Makes the weights and C.
        rig: Holds them and makes A and B.
        gate: Judges.
        scratch: Folder for checkpoints.
        push_path: How complete pushes travel; faulty ones always use the tensor session.
        policy: Limits of the replay where the noise at an earlier state is known.
        first_policy: Limits where it is not: at T0, and for responses that were generated at the verified version.
        say: Called with what is going on.
    """

    trainer: Trainer
    rig: Rig
    gate: Gate
    scratch: Path
    push_path: PushPath
    policy: ReplayPolicy
    first_policy: ReplayPolicy
    say: Callable[[str], None] = lambda _text: None
    number: int = 0
    boxes: dict[str, tuple[Box, ...]] = field(default_factory=dict)
    batch: tuple[ReplayRecord, ...] = ()
    changed: frozenset[str] = frozenset()
    held: dict[str, torch.Tensor] = field(default_factory=dict)

    def run(self) -> Iterator[StepResult]:
        """Yield the result of each step."""
        yield self.first()
        yield self.update(Step("clean", "push T{n} whole", ReadinessState.READY))
        yield self.update(
            Step(
                "case 3",
                "skip the push of T{n}; the label says T{n}",
                ReadinessState.BLOCKED,
                frozenset({FindingCode.STALE, FindingCode.REPLAY_STALE}),
            ),
            push="skip",
        )
        yield self.update(Step("resumed", "synchronization resumes with T{n}", ReadinessState.READY))
        yield self.update(
            Step(
                "torn",
                "push half of the tensors of T{n}",
                ReadinessState.BLOCKED,
                frozenset({FindingCode.STALE, FindingCode.TORN}),
            ),
            push="half",
        )
        yield self.update(Step("repaired", "push T{n} whole", ReadinessState.READY))
        if self.rig.tp > 1:
            yield self.update(
                Step(
                    "one rank",
                    "rank 1 keeps what it has, the others get T{n}",
                    ReadinessState.BLOCKED,
                    frozenset({FindingCode.STALE}),
                ),
                push="one rank",
            )
            yield self.update(Step("repaired", "push T{n} whole", ReadinessState.READY))
        yield self.case_1()
        yield self.case_2()

    def first(self) -> StepResult:
        """Bring T0 to the worker, let it generate the one response, and prove T0."""
        step = Step("start", "push T0, generate one response and save it", ReadinessState.READY)
        version = WeightVersion(RUN_ID, 0)
        self.say("T0: push")
        self.gate.before_push(version)
        weights = self.trainer.export()
        push_s = self.push_whole(weights, str(version))
        self.boxes = self.gate.boxes()
        self.generate()
        record = _bare(self.carried)
        return self.judge(
            step, version, self.manifest(version, weights), self.with_trainer_scores(record, "new"), push_s
        )

    def update(self, step: Step, *, push: str = "whole") -> StepResult:
        """Take an optimizer step, push it well or badly, and judge."""
        self.number += 1
        version = WeightVersion(RUN_ID, self.number)
        step = replace(step, does=step.does.replace("{n}", str(self.number)))
        self.say(f"T{self.number}: optimizer step")
        before = self.carried
        # The sign of the two rewards alternates, so that the policy moves at each step and drifts nowhere.
        rewards = balanced_rewards(len(self.batch))
        report = self.trainer.train_step(self.batch, rewards if self.number % 2 else rewards[::-1])
        self.changed = frozenset(report.changed)
        weights = self.trainer.export()
        changed = frozenset(name for name, tensor in weights.items() if not _equal_bits(tensor, self.held.get(name)))
        self.say(f"T{self.number}: {step.does}")
        self.gate.before_push(version, before)
        started = time.perf_counter()
        held_back: frozenset[str] = frozenset()
        if push == "skip":
            self.rig.set_label(str(version))
            held_back = changed
        elif push == "half":
            names = sorted(weights)[::2]
            self.rig.push_tensors(weights, str(version), only=names)
            held_back = changed - set(names)
            self.held |= {name: weights[name].clone() for name in names}
        elif push == "one rank":
            self.rig.push_but_one_rank(weights, str(version), rank=1, kept=self.held)
            held_back = changed
        else:
            self.push_whole(weights, str(version))
        push_s = time.perf_counter() - started
        record = self.with_trainer_scores(before, "new")
        result = self.judge(step, version, self.manifest(version, weights), record, push_s, held_back)
        if result.outcome.readiness.state is ReadinessState.READY:
            self.generate()
        return result

    def case_1(self) -> StepResult:
        """Alter stored A only: B and C stay close, and A stands apart from position 1 on."""
        step = Step(
            "case 1",
            f"-{OFFSET_NATS:.2f} nat on stored A from position 1 on",
            ReadinessState.READY,
            side="A",
        )
        return self.altered(step, {A: 1})

    def case_2(self) -> StepResult:
        """Alter both C passes: A and B stay close, and C stands apart."""
        step = Step(
            "case 2",
            f"-{OFFSET_NATS:.2f} nat on both C passes",
            ReadinessState.BLOCKED,
            frozenset({FindingCode.REPLAY_MISMATCH}),
            side="C",
        )
        return self.altered(step, {c_key(0, "new"): 0, c_key(1, "new"): 0, c_key(0, "old"): 0, c_key(1, "old"): 0})

    def altered(self, step: Step, offsets: Mapping[Any, int]) -> StepResult:
        """Generate anew at the version that is resident, alter stored scores, and judge again."""
        self.number += 1
        version = WeightVersion(RUN_ID, self.number)
        self.say(f"T{self.number}: {step.does}")
        weights = self.trainer.export()
        self.changed = frozenset()
        self.gate.before_push(version)
        push_s = self.push_whole(weights, str(version))
        record = self.with_trainer_scores(self.capture(self.number), "new")
        scores = {key: values.copy() for key, values in record.scores.items()}
        for key, first in offsets.items():
            if key in scores:
                scores[key][first:] -= OFFSET_NATS
        return self.judge(step, version, self.manifest(version, weights), replace(record, scores=scores), push_s)

    def judge(
        self,
        step: Step,
        version: WeightVersion,
        manifest: Manifest,
        record: ReplayRecord,
        push_s: float,
        held_back: frozenset[str] = frozenset(),
    ) -> StepResult:
        """Verify, diagnose, and compare with what the step expects."""
        self.say(f"T{version.step}: verify")
        carried = any(key.state == "old" and key != A for key in record.scores)
        self.gate.replay_policy = self.policy if carried else self.first_policy
        started = time.perf_counter()
        self.gate.after_push(manifest, record)
        verify_s = time.perf_counter() - started
        (outcome,) = self.gate.verdicts()
        scored = outcome.record
        diagnosis = diagnose(scored, self.gate.replay_policy) if scored is not None else None
        stale = frozenset(f.fqn for f in outcome.verdict.findings if f.code in _STALE and f.fqn)
        result = StepResult(
            step, str(version), outcome, (), diagnosis, push_s, verify_s, stale=stale, held_back=held_back
        )
        return replace(result, wrong=tuple(_unexpected(result, self.rig.tp)))

    def push_whole(self, weights: Weights, label: str) -> float:
        """Push everything on the chosen path; return seconds."""
        started = time.perf_counter()
        if self.push_path is PushPath.DISK:
            folder = self.scratch / "checkpoint"
            self.trainer.save_checkpoint(folder)
            self.rig.push_folder(folder, label)
        else:
            self.rig.push_tensors(weights, label)
        self.held = {name: tensor.clone() for name, tensor in weights.items()}
        return time.perf_counter() - started

    def manifest(self, version: WeightVersion, weights: Weights) -> Manifest:
        """Digest the export, with the boxes of the worker's ranks as parts, so that a rank can be named."""
        builder = ManifestBuilder(version)
        for name, tensor in weights.items():
            builder.add(name, tensor, boxes=self.boxes.get(name, ()))
        return builder.build(changed=self.changed if self.number else None, source="demo trainer")

    @property
    def carried(self) -> ReplayRecord:
        """The response that is carried across the next update: generated at the last proven version, with C_old."""
        return self.batch[0]

    def generate(self) -> None:
        """Let the worker generate what the trainer learns from next; the first response is carried along."""
        self.say(f"T{self.number}: generate")
        first, second = (self.capture(2 * self.number + i) for i in (1, 2))
        self.batch = (self.with_trainer_scores(first, "old"), second)

    def capture(self, seed: int) -> ReplayRecord:
        """Let the worker generate one response with A."""
        return self.gate.capture(PROMPT_IDS, max_new_tokens=RESPONSE_LENGTH, seed=seed)

    def with_trainer_scores(self, record: ReplayRecord, state: str) -> ReplayRecord:
        """Return the record with two frozen forwards of the trainer at this state."""
        first, second = self.trainer.score_twice(record)
        return record.with_scores({c_key(0, state): first, c_key(1, state): second})  # type: ignore[arg-type]


_STALE = {FindingCode.STALE, FindingCode.REPLICA_DIFFERS}


def _bare(record: ReplayRecord) -> ReplayRecord:
    """Return the record with A only."""
    return replace(record, scores={A: record.scores[A]})


def _equal_bits(left: torch.Tensor, right: torch.Tensor | None) -> bool:
    return right is not None and bool((left == right).all())


def _unexpected(result: StepResult, tp: int) -> Iterator[str]:
    """Yield what is not as the step expects."""
    step, outcome = result.step, result.outcome
    if outcome.readiness.state is not step.expects:
        yield f"{outcome.readiness.state.value} instead of {step.expects.value}: {outcome.verdict.reason}"
    codes = {finding.code for finding in outcome.verdict.findings}
    missing = sorted(code.value for code in step.codes - codes)
    if missing:
        yield f"no finding {', '.join(missing)}"
    if result.held_back != result.stale:
        odd = sorted(result.held_back ^ result.stale)
        yield f"named stale and held back differ in {', '.join(odd[:3])}"
    ranks = {finding.rank for finding in outcome.verdict.findings if finding.code in _STALE and finding.fqn}
    if step.name == "one rank" and ranks != {f"tp1/{tp}"}:
        yield f"blamed {sorted(ranks)} instead of rank 1"
    if step.side and (result.diagnosis is None or result.diagnosis.side != step.side):
        found = "none" if result.diagnosis is None else f"{result.diagnosis.kind.value} on {result.diagnosis.side}"
        yield f"diagnosis {found} instead of a fault on {step.side}"
