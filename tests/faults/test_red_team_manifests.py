"""Manifests that contradict themselves, skip too much, or come back after a rollback."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from syncguard.digest import PartialDigest
from syncguard.errors import ManifestError
from syncguard.manifest.codec import check, manifest_id, seal
from syncguard.manifest.compare import compare, known_version
from syncguard.manifest.model import Changed, ExemptPolicy, Part
from syncguard.manifest.tensors import TensorOutcome
from syncguard.manifest.verdict import FindingCode, VerdictStatus
from syncguard.spec import Box

# By its path: every folder of tests has a module of that name.
_SPEC = importlib.util.spec_from_file_location(
    "red_team_manifests_worker", Path(__file__).parents[1] / "unit" / "manifest" / "conftest.py"
)
made = importlib.util.module_from_spec(_SPEC)
sys.modules[_SPEC.name] = made
_SPEC.loader.exec_module(made)
Worker, digest, manifest_of, weights = made.Worker, made.digest, made.manifest_of, made.weights

T0, T1 = weights(0), weights(1)


def with_entries(manifest, change):
    changed = replace(manifest, entries=tuple(change(entry) for entry in manifest.entries), manifest_id="")
    return replace(changed, manifest_id=manifest_id(changed))


def test_stale_wholes_beside_new_parts_are_refused_and_not_believed():
    whole = {name: (Box.whole(array.shape),) for name, array in T1.items()}
    new = {entry.fqn: entry.parts for entry in manifest_of(T1, "run@1", parts=whole).entries}
    mixed = with_entries(manifest_of(T0, "run@1"), lambda entry: structs.replace(entry, parts=new[entry.fqn]))
    with pytest.raises(ManifestError, match="parts of a manifest entry"):
        check(mixed)


def test_parts_whose_counts_are_exchanged_are_refused():
    boxes = (Box((0, 0), (8, 4)), Box((0, 4), (8, 8)))
    honest = manifest_of(T1, "run@1", parts={"down.weight": boxes})

    def exchanged(entry):
        if not entry.parts:
            return entry
        first, second = entry.parts
        moved = PartialDigest(32, 0, 0)
        return structs.replace(
            entry, parts=(Part(first.box, first.partial + moved), Part(second.box, second.partial - moved))
        )

    check(honest)
    with pytest.raises(ManifestError, match="another number of elements"):
        check(with_entries(honest, exchanged))


def test_one_shard_counted_twice_and_another_never_is_refused_although_the_count_is_right():
    left = T1["down.weight"][:, :6]
    twice = digest(left, (8, 12), Box((0, 0), (8, 6)))

    def doubled(entry):
        return structs.replace(entry, partial=twice + twice) if entry.fqn == "down.weight" else entry

    with pytest.raises(ManifestError, match="not each once"):
        check(with_entries(manifest_of(T1, "run@1"), doubled))


@pytest.mark.parametrize(
    "policies",
    [
        (ExemptPolicy("norm.weight", ""),),
        (ExemptPolicy("norm.weight", "  "),),
        (ExemptPolicy("norm.*", "a pattern"),),
        (ExemptPolicy("norm.weight", "frozen"), ExemptPolicy("norm.weight", "again")),
    ],
    ids=["no reason", "a blank reason", "a pattern", "twice"],
)
def test_an_exemption_names_one_exported_tensor_with_a_reason(policies):
    with pytest.raises(ManifestError, match="an exemption"):
        manifest_of(T1, "run@1", exempt=policies)


def test_a_verdict_with_exemptions_does_not_claim_all_tensors():
    exported = {**T1, "ghost.weight": T1["norm.weight"]}
    manifest = manifest_of(exported, "run@1", exempt=(ExemptPolicy("ghost.weight", "a training-only head"),))
    verdict = compare(manifest, Worker.loaded(T1).observe())
    assert verdict.status is VerdictStatus.MATCH
    assert verdict.reason == "5 of 6 tensors of run@1 are resident bit for bit, 1 exempt by name"


def test_a_tensor_that_was_judged_in_silence_is_not_a_match(monkeypatch):
    monkeypatch.setattr("syncguard.manifest.compare.adds_up", lambda *_: False)
    monkeypatch.setattr(
        "syncguard.manifest.compare.judge_tensor", lambda entry, *_: TensorOutcome(proven=entry.fqn != "up.weight")
    )
    verdict = compare(manifest_of(T1, "run@1"), Worker.loaded(T1).observe())
    assert verdict.status is VerdictStatus.INCOMPLETE


def test_a_rollback_to_bytes_that_later_steps_kept_is_no_frozen_export():
    later = {name: array if name == "norm.weight" else array + 1 for name, array in T1.items()}
    target = with_entries(manifest_of(T1, "run@3"), lambda entry: structs.replace(entry, changed=Changed.CHANGED))
    worker = Worker.loaded(T1, label="run@3")
    history = [known_version(manifest_of(later, "run@5")), known_version(manifest_of(T0, "run@2"))]
    assert compare(target, worker.observe(), history=history).status is VerdictStatus.MATCH


def test_an_export_of_frozen_bytes_is_still_found_behind_a_later_version():
    target = with_entries(manifest_of(T1, "run@3"), lambda entry: structs.replace(entry, changed=Changed.CHANGED))
    history = [known_version(manifest_of(T0, "run@5")), known_version(manifest_of(T1, "run@2"))]
    verdict = compare(target, Worker.loaded(T1, label="run@3").observe(), history=history)
    assert verdict.status is VerdictStatus.MISMATCH
    assert FindingCode.UNCHANGED in {finding.code for finding in verdict.findings}


def test_a_sealed_manifest_passes_its_own_check():
    check(seal(manifest_of(T1, "run@1", exempt=(ExemptPolicy("norm.weight", "kept in float32 by the trainer"),))))
