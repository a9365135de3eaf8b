"""Compare a manifest with what one worker showed. Pure: values in, a verdict with its reasons out.

The order of the checks is the order of trust: first that the observation is of one state and complete, then that every
resident element is accounted for (`observed`), then that every logical tensor is covered exactly once per replica with
equal digests (`tensors`). A check that cannot be made is INCOMPLETE or UNSUPPORTED by name, never skipped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from syncguard.manifest.claims import TensorClaim, WorkerClaims, claims_of
from syncguard.manifest.explain import Explainer
from syncguard.manifest.model import KnownVersion, Manifest, ManifestEntry, WorkerObservation
from syncguard.manifest.observed import RankPair, comparable_pairs, drafts, rank_findings, residents
from syncguard.manifest.tensors import Held, TensorOutcome, adds_up, frozen_export, judge_tensor
from syncguard.manifest.verdict import Coverage, Finding, FindingCode, Severity, Verdict, VerdictStatus, status_of

_GRAVITY = {Severity.MISMATCH: 0, Severity.UNSUPPORTED: 1, Severity.INCOMPLETE: 2, Severity.WARNING: 3}


def compare(
    manifest: Manifest,
    observation: WorkerObservation,
    *,
    history: Sequence[KnownVersion] = (),
    require_label: bool = True,
) -> Verdict:
    """Judge one worker against a manifest.

    Args:
        manifest: The trainer's claim.
        observation: All ranks of the worker, read at one fence.
        history: Earlier versions, the newest first, to explain differences.
        require_label: Whether another weight version label is a mismatch (in the loop) or a warning (an audit).

    Returns:
        MATCH only when every tensor of the manifest is proven and every resident element is accounted for.
    """
    explainer = Explainer.of(manifest, history)
    pairs, unpaired = comparable_pairs(manifest, observation)
    claims = claims_of([layout for layout, _ in pairs])
    coverage, resident_side = residents(pairs, claims)
    findings = [*rank_findings(manifest, observation), *unpaired, *resident_side]
    findings += label_findings(manifest, observation, require_label=require_label)

    partials = [partial for _, rank in pairs for partial in rank.partials]
    exempt = {policy.fqn for policy in manifest.exempt} | claims.dropped
    sound: list[ManifestEntry] = []
    outcomes: list[TensorOutcome] = []
    replicas = exempted = dropped = 0
    for entry in manifest.entries:
        claim = claims.tensors.get(entry.fqn)
        if claim is None:
            if entry.fqn in exempt:
                exempted += 1
                dropped += entry.fqn in claims.dropped
            else:
                outcomes.append(TensorOutcome([_not_held(entry.fqn)]))
        elif adds_up(entry, claim, partials) and not frozen_export(entry, explainer):
            sound.append(entry)
            replicas += claim.replicas
        else:
            outcomes.append(judge_tensor(entry, _held(claim, claims, pairs), explainer))
    findings += [finding for outcome in outcomes for finding in outcome.findings]
    exported = {entry.fqn for entry in manifest.entries}
    findings += _not_exported({fqn: c for fqn, c in claims.tensors.items() if fqn not in exported}, claims, pairs)
    findings += torn_findings(outcomes, sound, explainer)

    proven = len(sound) + sum(outcome.proven for outcome in outcomes)
    missed = len(manifest.entries) - proven - exempted
    coverage = replace(
        coverage,
        exempt_tensors=exempted,
        manifest_tensors=len(manifest.entries),
        proven_tensors=proven,
        replicas=replicas + sum(outcome.replicas for outcome in outcomes),
        uncovered=tuple(sorted({*coverage.uncovered, *drafts(observation)})),
    )
    ordered = tuple(
        sorted(
            (replace(finding, worker=observation.worker) for finding in findings),
            key=lambda finding: _GRAVITY[finding.severity],
        )
    )
    # An empty manifest finds nothing wrong; it also proves nothing. Nor does silence prove what was not compared.
    status = status_of(ordered)
    if not proven or missed:
        status = max(status, VerdictStatus.INCOMPLETE, key=_rank_status)
    reason = _reason(status, ordered, manifest, coverage)
    return Verdict(status, reason, ordered, coverage, _evidence(manifest, observation, claims, dropped=dropped))


def known_version(manifest: Manifest, observation: WorkerObservation | None = None) -> KnownVersion:
    """Return what later comparisons should remember of a version.

    Args:
        manifest: Its manifest.
        observation: A worker that was proven to hold it; its boxes let later verdicts name single ranks.
    """
    shards = {(entry.fqn, part.box): part.partial for entry in manifest.entries for part in entry.parts}
    if observation is not None:
        pairs, _ = comparable_pairs(manifest, observation)
        for layout, rank in pairs:
            for binding, partial in zip(layout.bindings, rank.partials, strict=True):
                tensor, box = binding.shard.tensor, binding.shard.box
                if box.sizes != tensor.shape:  # wholes are remembered already
                    shards[tensor.fqn, box] = partial
    return KnownVersion(str(manifest.version), {entry.fqn: entry.partial for entry in manifest.entries}, shards)


def label_findings(manifest: Manifest, observation: WorkerObservation, *, require_label: bool) -> list[Finding]:
    """Compare the engine's label: equal, it proves nothing; different, it contradicts."""
    expected, observed = str(manifest.version), observation.weight_version_label
    if observed == expected:
        return []
    return [
        Finding(
            FindingCode.VERSION_LABEL,
            Severity.MISMATCH if require_label else Severity.WARNING,
            "the engine carries another weight version label; pass weight_version with the update",
            expected=expected,
            observed=observed or "none",
        )
    ]


