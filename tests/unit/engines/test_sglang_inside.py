"""The in-rank half of looking inside, without a server: what a rank does with our actions, on a real tiny model."""

import sys
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from syncguard.engines.sglang_forced import ForcedResponse
from syncguard.engines.sglang_inside import ACTION_PREFIX, INSIDE_KEY, InsideAnswer, InsideRequest, RankCapture
from syncguard.replay.inside import CHOSEN
from syncguard.replay.intermediates import capturing

sys.path.insert(0, str(Path(__file__).parents[2] / "engines"))
from tiny_models import tiny_model

IDS = torch.tensor([[3, 14, 15, 92, 65]])


class Placement:
    def model_dump(self):
        return {"tp_rank": 1, "pp_rank": 0}


class Rank:
    """A rank's checker and our hook on it."""

    def __init__(self, folder, kind="qwen3"):
        self.model = tiny_model(kind)
        self.forced = ForcedResponse()
        self.capture = RankCapture(folder, self.forced)
        self.checker = SimpleNamespace(_get_model=lambda: self.model, _parallelism_info=lambda role: Placement())
        self.passed = []

    def ask(self, **request) -> InsideAnswer:
        return self.say(ACTION_PREFIX + msgspec.json.encode(InsideRequest(**request)).decode())

    def say(self, action):
        said = self.capture.on_check(
            lambda _, action, **kwargs: self.passed.append(action), self.checker, action, role="target"
        )
        return None if said is None else msgspec.json.decode(said["checksums"][INSIDE_KEY], type=InsideAnswer)

    def forward(self):
        with torch.no_grad():
            self.model(input_ids=IDS, use_cache=False)

    def hooks(self):
        return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in self.model.modules())


def test_other_actions_go_through(tmp_path):
    rank = Rank(tmp_path)
    assert rank.say("checksum") is None
    assert rank.passed == ["checksum"]


def test_a_capture_writes_one_file_of_its_rank_and_leaves_no_hook(tmp_path):
    rank = Rank(tmp_path, "qwen3_moe")
    listed = rank.ask(op="list")
    assert listed.modules[-2:] == ("model.norm", "logits")
    assert rank.ask(op="capture", modules=(*listed.modules, *listed.routers), operator="model.layers.1.mlp").error == ""
    rank.forward()
    answer = rank.ask(op="stop")
    assert answer.modules == (*listed.modules, *listed.routers)
    assert Path(answer.file) == tmp_path / "tp1-pp0.safetensors"
    values = load_file(answer.file)
    assert values[f"{listed.routers[0]}{CHOSEN}"].dtype == torch.int64
    assert values["logits"].shape == (5, 130)
    assert set(load_file(answer.operator_file)) == {"input.0", "output"}
    assert rank.hooks() == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["operator-tp1-pp0.safetensors", "tp1-pp0.safetensors"]


def test_a_request_that_fails_is_an_answer_and_never_an_exception(tmp_path):
    rank = Rank(tmp_path)
    assert "none" in rank.ask(op="stop").error
    assert "no such module" in rank.ask(op="capture", modules=("nope",)).error
    assert "no such module" in rank.ask(op="capture", operator="nope").error
    assert "InsideRequest" in rank.say(ACTION_PREFIX + "{}").error or "op" in rank.say(ACTION_PREFIX + "{}").error
    assert rank.hooks() == 0


def test_a_point_that_cannot_be_kept_fails_the_look_and_not_the_forward_that_others_share(tmp_path):
    rank = Rank(tmp_path)

    class Side(torch.nn.Module):
        def forward(self, hidden_states):
            return {"no": "tensor"}

    rank.model.side = Side()
    rank.model.model.norm.register_forward_hook(lambda _, __, output: rank.model.side(output) and None)
    assert rank.ask(op="capture", modules=("side", "model.norm"), operator="side").error == ""
    rank.forward()
    assert "no tensor" in rank.ask(op="stop").error
    assert rank.ask(op="capture", modules=("model.norm",)).error == ""
    rank.forward()
    assert rank.ask(op="stop").file


