"""What has no digest is refused with the tensor and the box; nothing is guessed."""

import numpy as np
import pytest
import torch

from syncguard.digest import DigestJob, expected_coverage, storage_digest
from syncguard.errors import DigestInputError
from syncguard.spec import Box, dtype_named

BF16 = dtype_named("bfloat16")


def job(view, dtype=BF16, shape=(4, 6), box=None):
    return DigestJob(view, dtype, shape, box or Box.whole(shape), "layer.weight")


def freed():
    tensor = torch.zeros(4, 6, dtype=torch.bfloat16)
    tensor.untyped_storage().resize_(0)
    return tensor


CASES = {
    "meta device": job(torch.zeros(4, 6, dtype=torch.bfloat16, device="meta")),
    "freed storage": job(freed()),
    "sparse layout": job(torch.zeros(4, 6, dtype=torch.bfloat16).to_sparse()),
    "complex dtype": job(torch.zeros(4, 6, dtype=torch.complex128), dtype_named("float64")),
    "lazy conjugate": job(torch.zeros(4, 6, dtype=torch.complex64).conj(), dtype_named("float64")),
    "wrong item size": job(torch.zeros(4, 6)),
    "wrong item size, numpy": job(np.zeros((4, 6), np.uint8)),
    "wrong sizes": job(np.zeros((6, 4), np.uint16)),
    "wrong rank": job(np.zeros(24, np.uint16)),
    "box outside": job(np.zeros((4, 6), np.uint16), shape=(4, 6), box=Box((1, 0), (4, 6))),
    "box of another rank": job(np.zeros(24, np.uint16), box=Box((0,), (24,))),
    "row too long": job(np.zeros((1, 1), np.uint16), shape=(1, 2**33 + 1), box=Box((0, 0), (1, 1))),
    "too many rows": job(np.zeros((1, 1), np.uint16), shape=(2**32 + 1, 1), box=Box((0, 0), (1, 1))),
    "object array": job(np.zeros((4, 6), object), dtype_named("int64")),
    "big-endian array": job(np.zeros((4, 6), ">u2")),
    "structured array": job(np.zeros((4, 6), [("a", "u1"), ("b", "u1")])),
    "not an array": job([[0] * 6] * 4),
}


@pytest.mark.parametrize("bad", CASES.values(), ids=CASES)
def test_a_job_that_cannot_be_read_is_refused_by_name(engine, bad):
    with pytest.raises(DigestInputError) as caught:
        engine.partials([job(np.zeros((4, 6), np.uint16)), bad])
    assert "layer.weight" in str(caught.value)
    assert str(bad.box) in str(caught.value)


@pytest.mark.parametrize("seed", ["0" * 32, bytearray(32), None, 0, b"", b"short", bytes(1025)])
def test_a_wrong_key_is_refused(engine, seed):
    with pytest.raises(DigestInputError, match="not a key seed"):
        engine.partials([job(np.zeros((4, 6), np.uint16))], key_seed=seed)
    with pytest.raises(DigestInputError, match="not a key seed"):
        expected_coverage(BF16, (4, 6), key_seed=seed)


def test_a_dtype_without_a_rule_is_refused():
    with pytest.raises(DigestInputError, match="dtype without a rule"):
        dtype_named("complex64")
    with pytest.raises(DigestInputError, match="dtype without a rule"):
        storage_digest(np.zeros(3, np.complex64))


def test_the_largest_row_and_the_most_rows_are_accepted(engine):
    jobs = [
        job(np.ones((1, 1), np.uint16), shape=(1, 2**33), box=Box((0, 2**33 - 1), (1, 1))),
        job(np.ones((1, 1), np.uint16), shape=(2**32, 1), box=Box((2**32 - 1, 0), (1, 1))),
    ]
    for found, given in zip(engine.partials(jobs), jobs, strict=True):
        assert found.coverage == found.data == expected_coverage(BF16, given.shape, given.box).coverage
