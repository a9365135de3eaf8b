"""What a client streams to a daemon: a header first, then entries, records and options; read the same way by both daemons."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from syncguard.errors import BadInputError, ManifestError
from syncguard.rpc.limits import MANIFEST_ENTRIES_LIMIT, MANIFEST_LIMIT_BYTES
from syncguard.rpc.records import RecordCollector


@dataclass(slots=True)
class StreamParts:
    """What a request stream held.

    Attributes:
        header: Its first message; None when the stream was empty.
        chunks: Manifest chunks, in order.
        entries: Manifest entries in them.
        entry_bytes: Size of all chunks together.
        records: Chunks of replay records.
        policy: Limits of the replay; None when none were sent.
        workers: Names that a gate's request selects; empty for all.
    """

    header: Any = None
    chunks: list[Any] = field(default_factory=list)
    entries: int = 0
    entry_bytes: int = 0
    records: RecordCollector = field(default_factory=RecordCollector)
    policy: Any = None
    workers: tuple[str, ...] = ()


def read_parts(requests: Iterable[Any], *, limit_bytes: int = MANIFEST_LIMIT_BYTES) -> StreamParts:
    """Read a whole request stream, bounded before anything is kept.

    Args:
        requests: The messages.
        limit_bytes: Largest size of all manifest chunks together.

    Raises:
        BadInputError: A second header, or a part before the header.
        ManifestError: More entries, or larger ones, than a manifest may have.
        RecordError: More record bytes than a request may hold.
    """
    parts = StreamParts()
    for kind, part in _flat(requests):
        if kind == "header":
            if parts.header is not None:
                raise BadInputError("two headers in one stream", expected=1, found=2)
            parts.header = part
        elif parts.header is None:
            raise BadInputError("stream out of order", expected="the header first", found=kind or "an empty part")
        elif kind == "entries":
            _keep(parts, part, limit_bytes)
        elif kind == "record":
            parts.records.add(part)
        elif kind == "policy":
            parts.policy = part
        elif kind == "selection":
            parts.workers = tuple(part.workers)
    return parts


def _keep(parts: StreamParts, chunk: Any, limit_bytes: int) -> None:
    parts.entries += len(chunk.fqn)
    if parts.entries > MANIFEST_ENTRIES_LIMIT:
        raise ManifestError("entries of a manifest", expected=f"at most {MANIFEST_ENTRIES_LIMIT}", found=parts.entries)
    parts.entry_bytes += chunk.ByteSize() + 1
    if parts.entry_bytes > limit_bytes:
        parts.chunks.clear()
        raise ManifestError("size of a manifest", expected=f"at most {limit_bytes} bytes", found=parts.entry_bytes)
    parts.chunks.append(chunk)


def _flat(requests: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    """Yield each part with its kind; a whole request is its parts in order."""
    for request in requests:
        kind = request.WhichOneof("part")
        if kind != "whole":
            yield kind or "", getattr(request, kind) if kind else None
            continue
        whole = request.whole
        if whole.HasField("header"):
            yield "header", whole.header
        yield from (("entries", chunk) for chunk in whole.entries)
        yield from (("record", chunk) for chunk in whole.records)
        if whole.HasField("policy"):
            yield "policy", whole.policy
