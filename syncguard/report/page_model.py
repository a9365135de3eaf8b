"""What the page shows, as plain values: verdicts and records in, strings and plots out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from syncguard.errors import ExitCode
from syncguard.replay.compare import Difference, compare_scores, objective_effect
from syncguard.replay.diagnose import diagnose
from syncguard.replay.evidence import ReplayEvidence
from syncguard.replay.explain import ADVICE, Diagnosis, Kind
from syncguard.replay.judge import judge_replay
from syncguard.replay.policy import ReplayPolicy
from syncguard.replay.record import A, b_key, c_key
from syncguard.replay.run import summarize_run
from syncguard.report import figures
from syncguard.report.terminal import pairs_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from syncguard.replay.record import ReplayRecord

FINDINGS_SHOWN: Final = 60
FINDINGS_OPEN: Final = 8
RECORDS_DRAWN: Final = 12
WIDE_FROM: Final = figures.WIDE_FROM
_WORST_SHOWN: Final = 4

_TONES: Final = {
    "READY": "good",
    "MATCH": "good",
    "PASS": "good",
    "BLOCKED": "bad",
    "MISMATCH": "bad",
    "FAIL": "bad",
    "UNSUPPORTED": "bad",
}
_MAP: Final[tuple[tuple[str, tuple[Kind, ...]], ...]] = (
    ("Do all paths score the same tokens, with one definition?", (Kind.DEFINITION, Kind.RETOKENIZED)),
    ("Are there two passes of B and of C at one state?", (Kind.INCOMPLETE,)),
    ("Do repeats agree (B0-B1, C0-C1)?", (Kind.UNSTABLE,)),
    (
        "Which of A, B and C stands apart where the response was generated, and in what shape?",
        (
            Kind.ZERO_PADDING,
            Kind.MASK,
            Kind.SHIFT,
            Kind.OFFSET,
            Kind.TEMPERATURE,
            Kind.RETOKENIZED,
            Kind.OUTLIER,
            Kind.ROUTING,
            Kind.TAIL,
            Kind.DECODE_PATH,
            Kind.EXTRACTION,
            Kind.CROSS_ENGINE,
            Kind.TRAINING_FORWARD,
            Kind.AMBIGUOUS,
        ),
    ),
    (
        "After the update: did B make the change that C made, cold and warm?",
        (
            Kind.STALE_WEIGHTS,
            Kind.PARTIAL_UPDATE,
            Kind.TRAINER_STATE,
            Kind.STALE_PREFIX_CACHE,
            Kind.NO_POWER,
            Kind.UNSTABLE,
            Kind.OFFSET,
            Kind.CROSS_ENGINE,
            Kind.AMBIGUOUS,
        ),
    ),
    ("Nothing stands apart", (Kind.AGREEMENT,)),
)
_UPDATE_NODE: Final = 4
_LAST_NODE: Final = 5


def tone_of(word: str) -> str:
    """Return the colour class of a readiness, status or replay outcome; anything unknown is a warning, never good."""
    return _TONES.get(str(word).upper().rpartition(".")[2], "warn")


def tone_of_diagnosis(diagnosis: Diagnosis) -> str:
    """Return the colour class of a diagnosis."""
    if diagnosis.exit_code == ExitCode.OK:
        return "good"
    return "warn" if diagnosis.exit_code in {ExitCode.WARNING, ExitCode.INCOMPLETE} else "bad"


def _nats(value: Any) -> str:
    if value is None:
        return ""
    number = float(value)
    return f"{number:.6f}" if number == 0 or abs(number) >= 1e-5 else f"{number:.2e}"  # noqa: PLR2004 - six decimals


def figure_row(figure: Mapping[str, Any]) -> dict[str, str]:
    """Return the cells of one difference, as `Difference.as_dict` gives it."""
    signed = figure.get("signed_mean")
    return {
        "label": str(figure.get("label", "")),
        "signed_mean": "" if signed is None else ("-" if float(signed) < 0 else "+") + _nats(abs(float(signed))),
        "mae": _nats(figure.get("mae")),
        "p95": _nats(figure.get("p95")),
        "p99": _nats(figure.get("p99")),
        "maximum": _nats(figure.get("maximum")),
        "first": _nats(figure.get("first_mae")),
        "rest": _nats(figure.get("rest_mae")),
        "count": str(figure.get("count", "")),
    }


def _first(values: Mapping[str, Any], *names: str) -> str:
    return next((str(values[name]) for name in names if values.get(name) not in {None, ""}), "")


def finding_row(finding: Mapping[str, Any]) -> dict[str, str]:
    """Return the cells of one finding; the names of verdict JSON and those of a demonstration are both known."""
    text = _first(finding, "message", "text", "reason")
    expected, found, following = (
        _first(finding, "expected"),
        _first(finding, "observed", "found"),
        _first(finding, "next", "todo", "look_at"),
    )
    if expected or found:
        text += f" (expected {expected or 'nothing'}, found {found or 'nothing'})"
    return {
        "kind": _first(finding, "kind", "code"),
        "tensor": _first(finding, "tensor", "fqn", "resident"),
        "box": _first(finding, "box"),
        "rank": _first(finding, "rank"),
        "text": f"{text} {following}".strip(),
    }


def step_model(step: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the page shows of one step; a step without readiness or status is shown as unknown."""
    findings = list(step.get("findings") or [])
    replay = step.get("replay") or None
    readiness = _first(step, "readiness", "status") or "UNKNOWN"
    status = _first(step, "status")
    reason = _first(step, "message", "reason")
    timings = step.get("timings") or {}
    return {
        "name": _first(step, "step", "name") or "update",
        "worker": _first(step, "worker"),
        "version": _first(step, "version", "weight_version"),
        "readiness": readiness,
        "tone": tone_of(readiness),
        "status": status if status != readiness else "",
        "expected": _first(step, "expected", "planned"),
        "reason": reason,
        "messages": [text for text in (_first(step, "reason"), _first(step, "note")) if text and text != reason],
        "findings": [finding_row(one) for one in findings[:FINDINGS_OPEN]],
        "more_findings": [finding_row(one) for one in findings[FINDINGS_OPEN:FINDINGS_SHOWN]],
        "hidden_findings": max(0, len(findings) - FINDINGS_SHOWN),
        "replay": None if replay is None else _replay_model(replay),
        "timings": [(str(name), _seconds(value)) for name, value in timings.items()],
    }


