"""Speed of the digest beside a plain read loop and other hashes; prints the tables of SPEC.md.

    python tests/bench/digest_speed.py [--mib 512] [--rounds 7] [--only methods|threads|growth|small]

Medians of rounds in which every method runs once, so that a busy machine slows all of them alike; compare the ratios.
"""

import argparse
import hashlib
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import blake3
import numpy as np
import torch
import xxhash

sys.path.insert(0, str(Path(__file__).parent))
from digest_rivals import read_four_rows, read_rows, sglang_mix

from syncguard.digest import DigestJob, engine_for, warm_up
from syncguard.digest.cpu import NumbaEngine
from syncguard.digest.keys import _expand
from syncguard.digest.reference import NumpyEngine
from syncguard.digest.torch_path import TorchEngine
from syncguard.spec import Box, dtype_named

SHAPES = [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (12288, 4096), (12288, 4096), (4096, 12288)]
LAYOUTS = ("contiguous", "row slices", "column slices, 1/8", "transposed view")
SLOW_BYTES = 48 << 20


@dataclass(frozen=True)
class Piece:
    view: np.ndarray
    shape: tuple
    box: Box
    dtype: object

    @property
    def job(self):
        return DigestJob(self.view, self.dtype, self.shape, self.box, "w")

    @property
    def runs(self):
        """Address, rows, stride and bytes of the runs of memory that a reader of this view has to read."""
        view = self.view if self.view.strides[-1] == self.view.itemsize else self.view.T
        return view.ctypes.data, view.shape[0], view.strides[0], view.shape[1] * view.itemsize


def tensors(buffer, dtype):
    """Cut a buffer into matrices of the shapes of one transformer layer after the other."""
    elements = buffer.view(f"u{dtype.itemsize_bytes}")
    at, found = 0, []
    while True:
        for rows, columns in SHAPES:
            if at + rows * columns > elements.size:
                return found
            found.append(elements[at : at + rows * columns].reshape(rows, columns))
            at += rows * columns


