from __future__ import annotations

import base64
import zlib
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncguard.digest import ALGORITHM, PartialDigest
from syncguard.engines.base import RankStatus
from syncguard.engines.probe_wire import (
    ProbeAnswer,
    ProbeOp,
    ProbeRequest,
    decode_answer,
    decode_request,
    encode_answer,
    encode_request,
    pack_observation,
    unpack_observation,
)
from syncguard.errors import EngineError, SpecVersionError, SyncguardError, UnsupportedError, UsageError
from syncguard.layout.model import RankIdentity
from syncguard.manifest.model import CheckResult, RankObservation

PRIME = (1 << 61) - 1
partials = st.lists(
    st.builds(PartialDigest, st.integers(0, 2**40), st.integers(0, PRIME - 1), st.integers(0, PRIME - 1)),
    max_size=20,
)


def observation(found: tuple[PartialDigest, ...] = ()) -> RankObservation:
    return RankObservation(
        RankIdentity(1, 2),
        "abc",
        7,
        updating=False,
        layout_fingerprint="f" * 32,
        algorithm=ALGORITHM,
        key_seed_hex="00" * 32,
        partials=found,
        paddings=(CheckResult(ok=False, wrong_count=2, detail="first at (0, 1)"),),
        moved=("x",),
        read_bytes=12,
        duration_s=0.5,
        probe_version="0.1.0",
    )


@given(partials)
def test_an_observation_survives_the_text_channel(found):
    sent = observation(tuple(found))
    assert unpack_observation(decode_answer(encode_answer(pack_observation(sent)), "rank")) == sent


def test_a_binding_costs_at_most_64_bytes_on_the_way():
    found = tuple(PartialDigest(10**6, PRIME - i, (i * 0x9E3779B97F4A7C15) % PRIME) for i in range(1000))
    empty = len(encode_answer(pack_observation(observation())))
    assert (len(encode_answer(pack_observation(observation(found)))) - empty) / 1000 <= 64


@pytest.mark.parametrize("op", list(ProbeOp))
def test_a_request_reads_back_equal(op):
    request = ProbeRequest(op, "11" * 32)
    assert decode_request(encode_request(request)) == request


def test_a_request_of_another_specification_is_refused_as_such():
    with pytest.raises(SpecVersionError, match="expected 1"):
        decode_request('syncguard.observe:{"spec_version":2,"op":"observe","new_field":1}')


@given(st.text(max_size=60))
def test_no_action_text_does_anything_but_raise_ours(text):
    with pytest.raises(SyncguardError):
        decode_request(f"syncguard.{text}")


def test_an_unknown_operation_is_refused():
    with pytest.raises(UsageError):
        decode_request('syncguard.erase:{"spec_version":1,"op":"erase"}')


@given(st.binary(max_size=200))
def test_no_answer_bytes_do_anything_but_raise_ours(data):
    for text in (base64.b64encode(data).decode(), base64.b64encode(zlib.compress(data)).decode(), repr(data)):
        with pytest.raises(SyncguardError):
            decode_answer(text, "rank")


def test_an_answer_that_inflates_without_end_is_refused_before_it_fills_memory(monkeypatch):
    from syncguard.engines import probe_wire

    monkeypatch.setattr(probe_wire, "ANSWER_LIMIT_BYTES", 10_000)
    bomb = base64.b64encode(zlib.compress(bytes(10_000_000), 9)).decode()
    with pytest.raises(EngineError, match="too large"):
        decode_answer(bomb, "rank")


def test_a_cut_answer_is_refused():
    text = encode_answer(ProbeAnswer(status=RankStatus(RankIdentity(), "a", 1, updating=False, probe_version="v")))
    whole = base64.b64decode(text)
    for keep in (1, len(whole) // 2, len(whole) - 1):
        with pytest.raises(EngineError):
            decode_answer(base64.b64encode(whole[:keep]).decode(), "rank")


def test_a_torn_list_of_partial_digests_is_refused():
    answer = pack_observation(observation((PartialDigest(1, 2, 3),)))
    with pytest.raises(EngineError, match="torn"):
        unpack_observation(replace(answer, packed_partials=answer.packed_partials[:-1]))


@pytest.mark.parametrize(
    ("error", "kind"),
    [(UnsupportedError("no rule", todo="add one"), UnsupportedError), (EngineError("broke"), EngineError)],
)
def test_an_error_inside_the_rank_is_raised_again_as_its_own_kind(error, kind):
    with pytest.raises(kind, match=error.what):
        decode_answer(encode_answer(ProbeAnswer(error=error.as_dict())), "rank 1")
