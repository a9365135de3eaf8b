"""Times and bounds of one agent."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AgentConfig:
    """Times and bounds.

    Attributes:
        poll_interval_s: An unannounced update revokes READY at most this long after it began.
        lease_s: READY ends this long after the engine's last answer.
        race_attempts: Verifications tried when the engine changes while it is read.
        race_wait_s: Wait before each further one, in seconds.
        known_versions: Earlier versions kept to explain a difference.
        scrub_interval_s: Seconds between two scrubs of a READY worker; 0 for none.
        scrub_bytes: Bytes that each rank digests in one scrub. A rank that holds `n` bytes is read once in
            `n / scrub_bytes * scrub_interval_s` seconds.
        scrub_lease_s: READY ends this long after the last scrub, or full comparison, that found nothing; it must be
            longer than any call that keeps the engine's connection, such as a capture.
    """

    poll_interval_s: float = 1.0
    lease_s: float = 5.0
    race_attempts: int = 3
    race_wait_s: float = 0.2
    known_versions: int = 3
    scrub_interval_s: float = 1.0
    scrub_bytes: int = 128 << 20
    scrub_lease_s: float = 120.0
