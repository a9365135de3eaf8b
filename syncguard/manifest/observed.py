"""First half of a comparison: is the observation of one state, complete, and is every resident element accounted for?

Pure. Each function returns findings; none is a reason to stop looking, so that a verdict names everything at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from syncguard.layout.coverage import ProblemKind, ResidentProblem
from syncguard.layout.model import RankLayout
from syncguard.manifest.claims import LayoutFacts, WorkerClaims, claims_of
from syncguard.manifest.model import Manifest, RankObservation, WorkerObservation
from syncguard.manifest.verdict import Coverage, Finding, FindingCode, Severity

RankPair = tuple[RankLayout, RankObservation]

TARGET = "target"
"""Role of the model whose tokens are served; a draft model only proposes, so it is listed as uncovered instead."""


def rank_findings(manifest: Manifest, observation: WorkerObservation) -> list[Finding]:
    """Check that all ranks answered, once each, from one finished update."""
    findings = []
    # A worker that understates itself is not believed: its ranks' own group sizes count too.
    answered = [rank.rank for rank in observation.ranks if rank.rank.role == TARGET]
    sizes = [rank.tp_size * rank.pp_size * rank.dp_size for rank in answered]
    expected_ranks = max([observation.expected_ranks, *sizes])
    if expected_ranks > len(set(answered)) or not answered:
        findings.append(
            Finding(
                FindingCode.MISSING_RANK,
                Severity.INCOMPLETE,
                f"{len(set(answered))} of {expected_ranks} ranks answered; look at the probe of the others",
                expected=str(expected_ranks),
                observed=", ".join(str(rank) for rank in answered) or "none",
            )
        )
    findings += [
        Finding(
            FindingCode.DUPLICATE_RANK,
            Severity.INCOMPLETE,
            f"{times} answers call themselves {identity}; look at the engine's rank numbering",
            rank=str(identity),
        )
        for identity, times in Counter(rank.rank for rank in observation.ranks).items()
        if times > 1
    ]
    if len({rank.epoch for rank in observation.ranks}) > 1:
        findings.append(
            Finding(
                FindingCode.EPOCH_DIFFERS,
                Severity.INCOMPLETE,
                "ranks have finished different numbers of updates; look at an update call that reached only some",
                observed=", ".join(f"{rank.rank}: {rank.epoch}" for rank in observation.ranks),
            )
        )
    for rank in observation.ranks:
        if rank.updating:
            findings.append(
                Finding(
                    FindingCode.UPDATE_RUNNING,
                    Severity.INCOMPLETE,
                    "an update session is open; end it, then verify again",
                    rank=str(rank.rank),
                )
            )
        if (rank.algorithm, rank.key_seed_hex) != (manifest.algorithm, manifest.key_seed_hex):
            findings.append(
                Finding(
                    FindingCode.ALGORITHM_DIFFERS,
                    Severity.INCOMPLETE,
                    "digests of another algorithm or key cannot be compared; install one version on both sides",
                    rank=str(rank.rank),
                    expected=manifest.algorithm,
                    observed=rank.algorithm,
                )
            )
    return findings


def comparable_pairs(manifest: Manifest, observation: WorkerObservation) -> tuple[list[RankPair], list[Finding]]:
    """Pair each rank with the layout that it names, leaving out what cannot be compared, with a finding each.

    A rank of another algorithm or key is left out too; `rank_findings` names it. A draft model's rank is left out and
    listed by `drafts`.
    """
    claims = claims_of(observation.layouts)
    layouts = {layout.fingerprint: (layout, facts) for layout, facts in zip(claims.layouts, claims.facts, strict=True)}
    pairs: list[RankPair] = []
    findings = []
    for rank in observation.ranks:
        if (rank.algorithm, rank.key_seed_hex) != (
            manifest.algorithm,
            manifest.key_seed_hex,
        ) or rank.rank.role != TARGET:
            continue
        named = layouts.get(rank.layout_fingerprint)
        if named is None or not _answers_fit(*named, rank):
            findings.append(
                Finding(
                    FindingCode.LAYOUT_UNKNOWN,
                    Severity.INCOMPLETE,
                    "the answer does not fit the layout it names; read the layout again",
                    rank=str(rank.rank),
                    observed=rank.layout_fingerprint,
                )
            )
            continue
        pairs.append((named[0], rank))
    return pairs, findings


def drafts(observation: WorkerObservation) -> tuple[str, ...]:
    """Name what is resident beside the served model and not compared: draft models, rank by rank."""
    return tuple(
        f"{layout.rank.role} model {layout.architecture} of {layout.rank} ({len(layout.residents)} tensors)"
        for layout in observation.layouts
        if layout.rank.role != TARGET
    )


def _answers_fit(layout: RankLayout, facts: LayoutFacts, rank: RankObservation) -> bool:
    return (
        layout.rank == rank.rank
        and len(layout.bindings) == len(rank.partials)
        and len(layout.paddings) == len(rank.paddings)
        and len(layout.derived) == len(rank.derived)
        and facts.counts == tuple(partial.count for partial in rank.partials)
    )


def resident_findings(pair: RankPair, problems: tuple[ResidentProblem, ...]) -> Iterator[Finding]:
    """Account for every resident tensor of one rank: bound, padding, derived, exempt, or named as none of these."""
    layout, rank = pair
    where = str(rank.rank)
    for unbound in layout.unbound:
        yield Finding(
            FindingCode.UNBOUND,
            Severity.UNSUPPORTED,
            f"no rule for {unbound.layer_class}: {unbound.reason}",
            rank=where,
            resident=unbound.resident,
        )
    for problem in problems:
        empty = problem.kind is ProblemKind.EMPTY_RESIDENT
        yield Finding(
            FindingCode.EMPTY_RESIDENT if empty else FindingCode.NOT_COVERED,
            Severity.INCOMPLETE,
            f"{problem.kind.value}: {problem.detail}",
            rank=where,
            resident=problem.resident,
        )
    for padding, result in zip(layout.paddings, rank.paddings, strict=True):
        if not result.ok:
            yield Finding(
                FindingCode.PADDING_NOT_ZERO,
                Severity.MISMATCH,
                f"{result.wrong_count} padding elements are not what they must be ({padding.reason})",
                rank=where,
                resident=padding.resident,
                expected=f"every byte {padding.value_byte:#04x}",
                observed=result.detail,
            )
    for derived, result in zip(layout.derived, rank.derived, strict=True):
        if not result.ok:
            yield Finding(
                FindingCode.DERIVED_STALE,
                Severity.MISMATCH,
                f"does not follow from {', '.join(derived.sources)} by {derived.rule}; "
                "look at the engine's post-processing after this update",
                rank=where,
                resident=derived.resident,
                observed=result.detail,
            )
    reasons = {exempt.resident: exempt.reason for exempt in layout.exempt}
    for name in rank.altered:
        yield Finding(
            FindingCode.EXEMPT_CHANGED,
            Severity.MISMATCH,
            f"was exempt ({reasons.get(name, 'named by the layout')}), yet holds other bytes than at first; look at what "
            "wrote it, such as sleep and wake, and restart the engine",
            rank=where,
            resident=name,
        )
    for name in rank.moved:
        yield Finding(
            FindingCode.STORAGE_MOVED,
            Severity.WARNING,
            "storage moved since the first observation; a captured graph may still read the old address",
            rank=where,
            resident=name,
        )


def residents(pairs: list[RankPair], claims: WorkerClaims) -> tuple[Coverage, list[Finding]]:
    """Return the resident side of coverage over all ranks, with its findings.

    Args:
        pairs: Layouts and observations.
        claims: Of these layouts, in this order.
    """
    coverage = Coverage()
    findings: list[Finding] = []
    for pair, facts in zip(pairs, claims.facts, strict=True):
        findings += resident_findings(pair, facts.problems)
        coverage = _added(coverage, pair, facts)
    return coverage, findings


def _added(coverage: Coverage, pair: RankPair, facts: LayoutFacts) -> Coverage:
    layout, rank = pair
    return replace(
        coverage,
        resident_tensors=coverage.resident_tensors + facts.resident_tensors,
        bound_residents=coverage.bound_residents + facts.bound,
        derived_residents=coverage.derived_residents + facts.derived,
        exempt_residents=coverage.exempt_residents + len(layout.exempt),
        unbound_residents=coverage.unbound_residents + facts.unbound,
        padding_elements=coverage.padding_elements + facts.padding_elements,
        read_bytes=coverage.read_bytes + rank.read_bytes,
        uncovered=tuple(sorted({*coverage.uncovered, *layout.uncovered})),
    )
