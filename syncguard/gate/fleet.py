"""What only the whole fleet shows: one fault in many workers is a fault of the trainer, not of the workers. Pure."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

from syncguard.manifest.verdict import Finding, FindingCode, Severity, Verdict, VerdictStatus

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

ALL_STALE: Final = "fleet/all_stale"
ALL_ALIKE: Final = "fleet/all_alike"
FROZEN: Final = "fleet/frozen_export"
ONE_STALE: Final = "fleet/one_stale"
ONE_RANK: Final = "fleet/one_rank"
_TRAINER: Final = (ALL_STALE, ALL_ALIKE, FROZEN)
_WEIGHT_CODES: Final = frozenset(
    {
        FindingCode.STALE,
        FindingCode.SWAPPED,
        FindingCode.REARRANGED,
        FindingCode.CAST,
        FindingCode.SCALE_STALE,
        FindingCode.REPLICA_DIFFERS,
        FindingCode.UNKNOWN_CONTENT,
        FindingCode.SHAPE_DIFFERS,
        FindingCode.DTYPE_DIFFERS,
        FindingCode.NOT_HELD,
    }
)


def is_trainer_fault(finding: Finding) -> bool:
    """Return whether a fleet finding blames the trainer's side: push, export or quantizer."""
    return finding.resident in _TRAINER


def fleet_findings(wanted: str, verdicts: Sequence[tuple[str, Verdict | None]]) -> tuple[Finding, ...]:
    """Compare the workers' verdicts with each other.

    Args:
        wanted: Weight version label.
        verdicts: Worker and its verdict, None where there is none yet.

    Returns:
        Findings whose `resident` is the kind (`fleet/all_stale` …) and whose `worker` names who is concerned.
    """
    known = {worker: verdict for worker, verdict in verdicts if verdict is not None}
    wrong = {worker: v for worker, v in known.items() if v.status is VerdictStatus.MISMATCH}
    if not wrong:
        return ()
    found = []
    frozen = [w for w, v in wrong.items() if any(f.code is FindingCode.UNCHANGED for f in v.findings)]
    if frozen:
        found.append(
            _finding(
                FROZEN,
                FindingCode.UNCHANGED,
                f"the trainer says that tensors of {wanted} changed, but exported the bytes of the version before; "
                "look at the export, not at the workers",
                frozen,
            )
        )
    single = {worker: _single_rank(verdict) for worker, verdict in wrong.items()}
    everyone = len(wrong) == len(known) == len(verdicts) > 1
    if everyone and not any(single.values()):
        found += _of_all(wanted, wrong)
    others_match = any(v.status is VerdictStatus.MATCH for v in known.values())
    for worker, verdict in wrong.items():
        if single[worker]:
            text = f"rank {single[worker]} of {worker} alone is wrong; look at that rank's receiving side"
            found.append(_finding(ONE_RANK, FindingCode.TORN, text, [worker], single[worker]))
        elif others_match and _is_stale(verdict):
            text = f"{worker} is stale while others are not; look at its connection to the trainer"
            found.append(_finding(ONE_STALE, FindingCode.STALE, text, [worker]))
    return tuple(found)


def _of_all(wanted: str, wrong: Mapping[str, Verdict]) -> list[Finding]:
    """Return what it means when every worker is wrong, in all of its ranks."""
    if all(_is_stale(verdict) for verdict in wrong.values()):
        text = (
            f"all {len(wrong)} workers hold an older version than {wanted}: the trainer did not push, or pushed to "
            "nobody; look at the push call"
        )
        return [_finding(ALL_STALE, FindingCode.STALE, text, list(wrong))]
    patterns = {_pattern(verdict) for verdict in wrong.values()}
    if len(patterns) == 1 and patterns != {frozenset()}:
        text = (
            f"all {len(wrong)} workers agree with each other but not with the manifest of {wanted}; look at the export "
            "or the quantizer, not at the workers"
        )
        return [_finding(ALL_ALIKE, FindingCode.UNKNOWN_CONTENT, text, list(wrong))]
    return []


def _finding(kind: str, code: FindingCode, text: str, workers: Sequence[str], rank: str = "") -> Finding:
    return Finding(code, Severity.MISMATCH, text, worker=", ".join(workers), rank=rank, resident=kind)


def _is_stale(verdict: Verdict) -> bool:
    """Return whether staleness explains all differences of weights."""
    codes = Counter(f.code for f in verdict.findings if f.code in _WEIGHT_CODES)
    return bool(codes) and set(codes) <= {FindingCode.STALE, FindingCode.SCALE_STALE}


def _pattern(verdict: Verdict) -> frozenset[tuple[str, str, str, str]]:
    return frozenset((f.code.value, f.fqn, f.box, f.observed) for f in verdict.findings if f.code in _WEIGHT_CODES)


def _single_rank(verdict: Verdict) -> str:
    """Return the one rank of several that all differences of weights are on; empty when they are on more."""
    ranks = {f.rank for f in verdict.findings if f.code in _WEIGHT_CODES}
    if len(ranks) != 1:
        return ""
    (rank,) = ranks
    return "" if not rank or rank.startswith("tp0/1") or "," in rank else rank
