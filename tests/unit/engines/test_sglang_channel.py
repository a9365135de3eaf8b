"""Questions to servers of several pipeline stages: a real store between the stages, and what becomes of missing answers."""

from __future__ import annotations

import pytest
from torch.distributed import HashStore

from syncguard.engines.base import RankStatus
from syncguard.engines.probe_wire import ProbeAnswer, ProbeOp, ProbeRequest, decode_request, encode_answer
from syncguard.engines.sglang_channel import COLLECT_WAIT_S, ProbeChannel
from syncguard.engines.sglang_stages import ANSWER_KEY, KEPT, StageBoard
from syncguard.errors import EngineError, UnsupportedError
from syncguard.layout.model import RankIdentity


def said_by(tp_rank: int, stage: int, role: str = "target") -> str:
    identity = RankIdentity(tp_rank=tp_rank, tp_size=2, pp_rank=stage, pp_size=2, role=role)
    return encode_answer(ProbeAnswer(status=RankStatus(identity, f"i{stage}{tp_rank}", 3, False, "1")))


class Server:
    """Two stages of two ranks: the second stage answers after `late` more requests."""

    def __init__(self, late: int = 0, *, draft: bool = False) -> None:
        self.board = StageBoard(HashStore())
        self.late, self.draft = late, draft
        self.asked: list[ProbeOp] = []
        self.now_s = 0.0
        self.pending = ""

    def post(self, payload):
        request = decode_request(payload["action"])
        self.asked.append(request.op)
        info = [{"size": 4, "tp_size": 2, "pp_size": 2}]
        if request.op is not ProbeOp.COLLECT:
            self.pending = request.nonce
            ranks = [{"checksums": {ANSWER_KEY: said_by(tp, 0)}, "parallelism_info": info} for tp in range(2)]
            return 200, {"success": True, "ranks": ranks}
        if len(self.asked) > self.late + 1 and self.pending:
            for tp in range(2):
                self.board.leave(self.pending, 2 + tp, "target", said_by(tp, 1))
            if self.draft:
                self.board.leave(self.pending, 2, "draft", said_by(0, 1, "draft"))
            self.pending = ""
        found = self.board.collect(request.nonce, 4, "target")
        found |= {f"draft.{key}": text for key, text in self.board.collect(request.nonce, 4, "draft").items()}
        return 200, {"success": True, "ranks": [{"checksums": found, "parallelism_info": info}]}

    def channel(self) -> ProbeChannel:
        return ProbeChannel(self.post, "http://server", sleep=self.sleep, clock=lambda: self.now_s)

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.mark.parametrize("late", [0, 1, 5])
def test_answers_of_later_stages_are_waited_for(late):
    server = Server(late)
    answers, expected = server.channel().ask(ProbeRequest(ProbeOp.STATUS))
    assert [(a.status.rank.pp_rank, a.status.rank.tp_rank) for a in answers] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert expected == 4
    assert server.asked == [ProbeOp.STATUS, *[ProbeOp.COLLECT] * (late + 1)]


def test_a_stage_that_never_answers_is_missing_and_not_waited_for_without_end():
    server = Server(late=10**9)
    answers, expected = server.channel().ask(ProbeRequest(ProbeOp.STATUS))
    assert (len(answers), expected) == (2, 4)
    assert COLLECT_WAIT_S <= server.now_s < COLLECT_WAIT_S + 1


def test_a_draft_models_answer_does_not_stand_for_a_missing_rank():
    server = Server(draft=True)
    answers, _ = server.channel().ask(ProbeRequest(ProbeOp.STATUS))
    assert sorted(a.status.rank.role for a in answers) == ["draft", *["target"] * 4]


def test_each_question_has_its_own_nonce_so_that_an_old_answer_is_never_taken_for_a_new_one():
    server = Server()
    channel = server.channel()
    first, second = channel.ask(ProbeRequest(ProbeOp.STATUS)), channel.ask(ProbeRequest(ProbeOp.STATUS))
    assert first == second
    server.late = 10**9
    assert len(channel.ask(ProbeRequest(ProbeOp.STATUS))[0]) == 2


def test_a_server_of_one_stage_is_asked_once():
    server = Server()

    def post(payload):
        status, body = server.post(payload)
        for rank in body["ranks"]:
            rank["parallelism_info"] = [{"size": 2, "tp_size": 2, "pp_size": 1}]
        return status, body

    answers, expected = ProbeChannel(post, "http://server").ask(ProbeRequest(ProbeOp.STATUS))
    assert (len(answers), expected, server.asked) == (2, 2, [ProbeOp.STATUS])


def test_a_stage_keeps_only_its_last_answers_in_the_store():
    store = HashStore()
    board = StageBoard(store)
    for number in range(3 * KEPT):
        board.leave(f"n{number}", 1, "target", "text")
    kept = [number for number in range(3 * KEPT) if board.collect(f"n{number}", 2, "target")]
    assert kept == list(range(2 * KEPT, 3 * KEPT))


@pytest.mark.parametrize(
    ("status", "body", "error"),
    [
        (400, {"success": False, "message": "Unsupported action='syncguard.status'"}, UnsupportedError),
        (400, {"success": False, "message": "something broke"}, EngineError),
        (500, {"success": True}, EngineError),
    ],
)
def test_a_refusal_is_one_clear_error(status, body, error):
    with pytest.raises(error):
        ProbeChannel(lambda _payload: (status, body), "http://server").ask(ProbeRequest(ProbeOp.STATUS))
