"""A stranger's implementation of MLP61v1, from SPEC.md alone: Python integers, no import of syncguard, no speed.

It speaks the protocol of `run_implementation.py`: one JSON request a line on stdin, one JSON reply a line on stdout.
"""

import hashlib
import json
import sys
from functools import cache

P = 2**61 - 1


@cache
def tables(seed):
    raw = hashlib.shake_128(b"MLP61v1/keys\0" + seed).digest(4 * 65536 * 8)
    keys = [(int.from_bytes(raw[n : n + 8], "little") & (2**56 - 1)) + 1 for n in range(0, len(raw), 8)]
    found = [keys[n * 65536 : (n + 1) * 65536] for n in range(4)]
    found[1][0] = found[3][0] = 1
    return found


def key(low, high, index):
    return low[index % 65536] * high[index // 65536] % P


def rows_of(shape, offsets, sizes):
    """Yield the row index of each row of a box, in order."""
    lead = list(zip(shape[:-1], offsets[:-1], sizes[:-1], strict=True))
    total = 1
    for _, _, size in lead:
        total *= size
    for number in range(total):
        index, rest = [], number
        for _, offset, size in reversed(lead):
            index.append(offset + rest % size)
            rest //= size
        row = 0
        for (length, _, _), at in zip(lead, reversed(index), strict=True):
            row = row * length + at
        yield row


def answer(request):
    seed, raw, es = bytes.fromhex(request["key_seed"]), bytes.fromhex(request["bytes"]), request["itemsize"]
    t0, t1, t2, t3 = tables(seed)
    shape, offsets, sizes = (request[name] or [one] for name, one in (("shape", 1), ("offsets", 0), ("sizes", 1)))
    first, columns = offsets[-1] * es, sizes[-1]
    places = range(first, first + columns * es)
    keys = [key(t0, t1, q // 4) * 2 ** (8 * (q % 4)) % P for q in places]
    row_coverage = sum(keys[::es])
    count = coverage = data = 0
    for n, row in enumerate(rows_of(shape, offsets, sizes) if columns else ()):
        row_key = key(t2, t3, row)
        line = raw[n * columns * es : (n + 1) * columns * es]
        count += columns
        coverage += row_key * row_coverage
        data += row_key * sum(k * b for k, b in zip(keys, line, strict=True))
    coverage, data = coverage % P, data % P
    name, dtype = request["name"].encode(), request["dtype"].encode()
    message = b"MLP61v1/final\0" + len(seed).to_bytes(4, "little") + seed
    message += len(name).to_bytes(4, "little") + name + len(dtype).to_bytes(4, "little") + dtype
    message += len(request["shape"]).to_bytes(4, "little")
    for number in (*request["shape"], count, coverage, data):
        message += number.to_bytes(8, "little")
    digest = hashlib.blake2b(message, digest_size=16).hexdigest()
    return {"count": count, "coverage": f"{coverage:016x}", "data": f"{data:016x}", "digest": digest}


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), flush=True)
