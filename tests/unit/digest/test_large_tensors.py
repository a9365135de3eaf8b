"""Offsets beyond 2^32 elements, in sparse files: only what is read takes memory."""

import literal
import numpy as np
import pytest

from syncguard.digest import DigestJob, PartialDigest
from syncguard.spec import Box, dtype_named


@pytest.fixture
def sparse(tmp_path):
    def make(shape, name):
        return np.memmap(tmp_path / "sparse", dtype=name, mode="w+", shape=shape)

    return make


def check(engine, tensor, dtype, offsets, sizes):
    box = Box(offsets, sizes)
    view = tensor[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))]
    view[...] = np.random.default_rng(1).integers(1, 200, view.shape)
    (found,) = engine.partials([DigestJob(view, dtype, tensor.shape, box)])
    assert found == PartialDigest(*literal.partial(np.asarray(view), tensor.shape, offsets))


def test_the_end_of_a_matrix_of_2_to_the_33_elements(engine, sparse):
    tensor = sparse((2**17 + 3, 2**16), "uint8")
    check(engine, tensor, dtype_named("uint8"), (2**17 - 2, 2**16 - 37), (5, 37))


def test_the_end_of_a_vector_of_2_to_the_33_elements(engine, sparse):
    tensor = sparse((2**33 + 100,), "uint8")
    check(engine, tensor, dtype_named("float8_e4m3fn"), (2**33 - 50,), (150,))


def test_a_view_whose_strides_reach_beyond_2_to_the_32_elements(engine, sparse):
    tensor = sparse((3, 2**16 + 1, 2**16), "uint8")
    check(engine, tensor, dtype_named("uint8"), (0, 2**16 - 1, 11), (3, 2, 29))


def test_a_transposed_view_beyond_2_to_the_32_elements(engine, sparse):
    stored = sparse((3, 2**32 + 70), "uint8")
    view = stored[:, -70:].T
    view[...] = np.random.default_rng(2).integers(1, 200, view.shape)
    shape = (2**32, 3)
    box = Box((2**32 - 70, 0), (70, 3))
    (found,) = engine.partials([DigestJob(view, dtype_named("uint8"), shape, box)])
    assert found == PartialDigest(*literal.partial(np.asarray(view), shape, box.offsets))
