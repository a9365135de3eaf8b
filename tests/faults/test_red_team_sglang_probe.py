"""An SGLang that changes under the probe: calls it cannot watch, experts that move, another server at one address."""

from __future__ import annotations

import httpx
import pytest
from tiny_models import tiny_model

from syncguard.engines import sglang_probe
from syncguard.engines.base import RankStatus
from syncguard.engines.probe_wire import (
    ProbeAnswer,
    ProbeOp,
    ProbeRequest,
    decode_answer,
    encode_answer,
    encode_request,
)
from syncguard.engines.sglang import SglangEngine
from syncguard.engines.sglang_probe import ANSWER_KEY, ProbeHooks, ProcessProbes
from syncguard.errors import UnsupportedError
from syncguard.layout.model import RankIdentity

STATUS = encode_request(ProbeRequest(ProbeOp.STATUS))


class Placement(dict):
    def model_dump(self):
        return dict(self)


class Checker:
    """What the hooks use of SGLang's `WeightChecker`."""

    def _parallelism_info(self, *, role):
        return Placement(tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, dp_size=1, role=role)

    def _get_model(self):
        return tiny_model()


def asked(hooks, action=STATUS):
    answer = hooks.on_check(None, Checker(), action, role="target")
    return decode_answer(answer["checksums"][ANSWER_KEY], "rank 0")


def test_a_rank_with_an_update_call_that_cannot_be_watched_answers_nothing_else():
    hooks = ProbeHooks(ProcessProbes(), ("os.path.join", "os.path.renamed_in_another_version", "no.such.module.call"))
    for op in ProbeOp:
        with pytest.raises(UnsupportedError, match=r"os\.path\.renamed_in_another_version, no\.such\.module\.call"):
            asked(hooks, encode_request(ProbeRequest(op, "00" * 32)))


def test_a_rank_in_which_every_update_call_is_there_answers():
    assert asked(ProbeHooks(ProcessProbes(), ("os.path.join",))).status.epoch == 0


def test_a_move_of_experts_is_an_update():
    probes = ProcessProbes()
    hooks = ProbeHooks(probes)
    before = asked(hooks).status.epoch
    seen = []

    def move(*, update_layer_ids):
        seen.append(asked(hooks).status.updating)
        return update_layer_ids

    assert hooks.counted(move, update_layer_ids=[3]) == [3]
    assert seen == [True]
    assert asked(hooks).status.epoch == before + 1
    assert {
        "sglang.srt.eplb.eplb_manager.update_expert_location_with_recovery",
        "sglang.srt.eplb.expert_location_updater.ExpertLocationUpdater.update",
    } <= set(sglang_probe.UPDATE_CALLS)


def test_every_hooked_call_is_watched():
    assert set(sglang_probe.WATCHED) >= {
        sglang_probe.CHECKER,
        *sglang_probe.UPDATE_CALLS,
        *sglang_probe.SESSION_CALLS,
        *sglang_probe.SESSION_BOUNDS,
    }


def server(state):
    """An SGLang server's answers, as far as a status needs them."""

    def handle(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/server_info":
            return httpx.Response(200, json={"version": "0.5.23", "dp_size": state["replicas"]})
        if request.url.path == "/model_info":
            return httpx.Response(200, json={"model_path": "tiny", "weight_version": "run@1"})
        status = RankStatus(RankIdentity(), state["incarnation"], 0, updating=False, probe_version="1")
        rank = {"checksums": {ANSWER_KEY: encode_answer(ProbeAnswer(status=status))}, "parallelism_info": [{"size": 1}]}
        return httpx.Response(200, json={"success": True, "ranks": [rank]})

    return httpx.MockTransport(handle)


def test_a_restarted_server_with_more_replicas_is_asked_again_how_many_there_are():
    state = {"incarnation": "a", "replicas": 1}
    with SglangEngine("http://worker", transport=server(state)) as engine:
        assert engine.status().expected_ranks == 1
        state.update(incarnation="b", replicas=2)
        assert engine.status().expected_ranks == 2


def test_a_rank_counts_the_flushes_that_it_did_and_not_those_that_it_refused():
    probes = ProcessProbes()
    hooks = ProbeHooks(probes)
    assert hooks.on_flush(lambda _scheduler, empty_cache=True: empty_cache, None) is True
    assert asked(hooks).status.flushes == 1, "also before the probe was made"
    assert hooks.on_flush(lambda _scheduler: False, None) is False
    assert asked(hooks).status.flushes == 1
    assert hooks.on_flush(lambda _scheduler: True, None) is True
    assert asked(hooks).status.flushes == 2
    assert sglang_probe.missing_targets([sglang_probe.FLUSH]) == ()


class Replicas:
    """A server of data-parallel replicas that answers a flush with what its first replica said, as SGLang does."""

    def __init__(self, count: int, refusing: frozenset[int] = frozenset(), *, attention: bool = False) -> None:
        self.flushes = [0] * count
        self.refusing = refusing
        self.attention = attention

    def handle(self, request: httpx.Request) -> httpx.Response:
        count = len(self.flushes)
        if request.url.path == "/server_info":
            return httpx.Response(200, json={"dp_size": count, "enable_dp_attention": self.attention})
        if request.url.path == "/model_info":
            return httpx.Response(200, json={"model_path": "tiny", "weight_version": "run@1"})
        if request.url.path == "/flush_cache":
            self.flushes = [n + (i not in self.refusing) for i, n in enumerate(self.flushes)]
            return httpx.Response(200, text="Cache flushed.\n") if 0 not in self.refusing else httpx.Response(400)
        ranks = []
        for index, flushes in enumerate(self.flushes):
            place = RankIdentity(tp_rank=index, tp_size=count) if self.attention else RankIdentity(dp_rank=index)
            status = RankStatus(place, "a", 0, updating=False, probe_version="1", flushes=flushes)
            text = encode_answer(ProbeAnswer(status=status))
            info = [{"size": count if self.attention else 1}]
            ranks.append({"checksums": {ANSWER_KEY: text}, "parallelism_info": info})
        return httpx.Response(200, json={"success": True, "ranks": ranks})


@pytest.mark.parametrize("attention", [False, True])
def test_a_flush_that_one_replica_of_several_refused_is_not_confirmed(attention):
    replicas = Replicas(3, frozenset({2}), attention=attention)
    with SglangEngine("http://worker", transport=httpx.MockTransport(replicas.handle)) as engine:
        refused = engine.flush()
        assert not refused.confirmed
        assert refused.detail.endswith("but not " + ("tp2/3" if attention else "tp0/1"))
        replicas.refusing = frozenset()
        assert engine.flush().confirmed
        replicas.refusing = frozenset({0})
        assert not engine.flush().confirmed


def test_a_single_scheduler_is_believed_by_its_own_words():
    replicas = Replicas(1)
    with SglangEngine("http://worker", transport=httpx.MockTransport(replicas.handle)) as engine:
        assert engine.flush().confirmed
