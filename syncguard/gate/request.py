"""A verification request as bytes: encoded once for a whole fleet, in one message where it is small enough."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from syncguard.manifest.wire import chunks_to_proto, header_to_proto
from syncguard.rpc.records import record_chunks
from syncguard.rpc.replay_report import policy_to_proto
from syncguard.v1 import agent_service_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Sequence

    from syncguard.manifest.model import Manifest
    from syncguard.replay import ReplayPolicy, ReplayRecord

WHOLE_LIMIT_BYTES: Final = 1 << 20
"""A request up to this size is one message. A stream costs a thread for each call, which is what gating a thousand
workers costs; a large one is streamed all the same, so that nobody holds it twice."""


@dataclass(frozen=True, slots=True)
class EncodedVerify:
    """A verification request, encoded once for a whole fleet.

    Attributes:
        parts: Serialized `VerifyRequest` messages, in order.
    """

    parts: tuple[bytes, ...]

    @classmethod
    def of(
        cls,
        manifest: Manifest,
        records: Sequence[ReplayRecord] = (),
        policy: ReplayPolicy | None = None,
        replay_waived_because: str = "",
    ) -> EncodedVerify:
        """Encode a manifest, records and the limits of the replay.

        Raises:
            RecordError: The records are too large to send.
        """
        limits = pb.VerifyRequest.Policy(replay_waived_because=replay_waived_because)
        if policy is not None:
            limits = policy_to_proto(policy, waived_because=replay_waived_because)
        header, chunks, kept = header_to_proto(manifest), list(chunks_to_proto(manifest)), list(record_chunks(records))
        if sum(message.ByteSize() for message in (header, limits, *chunks, *kept)) <= WHOLE_LIMIT_BYTES:
            whole = pb.VerifyRequest.Whole(header=header, entries=chunks, records=kept, policy=limits)
            return cls((pb.VerifyRequest(whole=whole).SerializeToString(),))
        return cls(
            (
                pb.VerifyRequest(header=header).SerializeToString(),
                *(pb.VerifyRequest(entries=chunk).SerializeToString() for chunk in chunks),
                *(pb.VerifyRequest(record=chunk).SerializeToString() for chunk in kept),
                pb.VerifyRequest(policy=limits).SerializeToString(),
            )
        )
