"""Which changes each digest misses; prints the table of SPEC.md.

    python tests/bench/digest_detection.py [--trials 10000] [--seed 1]

Tensors are 64 x 64 bf16 weights (normal, 0.02), new ones for each trial. A trial changes one in place; changes that
leave the bits as they were are not counted. Exits 1 when MLP61v1 misses anything. A table with no miss bounds the rate
only by about 3 / trials: the claim rests on the proof in SPEC.md, the table shows what the others miss.
"""

import argparse
import sys
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))
from digest_rivals import sglang_mix

from syncguard.digest import DigestJob, warm_up
from syncguard.digest.cpu import NumbaEngine
from syncguard.spec import Box, dtype_named

SIDE = 64
BATCH = 1000
KINDS = {}


def kind(change):
    KINDS[change.__name__.replace("_", " ")] = change
    return change


def weights(random, count):
    values = random.normal(0, 0.02, (count, SIDE, SIDE)).astype(np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def floats(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


def bits_of(values):
    return (np.ascontiguousarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def places(random, bits, each):
    """Return flat views and `each` different positions per trial."""
    flat = bits.reshape(len(bits), -1)
    return flat, np.argsort(random.random((len(bits), 64)), axis=1)[:, :each] * 64 + random.integers(
        0, 64, (len(bits), each)
    )


def rows_of(bits):
    return np.arange(len(bits))


def blocks(bits, size):
    return bits.reshape(len(bits), SIDE // size, size, SIDE)


def exchange(bits, random, axis):
    for trial in bits:
        a, b = random.choice(trial.shape[axis], 2, replace=False)
        trial[[a, b]] = trial[[b, a]]


@kind
def one_bit_any(b, r):
    flat, at = places(r, b, 1)
    flat[rows_of(b), at[:, 0]] ^= np.uint16(1) << r.integers(0, 16, len(b)).astype(np.uint16)


def one_fixed_bit(bit):
    def change(b, r):
        flat, at = places(r, b, 1)
        flat[rows_of(b), at[:, 0]] ^= np.uint16(1 << bit)

    return change


for _label, _bit in {
    "lowest mantissa": 0,
    "highest mantissa": 6,
    "lowest exponent": 7,
    "highest exponent": 14,
    "sign": 15,
}.items():
    KINDS[f"one bit, {_label}"] = one_fixed_bit(_bit)


def two(change):
    def apply(b, r):
        flat, at = places(r, b, 2)
        x, y = change(flat[rows_of(b), at[:, 0]], flat[rows_of(b), at[:, 1]], r)
        flat[rows_of(b), at[:, 0]], flat[rows_of(b), at[:, 1]] = x, y

    return apply


KINDS["two elements swapped"] = two(lambda x, y, r: (y, x))
KINDS["equal and opposite, as integers"] = two(
    lambda x, y, r: (x + (d := r.integers(1, 2**16, len(x)).astype(np.uint16)), y - d)
)
KINDS["+1 ulp and -1 ulp"] = two(lambda x, y, r: (x + np.uint16(1), y - np.uint16(1)))
KINDS["the same bit in two elements"] = two(
    lambda x, y, r: (x ^ (d := np.uint16(1) << r.integers(0, 16, len(x)).astype(np.uint16)), y ^ d)
)
KINDS["the sign of two elements"] = two(lambda x, y, r: (x ^ np.uint16(0x8000), y ^ np.uint16(0x8000)))
KINDS["one element copied over another"] = two(lambda x, y, r: (x, x))
KINDS["low bytes of two elements swapped"] = two(lambda x, y, r: ((x & 0xFF00) | (y & 0xFF), (y & 0xFF00) | (x & 0xFF)))


@kind
def adjacent_elements_swapped(b, r):
    flat, at = places(r, b, 1)
    at = at[:, 0] & ~1
    x, y = flat[rows_of(b), at].copy(), flat[rows_of(b), at + 1].copy()
    flat[rows_of(b), at], flat[rows_of(b), at + 1] = y, x


@kind
def rows_swapped(b, r):
    exchange(b, r, 0)


@kind
def columns_swapped(b, r):
    exchange(b.transpose(0, 2, 1), r, 0)


@kind
def heads_swapped(b, r):
    exchange(blocks(b, 8), r, 0)


@kind
def experts_swapped(b, r):
    exchange(blocks(b, 16), r, 0)


@kind
def gate_and_up_swapped(b, r):
    b[:] = np.roll(b, SIDE // 2, axis=1)


@kind
def gate_and_up_interleaved(b, r):
    b[:] = b.reshape(len(b), 2, SIDE // 2, SIDE).transpose(0, 2, 1, 3).reshape(b.shape)


@kind
def column_shards_in_another_order(b, r):
    shards = b.reshape(len(b), SIDE, 4, 16)
    for trial in shards:
        trial[:] = trial[:, np.roll(np.arange(4), r.integers(1, 4))]


@kind
def one_shard_twice_another_missing(b, r):
    shards = blocks(b, 16)
    for trial in shards:
        a, c = r.choice(4, 2, replace=False)
        trial[c] = trial[a]


@kind
def one_shard_stale(b, r):
    blocks(b, 16)[:, 2] = bits_of(floats(blocks(b, 16)[:, 2]) * np.float32(1.01))


@kind
def shifted_by_one_element(b, r):
    b[:] = np.roll(b.reshape(len(b), -1), 1, axis=1).reshape(b.shape)


@kind
def shifted_by_one_row(b, r):
    b[:] = np.roll(b, 1, axis=1)


@kind
def shifted_by_one_column(b, r):
    b[:] = np.roll(b, 1, axis=2)


@kind
def transposed(b, r):
    b[:] = b.transpose(0, 2, 1).copy()


@kind
def rotated_by_180_degrees(b, r):
    b[:] = b[:, ::-1, ::-1].copy()


@kind
def elements_in_random_order(b, r):
    for trial in b.reshape(len(b), -1):
        r.shuffle(trial)


@kind
def sorted_by_bits(b, r):
    b.reshape(len(b), -1).sort(axis=1)


@kind
def negated(b, r):
    b ^= np.uint16(0x8000)


@kind
def one_row_negated(b, r):
    b[rows_of(b), r.integers(0, SIDE, len(b))] ^= np.uint16(0x8000)


@kind
def constant_added_to_all_bits(b, r):
    b += r.integers(1, 2**16, (len(b), 1, 1)).astype(np.uint16)


@kind
def all_bits_xored_with_a_constant(b, r):
    b ^= r.integers(1, 2**16, (len(b), 1, 1)).astype(np.uint16)


@kind
def one_ulp_everywhere(b, r):
    b += np.uint16(1)


@kind
def one_percent_by_one_ulp(b, r):
    b += (r.random(b.shape) < 0.01).astype(np.uint16)


@kind
def scaled_by_two(b, r):
    b[:] = bits_of(floats(b) * 2)


@kind
def sign_of_a_zero(b, r):
    flat, at = places(r, b, 1)
    flat[rows_of(b), at[:, 0]] = 0
    return lambda: flat.__setitem__((rows_of(b), at[:, 0]), 0x8000)


@kind
def payload_of_a_nan(b, r):
    flat, at = places(r, b, 1)
    flat[rows_of(b), at[:, 0]] = 0x7FC0
    return lambda: flat.__setitem__((rows_of(b), at[:, 0]), 0x7FC1)


@kind
def denormals_flushed_to_zero(b, r):
    flat, at = places(r, b, 2)
    for n in range(2):
        flat[rows_of(b), at[:, n]] = r.integers(1, 128, len(b))
    return lambda: [flat.__setitem__((rows_of(b), at[:, n]), 0) for n in range(2)]


@kind
def through_fp16_and_back(b, r):
    b[:] = bits_of(floats(b).astype(np.float16).astype(np.float32) + np.float32(0))


@kind
def through_fp8_and_back(b, r):
    tensor = torch.from_numpy(b.view(np.int16)).view(torch.bfloat16)
    b[:] = tensor.to(torch.float8_e4m3fn).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)


@kind
def rounding_instead_of_truncating_one_element(b, r):
    flat, at = places(r, b, 1)
    flat[rows_of(b), at[:, 0]] += np.uint16(1)


@kind
def bytes_of_each_element_reversed(b, r):
    b[:] = b.byteswap()


@kind
def all_bytes_reversed(b, r):
    raw = b.reshape(len(b), -1).view(np.uint8)
    raw[:] = raw[:, ::-1].copy()


@kind
def bytes_shifted_by_one(b, r):
    raw = b.reshape(len(b), -1).view(np.uint8)
    raw[:] = np.roll(raw, 1, axis=1)


@kind
def tail_zeroed(b, r):
    for trial in b.reshape(len(b), -1):
        trial[-r.integers(1, 512) :] = 0


@kind
def one_element_zeroed(b, r):
    flat, at = places(r, b, 1)
    flat[rows_of(b), at[:, 0]] = 0


@kind
def one_row_zeroed(b, r):
    b[rows_of(b), r.integers(0, SIDE, len(b))] = 0


@kind
def everything_zeroed(b, r):
    b[:] = 0


@kind
def last_rows_are_padding(b, r):
    b[:, -4:] = b[:, -5:-4]


@kind
def delta_applied_twice(b, r):
    delta = r.normal(0, 2e-4, b.shape).astype(np.float32)
    b[:] = bits_of(floats(b) + delta)
    return lambda: b.__setitem__(slice(None), bits_of(floats(b) + delta))


@kind
def delta_not_applied(b, r):
    b[:] = bits_of(floats(b) + r.normal(0, 2e-4, b.shape).astype(np.float32))


def digests(batch, engine, dtype, shape):
    """Return per method one value per tensor of a batch u16[n, rows, columns]."""
    box = Box.whole(shape)
    jobs = [DigestJob(tensor.reshape(shape), dtype, shape, box, "w") for tensor in batch]
    words = batch.reshape(len(batch), -1).view(np.uint32)
    tensor = torch.from_numpy(batch.view(np.int16)).view(torch.bfloat16)
    return {
        "MLP61v1": engine.plan(jobs).sums()[1],
        "torch.hash_tensor": torch.hash_tensor(tensor, dim=(1, 2)).view(torch.int64).numpy(),
        "XOR of words": np.bitwise_xor.reduce(words, axis=1),
        "sum of elements": batch.reshape(len(batch), -1).sum(axis=1, dtype=np.uint64),
        "SGLang's GPU hash": np.array([sglang_mix(row) for row in words], np.uint64),
    }


def study(change, trials, random, engine):
    """Return (trials that changed bits, missed trials per method)."""
    bf16, counted, missed = dtype_named("bfloat16"), 0, {}
    for first in range(0, trials, BATCH):
        before = weights(random, min(BATCH, trials - first))
        after = before.copy()
        rest = change(after, random)
        if rest is not None:  # a change in two steps: the first one prepares the tensor
            before = after.copy()
            rest()
        different = (before != after).reshape(len(before), -1).any(axis=1)
        counted += int(different.sum())
        old, new = (digests(batch, engine, bf16, (SIDE, SIDE)) for batch in (before, after))
        for method in old:
            same = (old[method] == new[method]) & different
            missed[method] = missed.get(method, 0) + int(same.sum())
    return counted, missed


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    warm_up()
    engine, random = NumbaEngine(threads=1), np.random.default_rng(options.seed)
    total, sums, header = 0, {}, False
    for name, change in KINDS.items():
        counted, missed = study(change, options.trials, random, engine)
        if not header:
            print(f"| change | trials | {' | '.join(missed)} |\n|{'---|' * (len(missed) + 2)}")
            header = True
        print(f"| {name} | {counted:,} | {' | '.join(f'{n:,}' for n in missed.values())} |", flush=True)
        total += counted
        sums = {method: sums.get(method, 0) + n for method, n in missed.items()}
    print(f"| **{len(KINDS)} kinds** | **{total:,}** | {' | '.join(f'**{n:,}**' for n in sums.values())} |")
    return int(sums["MLP61v1"] > 0)


if __name__ == "__main__":
    sys.exit(main())
