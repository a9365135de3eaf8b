import json
import socket
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn

from syncguard.replay import ReplayRecord, c_key, response_scores_from_logits
from syncguard.replay.capture import score_with_trainer
from syncguard.replay.trainer import frozen, gradient_forward, trainer_forward

VOCABULARY = 22


class Tiny(nn.Module):
    """A causal model called as Transformers' are."""

    def __init__(self, dropout: float = 0.0):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(VOCABULARY, 16), nn.Linear(16, VOCABULARY)
        self.dropout = nn.Dropout(dropout)
        self.calls = []

    def forward(self, input_ids, attention_mask, position_ids, use_cache):
        self.calls.append((self.training, torch.is_grad_enabled()))
        mixed = torch.cumsum(self.embedding(input_ids), dim=1) / (position_ids + 1).unsqueeze(-1)
        return type("Output", (), {"logits": self.head(self.dropout(mixed))})


def record(length: int = 30, **changes) -> ReplayRecord:
    return ReplayRecord(input_ids=np.random.default_rng(2).integers(0, VOCABULARY, length), prompt_length=5, **changes)


def test_frozen_scores_equal_those_taken_from_the_whole_logits():
    model, one = Tiny(), record()
    scored = score_with_trainer(one, trainer_forward(model), "old")
    ids = torch.tensor(one.input_ids).unsqueeze(0)
    logits = model(ids, None, torch.arange(30).unsqueeze(0), use_cache=False).logits[0].detach().numpy()
    np.testing.assert_allclose(
        scored.scores[c_key(0, "old")], response_scores_from_logits(logits, one.input_ids, 5), atol=1e-12
    )
    np.testing.assert_array_equal(scored.scores[c_key(0, "old")], scored.scores[c_key(1, "old")])


def test_long_responses_are_scored_in_blocks_alike():
    model, one = Tiny(), record(700)
    scores = trainer_forward(model)(one)
    assert scores.shape == (695,)
    np.testing.assert_allclose(scores[:100], trainer_forward(model)(record(700))[:100])


def test_the_frozen_forward_is_in_eval_mode_without_gradients_and_every_module_gets_its_mode_back():
    model = Tiny(dropout=0.5).train()
    model.head.eval()
    before = [module.training for module in model.modules()]
    trainer_forward(model)(record())
    assert model.calls == [(False, False)]
    assert [module.training for module in model.modules()] == before


def test_modes_come_back_after_an_error_too():
    model = Tiny().train()
    with pytest.raises(RuntimeError, match="boom"), frozen(model):
        raise RuntimeError("boom")
    assert model.training
    assert torch.is_grad_enabled()


def test_the_gradient_enabled_forward_runs_in_the_models_own_mode_and_dropout_shows():
    model, one = Tiny(dropout=0.4).train(), record()
    gap = np.abs(gradient_forward(model)(one) - trainer_forward(model)(one)).mean()
    assert model.calls[0] == (True, True)
    assert gap > 0.01


def test_positions_of_the_record_reach_the_model():
    model = Tiny()
    moved = record(positions=np.arange(30) + 7)
    assert np.abs(trainer_forward(model)(moved) - trainer_forward(model)(record())).max() > 1e-3


RANK_PROGRAM = """
import json, sys
import torch
from syncguard.replay.trainer import vocabulary_parallel_scores

rank, port, vocabulary = (int(text) for text in sys.argv[1:])
logits, targets = (torch.tensor(part) for part in json.load(sys.stdin))
torch.distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
first, last = ((0, 9), (9, vocabulary))[rank]
whole = vocabulary_parallel_scores(logits[:, first:last], first, targets).tolist()
alone = torch.log_softmax(logits[:, first:last].double(), -1)
column = (targets - first).clamp(0, last - first - 1)
print(json.dumps([whole, alone.gather(1, column.unsqueeze(1)).squeeze(1).tolist()]))
torch.distributed.destroy_process_group()
"""


def _logits():
    generator = torch.Generator().manual_seed(3)
    return torch.randn(14, VOCABULARY, generator=generator) * 3, torch.randint(
        0, VOCABULARY, (14,), generator=generator
    )


def test_vocabulary_parallel_scores_on_two_gloo_ranks_equal_the_whole_and_each_shard_alone_does_not():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    given = json.dumps([part.tolist() for part in _logits()])
    # Fresh processes: a fork of one in which torch has started threads may wait for them for ever.
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK_PROGRAM, str(rank), str(port), str(VOCABULARY)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    for rank in ranks:
        rank.stdin.write(given)
        rank.stdin.close()
    found, alone = zip(*(json.loads(rank.stdout.read()) for rank in ranks), strict=True)
    assert [rank.wait(60) for rank in ranks] == [0, 0]
    logits, targets = _logits()
    whole = torch.log_softmax(logits.double(), -1).gather(1, targets.unsqueeze(1)).squeeze(1)
    np.testing.assert_allclose(found[0], whole, atol=1e-12)
    assert found[0] == found[1]
    owner = np.where(targets.numpy() < 9, alone[0], alone[1])
    assert np.abs(owner - whole.numpy()).mean() > 0.1
