"""Named tensors give the manifest that their checkpoint would, whatever library, stride or order they come in."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from syncguard.errors import DigestInputError, ManifestError, UnsupportedError, VersionOrderError
from syncguard.export.checkpoint import export_checkpoint
from syncguard.export.entry import boxes_of
from syncguard.export.stream import ManifestBuilder
from syncguard.layout.model import Binding, LogicalTensor, RankIdentity, RankLayout, Shard
from syncguard.manifest.model import Changed, ExemptPolicy
from syncguard.spec import Box, WeightVersion

V1 = WeightVersion("run", 1)


def as_torch(tensors):
    return {name: torch.from_numpy(array.view(np.int16)).view(torch.bfloat16) for name, (_, array) in tensors.items()}


def test_named_tensors_give_the_entries_of_their_checkpoint(folder, tensors):
    builder = ManifestBuilder(V1)
    builder.add_many(reversed(as_torch(tensors).items()))
    assert builder.build().entries == export_checkpoint(folder, version=V1).entries


def test_one_by_one_and_all_at_once_are_the_same(tensors):
    one, many = ManifestBuilder(V1, b"k" * 32), ManifestBuilder(V1, b"k" * 32)
    for name, tensor in as_torch(tensors).items():
        one.add(name, tensor)
    many.add_many(as_torch(tensors).items())
    assert one.build() == many.build()
    assert len(one) == len(many) == len(tensors)


def test_numpy_torch_and_raw_bits_are_the_same():
    values = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)
    made = []
    for tensor, dtype in ((values, ""), (torch.from_numpy(values), ""), (values.view(np.uint32), "float32")):
        builder = ManifestBuilder(V1)
        builder.add("w", tensor, dtype=dtype)
        made.append(builder.build())
    assert made[0] == made[1] == made[2]


def test_a_transposed_view_is_read_as_what_it_shows():
    values = torch.arange(12.0).reshape(3, 4)
    entries = [ManifestBuilder(V1).add("w", tensor) for tensor in (values.T, values.T.contiguous())]
    assert entries[0] == entries[1]


def test_what_is_digested_is_what_was_there_when_it_was_added():
    tensor = torch.zeros(4)
    builder = ManifestBuilder(V1)
    entry = builder.add("w", tensor)
    tensor.fill_(1)
    assert builder.build().entries[0].digest == entry.digest


def test_parts_are_kept():
    boxes = [Box((0, 0), (1, 4)), Box((1, 0), (2, 4))]
    entry = ManifestBuilder(V1).add("w", torch.arange(12.0).reshape(3, 4), boxes=boxes)
    assert [part.box for part in entry.parts] == boxes
    assert entry.parts[0].partial + entry.parts[1].partial == entry.partial


def test_a_name_twice_is_refused_and_the_batch_with_it_adds_nothing():
    builder = ManifestBuilder(V1)
    builder.add("w", torch.zeros(2))
    with pytest.raises(ManifestError, match="a name twice"):
        builder.add("w", torch.zeros(2))
    with pytest.raises(ManifestError, match="a name twice"):
        builder.add_many([("x", torch.zeros(2)), ("y", torch.zeros(2)), ("x", torch.zeros(2))])
    with pytest.raises(ManifestError, match="without a name"):
        builder.add("", torch.zeros(2))
    assert len(builder) == 1


def test_an_empty_manifest_is_refused():
    with pytest.raises(ManifestError, match="no tensor"):
        ManifestBuilder(V1).build()


@pytest.mark.parametrize(
    ("tensor", "error"),
    [
        (torch.zeros(2, device="meta"), DigestInputError),
        (torch.zeros(2, dtype=torch.complex64), DigestInputError),
        (np.array(["text"]), DigestInputError),
    ],
    ids=["meta", "complex", "text"],
)
def test_tensors_without_readable_bits_are_refused(tensor, error):
    builder = ManifestBuilder(V1)
    with pytest.raises(error):
        builder.add("w", tensor)
    assert len(builder) == 0


def test_a_distributed_tensor_is_refused_rather_than_taken_for_the_whole(tmp_path):
    from torch import distributed
    from torch.distributed.tensor import Shard as ShardPlacement
    from torch.distributed.tensor import distribute_tensor, init_device_mesh

    distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        tensor = distribute_tensor(torch.zeros(4, 2), init_device_mesh("cpu", (1,)), [ShardPlacement(0)])
        with pytest.raises(UnsupportedError, match="distributed tensor"):
            ManifestBuilder(V1).add("w", tensor)
    finally:
        distributed.destroy_process_group()


def test_changes_exemptions_and_source_are_kept():
    builder = ManifestBuilder(V1)
    builder.add_many({"a": torch.zeros(2), "b": torch.ones(2)}.items())
    policy = ExemptPolicy("b", "not held by rollout workers")
    manifest = builder.build(changed=["a"], exempt=[policy], source="step 1")
    assert [entry.changed for entry in manifest.entries] == [Changed.CHANGED, Changed.UNCHANGED]
    assert (manifest.exempt, manifest.source) == ((policy,), "step 1")
    with pytest.raises(ManifestError, match="zzz"):
        builder.build(changed=["zzz"])


def test_an_older_version_than_the_previous_one_is_refused():
    builder = ManifestBuilder(V1)
    builder.add("a", torch.zeros(2))
    with pytest.raises(VersionOrderError):
        ManifestBuilder(V1, previous=builder.build())


def test_boxes_of_layouts_are_the_different_boxes_of_split_tensors():
    split, whole = LogicalTensor("split", "float32", (4,)), LogicalTensor("whole", "float32", (4,))

    def layout(rank, start):
        shards = (Shard(split, Box((start,), (2,))), Shard(whole, Box.whole((4,))))
        return RankLayout(RankIdentity(rank, 4), "Any", (), tuple(Binding(shard, "r") for shard in shards))

    layouts = [layout(0, 0), layout(1, 0), layout(2, 2), layout(3, 2)]
    assert boxes_of(layouts) == {"split": (Box((0,), (2,)), Box((2,), (2,)))}
