"""What each diagnosis means: the part to inspect and the next experiment, in words. Data and one constructor."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any, Final, Literal, NoReturn, TypeAlias

from syncguard.errors import ExitCode

Side: TypeAlias = Literal["", "A", "B", "C", "D"]


class Kind(str, Enum):
    """What the scores point at."""

    AGREEMENT = "agreement"
    NO_POWER = "no power"
    AMBIGUOUS = "ambiguous"
    INCOMPLETE = "incomplete"
    DEFINITION = "score definition"
    UNSTABLE = "unstable repeats"
    OFFSET = "constant offset"
    SHIFT = "shift by one"
    MASK = "mask misaligned"
    ZERO_PADDING = "zero padding"
    TEMPERATURE = "temperature"
    RETOKENIZED = "retokenized ids"
    OUTLIER = "single outlier"
    ROUTING = "expert routing"
    TAIL = "heavy tail"
    DECODE_PATH = "decode versus prefill"
    EXTRACTION = "score extraction"
    CROSS_ENGINE = "rollout versus trainer"
    TRAINING_FORWARD = "training forward"
    STALE_WEIGHTS = "stale weights"
    PARTIAL_UPDATE = "partial update"
    TRAINER_STATE = "trainer scored another version"
    STALE_PREFIX_CACHE = "stale prefix cache"

    def __bool__(self) -> NoReturn:
        """Refuse: a diagnosis is compared by name, never by truth."""
        raise TypeError("a diagnosis has no truth value; compare it with Kind.AGREEMENT")


@dataclass(frozen=True, slots=True)
class Advice:
    """What to do about a diagnosis.

    Attributes:
        meaning: One sentence in words.
        inspect_next: The part to look at.
        next_experiment: What to run to confirm or refute it.
    """

    meaning: str
    inspect_next: str
    next_experiment: str


ADVICE: Final[dict[Kind, Advice]] = {
    Kind.AGREEMENT: Advice(
        "All paths agree within their measured noise.",
        "nothing here",
        "carry this record across the next update, so that agreement is shown for new weights too",
    ),
    Kind.NO_POWER: Advice(
        "All paths agree, but a worker that kept the old weights would have looked the same.",
        "the digests, which do not depend on the size of the update",
        "replay other saved responses and keep those whose C_new-C_old is large, or wait for a larger update",
    ),
    Kind.AMBIGUOUS: Advice(
        "More than one explanation fits.",
        "the candidates named, cheapest first",
        "collect more responses (the gap is compared with noise per token), then run the test that separates the candidates",
    ),
    Kind.INCOMPLETE: Advice(
        "Evidence is missing, so nothing can be concluded.",
        "the capture: which pass was not taken, and why",
        "take B twice with a confirmed flush before each pass, and C twice in eval mode",
    ),
    Kind.DEFINITION: Advice(
        "The paths report log-probabilities of different distributions, which must not be subtracted.",
        "where each side takes its scores: before or after temperature, filters and penalties",
        "score the same full-vocabulary logit rows as log_softmax(z) and as log_softmax(z/T), and see which one each side returns "
        "(diagnose --check-definition)",
    ),
    Kind.UNSTABLE: Advice(
        "A path does not repeat its own answer, so gaps between paths cannot be read.",
        "batch composition, reduction order, atomics, router-mediated worker choice on that path",
        "repeat on one fixed worker with deterministic settings, five passes, all pairs; vary one setting at a time",
    ),
    Kind.OFFSET: Advice(
        "One number was added to the scores after they were computed; weights or kernels cannot do that.",
        "the code between the engine's scores and the record: indexing, first-token handling, post-processing of the scores",
        "capture the scores right after they are computed and again where they are used, in one and the same call",
    ),
    Kind.SHIFT: Advice(
        "The scores are right but belong to the neighbouring token.",
        "the target shift: logits[:, j] score input_ids[:, j + 1]",
        "print ids beside scores for the first three and last three response tokens on both sides",
    ),
    Kind.MASK: Advice(
        "Scores were cut out with a mask that is not aligned with their targets.",
        "where the loss mask is applied: it must move with the targets, and after extraction, not before",
        "keep every response score, and apply one mask to A, B and C alike",
    ),
    Kind.ZERO_PADDING: Advice(
        "Missing scores were filled with 0, which says probability 1.",
        "the place that pads or replaces missing log-probabilities",
        "compare the number of scores with the number of response ids before any padding",
    ),
    Kind.TEMPERATURE: Advice(
        "The gap grows with the score itself, as if one side had divided its logits by the sampling temperature.",
        "temperature handling in both scoring paths; dividing a finished log-probability by T is wrong as well",
        "score the same full-vocabulary logit rows as log_softmax(z) and as log_softmax(z/T) (diagnose --check-definition)",
    ),
    Kind.RETOKENIZED: Advice(
        "From one position on, the sides scored different tokens or a different prefix.",
        "any step that turns ids into text and back: chat templates, multi-turn joins, servers that re-encode",
        "compare the ids that each side really scored, position by position",
    ),
    Kind.OUTLIER: Advice(
        "Single tokens differ, all others agree: not a wrong weight, which would move all of them.",
        "these tokens: do repeats move them, is their probability tiny, does their expert routing flip?",
        "repeat the pass five times and compare these tokens over all pairs",
    ),
    Kind.ROUTING: Advice(
        "A share of the tokens differs much while most agree, in a mixture-of-experts model: routers that flip do that.",
        "expert ids and routing weights on both sides",
        "compare expert ids and routing weights (syncguard inside), then dispatch order and accumulation",
    ),
    Kind.TAIL: Advice(
        "A share of the tokens differs much while most agree, in a model without recorded experts.",
        "attention over packed or padded positions, and kernels that depend on length",
        "sort the tokens that differ by position and by segment; replay without packing",
    ),
    Kind.DECODE_PATH: Advice(
        "Decode and prefill of one engine disagree without a simple shape.",
        "incremental decode: its cache, batch, graph capture, attention backend; where A and C agree, the prefill path",
        "teacher-force the saved response through incremental decode (capture --decode), and vary one of them at a time",
    ),
    Kind.EXTRACTION: Advice(
        "Decoding the saved tokens again gives the prefill's scores, so the recorded A was altered on its way.",
        "the path from the engine's answer to the record",
        "compare the engine's raw answer with what reached the trainer",
    ),
    Kind.CROSS_ENGINE: Advice(
        "Rollout agrees with itself and not with the trainer: two policy states, or two different computations.",
        "resident weights first (digests), then the score definition, then the model's intermediate outputs",
        "audit the worker's digests; if they are equal, look inside both sides on this record (syncguard inside)",
    ),
    Kind.TRAINING_FORWARD: Advice(
        "The frozen forward agrees, the gradient-enabled one does not.",
        "dropout, recomputation, routing under training mode",
        "compare both forwards before the optimizer step, with each of these off in turn",
    ),
    Kind.STALE_WEIGHTS: Advice(
        "The trainer's scores moved with the update and the worker's did not: it still holds the old weights.",
        "export, transfer, installation and readiness of this update, and who set the version label",
        "audit the worker's digests against the manifests of both versions; push again, then replay",
    ),
    Kind.PARTIAL_UPDATE: Advice(
        "The worker made only a part of the change, or another one: some tensors are old or wrong.",
        "which tensors and ranks took the update",
        "audit the worker's digests per tensor and rank",
    ),
    Kind.TRAINER_STATE: Advice(
        "The worker moved with the update and the trainer's scores did not: they come from another version.",
        "which model object scored C: actor, reference model, or an older snapshot",
        "score C again right after the optimizer step with the exported state",
    ),
    Kind.STALE_PREFIX_CACHE: Advice(
        "With a warm prefix cache the worker scores differently: keys and values of other weights are still cached.",
        "the flush after the update, and whether it was confirmed or refused because requests were pending",
        "flush, confirm, and replay warm again; salt the cache with the weight version",
    ),
}

_EXIT: Final[dict[Kind, ExitCode]] = {
    Kind.AGREEMENT: ExitCode.OK,
    Kind.NO_POWER: ExitCode.WARNING,
    Kind.AMBIGUOUS: ExitCode.WARNING,
    Kind.INCOMPLETE: ExitCode.INCOMPLETE,
}


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """A diagnosis with its evidence.

    Attributes:
        kind: What the scores point at.
        side: The path that stands apart: A, B, C, D or none.
        reason: What was seen, with numbers.
        evidence: Figures in the order in which they were looked at, each with its subtraction order.
        inspect_next: The part to look at.
        next_experiment: What to run to confirm or refute it.
        path_taken: Questions of the decision map that were asked, in order, with their answers where they have one.
        candidates: Explanations that fit, where the kind is ambiguous.
        limit_nats: MAE under which two paths were taken to agree.
    """

    kind: Kind
    side: Side
    reason: str
    evidence: tuple[str, ...]
    inspect_next: str
    next_experiment: str
    path_taken: tuple[str, ...]
    candidates: tuple[str, ...] = ()
    limit_nats: float = 0.01

    def __bool__(self) -> NoReturn:
        """Refuse: a diagnosis is read, never tested for truth."""
        raise TypeError("a diagnosis has no truth value; compare its kind")

    @property
    def exit_code(self) -> ExitCode:
        """Exit code of a command that ends with this diagnosis."""
        return _EXIT.get(self.kind, ExitCode.MISMATCH)

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {**asdict(self), "kind": self.kind.value, "meaning": ADVICE[self.kind].meaning}


def conclude(
    kind: Kind,
    side: Side,
    detail: str,
    evidence: tuple[str, ...],
    path: tuple[str, ...],
    candidates: tuple[str, ...] = (),
) -> Diagnosis:
    """Return a diagnosis with the advice that belongs to its kind."""
    advice = ADVICE[kind]
    said = f"{detail}; fits: {', or '.join(candidates)}" if candidates else detail
    return Diagnosis(
        kind, side, said or advice.meaning, evidence, advice.inspect_next, advice.next_experiment, path, candidates
    )
