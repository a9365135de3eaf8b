"""MLP61v1 straight from its definition, one byte at a time in Python integers; shares no code with the package."""

import hashlib
from itertools import product

P = 2**61 - 1


def tables(seed):
    stream = hashlib.shake_128(b"MLP61v1/keys\0" + seed).digest(4 * 65536 * 8)
    words = [int.from_bytes(stream[n : n + 8], "little") for n in range(0, len(stream), 8)]
    keys = [(word & (2**56 - 1)) + 1 for word in words]
    found = [keys[n * 65536 : (n + 1) * 65536] for n in range(4)]
    found[1][0] = found[3][0] = 1
    return found


TABLES = tables(bytes(32))


def index_key(pair, index, found=TABLES):
    return found[2 * pair][index % 65536] * found[2 * pair + 1][index // 65536] % P


def byte_key(place, found=TABLES):
    return index_key(0, place // 4, found) * 2 ** (8 * (place % 4)) % P


def partial(array, shape, offsets, found=TABLES):
    """Return (count, coverage, data) of an array of raw elements that lies at `offsets` of a tensor of `shape`."""
    size = array.itemsize
    if array.ndim < 2:
        array = array.reshape((1,) * (2 - array.ndim) + array.shape)
        shape = (1,) * (2 - len(shape)) + tuple(shape)
        offsets = (0,) * (2 - len(offsets)) + tuple(offsets)
    count = coverage = data = 0
    for index in product(*(range(n) for n in array.shape)):
        row = 0
        for local, offset, length in zip(index[:-1], offsets[:-1], shape[:-1], strict=True):
            row = row * length + offset + local
        place = (offsets[-1] + index[-1]) * size
        row_key = index_key(1, row, found)
        count += 1
        coverage += row_key * byte_key(place, found)
        for n, byte in enumerate(array[index].tobytes()):
            data += row_key * byte_key(place + n, found) * byte
    return count, coverage % P, data % P
