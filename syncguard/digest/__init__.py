"""MLP61v1: shard-composable tensor digests, and storage digests.

Every holder of any part of a tensor reads its own memory in place and gets three integers (`PartialDigest`); those of
a partition add up to the whole tensor's. SPEC.md beside this module is the specification. Importing this package
imports neither torch nor numba.
"""

from syncguard.digest.coverage import expected_coverage, finalize
from syncguard.digest.localize import grid_boxes, grid_partials, localize
from syncguard.digest.partial import (
    ALGORITHM,
    DEFAULT_KEY_SEED,
    DigestEngine,
    DigestJob,
    KeySeed,
    PartialDigest,
)
from syncguard.digest.select import available_engines, engine_for, warm_up
from syncguard.digest.selftest import KNOWN_ANSWER_COUNT, selftest
from syncguard.digest.storage import storage_digest

__all__ = [
    "ALGORITHM",
    "DEFAULT_KEY_SEED",
    "KNOWN_ANSWER_COUNT",
    "DigestEngine",
    "DigestJob",
    "KeySeed",
    "PartialDigest",
    "available_engines",
    "engine_for",
    "expected_coverage",
    "finalize",
    "grid_boxes",
    "grid_partials",
    "localize",
    "selftest",
    "storage_digest",
    "warm_up",
]
