"""What a score means, and how the score of a saved token is taken out of logits.

A score is the natural logarithm of a probability, in nats. Which probability is data: a `ScoreDefinition` travels
with the numbers, and scores of two definitions are never subtracted. Everything here is numpy and pure.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from syncguard.errors import ScoreError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

FloatArray: TypeAlias = npt.NDArray[np.float64]
IntArray: TypeAlias = npt.NDArray[np.int64]
ScoreKind: TypeAlias = Literal["raw", "temperature", "behavior"]

SCORE_KINDS: Final[tuple[ScoreKind, ...]] = ("raw", "temperature", "behavior")


@dataclass(frozen=True, slots=True)
class ScoreDefinition:
    """The distribution whose log-probability was recorded.

    Attributes:
        kind: `raw` is the softmax of the logits, `temperature` the softmax of logits / temperature, `behavior` the
            distribution that tokens were really drawn from, after filters and penalties.
        temperature: Divisor of the logits; 1 for `raw`.
        top_k: Number of tokens kept; -1 keeps all.
        top_p: Probability mass kept; 1 keeps all.
        min_p: Smallest share of the largest probability kept; 0 keeps all.
        repetition_penalty: Multiplicative penalty; 1 is none.
        frequency_penalty: Additive penalty per occurrence; 0 is none.
        presence_penalty: Additive penalty for any occurrence; 0 is none.
    """

    kind: ScoreKind = "raw"
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0

    def __post_init__(self) -> None:
        """Refuse a definition that contradicts itself."""
        if self.kind not in SCORE_KINDS:
            raise ScoreError("unknown score definition", expected=" ".join(SCORE_KINDS), found=repr(self.kind))
        numbers = [value for name, value in asdict(self).items() if name != "kind"]
        if not all(math.isfinite(value) for value in numbers) or self.temperature <= 0:
            raise ScoreError(
                "score definition without meaning", expected="finite numbers, temperature above 0", found=str(self)
            )
        untouched = ScoreDefinition if self.kind == "raw" else None
        if untouched is not None and numbers != [1.0, -1, 1.0, 0.0, 1.0, 0.0, 0.0]:
            raise ScoreError(
                "a raw score has no temperature, filter or penalty",
                expected="kind='temperature' or 'behavior' for these settings",
                found=str(self),
                todo="state which distribution the engine reports",
            )
        if self.kind == "temperature" and numbers[1:] != [-1, 1.0, 0.0, 1.0, 0.0, 0.0]:
            raise ScoreError(
                "a temperature-adjusted score has no filter or penalty",
                expected="kind='behavior' for these settings",
                found=str(self),
                todo="state which distribution the engine reports",
            )

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> ScoreDefinition:
        """Read back what `as_dict` wrote.

        Raises:
            ScoreError: A field is unknown, of the wrong type, or contradicts another.
        """
        defaults = asdict(cls())
        kept: dict[str, object] = {}
        for name, value in values.items():
            if name not in defaults or isinstance(value, bool) or not isinstance(value, str | int | float):
                raise ScoreError("unknown part of a score definition", expected=" ".join(defaults), found=name)
            if isinstance(value, str) != isinstance(defaults[name], str):
                raise ScoreError("score definition of a wrong type", where=name, found=repr(value))
            kept[name] = int(value) if name == "top_k" else value
        return cls(**kept)  # type: ignore[arg-type]

    def as_dict(self) -> dict[str, str | int | float]:
        """Return all fields, for metadata and JSON."""
        return asdict(self)

    def __str__(self) -> str:
        """Return the kind and the settings that differ from none, such as `temperature(temperature=0.8)`."""
        plain = {"temperature": 1.0, "top_k": -1, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
        plain |= {"frequency_penalty": 0.0, "presence_penalty": 0.0}
        changed = [f"{name}={getattr(self, name):g}" for name, none in plain.items() if getattr(self, name) != none]
        return f"{self.kind}({', '.join(changed)})" if changed else self.kind


RAW: Final = ScoreDefinition()
"""Softmax of the logits: the definition in which engines are compared."""


def require_same_definition(left: ScoreDefinition, right: ScoreDefinition, *, label: str) -> None:
    """Refuse to subtract scores of two definitions.

    Args:
        left: Definition of the first operand.
        right: Definition of the second operand.
        label: Subtraction order, such as `B-C`.

    Raises:
        ScoreError: The definitions differ.
    """
    if left != right:
        raise ScoreError(
            f"{label} would subtract scores of different definitions",
            expected=str(left),
            found=str(right),
            todo="record raw scores on both sides, or compare log_softmax(z) with log_softmax(z/T) on the same logits",
        )


def checked_scores(values: npt.ArrayLike, *, label: str, count: int | None = None) -> FloatArray:
    """Return scores as a read-only float64 array, or refuse them.

    Args:
        values: Response-aligned log-probabilities, in nats.
        label: Name of the scores, for the error.
        count: Response length that the array must have, where known.

    Raises:
        ScoreError: Not one-dimensional, of another length, or with a missing or non-finite value.
    """
    try:
        scores = np.array(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ScoreError(f"scores {label} hold a missing value", expected="numbers", found=str(error)) from error
    if scores.ndim != 1 or (count is not None and scores.shape != (count,)):
        raise ScoreError(
            f"scores {label} do not line up with the response",
            expected=f"({'n' if count is None else count},)",
            found=scores.shape,
            todo="keep one score per response token, before any loss mask",
        )
    bad = np.flatnonzero(~np.isfinite(scores))
    if bad.size:
        raise ScoreError(
            f"scores {label} are not finite",
            expected="finite nats on every response token",
            found=f"{scores[bad[0]]} and {bad.size - 1} more",
            where=f"response position {bad[0]}",
            todo="look for a filtered token (top-k/top-p) or an overflow; never replace it by a number",
        )
    scores.flags.writeable = False
    return scores


def logsumexp_rows(rows: npt.ArrayLike) -> FloatArray:
    """Return log(sum(exp(row))) of each row, stable for any finite row.

    Args:
        rows: [rows, vocabulary] logits.
    """
    values = np.asarray(rows, dtype=np.float64)
    top = values.max(axis=-1)
    return np.asarray(top + np.log(np.exp(values - top[..., None]).sum(axis=-1)), dtype=np.float64)


def response_scores_from_logits(
    logits: npt.ArrayLike, input_ids: Sequence[int] | IntArray, prompt_length: int, *, temperature: float = 1.0
) -> FloatArray:
    """Return the log-probability of each response token from the logits of the whole sequence.

    Row j predicts token j + 1, so the rows used are `prompt_length - 1 … length - 2`.

    Args:
        logits: [length, vocabulary], any float dtype; computed on in float64.
        input_ids: [length] prompt and response token ids.
        prompt_length: Index of the first response token; at least 1, since nothing predicts token 0.
        temperature: Divisor of the logits before normalizing; 1 gives raw scores.

    Returns:
        float64 [length - prompt_length], in nats.

    Raises:
        ScoreError: Shapes disagree, an id is outside the vocabulary, or a score is not finite.
    """
    rows = np.asarray(logits)
    ids = np.asarray(input_ids, dtype=np.int64)
    if rows.ndim != 2 or ids.shape != rows.shape[:1]:  # noqa: PLR2004 - rows and vocabulary
        raise ScoreError("logits do not cover the sequence", expected=f"[{ids.size}, vocabulary]", found=rows.shape)
    if not 1 <= prompt_length < ids.size:
        raise ScoreError(
            "no prediction row for the response", expected=f"prompt_length in 1..{ids.size - 1}", found=prompt_length
        )
    targets = ids[prompt_length:]
    if targets.min() < 0 or targets.max() >= rows.shape[1]:
        raise ScoreError(
            "token id outside the vocabulary", expected=f"0..{rows.shape[1] - 1}", found=int(targets.max())
        )
    predictions = rows[prompt_length - 1 : -1].astype(np.float64) / temperature
    chosen = predictions[np.arange(targets.size), targets]
    return checked_scores(chosen - logsumexp_rows(predictions), label="from logits")


@dataclass(frozen=True, slots=True)
class DefinitionCheck:
    """Which definition of the same logit rows a set of scores fits.

    Attributes:
        closest: `raw`, `temperature`, or `divided` (a finished log-probability divided by T, which is no distribution).
        mae_nats: Mean absolute error to each of them.
        apart_nats: MAE between `raw` and `temperature`; a check is worth nothing when this is near zero.
    """

    closest: str
    mae_nats: Mapping[str, float]
    apart_nats: float


def check_definition(
    scores: npt.ArrayLike,
    logits: npt.ArrayLike,
    input_ids: Sequence[int] | IntArray,
    prompt_length: int,
    *,
    temperature: float,
) -> DefinitionCheck:
    """Compare scores with `log_softmax(z)` and `log_softmax(z / T)` of the very same full-vocabulary rows.

    The rows are one side's own logits, so nothing upstream of the scoring formula can make a difference.

    Args:
        scores: [response] scores that the side reported.
        logits: [length, vocabulary] logits of the same side.
        input_ids: [length] ids.
        prompt_length: Index of the first response token.
        temperature: Temperature in question.

    Raises:
        ScoreError: Shapes disagree or a score is not finite.
    """
    raw = response_scores_from_logits(logits, input_ids, prompt_length)
    heated = response_scores_from_logits(logits, input_ids, prompt_length, temperature=temperature)
    reported = checked_scores(scores, label="reported", count=raw.size)
    forms = {"raw": raw, "temperature": heated, "divided": raw / temperature}
    errors = {name: float(np.abs(reported - form).mean()) for name, form in forms.items()}
    return DefinitionCheck(min(errors, key=lambda name: errors[name]), errors, float(np.abs(raw - heated).mean()))


def combine_normalizers(shard_normalizers: npt.ArrayLike) -> FloatArray:
    """Return the global normalizer of logits whose vocabulary is split over ranks.

    Args:
        shard_normalizers: [shards, rows], the logsumexp of each shard's own columns.

    Returns:
        float64 [rows]. Using one shard's normalizer alone scores another distribution.
    """
    return logsumexp_rows(np.asarray(shard_normalizers, dtype=np.float64).T)


def scores_from_vocabulary_shards(
    shards: Sequence[npt.ArrayLike], first_columns: Sequence[int], targets: Sequence[int] | IntArray
) -> FloatArray:
    """Return target scores from vocabulary-parallel logits with one global normalizer.

    Args:
        shards: Per rank [rows, columns] logits; row i predicts `targets[i]`. Padding columns must be cut off or -inf.
        first_columns: Per rank, vocabulary index of its first column.
        targets: [rows] token ids.

    Raises:
        ScoreError: A target lies in no shard or in two.
    """
    wanted = np.asarray(targets, dtype=np.int64)
    chosen = np.zeros(wanted.size)
    owners = np.zeros(wanted.size, dtype=np.int64)
    parts = [np.asarray(shard, dtype=np.float64) for shard in shards]
    for part, first in zip(parts, first_columns, strict=True):
        mine = (wanted >= first) & (wanted < first + part.shape[1])
        owners += mine
        chosen[mine] = part[mine, wanted[mine] - first]
    wrong = np.flatnonzero(owners != 1)
    if wrong.size:
        raise ScoreError(
            "target not in exactly one vocabulary shard",
            expected="one owner",
            found=f"{owners[wrong[0]]} owners",
            where=f"token id {wanted[wrong[0]]}",
        )
    normalizers = combine_normalizers([logsumexp_rows(part) for part in parts])
    return checked_scores(chosen - normalizers, label="from vocabulary shards")


def check_returned_ids(saved: Sequence[int] | IntArray, returned: Sequence[int] | IntArray, vocab_size: int) -> None:
    """Refuse scores that belong to other tokens than the saved ones.

    SGLang 0.5.23 reports the id `vocab_size - 1` as 0 in `input_token_logprobs` (logprob_result_processor.py:54),
    so a returned 0 is accepted where the saved id is the last of the vocabulary, and only there.

    Args:
        saved: [response] ids of the record.
        returned: [response] ids that came back with the scores.
        vocab_size: Size of the vocabulary that the engine reports with.

    Raises:
        ScoreError: Lengths differ or an id differs.
    """
    ours, theirs = np.asarray(saved, dtype=np.int64), np.asarray(returned, dtype=np.int64)
    if ours.shape != theirs.shape:
        raise ScoreError(
            "the engine scored another number of tokens",
            expected=ours.size,
            found=theirs.size,
            todo="check logprob_start_len and that the text was not tokenized again",
        )
    clamped = (ours == vocab_size - 1) & (theirs == 0)
    wrong = np.flatnonzero((ours != theirs) & ~clamped)
    if wrong.size:
        at = int(wrong[0])
        raise ScoreError(
            "the engine scored other tokens than the saved ones",
            expected=f"id {ours[at]}",
            found=f"id {theirs[at]} ({wrong.size} of {ours.size} differ)",
            where=f"response position {at}",
            todo="send the saved ids, never text; check the alignment of the returned list",
        )


def restore_order(parts: Sequence[Mapping[int, npt.ArrayLike]], count: int) -> list[FloatArray]:
    """Put per-sample scores that data-parallel ranks return back into the order of the samples.

    Args:
        parts: Per rank, sample index → response-aligned scores.
        count: Number of samples.

    Raises:
        ScoreError: A sample is missing or was returned twice.
    """
    found: dict[int, FloatArray] = {}
    for rank, part in enumerate(parts):
        for index, values in part.items():
            if index in found:
                raise ScoreError("a sample was scored by two ranks", where=f"rank {rank}", found=f"sample {index}")
            found[index] = checked_scores(values, label=f"sample {index}")
    if sorted(found) != list(range(count)):
        missing = sorted(set(range(count)) - set(found))
        raise ScoreError("samples without scores", expected=f"samples 0..{count - 1}", found=f"missing {missing}")
    return [found[index] for index in range(count)]
