from __future__ import annotations

import json
import os
from dataclasses import replace

import pytest
from msgspec import structs

from syncguard.digest import PartialDigest
from syncguard.errors import ExitCode, ManifestError, SpecVersionError
from syncguard.manifest import codec, wire
from syncguard.manifest.compare import compare
from syncguard.manifest.model import Part
from syncguard.manifest.verdict import Readiness, ReadinessState, VerdictStatus
from syncguard.manifest.wire_verdict import (
    finding_from_proto,
    readiness_from_proto,
    readiness_to_proto,
    verdict_from_proto,
    verdict_to_proto,
)
from syncguard.spec import Box
from syncguard.v1 import verdict_pb2


@pytest.fixture
def manifest(make_weights, make_manifest):
    parts = {"down.weight": (Box((0, 0), (8, 6)), Box((0, 6), (8, 6)))}
    return make_manifest(make_weights(3), "run-7@41", parts=parts, source="test")


def test_a_file_reads_back_equal(manifest, tmp_path):
    codec.save(manifest, tmp_path / "m.json")
    assert codec.load(tmp_path / "m.json") == manifest
    assert [path.name for path in tmp_path.iterdir()] == ["m.json"]


def test_a_stream_reads_back_equal_in_chunks_of_any_size(manifest, monkeypatch):
    monkeypatch.setattr(wire, "ENTRIES_PER_CHUNK", 2)
    chunks = list(wire.chunks_to_proto(manifest))
    assert [len(chunk.fqn) for chunk in chunks] == [2, 2, 1]
    assert wire.manifest_from_proto(wire.header_to_proto(manifest), chunks) == manifest


@pytest.mark.parametrize("missing", [0, -1])
def test_a_stream_that_lost_a_chunk_is_refused(manifest, monkeypatch, missing):
    monkeypatch.setattr(wire, "ENTRIES_PER_CHUNK", 2)
    chunks = list(wire.chunks_to_proto(manifest))
    del chunks[missing]
    with pytest.raises(ManifestError, match="expected 5"):
        wire.manifest_from_proto(wire.header_to_proto(manifest), chunks)


def test_a_stream_that_changed_on_the_way_is_refused(manifest):
    (chunk,) = wire.chunks_to_proto(manifest)
    chunk.data[2] ^= 1
    with pytest.raises(ManifestError, match="changed on the way"):
        wire.manifest_from_proto(wire.header_to_proto(manifest), [chunk])


@pytest.mark.parametrize("column", ["form", "count", "coverage", "data", "changed"])
def test_a_chunk_whose_columns_differ_in_length_is_refused(manifest, column):
    (chunk,) = wire.chunks_to_proto(manifest)
    getattr(chunk, column).append(0)
    with pytest.raises(ManifestError, match="columns of one length"):
        wire.manifest_from_proto(wire.header_to_proto(manifest), [chunk])


def test_a_chunk_that_refers_past_its_columns_is_refused(manifest):
    (form,), (parts,), (digests,) = (list(wire.chunks_to_proto(manifest)) for _ in range(3))
    form.form[1] = len(form.forms)
    parts.parts.add(entry=len(parts.fqn)).parts.add()
    digests.digests = digests.digests[:-1]
    for chunk in (form, parts, digests):
        with pytest.raises(ManifestError, match="chunk of a manifest"):
            wire.manifest_from_proto(wire.header_to_proto(manifest), [chunk])


@pytest.mark.parametrize("keep", [0, 1, 40, -2])
def test_a_truncated_file_is_refused_in_one_line(manifest, tmp_path, keep):
    data = codec.encode(manifest)
    (tmp_path / "m.json").write_bytes(data[:keep])
    with pytest.raises(ManifestError) as caught:
        codec.load(tmp_path / "m.json")
    assert "\n" not in str(caught.value)
    assert "m.json" in str(caught.value)
    assert caught.value.exit_code is ExitCode.USAGE


def test_every_edited_field_is_refused(manifest):
    document = json.loads(codec.encode(manifest))
    for path, value in (
        (("version", "step"), 42),
        (("source",), "elsewhere"),
        (("algorithm",), "MLP61v9"),
        (("entries", 0, "partial", "data"), 5),
        (("entries", 0, "fqn"), "a"),
        (("entries", 1, "digest"), "00" * 16),
        (("manifest_id",), "00" * 16),
    ):
        edited = json.loads(json.dumps(document))
        place = edited
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value
        with pytest.raises(ManifestError):
            codec.decode(json.dumps(edited).encode())


def test_another_specification_is_its_own_error_with_exit_code_14(manifest):
    document = json.loads(codec.encode(manifest))
    document["spec_version"] = 2
    document["a_field_of_the_future"] = {}
    with pytest.raises(SpecVersionError) as caught:
        codec.decode(json.dumps(document).encode())
    assert int(caught.value.exit_code) == 14


def test_a_name_twice_is_refused_when_sealing(manifest):
    with pytest.raises(ManifestError, match="added twice"):
        codec.seal(replace(manifest, entries=(*manifest.entries, manifest.entries[0])))


def test_entries_that_contradict_their_shape_are_refused(manifest):
    entry = manifest.entries[0]
    short = structs.replace(entry, partial=PartialDigest(entry.partial.count - 1, 1, 1))
    with pytest.raises(ManifestError, match="element count"):
        codec.seal(replace(manifest, entries=(short,)))
    with pytest.raises(ManifestError, match="dtype"):
        codec.seal(replace(manifest, entries=(structs.replace(entry, dtype="float128"),)))
    gap = structs.replace(entry, parts=(Part(Box((0, 0), (1, 1)), entry.partial),))
    with pytest.raises(ManifestError, match="partition"):
        codec.seal(replace(manifest, entries=(gap,)))


def test_a_failed_write_leaves_the_old_file_and_nothing_beside_it(manifest, tmp_path, monkeypatch):
    codec.save(manifest, tmp_path / "m.json")
    before = (tmp_path / "m.json").read_bytes()

    def full_disk(_fd):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space"):
        codec.save(replace(manifest, source="new"), tmp_path / "m.json")
    assert (tmp_path / "m.json").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["m.json"]


def test_observations_and_verdicts_survive_the_wire(manifest, make_weights, make_worker):
    worker = make_worker(make_weights(3), label="run-7@41")
    worker.residents[1]["down.weight"][0, 0] += 1
    observation = worker.observe()
    for rank in (*observation.ranks, replace(observation.ranks[0], altered=("rotary.cache",), moved=("norm.weight",))):
        assert wire.observation_from_proto(wire.observation_to_proto(rank)) == rank
    verdict = compare(manifest, observation)
    assert verdict.findings
    assert verdict_from_proto(verdict_to_proto(verdict)) == verdict
    readiness = Readiness(ReadinessState.BLOCKED, "mismatch", "why", "run-7@41", 12.5)
    assert readiness_from_proto(readiness_to_proto(readiness)) == readiness


def test_nothing_unspecified_ever_reads_as_good():
    assert verdict_from_proto(verdict_pb2.Verdict()).status is VerdictStatus.INCOMPLETE
    assert readiness_from_proto(verdict_pb2.Readiness()).state is ReadinessState.PENDING
    assert finding_from_proto(verdict_pb2.Finding(code="new")).severity.value == "incomplete"
    assert (
        not wire.observation_from_proto(wire.manifest_pb2.RankObservation(paddings=[wire.manifest_pb2.CheckResult()]))
        .paddings[0]
        .ok
    )
