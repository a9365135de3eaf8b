"""Streams that never end, or that hold what nobody counts."""

from __future__ import annotations

import itertools

import pytest

from syncguard.errors import BadInputError, ManifestError
from syncguard.rpc.streams import read_parts
from syncguard.v1 import agent_service_pb2 as pb
from syncguard.v1 import manifest_pb2

HEADER = pb.VerifyRequest(header=manifest_pb2.ManifestHeader())
NAMELESS = [
    manifest_pb2.ManifestChunk(digests=b"x" * 4096),
    manifest_pb2.ManifestChunk(data=[1] * 512),
    manifest_pb2.ManifestChunk(forms=[manifest_pb2.TensorForm(dtype="bfloat16")] * 512),
    manifest_pb2.ManifestChunk(parts=[manifest_pb2.EntryParts(entry=1)] * 512),
    manifest_pb2.ManifestChunk(),
]


@pytest.mark.parametrize("chunk", NAMELESS)
def test_an_endless_stream_of_chunks_without_names_is_refused_within_its_bound(chunk):
    with pytest.raises(ManifestError, match="size of a manifest"):
        read_parts(itertools.chain([HEADER], itertools.repeat(pb.VerifyRequest(entries=chunk))), limit_bytes=1 << 16)


def test_chunks_of_one_message_are_bounded_like_those_of_many():
    whole = pb.VerifyRequest.Whole(header=HEADER.header, entries=NAMELESS[:1] * 64)
    with pytest.raises(ManifestError, match="size of a manifest"):
        read_parts([pb.VerifyRequest(whole=whole)], limit_bytes=1 << 16)


def test_two_requests_in_one_call_are_refused_however_they_are_sent():
    whole = pb.VerifyRequest(whole=pb.VerifyRequest.Whole(header=HEADER.header))
    for messages in ([whole, whole], [whole, HEADER], [HEADER, whole]):
        with pytest.raises(BadInputError, match="two headers"):
            read_parts(messages)


def test_one_message_without_a_header_is_refused():
    whole = pb.VerifyRequest.Whole(entries=NAMELESS[:1])
    with pytest.raises(BadInputError, match="out of order"):
        read_parts([pb.VerifyRequest(whole=whole)])
