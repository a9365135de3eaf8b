from __future__ import annotations

from collections import defaultdict
from functools import partial

import pytest
import torch
from layout_cases import CELLS, walk
from layout_witness import disagreements, record

from syncguard.layout.coverage import partition_problems, resident_problems

torch.set_num_threads(1)


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_the_rules_bind_every_element_where_the_engines_own_loader_put_it(cell, exported, record_property):
    folder, tensors = exported(cell)
    boxes, dropped = defaultdict(set), set()
    for pp_rank, tp_rank in cell.split.ranks:
        seen = record(tensors, partial(cell.rank, folder, pp_rank, tp_rank), walk)
        assert seen.layout.unbound == ()
        assert resident_problems(seen.layout) == ()
        assert disagreements(seen) == []
        record_property("derived", bool(seen.layout.derived))
        dropped.update(named.fqn for named in seen.layout.dropped)
        for shard in seen.layout.shards():
            boxes[shard.tensor.fqn].add(shard.box)
    lost = {fqn for fqn in tensors if partition_problems(tuple(tensors[fqn].shape), sorted(boxes[fqn]))}
    assert lost - dropped == set()
    assert not any(boxes[fqn] for fqn in dropped)
