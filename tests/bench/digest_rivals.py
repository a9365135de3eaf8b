"""What digests are measured against: read loops (the limit), and hashes that others use for the same purpose."""

import numba
import numpy as np

from syncguard.digest.cpu_loops import load_64

MASK_32 = 0xFFFFFFFF
U32 = np.uint32


@numba.njit(nogil=True)
def read_rows(address, rows, stride, size):
    """Read rows of `size` bytes one after the other, and do nothing but XOR them: the plain loop."""
    seen = np.uint64(0)
    for row in range(rows):
        at = address + row * stride
        for n in range(size // 8):
            seen ^= load_64(at + 8 * n)
    return seen


@numba.njit(nogil=True)
def read_four_rows(address, rows, stride, size):
    """Read four rows side by side, as the digest does: the processor then fetches more lines at a time."""
    seen = np.uint64(0)
    for row in range(0, rows // 4 * 4, 4):
        a = address + row * stride
        b, c, d = a + stride, a + 2 * stride, a + 3 * stride
        for n in range(size // 8):
            seen ^= load_64(a + 8 * n) ^ load_64(b + 8 * n) ^ load_64(c + 8 * n) ^ load_64(d + 8 * n)
    return seen


@numba.njit(nogil=True)
def _mix(x):
    x ^= x >> U32(16)
    x *= U32(0x85EBCA6B)
    x ^= x >> U32(13)
    x *= U32(0xC2B2AE35)
    return x ^ (x >> U32(16))


@numba.njit(nogil=True)
def sglang_mix(words, seed=0x243F6A88):
    """The rule of SGLang 0.5.23's GPU tensor hash (kernels/ops/memory/gpu_tensor_hash.py): 64 bits over 32-bit words.

    Each word is mixed with its position in two lanes; tiles of 8,192 words are summed, mixed, and summed again.
    """
    s1, s2 = U32(seed), U32(((seed * 0x9E3779B1) ^ 0xDEADBEEF) & 0xFFFFFFFF)
    total = np.uint64(0)
    length = U32(words.size * 4 & 0xFFFFFFFF)
    for tile in range(0, words.size, 8192):
        h1, h2 = U32(0), U32(0)
        for n in range(tile, min(tile + 8192, words.size)):
            i = U32(n)
            p1 = (i * U32(0x27D4EB2D) + s1) ^ ((i << U32(15)) | (i >> U32(17)))
            p2 = (i * U32(0x165667B1) + s2) ^ ((i << U32(13)) | (i >> U32(19)))
            h1 += _mix(words[n] ^ p1)
            h2 += _mix(words[n] ^ p2)
        total += (np.uint64(_mix(h1 ^ length)) << np.uint64(32)) | np.uint64(_mix(h2 ^ length))
    total ^= total >> np.uint64(30)
    total *= np.uint64(0xBF58476D1CE4E5B9)
    total ^= total >> np.uint64(27)
    total *= np.uint64(0x94D049BB133111EB)
    return total ^ (total >> np.uint64(31))