def _seconds(value: Any) -> str:
    return f"{float(value):.3f} s" if isinstance(value, int | float) else str(value)


def _replay_model(replay: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "status": _first(replay, "status") or "UNKNOWN",
        "fingerprint": _first(replay, "fingerprint"),
        "reason": _first(replay, "reason"),
        "limit_reason": _first(replay, "limit_reason"),
        "figures": [figure_row(one) for one in replay.get("figures") or []],
    }


def timeline_plot(steps: Sequence[Mapping[str, Any]]) -> str:
    """Return the plot of replays across steps; empty where fewer than two were measured."""
    measured = [step for step in steps if (step.get("replay") or {}).get("figures")]
    if len(measured) < 2:  # noqa: PLR2004 - a line needs two
        return ""

    def mae(step: Mapping[str, Any], label: str) -> float:
        found = [one for one in step["replay"]["figures"] if one.get("label") == label]
        return float(found[0]["mae"]) if found else float("nan")

    limits = [step["replay"].get("limit_nats") for step in measured]
    return figures.update_timeline(
        [_first(step, "step", "name").partition(":")[0] for step in measured],
        np.array([mae(step, "B_new-C_new") for step in measured]),
        np.array([mae(step, "C_new-C_old") for step in measured]),
        np.array([float("nan") if limit is None else float(limit) for limit in limits]),
        [_first(step["replay"], "status") for step in measured],
    )


def steps_of_records(records: Sequence[ReplayRecord]) -> list[dict[str, Any]]:
    """Return one step per weight version that responses were carried to, judged over all of them, in the order given.

    What the timeline shows where only records are at hand, without the verdicts of agents.
    """
    versions: dict[str, list[ReplayEvidence]] = {}
    for record in records:
        if record.at_one_state().passes("C", "new"):
            versions.setdefault(record.versions.get("new", ""), []).append(ReplayEvidence.from_record(record))
    rules = ReplayPolicy(require_warm=False)
    return [
        {"step": version or "no label", "replay": judge_replay(evidence, rules).as_dict()}
        for version, evidence in versions.items()
    ]


def record_model(record: ReplayRecord, decode: Callable[[int], str] | None, *, first: bool) -> dict[str, Any]:
    """Return what the page shows of one record: diagnosis, figures, plots, map, worst tokens, provenance."""
    found, record = diagnose(record), record.at_one_state()
    pairs = pairs_of(record) if record.loss_mask.any() else []
    differences = [compare_scores(left, right, record.loss_mask, label) for label, left, right in pairs]
    return {
        **record_row(record, found),
        "side": found.side,
        "about": f"{record.response_length} tokens, {int(record.loss_mask.sum())} in the loss",
        "meaning": ADVICE[found.kind].meaning,
        "inspect_next": found.inspect_next,
        "next_experiment": found.next_experiment,
        "figures": [figure_row(one.as_dict()) for one in differences],
        "plots": _plots(record, pairs, found.limit_nats),
        "map": map_model(found),
        "open": first,
        "worst": _worst(record, pairs, differences, decode),
        "facts": _facts(record),
    }


def record_row(record: ReplayRecord, found: Diagnosis) -> dict[str, str]:
    """Return the line of a record in an index."""
    tone = tone_of_diagnosis(found)
    return {"name": record.record_id or "record", "kind": found.kind.value, "tone": tone, "reason": found.reason}