def pieces(layout, matrices, dtype):
    found = []
    for m in matrices:
        rows, columns = m.shape
        if layout == "row slices":
            box = Box((rows // 2, 0), (rows // 2, columns))
            found.append(Piece(m[rows // 2 :], m.shape, box, dtype))
        elif layout.startswith("column"):
            width = columns // 8
            found += [
                Piece(m[:, n : n + width], m.shape, Box((0, n), (rows, width)), dtype)
                for n in range(0, columns, 4 * width)
            ]
        elif layout.startswith("transposed"):
            found.append(Piece(m.T, m.T.shape, Box.whole(m.T.shape), dtype))
        else:
            found.append(Piece(m, m.shape, Box.whole(m.shape), dtype))
    return found


def size_of(found):
    return sum(piece.view.nbytes for piece in found)


def read(loop, found, threads=1):
    def share(part):
        for piece in part:
            loop(*piece.runs)

    if threads == 1:
        share(found)
        return
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(share, [found[n::threads] for n in range(threads)]))


def hashed(update, found):
    for piece in found:
        update(np.ascontiguousarray(piece.view).reshape(-1).view(np.uint8))


def torch_xor(found):
    for piece in found:
        torch.hash_tensor(torch.from_numpy(piece.view.view(np.int16)).view(torch.bfloat16))


def interleaved(methods, rounds, clock=time.thread_time):
    """Return median seconds per method; each round runs each once, the first round only warms up.

    One thread is timed in its own CPU time, which leaves out the turns that other processes take.
    """
    times = {name: [] for name in methods}
    for turn in range(rounds + 1):
        for name, run in methods.items():
            start = clock()
            run()
            if turn:
                times[name].append(clock() - start)
    return {name: median(found) for name, found in times.items()}


def table(title, columns, rows):
    print(f"\n{title}\n\n| | {' | '.join(columns)} |\n|{'---|' * (len(columns) + 1)}")
    for name, cells in rows.items():
        print(f"| {name} | {' | '.join(cells)} |")


def methods_table(buffer, rounds):
    rows = {}
    engine, reference, in_torch = NumbaEngine(threads=1), NumpyEngine(), TorchEngine()
    bf16, fp8 = dtype_named("bfloat16"), dtype_named("float8_e4m3fn")
    for layout in LAYOUTS:
        found = pieces(layout, tensors(buffer, bf16), bf16)
        eight = pieces(layout, tensors(buffer, fp8), fp8)
        few = []
        for piece in found:
            few.append(piece)
            if size_of(few) >= SLOW_BYTES:
                break
        all_of, part = size_of(found), size_of(few)
        runs = {
            "plain read loop": (lambda f=found: read(read_rows, f), all_of),
            "read loop, 4 rows at once": (lambda f=found: read(read_four_rows, f), all_of),
            "plain read loop, same shapes in fp8": (lambda f=eight: read(read_rows, f), size_of(eight)),
            "**MLP61v1, numba (shipped)**": (lambda f=found: engine.partials([p.job for p in f]), all_of),
            "**MLP61v1, numba, fp8**": (lambda f=eight: engine.partials([p.job for p in f]), size_of(eight)),
            "xxh3_128 (copy first unless contiguous)": (lambda f=found: hashed(xxhash.xxh3_128_digest, f), all_of),
            "MLP61v1, torch operations": (lambda f=few: in_torch.partials([p.job for p in f]), part),
            "MLP61v1, numpy reference": (lambda f=few[:1]: reference.partials([p.job for p in f]), size_of(few[:1])),
            "blake3": (lambda f=few: hashed(lambda b: blake3.blake3(b).digest(), f), part),
            "SHA-256 (SGLang's checker on the CPU)": (
                lambda f=few: hashed(lambda b: hashlib.sha256(b).digest(), f),
                part,
            ),
            "SGLang's GPU hash, in numba": (lambda f=few: hashed(lambda b: sglang_mix(b.view(np.uint32)), f), part),
            "torch.hash_tensor, bf16": (lambda f=few: torch_xor(f), part),
        }
        times = interleaved({name: run for name, (run, _) in runs.items()}, rounds)
        speed = {name: runs[name][1] / times[name] / 1e9 for name in runs}
        for name in runs:
            limit = speed["plain read loop, same shapes in fp8" if "fp8" in name else "plain read loop"]
            ratio = speed[name] / limit
            rows.setdefault(name, []).append(f"{ratio:.2f} ({speed[name]:.1f})")
    table(
        f"One thread, {buffer.nbytes >> 20} MiB of bf16: ratio to the plain read loop in the same layout (GB/s)",
        LAYOUTS,
        rows,
    )


def threads_table(buffer, rounds):
    rows, bf16 = {}, dtype_named("bfloat16")
    for layout in LAYOUTS:
        found = pieces(layout, tensors(buffer, bf16), bf16)
        methods = {}
        for threads in (1, 2):
            engine = NumbaEngine(threads=threads)
            methods[f"plain read loop, {threads}"] = lambda t=threads, f=found: read(read_rows, f, t)
            methods[f"read loop, 4 rows, {threads}"] = lambda t=threads, f=found: read(read_four_rows, f, t)
            methods[f"**MLP61v1, {threads}**"] = lambda e=engine, f=found: e.partials([p.job for p in f])
        times = interleaved(methods, rounds, time.perf_counter)
        for name, seconds in times.items():
            base = times[f"plain read loop, {2 if '2' in name else 1}"]
            rows.setdefault(name, []).append(f"{base / seconds:.2f} ({size_of(found) / seconds / 1e9:.1f})")
    table("Threads: ratio to the plain read loop of as many threads (GB/s)", LAYOUTS, rows)


def growth_table(buffer, rounds):
    engine, bf16 = NumbaEngine(threads=1), dtype_named("bfloat16")
    words = buffer.view(np.uint16)
    methods, sizes = {}, {}

    def put(name, jobs):
        methods[name] = lambda: engine.partials(jobs)
        sizes[name] = (sum(job.view.nbytes for job in jobs), len(jobs))

    for exponent in range(0, 10, 3):
        matrix = words[: (1 << exponent) << 19].reshape(-1, 4096)
        put(f"one matrix of {1 << exponent} MiB", [Piece(matrix, matrix.shape, Box.whole(matrix.shape), bf16).job])
    for count in (16, 256, 4096, 65536):
        cells = words[: 64 << 19].reshape(count, -1)
        put(
            f"64 MiB in {count} vectors",
            [Piece(v, v.shape, Box.whole(v.shape), bf16).job for v in cells],
        )
    matrix = words[: 64 << 19].reshape(-1, 4096)
    for shards in (1, 2, 4, 8, 16, 32, 64):
        width = 4096 // shards
        put(
            f"64 MiB in {shards} column shards",
            [
                Piece(matrix[:, n : n + width], matrix.shape, Box((0, n), (len(matrix), width)), bf16).job
                for n in range(0, 4096, width)
            ],
        )
    times = interleaved(methods, rounds)
    rows = {
        name: [f"{1e3 * seconds:.2f}", f"{sizes[name][0] / seconds / 1e9:.1f}", str(sizes[name][1])]
        for name, seconds in times.items()
    }
    table("How cost grows (one thread)", ("ms", "GB/s", "jobs"), rows)


def small_table(rounds):
    engine, bf16, count = NumbaEngine(threads=1), dtype_named("bfloat16"), 100_000
    rows = {}
    for length in (1, 128, 1024):
        memory = torch.zeros(count, length, dtype=torch.bfloat16)
        views = [memory[n] for n in range(count)]
        jobs = [DigestJob(view, bf16, (length,), Box((0,), (length,)), "w") for view in views]
        plan = engine.plan(jobs)
        one = Piece(memory.view(torch.int16).numpy(), (count, length), Box.whole((count, length)), bf16)
        times = interleaved(
            {
                "plan": lambda j=jobs: engine.plan(j),
                "run": lambda p=plan: p.sums(),
                "results": lambda p=plan: p.partials(),
                "read": lambda o=one: read(read_rows, [o]),
            },
            rounds,
        )
        each = {name: 1e6 * seconds / count for name, seconds in times.items()}
        beyond = each["run"] - each["read"]
        rows[f"{count} vectors of {length}"] = [
            f"{each['read']:.2f}", f"{each['run']:.2f}", f"**{beyond:.2f}**", f"{each['results']:.2f}", f"{each['plan']:.1f}",
        ]  # fmt: skip
    table(
        "Small tensors, microseconds each (one thread)",
        ("read loop", "plan.sums()", "beyond the bytes", "plan.partials()", "making the plan"),
        rows,
    )
    start = time.perf_counter()
    for n in range(20):
        _expand.__wrapped__(bytes([n]) * 32)
    print(f"\nExpanding a new seed: {(time.perf_counter() - start) / 20 * 1e3:.1f} ms (SHAKE-128 of 2 MiB)")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", choices=("methods", "threads", "growth", "small"))
    options = parser.parse_args()
    start = time.perf_counter()
    print(f"engine: {warm_up()}, ready after {time.perf_counter() - start:.1f} s; torch threads 1")
    torch.set_num_threads(1)
    assert engine_for("cpu").name == "numba", "the table is about the shipped path"
    buffer = np.random.default_rng(0).integers(0, 2**63, options.mib << 17, np.int64).view(np.uint8)
    if options.only in (None, "methods"):
        methods_table(buffer, options.rounds)
    if options.only in (None, "threads"):
        threads_table(buffer, options.rounds)
    if options.only in (None, "growth"):
        growth_table(buffer, options.rounds)
    if options.only in (None, "small"):
        small_table(options.rounds)


if __name__ == "__main__":
    main()
