"""Known answers, checked at the start of every daemon: a wrong table or a broken engine must not get to judge."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Final

import numpy as np

from syncguard.digest.coverage import expected_coverage, finalize
from syncguard.digest.partial import DEFAULT_KEY_SEED, DigestJob
from syncguard.digest.select import engine_for
from syncguard.errors import IncompleteError
from syncguard.spec import Box, dtype_named

if TYPE_CHECKING:
    from syncguard.digest.partial import DigestEngine

KNOWN_ANSWERS: Final = (
    (0, "float32", (), "b1c0c74d5339b3a994827a8620bbfd79"),
    (3, "bfloat16", (5, 7), "2904c1ddd772d5b9f42ca421ecd34010"),
    (6, "float8_e4m3fn", (2, 3, 5), "167af6bfcd00edf2539d6d2f4c32b9cf"),
    (7, "uint8", (1, 257), "c673a91d8987e6f20ef621b639f69fad"),
    (12, "int64", (7,), "85cd8168dcc0e13507eb6ed9c0aabf37"),
    (15, "bfloat16", (64, 130), "fb91fa706fef0f48075ca2605f6e63da"),
)
"""(i, dtype, shape, digest) of cases of the first vector file; the name is `model.layers.<i>.weight`."""
KNOWN_ANSWER_COUNT: Final = 2 * len(KNOWN_ANSWERS)


def selftest(engine: DigestEngine | None = None) -> int:
    """Check the known answers with an engine, each in two layouts.

    Args:
        engine: The engine that will be used; that of the CPU when None.

    Returns:
        Number of answers checked, always `KNOWN_ANSWER_COUNT`.

    Raises:
        IncompleteError: An answer was wrong, or fewer were checked than there are.
    """
    engine = engine or engine_for("cpu")
    checked = 0
    for i, name, shape, expected in KNOWN_ANSWERS:
        dtype, whole, fqn = dtype_named(name), Box.whole(shape), f"model.layers.{i}.weight"
        size = whole.count * dtype.itemsize_bytes
        raw = hashlib.shake_256(b"syncguard/vector\0" + f"v1/{i}".encode()).digest(size)
        tensor = np.frombuffer(raw, f"<u{dtype.itemsize_bytes}").reshape(shape)
        for view in (tensor, tensor.T.copy().T):
            (partial,) = engine.partials([DigestJob(view, dtype, shape, whole, fqn)])
            place = expected_coverage(dtype, shape, key_seed=DEFAULT_KEY_SEED)
            found = finalize(partial, fqn=fqn, dtype=dtype, shape=shape)
            if found != expected or (partial.count, partial.coverage) != (place.count, place.coverage):
                raise IncompleteError(
                    f"self-test of the {engine.name} digest failed",
                    expected=expected,
                    found=found,
                    where=f"{fqn} {whole}",
                    todo="do not use this process; reinstall syncguard and its fast path",
                )
            checked += 1
    if checked != KNOWN_ANSWER_COUNT:
        raise IncompleteError("self-test did not run to its end", expected=KNOWN_ANSWER_COUNT, found=checked)
    return checked