_RUN_PAIRS: Final = (
    ("A-B", A, b_key(0, "old")),
    ("B-C", b_key(0, "old"), c_key(0, "old")),
    ("A-C", A, c_key(0, "old")),
    ("B0-B1", b_key(0, "old"), b_key(1, "old")),
    ("C0-C1", c_key(0, "old"), c_key(1, "old")),
    ("B_new-C_new", b_key(0, "new"), c_key(0, "new")),
)


def run_rows(records: Sequence[ReplayRecord]) -> list[dict[str, str]]:
    """Return the comparisons that all records of a run allow, each with an interval that resamples responses."""
    if len(records) < 2 or not all(record.loss_mask.any() for record in records):  # noqa: PLR2004 - a run
        return []
    rows = []
    for label, left, right in _RUN_PAIRS:
        if all(
            left in record.scores
            and right in record.scores
            and record.definition_of(left) == record.definition_of(right)
            for record in records
        ):
            found = summarize_run(records, left, right, label)
            interval = f"{_nats(found.interval.low)} to {_nats(found.interval.high)}"
            rows.append({**figure_row(found.difference.as_dict()), "interval": interval})
    return rows


def _plots(record: ReplayRecord, pairs: Sequence[tuple[str, Any, Any]], limit_nats: float) -> list[str]:
    if not pairs:
        return []
    active = record.loss_mask == 1
    cut = [(label, left[active], right[active]) for label, left, right in pairs]
    has_new = any(label.startswith("B_new") for label, _, _ in pairs)
    shown = ("B_new-C_new", "B_new_warm-B_new", "C_new-C_old") if has_new else ("A-B", "B-C", "A-C")
    chosen = [pair for pair in cut if pair[0] in shown] or cut
    positions = np.flatnonzero(active).astype(np.float64)
    return [
        figures.scatter([pair for pair in chosen if pair[0] not in {"A-C", "B_new_warm-B_new"}] or chosen),
        figures.error_by_position(chosen, positions, limit_nats),
        figures.histogram(chosen),
        figures.tails(chosen),
    ]


def map_model(found: Diagnosis) -> list[dict[str, Any]]:
    """Return the decision map: every question, every end, and which were reached."""
    last = _end_node(found)
    nodes = []
    for index, (question, ends) in enumerate(_MAP):
        reached = index < last and not (index == _UPDATE_NODE and last == _LAST_NODE and not _was_updated(found))
        css = "asked last" if index == last else "asked" if reached else ""
        tone = tone_of_diagnosis(found)
        shown = ends if index != last or found.kind in ends else (*ends, found.kind)
        marked = [
            {"name": kind.value, "css": tone if index == last and kind is found.kind else "none"} for kind in shown
        ]
        nodes.append({"question": question, "css": css, "ends": marked})
    return nodes


def _was_updated(found: Diagnosis) -> bool:
    return any(step.startswith("after the update") for step in found.path_taken)


def _end_node(found: Diagnosis) -> int:
    if found.kind is Kind.AGREEMENT:
        return _LAST_NODE
    if _was_updated(found):
        return _UPDATE_NODE
    return min(len(found.path_taken), _UPDATE_NODE) - 1


def _worst(
    record: ReplayRecord,
    pairs: Sequence[tuple[str, Any, Any]],
    differences: Sequence[Difference],
    decode: Callable[[int], str] | None,
) -> list[dict[str, str]]:
    rows = []
    for (label, left, right), found in zip(pairs, differences, strict=True):
        for token in found.worst[:_WORST_SHOWN]:
            token_id = int(record.response_ids[token.position])
            rows.append(
                {
                    "label": label,
                    "position": str(token.position),
                    "token_id": str(token_id),
                    "text": repr(decode(token_id))[1:-1] if decode is not None else "",
                    "left": f"{left[token.position]:.6f}",
                    "right": f"{right[token.position]:.6f}",
                    "difference": f"{token.difference:+.6f}",
                }
            )
    return rows


def _facts(record: ReplayRecord) -> list[tuple[str, str]]:
    facts = [
        ("worker", record.worker),
        ("weight versions", ", ".join(f"{state}: {label}" for state, label in record.versions.items())),
        ("model", record.model_revision),
        ("tokenizer", record.tokenizer_revision),
        ("score definition", str(record.definition)),
        ("sampling", ", ".join(f"{name}={value}" for name, value in record.sampling.items())),
        ("batch", ", ".join(record.batch)),
        ("scores", " ".join(map(str, record.scores))),
    ]
    a, c = record.passes("A"), record.passes("C", "old")
    if a and c and record.loss_mask.any() and record.definition_of(A) == record.definition_of(c_key(0, "old")):
        effect = objective_effect(c[0], a[0], record.loss_mask)
        facts.append(
            (
                "effect on the objective (ratio = exp(C-A))",
                (
                    f"mean ratio {effect.ratio_mean:.4f}, k1 {effect.k1:+.2e}, k2 {effect.k2:.2e}, k3 {effect.k3:.2e}, "
                    f"clipped at 0.2: {effect.clip_share:.1%}, effective sample size {effect.effective_sample_share:.1%}"
                ),
            )
        )
    return [(name, value) for name, value in facts if value]
