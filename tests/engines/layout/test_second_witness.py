from __future__ import annotations

from collections import defaultdict
from functools import partial

import pytest
import torch
from layout_cases import CELLS, build, walk
from layout_checkpoints import CHECKPOINTS
from layout_witness import disagreements, record

from syncguard.layout.coverage import partition_problems, resident_problems

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    saved = {}

    def get(name):
        if name not in saved:
            folder = tmp_path_factory.mktemp(name)
            saved[name] = (folder, CHECKPOINTS[name].save(folder))
        return saved[name]

    return get


@pytest.mark.parametrize(("name", "split"), CELLS, ids=lambda value: str(value).replace(" ", "-"))
def test_the_rules_bind_every_element_where_the_engines_own_loader_put_it(name, split, checkpoints):
    folder, tensors = checkpoints(name)
    boxes = defaultdict(set)
    for pp_rank, tp_rank in split.ranks:
        seen = record(tensors, partial(build, name, folder, split, pp_rank, tp_rank), walk)
        assert seen.layout.unbound == ()
        assert resident_problems(seen.layout) == ()
        assert disagreements(seen) == []
        for shard in seen.layout.shards():
            boxes[shard.tensor.fqn].add(shard.box)
    lost = {fqn for fqn in tensors if partition_problems(tuple(tensors[fqn].shape), sorted(boxes[fqn]))}
    assert lost == set()
