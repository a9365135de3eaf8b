"""Bounds of every message and stream, equal on both ends."""

from __future__ import annotations

from typing import Any, Final

MESSAGE_LIMIT_BYTES: Final = 64 << 20
"""A rank's layout of 20,000 residents is 6 MB; a verdict with 10,000 findings is 5 MB."""

MANIFEST_ENTRIES_LIMIT: Final = 200_000
MANIFEST_LIMIT_BYTES: Final = 512 << 20
"""100,000 tensors are 13 MB, with 16 parts each 100 MB more. Bounds what the number of names does not: other columns, parts."""
FINDINGS_LIMIT: Final = 10_000
PROMPT_TOKENS_LIMIT: Final = 1 << 20

CHANNEL_OPTIONS: Final[tuple[tuple[str, Any], ...]] = (
    ("grpc.max_send_message_length", MESSAGE_LIMIT_BYTES),
    ("grpc.max_receive_message_length", MESSAGE_LIMIT_BYTES),
    # A half-open connection is noticed within 20 + 10 s, also while nothing is sent.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
)
SERVER_OPTIONS: Final[tuple[tuple[str, Any], ...]] = (
    *CHANNEL_OPTIONS,
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
    ("grpc.so_reuseport", 0),
)
