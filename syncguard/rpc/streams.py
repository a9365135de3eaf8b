"""What a client streams to a daemon: a header first, then entries, records and options; read the same way by both daemons."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from syncguard.errors import BadInputError, ManifestError
from syncguard.rpc.limits import MANIFEST_ENTRIES_LIMIT
from syncguard.rpc.records import RecordCollector


@dataclass(slots=True)
class StreamParts:
    """What a request stream held.

    Attributes:
        header: Its first message; None when the stream was empty.
        chunks: Manifest chunks, in order.
        entries: Manifest entries in them.
        records: Chunks of replay records.
        policy: Limits of the replay; None when none were sent.
        workers: Names that a gate's request selects; empty for all.
    """

    header: Any = None
    chunks: list[Any] = field(default_factory=list)
    entries: int = 0
    records: RecordCollector = field(default_factory=RecordCollector)
    policy: Any = None
    workers: tuple[str, ...] = ()


def read_parts(requests: Iterable[Any]) -> StreamParts:
    """Read a whole request stream, bounded before anything is kept.

    Raises:
        BadInputError: A second header, or a part before the header.
        ManifestError: More entries than a manifest may have.
        RecordError: More record bytes than a request may hold.
    """
    parts = StreamParts()
    for request in requests:
        kind = request.WhichOneof("part")
        if kind == "header":
            if parts.header is not None:
                raise BadInputError("two headers in one stream", expected=1, found=2)
            parts.header = request.header
        elif parts.header is None:
            raise BadInputError("stream out of order", expected="the header first", found=kind or "an empty part")
        elif kind == "entries":
            parts.entries += len(request.entries.fqn)
            if parts.entries > MANIFEST_ENTRIES_LIMIT:
                raise ManifestError(
                    "entries of a manifest", expected=f"at most {MANIFEST_ENTRIES_LIMIT}", found=parts.entries
                )
            parts.chunks.append(request.entries)
        elif kind == "record":
            parts.records.add(request.record)
        elif kind == "policy":
            parts.policy = request.policy
        elif kind == "selection":
            parts.workers = tuple(request.selection.workers)
    return parts
