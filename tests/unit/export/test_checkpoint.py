"""A manifest says what the files hold, bit for bit, and a damaged folder gives one line and no manifest."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest
from checkpoint_folder import CONFIG, expected_shapes, header_of, random_tensors, write_file, write_folder

from syncguard.digest import DEFAULT_KEY_SEED, DigestJob, finalize
from syncguard.digest.reference import NumpyEngine
from syncguard.errors import CheckpointError, DigestInputError, ManifestError, VersionOrderError
from syncguard.export.checkpoint import export_checkpoint
from syncguard.manifest.model import Changed
from syncguard.spec import Box, WeightVersion, dtype_named

V1 = WeightVersion("run", 1)
V2 = WeightVersion("run", 2)
UNKNOWN = {"architectures": ["SomethingNew"]}
DTYPE = {"BF16": "bfloat16", "F32": "float32", "F8_E4M3": "float8_e4m3fn", "U8": "uint8", "F16": "float16"}


def refused(folder, match, **options):
    with pytest.raises(CheckpointError, match=match) as caught:
        export_checkpoint(folder, version=V1, **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("code", DTYPE)
@pytest.mark.parametrize("shards", [1, 3])
def test_every_entry_is_the_reference_digest_of_the_stored_bits(tmp_path, code, shards):
    shapes = expected_shapes() | {"scalar": (), "empty": (0, 3), "cube": (2, 3, 4)}
    tensors = random_tensors(shapes, code=code)
    manifest = export_checkpoint(write_folder(tmp_path, tensors, shards=shards), version=V1)
    assert [entry.fqn for entry in manifest.entries] == sorted(shapes)
    for entry in manifest.entries:
        dtype, raw = dtype_named(DTYPE[code]), tensors[entry.fqn][1]
        (partial,) = NumpyEngine().partials([DigestJob(raw, dtype, raw.shape, Box.whole(raw.shape))])
        assert (entry.dtype, entry.shape, entry.partial) == (dtype.name, shapes[entry.fqn], partial)
        assert entry.digest == finalize(partial, fqn=entry.fqn, dtype=dtype, shape=raw.shape)
        assert entry.changed is Changed.UNKNOWN
    assert (manifest.version, manifest.key_seed, bool(manifest.manifest_id)) == (V1, DEFAULT_KEY_SEED, True)


def test_shards_and_one_file_give_the_same_manifest(tmp_path, tensors):
    one = export_checkpoint(write_folder(tmp_path / "one" / "same", tensors), version=V1)
    many = export_checkpoint(write_folder(tmp_path / "many" / "same", tensors, shards=4), version=V1)
    assert one == many


def test_files_without_an_index_are_read_together(tmp_path, tensors):
    folder = write_folder(tmp_path, tensors, shards=2)
    (folder / "model.safetensors.index.json").unlink()
    assert len(export_checkpoint(folder, version=V1).entries) == len(tensors)


def test_tensors_at_odd_addresses_are_read_right(tmp_path):
    values = random_tensors({"a": (3,), "b": (5, 2)}, code="F32")
    odd = {"first": ("U8", np.zeros(1, np.uint8)), **values}
    even = {**values, "first": odd["first"]}
    digests = [
        {e.fqn: e.digest for e in export_checkpoint(write_folder(tmp_path / n, t, config=UNKNOWN), version=V1).entries}
        for n, t in (("odd", odd), ("even", even))
    ]
    assert digests[0] == digests[1]


def test_one_flipped_bit_changes_one_entry(folder):
    before = export_checkpoint(folder, version=V1)
    path = folder / "model.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 0x80
    path.write_bytes(raw)
    after = export_checkpoint(folder, version=V1)
    assert sum(a != b for a, b in zip(before.entries, after.entries, strict=True)) == 1


def test_parts_tile_their_tensor_and_add_up(folder):
    boxes = {"lm_head.weight": (Box((0, 0), (6, 8)), Box((6, 0), (4, 8)))}
    plain, parted = export_checkpoint(folder, version=V1), export_checkpoint(folder, version=V1, boxes=boxes)
    by_name = {entry.fqn: entry for entry in parted.entries}
    assert tuple(part.box for part in by_name["lm_head.weight"].parts) == boxes["lm_head.weight"]
    assert [(e.fqn, e.partial, e.digest) for e in plain.entries] == [
        (e.fqn, e.partial, e.digest) for e in parted.entries
    ]
    assert all(not entry.parts for name, entry in by_name.items() if name not in boxes)


@pytest.mark.parametrize(
    "boxes",
    [
        [Box((0, 0), (6, 8))],
        [Box((0, 0), (6, 8)), Box((5, 0), (5, 8))],
        [Box((0, 0), (6, 8)), Box((6, 0), (5, 8))],
        [Box((0,), (10,))],
    ],
    ids=["hole", "overlap", "outside", "rank"],
)
def test_boxes_that_do_not_tile_are_refused(folder, boxes):
    with pytest.raises(ManifestError, match=r"lm_head\.weight"):
        export_checkpoint(folder, version=V1, boxes={"lm_head.weight": boxes})


def test_boxes_and_changes_of_unknown_names_are_refused(folder):
    for options in ({"boxes": {"nothing": ()}}, {"changed": ["nothing"]}):
        with pytest.raises(ManifestError, match="nothing"):
            export_checkpoint(folder, version=V1, **options)


def test_the_trainers_statement_of_what_changed_is_kept(folder):
    manifest = export_checkpoint(folder, version=V1, changed=["lm_head.weight"])
    assert {e.fqn for e in manifest.entries if e.changed is Changed.CHANGED} == {"lm_head.weight"}
    assert {e.changed for e in manifest.entries if e.fqn != "lm_head.weight"} == {Changed.UNCHANGED}


def test_without_a_statement_other_bits_prove_a_change_and_equal_bits_prove_nothing(tmp_path, tensors, folder):
    previous = export_checkpoint(folder, version=V1)
    code, array = tensors["lm_head.weight"]
    newer = write_folder(tmp_path / "newer", tensors | {"lm_head.weight": (code, array ^ 1)})
    manifest = export_checkpoint(newer, version=V2, previous=previous)
    told = {entry.fqn: entry.changed for entry in manifest.entries}
    assert told.pop("lm_head.weight") is Changed.CHANGED
    assert set(told.values()) == {Changed.UNKNOWN}


def test_another_key_seed_gives_other_digests_and_no_statement_against_the_old_ones(folder):
    previous = export_checkpoint(folder, version=V1)
    manifest = export_checkpoint(folder, version=V2, key_seed=b"k" * 32, previous=previous)
    assert all(a.digest != b.digest for a, b in zip(previous.entries, manifest.entries, strict=True))
    assert {entry.changed for entry in manifest.entries} == {Changed.UNKNOWN}
    with pytest.raises(DigestInputError):
        export_checkpoint(folder, version=V1, key_seed=b"short")


def test_a_version_that_does_not_follow_the_previous_one_is_refused(folder):
    previous = export_checkpoint(folder, version=V2)
    for version in (V1, V2):
        with pytest.raises(VersionOrderError, match="does not follow"):
            export_checkpoint(folder, version=version, previous=previous)
    assert export_checkpoint(folder, version=WeightVersion("another", 0), previous=previous)


def test_progress_ends_at_one_and_never_falls(folder):
    seen = []
    export_checkpoint(folder, version=V1, progress=seen.append)
    assert seen == sorted(seen)
    assert seen[-1] == 1.0


def test_torch_is_not_needed(folder):
    import subprocess

    code = (
        "import sys; from pathlib import Path; from syncguard.export.checkpoint import export_checkpoint\n"
        "from syncguard.spec import WeightVersion\n"
        f"export_checkpoint(Path({str(folder)!r}), version=WeightVersion('run', 1)); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


# What is refused.


def test_a_folder_without_a_config_is_exported_and_says_that_shapes_were_not_checked(folder):
    whole = export_checkpoint(folder, version=WeightVersion("run", 1))
    (folder / "config.json").unlink()
    bare = export_checkpoint(folder, version=WeightVersion("run", 1))
    assert bare.entries == whole.entries
    assert "shapes not checked" in bare.source
    assert "shapes not checked" not in whole.source


def test_a_missing_folder_or_weight_file_and_a_damaged_config_are_named(tmp_path, folder):
    refused(tmp_path / "nowhere", "nowhere")
    (folder / "config.json").write_text("{")
    refused(folder, "config.json")
    bare = write_folder(tmp_path / "bare", {})
    (bare / "model.safetensors").unlink()
    refused(bare, "without weights")


@pytest.mark.parametrize("lost", [1, 100])
def test_a_truncated_file_is_refused(folder, lost):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-lost])
    refused(folder, r"truncated.*model\.safetensors")


@pytest.mark.parametrize("kept", [0, 4, 8, 40])
def test_a_file_cut_inside_its_header_is_refused(folder, kept):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    refused(folder, r"header does not fit.*model\.safetensors")


def test_trailing_bytes_are_refused(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes() + b"\0")
    refused(folder, "trailing bytes")


@pytest.mark.parametrize("length", [100_000_001, 2**63, 2**64 - 1])
def test_an_absurd_header_length_is_refused_without_reading_it(folder, length):
    path = folder / "model.safetensors"
    path.write_bytes(length.to_bytes(8, "little") + path.read_bytes()[8:])
    refused(folder, "header does not fit")


@pytest.mark.parametrize("header", [b"{", b"[]", b"\xff\xfe{}", b"[" * 200_000, b"nul", b'"text"'])
def test_a_header_that_is_not_a_json_object_is_refused(folder, header):
    write_file(folder / "model.safetensors", header, b"")
    refused(folder, r"JSON.*model\.safetensors")


def test_a_name_twice_in_one_header_is_refused(folder):
    entry = '{"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}'
    write_file(folder / "model.safetensors", f'{{"a": {entry}, "a": {entry}}}'.encode(), b"\0")
    refused(folder, "a name twice.*found a")


def test_a_name_in_two_files_is_refused(folder, tensors):
    write_file(folder / "other.safetensors", *header_of({"model.norm.weight": tensors["model.norm.weight"]}))
    refused(folder, r"a name twice.*model\.norm\.weight in model\.safetensors and other\.safetensors")


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "F99"},
        {"dtype": ["U8"]},
        {"shape": [-8]},
        {"shape": [True]},
        {"shape": [8.0]},
        {"shape": 8},
        {"shape": [9]},
        {"shape": [2**70, 2**70]},
        {"shape": [1] * 40},
        {"data_offsets": [8, 0]},
        {"data_offsets": [0, 8, 16]},
        {"data_offsets": [1, 9]},
        {"extra": 1},
    ],
    ids=str,
)
def test_an_entry_that_contradicts_itself_is_refused(tmp_path, change):
    entry = {"dtype": "U8", "shape": [8], "data_offsets": [0, 8]}
    folder = write_folder(tmp_path, {}, config=UNKNOWN)
    write_file(folder / "model.safetensors", {"a": entry | change}, b"12345678")
    refused(folder, r"model\.safetensors")
    write_file(folder / "model.safetensors", {"a": entry}, b"12345678")
    assert export_checkpoint(folder, version=V1).entries[0].shape == (8,)


def test_tensors_that_overlap_or_leave_a_gap_are_refused(tmp_path):
    folder = write_folder(tmp_path, {}, config=UNKNOWN)
    for begin in (4, 12):
        header = {
            "a": {"dtype": "U8", "shape": [8], "data_offsets": [0, 8]},
            "b": {"dtype": "U8", "shape": [8], "data_offsets": [begin, begin + 8]},
        }
        write_file(folder / "model.safetensors", header, b"0" * (begin + 8))
        refused(folder, "gap or overlap")


# The index.


def test_an_index_that_names_a_missing_file_is_refused(tmp_path, tensors):
    folder = write_folder(tmp_path, tensors, shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    refused(folder, r"not there.*model-00002-of-00003")


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd", "", 5])
def test_an_index_that_points_out_of_the_folder_is_refused(tmp_path, tensors, name):
    folder = write_folder(tmp_path / "inside", tensors, shards=2)
    write_file(tmp_path / "outside.safetensors", *header_of(tensors))
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
    refused(folder, "not there")


def test_tensors_that_the_index_does_not_list_are_refused(tmp_path, tensors):
    folder = write_folder(tmp_path, tensors, shards=2)
    index = folder / "model.safetensors.index.json"
    whole = json.loads(index.read_text())
    del whole["weight_map"]["model.norm.weight"]
    index.write_text(json.dumps(whole))
    refused(folder, r"does not list.*model\.norm\.weight")


def test_an_index_that_places_a_tensor_in_another_file_is_refused(tmp_path, tensors):
    folder = write_folder(tmp_path, tensors, shards=2)
    index = folder / "model.safetensors.index.json"
    whole = json.loads(index.read_text())
    first, second = sorted(set(whole["weight_map"].values()))
    name = next(key for key, file in whole["weight_map"].items() if file == first)
    whole["weight_map"][name] = second
    index.write_text(json.dumps(whole))
    refused(folder, "disagrees with its files")
    whole["weight_map"][name] = first
    whole["weight_map"]["in.no.file"] = first
    index.write_text(json.dumps(whole))
    refused(folder, "in no file")


@pytest.mark.parametrize("content", ["{", "[]", '{"weight_map": []}', '{"weight_map": {}}', "{}"])
def test_a_damaged_index_is_refused(tmp_path, tensors, content):
    folder = write_folder(tmp_path, tensors, shards=2)
    (folder / "model.safetensors.index.json").write_text(content)
    refused(folder, "index")


def test_a_second_index_is_refused(tmp_path, tensors):
    folder = write_folder(tmp_path, tensors, shards=2)
    (folder / "another.safetensors.index.json").write_text("{}")
    refused(folder, "several indexes")


def test_a_weight_file_outside_the_index_is_not_read_and_is_named(tmp_path, tensors):
    folder = write_folder(tmp_path, tensors, shards=2)
    write_file(folder / "consolidated.safetensors", *header_of({"x": ("U8", np.zeros(1, np.uint8))}))
    manifest = export_checkpoint(folder, version=V1)
    assert "consolidated.safetensors" in manifest.source
    assert "x" not in {entry.fqn for entry in manifest.entries}


# The config.


@pytest.mark.parametrize("name", sorted(expected_shapes()))
def test_a_shape_that_disagrees_with_the_config_is_refused_by_name(tmp_path, tensors, name):
    code, array = tensors[name]
    folder = write_folder(tmp_path, tensors | {name: (code, np.concatenate([array, array]))})
    refused(folder, f"disagrees with config.json.*{name}")


@pytest.mark.parametrize("name", sorted(expected_shapes()))
def test_a_missing_tensor_is_refused_by_name(tmp_path, tensors, name):
    refused(write_folder(tmp_path, {key: value for key, value in tensors.items() if key != name}), f"1 missing.*{name}")


def test_a_layer_more_than_the_config_says_is_refused(tmp_path, tensors):
    more = tensors | {"model.layers.2.input_layernorm.weight": tensors["model.norm.weight"]}
    refused(write_folder(tmp_path, more), r"outside the model.*layers\.2")


def test_a_tied_checkpoint_needs_no_head(tmp_path, tensors):
    tied = {key: value for key, value in tensors.items() if key != "lm_head.weight"}
    folder = write_folder(tmp_path, tied, config=CONFIG | {"tie_word_embeddings": True})
    assert len(export_checkpoint(folder, version=V1).entries) == len(tied)


def test_extra_tensors_inside_the_model_are_exported(tmp_path, tensors):
    folder = write_folder(tmp_path, tensors | {"model.rotary_emb.inv_freq": ("F32", np.ones(2, np.float32))})
    assert len(export_checkpoint(folder, version=V1).entries) == len(tensors) + 1


@pytest.mark.parametrize("config", [UNKNOWN, {}, CONFIG | {"quantization_config": {"quant_method": "fp8"}}])
def test_a_config_that_does_not_determine_shapes_is_not_judged(tmp_path, config):
    folder = write_folder(tmp_path, {"x": ("U8", np.zeros(3, np.uint8))}, config=config)
    assert len(export_checkpoint(folder, version=V1).entries) == 1


@pytest.mark.parametrize("key", ["hidden_size", "vocab_size", "num_hidden_layers", "intermediate_size"])
@pytest.mark.parametrize("value", [None, 0, -1, "8", 8.0, True])
def test_a_config_with_an_impossible_size_is_refused_by_key(tmp_path, tensors, key, value):
    refused(write_folder(tmp_path, tensors, config=CONFIG | {key: value}), f"size in config.json.*{key}")


def test_a_mixture_of_experts_is_checked_expert_by_expert(tmp_path):
    config = CONFIG | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_local_experts": 2,
        "moe_intermediate_size": 6,
        "mlp_only_layers": [0],
    }
    shapes = {name: shape for name, shape in expected_shapes().items() if not name.startswith("model.layers.1.mlp")}
    shapes["model.layers.1.mlp.gate.weight"] = (2, 8)
    for expert in range(2):
        shapes |= {
            f"model.layers.1.mlp.experts.{expert}.{name}_proj.weight": shape
            for name, shape in {"gate": (6, 8), "up": (6, 8), "down": (8, 6)}.items()
        }
    tensors = random_tensors(shapes)
    assert len(export_checkpoint(write_folder(tmp_path / "good", tensors, config=config), version=V1).entries) == len(
        shapes
    )
    name = "model.layers.1.mlp.experts.1.down_proj.weight"
    turned = (tensors[name][0], tensors[name][1].T)
    refused(write_folder(tmp_path / "bad", tensors | {name: turned}, config=config), f"disagrees.*{name}")
