"""How many tokens an engine's vocabulary has, read off its layout: it tells a clamped last id from a wrong one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from syncguard.agent.replay_pass import vocabulary_of
from syncguard.layout.model import Binding, LogicalTensor, RankIdentity, RankLayout, ResidentTensor, Role, Shard
from syncguard.spec import Box


def layout(fqn, layer_class, rows):
    resident = ResidentTensor("r.weight", "float32", (192, 8), (8, 1), Role.PARAMETER, layer_class)
    shard = Shard(LogicalTensor(fqn, "float32", (rows, 8)), Box((0, 0), (rows, 8)))
    return RankLayout(RankIdentity(), "Model", (resident,), (Binding(shard, "r.weight"),))


@pytest.mark.parametrize(
    ("fqn", "layer_class", "size"),
    [
        ("model.embed_tokens.weight", "Embedding", 130),
        ("transformer.wte.weight", "VocabParallelEmbedding", 130),
        ("output.weight", "ParallelLMHead", 130),
        ("transformer.wpe.weight", "Embedding", 0),
    ],
)
def test_the_layer_class_tells_the_vocabulary_where_the_name_does_not(fqn, layer_class, size):
    assert vocabulary_of([layout(fqn, layer_class, 130)]) == size


def test_the_vocabulary_of_a_draft_model_is_not_that_of_the_served_one():
    served = layout("model.embed_tokens.weight", "VocabParallelEmbedding", 130)
    draft = layout("model.embed_tokens.weight", "VocabParallelEmbedding", 999)
    draft = replace(draft, rank=replace(draft.rank, role="draft"))
    assert vocabulary_of([served, draft]) == vocabulary_of([draft, served]) == 130
