import numpy as np
import pytest
import torch
import xxhash

from syncguard.digest import storage_digest
from syncguard.errors import DigestInputError


def test_the_header_is_as_documented():
    array = np.arange(6, dtype=np.uint16).reshape(2, 3)
    header = b"syncguard/storage/v1\0" + (6).to_bytes(4, "little") + b"uint16" + (2).to_bytes(4, "little")
    header += b"".join(n.to_bytes(8, "little") for n in (2, 3, 3, 1))
    assert storage_digest(array) == xxhash.xxh3_128(header + array.tobytes()).hexdigest()


def test_equal_bytes_in_another_dtype_shape_or_layout_differ():
    array = np.arange(12, dtype=np.int32).reshape(3, 4)
    others = [array.view(np.float32), array.reshape(4, 3), array.T.copy().T, array.reshape(12), array + 1]
    assert len({storage_digest(other) for other in (array, *others)}) == 6


def test_torch_and_numpy_agree_on_equal_storage():
    array = np.arange(600, dtype=np.float32).reshape(20, 30)
    tensor = torch.from_numpy(array)
    for plain, torched in (
        (array, tensor),
        (array.T, tensor.T),
        (array[::2, 3:], tensor[::2, 3:]),
        (array[:0], tensor[:0]),
    ):
        assert storage_digest(plain) == storage_digest(torched)


def test_a_strided_view_of_several_blocks_is_hashed_in_logical_order():
    array = np.arange(3_000_000, dtype=np.uint8).reshape(1000, 3000)
    view = array[:, ::2]
    header = b"syncguard/storage/v1\0" + (5).to_bytes(4, "little") + b"uint8" + (2).to_bytes(4, "little")
    header += b"".join(n.to_bytes(8, "little") for n in (1000, 1500, 3000, 2))
    assert storage_digest(view) == xxhash.xxh3_128(header + view.tobytes()).hexdigest()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.float64])
def test_dtypes_that_numpy_lacks_are_hashed_too(dtype):
    assert storage_digest(torch.zeros(3, 4, dtype=dtype)) != storage_digest(torch.ones(3, 4, dtype=dtype))
    assert len(storage_digest(torch.zeros((), dtype=dtype))) == 32


@pytest.mark.parametrize("bad", [np.zeros(2, object), "text", torch.zeros(2, device="meta")])
def test_what_has_no_storage_is_refused(bad):
    with pytest.raises(DigestInputError):
        storage_digest(bad)
