"""Second half of a comparison: one manifest tensor against everything that the ranks say they hold of it.

Pure. A tensor is proven when its boxes tile it exactly once per replica, all replicas are equal, and the sums are the
manifest's. Anything else is blamed on the ranks that are wrong, as far as the evidence tells them apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from syncguard.digest import PartialDigest
from syncguard.layout.coverage import partition_problems
from syncguard.layout.model import Binding, RankIdentity
from syncguard.manifest.claims import TensorClaim
from syncguard.manifest.explain import Explainer, expected_of_box
from syncguard.manifest.model import Changed, ManifestEntry
from syncguard.manifest.verdict import Finding, FindingCode, Severity
from syncguard.spec import Box


@dataclass(frozen=True, slots=True)
class Held:
    """One shard as one rank showed it."""

    rank: RankIdentity
    binding: Binding
    partial: PartialDigest

    @property
    def box(self) -> Box:
        """Box of the logical tensor."""
        return self.binding.shard.box


@dataclass(slots=True)
class TensorOutcome:
    """What is known of one manifest tensor.

    Attributes:
        findings: Why it is not proven, or warnings.
        proven: Covered exactly once per replica with equal digests.
        replicas: Shards beyond the first of each box, all compared.
        changed: The newest earlier version knows it with other content.
        stale_versions: Version labels of the shards found stale, one each.
    """

    findings: list[Finding] = field(default_factory=list)
    proven: bool = False
    replicas: int = 0
    changed: bool = False
    stale_versions: list[str] = field(default_factory=list)


def adds_up(entry: ManifestEntry, claim: TensorClaim, partials: Sequence[PartialDigest]) -> bool:
    """Return whether the shards tile a tensor, replicas are equal, and the sums are the manifest's: nearly always.

    A shortcut for tensors with nothing to report, since there may be a hundred thousand; `judge_tensor` says the same,
    with findings. Of the history it knows nothing.

    Args:
        entry: What the trainer exported.
        claim: Who holds it.
        partials: Partial digests of all bindings of all ranks, in one list.
    """
    if not claim.tiles or claim.shape != entry.shape or claim.dtype != entry.dtype:
        return False
    shards = [partials[group[0]] for group in claim.groups]
    if (shards[0] if len(shards) == 1 else PartialDigest.total(shards)) != entry.partial:
        return False
    return not claim.replicas or all(partials[i] == partials[group[0]] for group in claim.groups for i in group[1:])


def judge_tensor(entry: ManifestEntry, held: Sequence[Held], explainer: Explainer) -> TensorOutcome:
    """Prove one manifest tensor, or say what is wrong with it and where.

    Args:
        entry: What the trainer exported.
        held: Every shard of it that any rank showed; at least one.
        explainer: Indexes of the manifest and of earlier versions.
    """
    outcome = TensorOutcome(changed=explainer.differs_from(entry))
    if explainer.history:
        outcome.findings += frozen_export(entry, explainer)
    forms = _form_differences(entry, held)
    if forms:
        outcome.findings += forms
        return outcome
    boxes: dict[Box, list[Held]] = {}
    for shard in held:
        boxes.setdefault(shard.box, []).append(shard)
    outcome.replicas = len(held) - len(boxes)
    problems = partition_problems(entry.shape, tuple(boxes))
    outcome.findings += [
        Finding(
            FindingCode.HELD_TWICE if problem.startswith("overlap") else FindingCode.NOT_COVERED,
            Severity.INCOMPLETE,
            f"{problem}; look at the ranks that answered and at the layout rule",
            fqn=entry.fqn,
        )
        for problem in problems
    ]
    total = PartialDigest.total(group[0].partial for group in boxes.values())
    agree = all(shard.partial == group[0].partial for group in boxes.values() for shard in group)
    if agree and total == entry.partial and not problems:
        outcome.proven = not outcome.findings
        return outcome
    wrong = [shard for shard in held if _contradicts(entry, shard)]
    if not wrong and agree and total != entry.partial and not problems:
        wrong = _suspects(entry, held, explainer)
    for shard in wrong:
        _blame(entry, shard, explainer, outcome)
    if not agree and not wrong:
        outcome.findings += _replica_differences(entry, boxes, explainer, outcome)
    return outcome


def frozen_export(entry: ManifestEntry, explainer: Explainer) -> list[Finding]:
    """Report an export of frozen bytes, which would pass every equality check (verl issue 7495 is one)."""
    if entry.changed is not Changed.CHANGED:
        return []
    newest = next((known for known in explainer.precedents if entry.fqn in known.wholes), None)
    if newest is not None and newest.wholes[entry.fqn] == entry.partial:
        return [
            Finding(
                FindingCode.UNCHANGED,
                Severity.MISMATCH,
                f"the trainer says that this tensor changed, yet its export equals {newest.label}; look at the export",
                fqn=entry.fqn,
            )
        ]
    return []


def _form_differences(entry: ManifestEntry, held: Sequence[Held]) -> list[Finding]:
    for shard in held:
        tensor = shard.binding.shard.tensor
        for code, expected, observed, advice in (
            (FindingCode.SHAPE_DIFFERS, entry.shape, tensor.shape, "look at the export's padding or fusion"),
            (
                FindingCode.DTYPE_DIFFERS,
                entry.dtype,
                tensor.dtype,
                "export in the workers' forms (Gate.forms), which casts first",
            ),
        ):
            if expected != observed:
                return [
                    Finding(
                        code,
                        Severity.MISMATCH,
                        f"exported and resident forms differ; {advice}",
                        fqn=entry.fqn,
                        rank=str(shard.rank),
                        resident=shard.binding.resident,
                        expected=str(expected),
                        observed=str(observed),
                    )
                ]
    return []


def _contradicts(entry: ManifestEntry, shard: Held) -> bool:
    """Return whether the manifest itself speaks of this box and says something else."""
    expected = expected_of_box(entry, shard.box)
    return expected is not None and expected != shard.partial


def _suspects(entry: ManifestEntry, held: Sequence[Held], explainer: Explainer) -> list[Held]:
    """Return the shards to blame when only the sum over all of them is known to be wrong.

    When some, but not all, equal an earlier version that differs as a whole, those did not get the update.
    """
    stale = [s for s in held if explainer.stale_version(entry.fqn, s.box, entry.shape, s.partial)]
    return stale or list(held)


def _blame(entry: ManifestEntry, shard: Held, explainer: Explainer, outcome: TensorOutcome) -> None:
    explanation = explainer.explain(entry, shard.box, shard.partial)
    if explanation.version:
        outcome.stale_versions.append(explanation.version)
    expected = expected_of_box(entry, shard.box)
    outcome.findings.append(
        Finding(
            explanation.code,
            Severity.MISMATCH,
            explanation.text,
            fqn=entry.fqn,
            box=str(shard.box),
            rank=str(shard.rank),
            resident=shard.binding.resident,
            expected=f"{expected.data:016x}" if expected else f"a box of {entry.digest}",
            observed=f"{shard.partial.data:016x}",
        )
    )


def _replica_differences(
    entry: ManifestEntry, boxes: dict[Box, list[Held]], explainer: Explainer, outcome: TensorOutcome
) -> list[Finding]:
    findings = []
    for box, group in boxes.items():
        if all(shard.partial == group[0].partial for shard in group):
            continue
        versions = {
            str(shard.rank): explainer.stale_version(entry.fqn, box, entry.shape, shard.partial) for shard in group
        }
        outcome.stale_versions += [version for version in versions.values() if version]
        older = [f"{rank} holds {version}" for rank, version in versions.items() if version]
        findings.append(
            Finding(
                FindingCode.REPLICA_DIFFERS,
                Severity.MISMATCH,
                "ranks that must hold equal bytes do not"
                + (f" ({'; '.join(older)})" if older else "")
                + "; look at an update that reached only some",
                fqn=entry.fqn,
                box=str(box),
                rank=", ".join(rank for rank, version in versions.items() if version or not older),
                resident=group[0].binding.resident,
                observed=", ".join(f"{shard.partial.data:016x}" for shard in group),
            )
        )
    return findings
