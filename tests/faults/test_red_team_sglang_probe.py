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
