"""The recorder against torch itself: the same random loader, run on numbered tensors and on the twin, tells one story."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn

from syncguard.engines.loader_record import record_loader
from syncguard.layout.model import LogicalTensor, ResidentTensor, Role
from syncguard.layout.ops import apply_ops
from syncguard.layout.recorded import Contents, Piece, Strided, UnfollowedError, blocks_of, row_major
from syncguard.layout.recording import recorded_claims
from syncguard.spec import Box

SHAPE = (6, 8)


def viewed(tensor, dice):
    """Take a random view or copy of a matrix, of any shape."""
    for _ in range(dice.randrange(4)):
        kind = dice.randrange(7)
        if kind == 0 and tensor.dim() > 1:
            tensor = tensor.transpose(*dice.sample(range(tensor.dim()), 2))
        elif kind == 1:
            dim = dice.randrange(tensor.dim())
            size = dice.randint(1, tensor.shape[dim])
            tensor = tensor.narrow(dim, dice.randint(0, tensor.shape[dim] - size), size)
        elif kind == 2:
            tensor = tensor.clone(memory_format=torch.contiguous_format)
        elif kind == 3:
            dim = dice.randrange(tensor.dim())
            if tensor.shape[dim] % 2 == 0:
                tensor = tensor.unflatten(dim, (2, tensor.shape[dim] // 2))
        elif kind == 4 and tensor.dim() > 1:
            tensor = tensor.flatten(0, 1)
        elif kind == 5:
            dim = dice.randrange(tensor.dim())
            tensor = torch.cat([tensor, tensor.flip(dim)[:0] if dim == 0 else tensor.narrow(dim, 0, 0)], dim)
        else:
            dim = dice.randrange(tensor.dim())
            tensor = torch.cat(list(reversed(tensor.split(dice.randint(1, tensor.shape[dim]), dim))), dim)
    return tensor


def program(seed):
    def load(self, weights):
        dice = random.Random(seed)
        sources = [tensor for _, tensor in weights]
        if dice.random() < 0.8:
            self.weight.data.copy_(sources[0])
        for _ in range(dice.randint(1, 4)):
            source = viewed(dice.choice(sources), dice)
            flat = source.reshape(-1)
            target = self.weight.data
            if dice.random() < 0.3:
                target = target.t()
            rows = dice.randint(1, target.shape[0])
            first = dice.randint(0, target.shape[0] - rows)
            part = target.narrow(0, first, rows)
            if dice.random() < 0.2:
                part.zero_()
            elif flat.numel() >= part.numel():
                part.copy_(flat[: part.numel()].reshape(part.shape))

    return load


class Model(nn.Module):
    def __init__(self, load):
        super().__init__()
        self.weight = nn.Parameter(torch.full(SHAPE, -7.0), requires_grad=False)
        self.load_weights = load.__get__(self)


@pytest.mark.parametrize("seed", range(150))
def test_a_random_loader_is_recorded_as_it_moves_numbers(seed):
    shapes = {"a": (6, 8), "b": (4, 12)}
    model, real = Model(program(seed)), Model(program(seed))
    recording = record_loader(model, {name: LogicalTensor(name, "float32", shape) for name, shape in shapes.items()})
    assert recording.failed == ""
    assert (model.weight == -7).all()
    numbers = {
        name: torch.arange(1.0, 49.0).reshape(shape) + 100 * index for index, (name, shape) in enumerate(shapes.items())
    }
    real.load_weights(numbers.items())
    due = real.weight.numpy()
    resident = ResidentTensor("weight", "float32", SHAPE, row_major(SHAPE), Role.PARAMETER, "Model")
    if (due == -7).any():
        with pytest.raises(UnfollowedError, match="elements"):
            recorded_claims(resident, recording)
        return
    held = np.full(SHAPE, np.nan)
    bindings, paddings = recorded_claims(resident, recording)
    for binding in bindings:
        box = binding.shard.box
        spans = tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))
        apply_ops(held, binding.ops)[...] = numbers[binding.shard.tensor.fqn].numpy()[spans]
    for padding in paddings:
        apply_ops(held, padding.ops)[...] = 0
    assert np.array_equal(held, due)


def test_a_later_write_takes_the_place_of_an_earlier_one():
    target = Contents(Strided(0, (4, 4), (4, 1)))
    source = Contents.of_checkpoint("a", (4, 4))
    target.write(target.view, source.read(source.view))
    target.write(Strided(5, (2, 2), (4, 1)), [Piece.constant((2, 2), "(zero)")])
    zeros = [piece for piece in target.pieces if piece.source == "(zero)"]
    assert [piece.box for piece in zeros] == [Box((1, 1), (2, 2))]
    assert sum(piece.box.count for piece in target.pieces) == 16


@pytest.mark.parametrize(
    ("view", "parent"),
    [
        (Strided(0, (4, 4), (4, 4)), Strided(0, (4, 4), (4, 1))),  # two dimensions walk one
        (Strided(14, (4,), (1,)), Strided(0, (4, 4), (4, 1))),  # leaves the parent
        (Strided(0, (5000,), (2,)), Strided(0, (10000,), (1,))),  # too many parts
    ],
)
def test_what_is_no_union_of_few_boxes_is_refused(view, parent):
    with pytest.raises(UnfollowedError):
        list(blocks_of(view, parent))