def torn_findings(
    outcomes: Sequence[TensorOutcome], sound: Sequence[ManifestEntry], explainer: Explainer
) -> list[Finding]:
    """See the whole: some changed tensors are new and others are not.

    Args:
        outcomes: Of tensors that were judged one by one.
        sound: Tensors that were proven at once.
        explainer: Knows which of them changed.
    """
    stale = Counter(version for outcome in outcomes for version in outcome.stale_versions)
    if not stale:
        return []
    new = sum(outcome.proven and outcome.changed for outcome in outcomes)
    new += sum(explainer.differs_from(entry) for entry in sound)
    if not new:
        return []
    versions = ", ".join(f"{count} of {version}" for version, count in sorted(stale.items()))
    return [
        Finding(
            FindingCode.TORN,
            Severity.MISMATCH,
            f"the update was torn: {new} changed tensors are new, shards of earlier versions remain ({versions}); "
            "push it again as a whole",
        )
    ]


def _held(claim: TensorClaim, claims: WorkerClaims, pairs: Sequence[RankPair]) -> list[Held]:
    """Return every shard of a tensor, in the order of ranks."""
    held = []
    for index in sorted(index for group in claim.groups for index in group):
        at, binding = claims.place(index)
        layout, rank = pairs[at]
        held.append(Held(rank.rank, layout.bindings[binding], rank.partials[binding]))
    return held


def _not_held(fqn: str) -> Finding:
    return Finding(
        FindingCode.NOT_HELD,
        Severity.INCOMPLETE,
        "exported, but no rank says that it holds any of it; look at the engine's name table",
        fqn=fqn,
    )


def _not_exported(left: dict[str, TensorClaim], claims: WorkerClaims, pairs: Sequence[RankPair]) -> list[Finding]:
    """Report what is held but was not exported, but for a second name of something exported (a tied head)."""
    return [
        Finding(
            FindingCode.NOT_EXPORTED,
            Severity.INCOMPLETE,
            "held by the worker, but not in the manifest; look at the trainer's export list",
            fqn=fqn,
            rank=", ".join(str(shard.rank) for shard in shards),
            resident=shards[0].binding.resident,
        )
        for fqn, claim in left.items()
        if not claim.alias
        for shards in (_held(claim, claims, pairs),)
    ]


def _rank_status(status: VerdictStatus) -> int:
    order = (VerdictStatus.MATCH, VerdictStatus.INCOMPLETE, VerdictStatus.UNSUPPORTED, VerdictStatus.MISMATCH)
    return order.index(status)


def _reason(status: VerdictStatus, findings: Sequence[Finding], manifest: Manifest, coverage: Coverage) -> str:
    total, proven, exempt = len(manifest.entries), coverage.proven_tensors, coverage.exempt_tensors
    if status is VerdictStatus.MATCH and exempt:
        return f"{proven} of {total} tensors of {manifest.version} are resident bit for bit, {exempt} exempt by name"
    if status is VerdictStatus.MATCH:
        return f"all {total} tensors of {manifest.version} are resident bit for bit"
    counts = Counter(finding.code.value for finding in findings if finding.severity is not Severity.WARNING)
    listed = ", ".join(f"{count} {code}" for code, count in counts.most_common()) or "nothing was compared"
    return f"{proven} of {total} tensors of {manifest.version} proven; {listed}"


def _evidence(
    manifest: Manifest, observation: WorkerObservation, claims: WorkerClaims, *, dropped: int
) -> dict[str, str]:
    return {
        "worker": observation.worker,
        "weight_version": str(manifest.version),
        "manifest_id": manifest.manifest_id,
        "algorithm": manifest.algorithm,
        "ranks": ", ".join(str(rank.rank) for rank in observation.ranks),
        "epoch": ", ".join(sorted({str(rank.epoch) for rank in observation.ranks})),
        "observe_s": f"{max((rank.duration_s for rank in observation.ranks), default=0.0):.4f}",
        "quantized_bindings": str(sum(facts.quantized for facts in claims.facts)),
        "dropped_by_the_engine": str(dropped),
        "recorded_bindings": str(sum(facts.recorded for facts in claims.facts)),
    }
