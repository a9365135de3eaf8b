"""Replay records as bounded streams of chunks: the bytes of one safetensors file, checked down to the last one."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

from syncguard.errors import RecordError
from syncguard.replay import ReplayRecord, load_many, save_many
from syncguard.v1 import replay_pb2

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

CHUNK_BYTES: Final = 1 << 20
RECORD_LIMIT_BYTES: Final = 64 << 20
"""A response of 32k tokens with 20 score passes is 6 MB; what is larger is refused before it is kept."""


def encode_records(records: Sequence[ReplayRecord]) -> bytes:
    """Return the bytes of a record file."""
    with tempfile.TemporaryDirectory(prefix="syncguard-") as folder:
        path = Path(folder) / "records.safetensors"
        save_many(path, list(records))
        return path.read_bytes()


def decode_records(data: bytes) -> tuple[ReplayRecord, ...]:
    """Read the bytes of a record file.

    Raises:
        RecordError: Truncated, corrupt or contradicting itself.
        SpecVersionError: Of another specification.
    """
    with tempfile.TemporaryDirectory(prefix="syncguard-") as folder:
        path = Path(folder) / "records.safetensors"
        path.write_bytes(data)
        return tuple(load_many(path))


def record_chunks(records: Sequence[ReplayRecord]) -> Iterator[replay_pb2.RecordChunk]:
    """Yield records in chunks; nothing when there are none."""
    if not records:
        return
    data = encode_records(records)
    if len(data) > RECORD_LIMIT_BYTES:
        raise RecordError(
            "records too large to send",
            expected=f"at most {RECORD_LIMIT_BYTES} bytes",
            found=len(data),
            todo="carry fewer or shorter responses across the update",
        )
    for start in range(0, len(data), CHUNK_BYTES):
        yield replay_pb2.RecordChunk(data=data[start : start + CHUNK_BYTES])


class RecordCollector:
    """Chunks of one stream, put together under a limit."""

    def __init__(self, limit_bytes: int = RECORD_LIMIT_BYTES) -> None:
        """Start empty."""
        self._limit_bytes = limit_bytes
        self._parts: list[bytes] = []
        self._size_bytes = 0

    def add(self, chunk: replay_pb2.RecordChunk) -> None:
        """Keep one chunk.

        Raises:
            RecordError: The limit is passed.
        """
        self._size_bytes += len(chunk.data)
        if self._size_bytes > self._limit_bytes:
            self._parts.clear()
            raise RecordError(
                "records on the wire",
                expected=f"at most {self._limit_bytes} bytes",
                found=f"{self._size_bytes} or more",
            )
        self._parts.append(chunk.data)

    def records(self) -> tuple[ReplayRecord, ...]:
        """Return the records; none when no chunk came.

        Raises:
            RecordError: As `decode_records`.
            SpecVersionError: As `decode_records`.
        """
        return decode_records(b"".join(self._parts)) if self._parts else ()