def test_a_second_start_ends_the_first(tmp_path):
    rank = Rank(tmp_path)
    rank.ask(op="capture", modules=("model.norm",))
    rank.ask(op="capture", modules=("model.embed_tokens",))
    rank.forward()
    assert rank.ask(op="stop").modules == ("model.embed_tokens",)
    assert rank.hooks() == 0


class OwedOutput:
    """What a layer of SGLang 0.5.23 returns while its reduction over the ranks is still to come."""


def test_a_layer_whose_sum_is_still_owed_is_read_where_the_next_module_is_given_it():
    class Attention(torch.nn.Module):
        def forward(self, hidden_states, forward_batch):
            return hidden_states

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.self_attn = Attention()

        def forward(self, hidden_states, forward_batch):
            if isinstance(hidden_states, OwedOutput):  # the boundary completes the sum and writes the residual
                forward_batch.residual_stream.residual = forward_batch.sums.pop(0)
            self.self_attn(hidden_states=torch.zeros(2, 3), forward_batch=forward_batch)
            return OwedOutput()

    class Norm(torch.nn.Module):
        def forward(self, hidden_states, residual):
            return hidden_states + residual, residual

    class Inner(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers, self.norm = torch.nn.ModuleList([Layer(), Layer()]), Norm()

        def forward(self, batch):
            hidden = torch.zeros(2, 3)
            for layer in self.layers:
                hidden = layer(hidden, batch)
            return self.norm(torch.full((2, 3), 5.0), torch.full((2, 3), 2.0))

    model = torch.nn.Module()
    model.model = Inner()
    batch = SimpleNamespace(residual_stream=SimpleNamespace(residual=torch.zeros(2, 3)), sums=[torch.full((2, 3), 4.0)])
    with capturing(model, ["model.layers.0", "model.layers.1"], guarded=True) as kept:
        model.model(batch)
    assert kept.error == ""
    assert (kept.values["model.layers.0"] == 4).all()
    assert (kept.values["model.layers.1"] == 7).all()


def sampled(forced, position, drawn=(9,), pair=True):
    """Run the hook around a sampler that draws these ids."""
    chosen = torch.tensor(drawn)
    result = forced.on_sample(
        lambda *_: (chosen, None) if pair else chosen, None, None, None, torch.tensor([position] * len(drawn))
    )
    return (result[0] if pair else result).tolist()


@pytest.mark.parametrize("pair", [True, False])
def test_only_an_armed_response_replaces_what_was_drawn_and_by_position(pair):
    forced = ForcedResponse()
    assert sampled(forced, 4, pair=pair) == [9]
    forced.arm([21, 22, 23], prompt_length=5)
    assert [sampled(forced, at, pair=pair) for at in (4, 5, 6)] == [[21], [22], [23]]
    assert (forced.forced, forced.error) == (3, "")
    forced.disarm()
    assert sampled(forced, 4, pair=pair) == [9]


@pytest.mark.parametrize(("position", "drawn"), [(3, (9,)), (8, (9,)), (4, (9, 8))])
def test_another_request_keeps_its_own_tokens_and_is_reported(position, drawn):
    forced = ForcedResponse()
    forced.arm([21, 22, 23], prompt_length=5)
    assert sampled(forced, position, drawn) == list(drawn)
    assert "not idle" in forced.error


def test_a_sampler_that_cannot_be_written_to_is_reported_and_goes_on():
    forced = ForcedResponse()
    forced.arm([21], prompt_length=1)
    assert forced.on_sample(lambda *_: "not a tensor", None, None, None, torch.tensor([0])) == "not a tensor"
    assert "AttributeError" in forced.error


def test_a_forced_response_is_answered_with_what_was_forced(tmp_path):
    rank = Rank(tmp_path)
    rank.ask(op="force", response_ids=(21, 22), prompt_length=5)
    assert sampled(rank.forced, 4) == [21]
    answer = rank.ask(op="stop")
    assert (answer.forced, answer.error, answer.file) == (1, "", "")
    assert sampled(rank.forced, 5) == [9]
