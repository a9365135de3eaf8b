"""Recording a loader inside an engine that serves: nothing that the loader does may stay behind in the live model."""

from __future__ import annotations

from collections import OrderedDict, deque

import pytest
import torch
from torch import nn

from syncguard.engines.loader_record import record_loader
from syncguard.layout.model import LogicalTensor

CHECKPOINT = {"w": LogicalTensor("w", "float32", (4, 3))}


class Tracker:
    """An object beside the layers, as quantization methods and placement managers are."""

    def __init__(self):
        self.count, self.names, self.seen = 0, ["first"], {"a": 1}
        self.scale = torch.ones(2)


class Layer(nn.Module):
    """A layer whose loader does something besides copying."""

    def __init__(self, does, *, breaks=False):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(4, 3))
        self.quant_method, self.listed = Tracker(), [Tracker()]
        self.loaded, self.order, self.recent = {"x"}, OrderedDict(b=1, a=2), deque([1, 2], maxlen=2)
        self._does, self._breaks = does, breaks

    def load_weights(self, weights):
        for name, tensor in weights:
            self.get_parameter(name).data.copy_(tensor)
            self._does(self, tensor)
        if self._breaks:
            raise RuntimeError("half-way")


def counts(layer, _tensor):
    layer.quant_method.count += 1
    layer.listed[0].count += 1


def keeps_a_tensor(layer, tensor):
    layer.quant_method.scale = tensor.new_ones(2)
    layer.quant_method.late = tensor


def lists(layer, _tensor):
    layer.quant_method.names.append("w")
    layer.quant_method.seen["w"] = 2
    layer.loaded.add("w")
    layer.order.pop("b")
    layer.recent.append(3)


def state_of(layer):
    held = [
        vars(one) | {"names": list(one.names), "seen": dict(one.seen)} for one in (layer.quant_method, *layer.listed)
    ]
    return held, set(layer.loaded), list(layer.order.items()), list(layer.recent), layer.recent.maxlen


@pytest.mark.parametrize("breaks", [False, True])
@pytest.mark.parametrize("does", [counts, keeps_a_tensor, lists])
def test_what_a_loader_keeps_beside_the_weights_is_put_back(does, breaks):
    layer = Layer(does, breaks=breaks)
    before = state_of(layer)
    objects = (layer.quant_method, layer.listed, layer.loaded, layer.order, layer.recent, layer.quant_method.names)
    recording = record_loader(layer, CHECKPOINT)
    assert bool(recording.failed) is breaks
    assert str(state_of(layer)) == str(before)
    assert layer.quant_method.scale.device.type == "cpu"
    now = (layer.quant_method, layer.listed, layer.loaded, layer.order, layer.recent, layer.quant_method.names)
    assert all(one is other for one, other in zip(now, objects, strict=True))


def test_a_loader_that_counts_is_still_recorded_the_next_time():
    layer = Layer(counts)
    first, second = (record_loader(layer, CHECKPOINT) for _ in range(2))
    assert first.contents["w"].pieces == second.contents["w"].pieces != []
    assert not layer.w.any()
