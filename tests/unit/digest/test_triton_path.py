"""The GPU kernel, run by Triton's interpreter in a process of its own, and how views become its tiles."""

import os
import subprocess
import sys

import numpy as np
import pytest

from syncguard.digest import engine_for
from syncguard.digest.panels import Panel
from syncguard.digest.triton_path import Form, tiles_of

PROGRAM = """
import numpy as np, torch
from syncguard.digest import DigestJob
from syncguard.digest.reference import NumpyEngine
from syncguard.digest.triton_path import TritonEngine
from syncguard.spec import Box, dtype_named

random = np.random.default_rng(3)
jobs = []
for name in ("uint8", "bfloat16", "float32", "float64"):
    dtype = dtype_named(name)
    memory = torch.from_numpy(random.integers(0, 256, 20_000, np.uint8)[: 19_992]).view(
        {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize_bytes])
    matrix = memory[: 15 * 70].reshape(15, 70)
    views = [matrix[:, :64], matrix[2:5, 3:8], matrix[:9].T, matrix[1:, 5:12].T, matrix[:, 1:70:3], matrix[0]]
    for view in views if name == "bfloat16" else views[1:3]:
        offsets, shape = (65530, 262135), (70000, 270001)
        rank = view.ndim
        jobs.append(DigestJob(view, dtype, shape[-rank:], Box(offsets[-rank:], tuple(view.shape)), "w"))
    cube = memory[: 4 * 6 * 10].reshape(4, 6, 10)
    for view in (cube.transpose(0, 2), cube[1:3, 2:4]) if name in ("uint8", "bfloat16") else ():
        jobs.append(DigestJob(view, dtype, (20, 20, 20), Box((2, 3, 5), tuple(view.shape)), "w"))
empty = torch.zeros(0, 4, dtype=torch.int16)
jobs.append(DigestJob(empty, dtype_named("bfloat16"), (0, 4), Box.whole((0, 4))))
high = torch.from_numpy(random.integers(0, 256, (2100, 256), np.uint8))
jobs.append(DigestJob(high, dtype_named("uint8"), (2100, 256), Box.whole((2100, 256))))  # three chunks of lines
scalar = torch.tensor(3.0)
jobs.append(DigestJob(scalar, dtype_named("float32"), (), Box.whole(())))
found, expected = TritonEngine().partials(jobs), NumpyEngine().partials(jobs)
print(len(jobs), [n for n in range(len(jobs)) if found[n] != expected[n]])
"""


def test_the_interpreted_kernel_agrees_with_the_reference_on_every_way_of_reading():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
        env={**os.environ, "TRITON_INTERPRET": "1"},
    )
    assert done.stdout.split("\n")[0] == "19 []", done.stderr


def covered(panel):
    """Return how often each byte of a panel is read, by the address arithmetic of the kernel."""
    size = max(
        1, (panel.rows - 1) * panel.row_stride + (panel.columns - 1) * panel.column_stride + panel.itemsize_bytes
    )
    counts = np.zeros(size, np.int64)
    for form, tile in tiles_of(panel):
        address, lines, count, line_stride, index_stride, part_stride = tile[:6]
        for line in range(lines):
            for index in range(count):
                for part in range(form.parts):
                    at = address - panel.address + line * line_stride + index * index_stride + part * part_stride
                    assert (panel.address + at) % form.width == 0, "unaligned load"
                    counts[at : at + form.width] += 1
        if form.aligned:
            assert address % 16 == line_stride % 16 == 0
            assert count % 4 == 0
    return counts


@pytest.mark.parametrize("itemsize", [1, 2, 4, 8])
@pytest.mark.parametrize("column", [0, 1, 2, 3, 65535])
@pytest.mark.parametrize("shift", [0, 1, 2])
@pytest.mark.parametrize("transposed", [False, True])
def test_tiles_read_every_byte_once_and_never_unaligned(itemsize, column, shift, transposed):
    rows, columns = 5, 23
    address = 4096 + shift * itemsize
    if transposed:
        panel = Panel(address, rows, columns, itemsize, rows * itemsize, 7, 1, column, itemsize)
    else:
        panel = Panel(address, rows, columns, columns * itemsize, itemsize, 65533, 1, column, itemsize)
    assert set(covered(panel).tolist()) == {1}


def test_large_aligned_rows_take_the_form_with_16_byte_loads():
    panel = Panel(4096, 64, 4096, 8192, 2, 0, 1, 0, 2)
    assert {form for form, _ in tiles_of(panel)} == {Form(4, 1, aligned=True)}


def test_a_device_without_triton_falls_back_to_torch_loudly(caplog):
    engine_for.cache_clear()
    assert engine_for("cuda").name == "torch"
    assert "SLOW DIGESTS" in caplog.text
