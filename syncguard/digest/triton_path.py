"""MLP61v1 on a GPU: one pass over memory, all tensors of a rank in a handful of launches, one copy to the host.

A tile is some lines of one view, described by a row of a table (`triton_kernel.TILE_FIELDS`), so one launch works on any
number of tensors; its lines are shared out to up to 16 programs. There is a launch per way of putting words together. Views that are contiguous in neither direction
are gathered first, at most eight panels of 4 MiB at a time. With `TRITON_INTERPRET=1` it works on CPU tensors, which is how its
results are tested without a GPU.
"""

# ruff: noqa: PLR2004 - bytes of words and of loads

from __future__ import annotations

import os
from collections import defaultdict
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import torch

from syncguard.digest.coverage import expected_coverage
from syncguard.digest.keys import key_tables
from syncguard.digest.panels import Panel, panels_of
from syncguard.digest.partial import DEFAULT_KEY_SEED, PRIME, DigestJob, KeySeed, PartialDigest, as_array, check_seed
from syncguard.digest.torch_path import raw_view
from syncguard.digest.triton_kernel import PRODUCTS_PER_FOLD, TILE_FIELDS, digest_tiles

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_TABLE: Final = 65536
_TILE_BYTES: Final = 4 << 20
_CHUNK_BYTES: Final = 1 << 18
_CHUNKS_MAX: Final = 16
_COUNTS: Final = (1, 2)  # places of lines and words of a line in a tile
_LINES: Final = 16
_INDICES: Final = 128
_WARPS: Final = 4
_GATHERED_MAX: Final = 8


class Form(NamedTuple):
    """How a word is loaded: `parts` loads of `width` bytes; or, when aligned, four words in one load."""

    width: int
    parts: int
    aligned: bool = False


Tile = tuple[int, ...]


def tiles_of(panel: Panel) -> Iterator[tuple[Form, Tile]]:
    """Yield the tiles of a panel that is contiguous along its columns or along its rows.

    Words are aligned to the words of the logical row, so that their keys are whole; elements before the first and
    after the last whole word are lines of their own, along the rows.
    """
    size, at = panel.itemsize_bytes, panel.address
    along_rows = panel.column_stride != size and panel.row_step == 1
    per_word = max(1, 4 // size)
    head = min(-panel.column % per_word, panel.columns)
    whole = (panel.columns - head) // per_word
    for column in (*range(head), *range(head + whole * per_word, panel.columns)):
        place = (panel.column + column) * size
        here, form = at + column * panel.column_stride, Form(size, 1)
        rows, of_word = (panel.row, panel.row_step), (place // 4, 1)
        if panel.row_step == 1:
            yield from _split(
                form, here, (1, panel.rows), (0, panel.row_stride, 0), panel.row, of_word, 8 * (place % 4), pair=1
            )
        else:  # rows that do not follow each other have no common table: they are the lines
            yield from _split(
                form, here, (panel.rows, 1), (panel.row_stride, 0, 0), place // 4, rows, 8 * (place % 4), pair=0
            )
    if not whole:
        return
    at += head * panel.column_stride
    word = (panel.column + head) * size // 4
    if along_rows:
        for half in range(max(1, size // 4)):  # an 8-byte element is two words
            strides = (per_word * panel.column_stride, panel.row_stride, panel.column_stride)
            form = Form(min(size, 4), per_word)
            yield from _split(
                form, at + 4 * half, (whole, panel.rows), strides,
                panel.row, (word + half, max(1, size // 4)), 0, pair=1,
            )  # fmt: skip
        return
    words = whole * max(1, size // 4)
    aligned = 4
    while (at | panel.row_stride) % aligned:
        aligned //= 2
    form = Form(aligned, 4 // aligned)
    yield from _split(
        form, at, (panel.rows, words), (panel.row_stride, 4, aligned), word, (panel.row, panel.row_step), 0, pair=0
    )


def _split(
    form: Form,
    address: int,
    counts: tuple[int, int],
    strides: tuple[int, int, int],
    first: int,
    line: tuple[int, int],
    shift: int,
    *,
    pair: int,
) -> Iterator[tuple[Form, Tile]]:
    """Yield tiles of `counts` (lines, indices from `first`), of at most about 4 MiB; none crosses the end of a key table."""
    lines, count = counts
    line_stride, index_stride, part_stride = strides
    line_first, line_step = line
    done = 0
    while done < count:
        number = first + done
        here = min(count - done, _TABLE - number % _TABLE)
        start = address + done * index_stride
        fits = form == Form(4, 1) and index_stride == 4 and (start | line_stride) % 16 == 0 and here >= 4
        here = here // 4 * 4 if fits else here
        height = max(_LINES, _TILE_BYTES // (4 * here) // _LINES * _LINES)
        for top in range(0, lines, height):
            tile = (
                start + top * line_stride, min(height, lines - top), here,
                line_stride, index_stride, part_stride, number % _TABLE, number // _TABLE,
                line_first + top * line_step, line_step, shift, pair,
            )  # fmt: skip
            yield (form._replace(aligned=True) if fits else form), tile
        done += here


class TritonEngine:
    """MLP61v1 as a Triton kernel on CUDA devices, or on the CPU under Triton's interpreter."""

    name = "triton"

    def partials(self, jobs: Sequence[DigestJob], *, key_seed: KeySeed = DEFAULT_KEY_SEED) -> list[PartialDigest]:
        """Return one partial digest per job; see `DigestEngine.partials`. One copy to the host per device."""
        check_seed(key_seed)
        views = [_view(job) for job in jobs]
        places = [expected_coverage(job.dtype, job.shape, job.box, key_seed=key_seed) for job in jobs]
        queues: dict[torch.device, _Queue] = {}
        for index, (job, view) in enumerate(zip(jobs, views, strict=True)):
            if job.box.count:
                queue = queues.setdefault(view.device, _Queue(view.device, key_seed))
                queue.put(index, job, view)
        data = [0] * len(jobs)
        for queue in queues.values():
            data = [value + more for value, more in zip(data, queue.results(len(jobs)), strict=True)]
        return [
            PartialDigest(place.count, place.coverage, value % PRIME) for place, value in zip(places, data, strict=True)
        ]


def _view(job: DigestJob) -> torch.Tensor:
    """Return the checked view of a job, as integers, on a device where a kernel can read it."""
    if isinstance(job.view, np.ndarray | np.generic):
        array = as_array(job)
        raw = torch.from_numpy(np.array(array).view(f"i{array.itemsize}" if array.itemsize > 1 else "u1"))
        return raw if interpreting() else raw.cuda()
    return raw_view(job)


class _Queue:
    """Tiles of one device on their way into launches."""

    def __init__(self, device: torch.device, key_seed: KeySeed) -> None:
        self.device, self.keys = device, _device_keys(key_seed, str(device))
        self.tiles: dict[Form, list[tuple[int, Tile]]] = defaultdict(list)
        self.gathered: list[torch.Tensor] = []
        self.owners: list[np.ndarray[Any, np.dtype[np.int64]]] = []
        self.sums: list[torch.Tensor] = []

    def put(self, owner: int, job: DigestJob, view: torch.Tensor) -> None:
        """Queue the tiles of a view; gathers panels that are contiguous in neither direction."""
        strides = tuple(stride * view.element_size() for stride in view.stride())
        for found in panels_of(view.data_ptr(), strides, job):
            panel, size = found, found.itemsize_bytes
            dense = panel.column_stride == size or panel.columns == 1
            if not dense and (panel.row_stride != size or panel.row_step != 1):
                copy = _gathered(panel, view)
                self.gathered.append(copy)
                panel = panel._replace(address=copy.data_ptr(), row_stride=panel.columns * size, column_stride=size)
            for form, tile in tiles_of(panel):
                self.tiles[form].append((owner, tile))
            if len(self.gathered) >= _GATHERED_MAX:
                self.launch()

    def launch(self) -> None:
        """Start a kernel per form; the memory of gathered panels is free for what is queued behind it."""
        for form, found in self.tiles.items():
            table = np.array([tile for _, tile in found], np.int64)
            largest = int(np.prod(table[:, _COUNTS], axis=1).max()) * 4
            chunks = min(_CHUNKS_MAX, -(-largest // _CHUNK_BYTES))
            out = torch.empty(len(found) * chunks, dtype=torch.int64, device=self.device)
            digest_tiles[(len(found), chunks)](
                torch.from_numpy(table).to(self.device), self.keys, out.view(torch.uint64),
                WIDTH=form.width, PARTS=form.parts, ALIGNED=form.aligned, LINES=_LINES, INDICES=_INDICES,
                FOLD=PRODUCTS_PER_FOLD, FIELDS=len(TILE_FIELDS), num_warps=_WARPS,
            )  # fmt: skip
            self.sums.append(out)
            self.owners.append(np.repeat(np.array([owner for owner, _ in found], np.int64), chunks))
        self.tiles.clear()
        self.gathered.clear()

    def results(self, count: int) -> list[int]:
        """Return the data sum of each of `count` owners, not reduced; the one synchronization with the device."""
        self.launch()
        sums, owners = torch.cat(self.sums).cpu().numpy(), np.concatenate(self.owners)
        halves = []
        for half in (sums & 0xFFFFFFFF, sums >> 32):  # of 2^31 chunks at most: both stay below 2^63
            total = np.zeros(count, np.int64)
            np.add.at(total, owners, half)
            halves.append(total.tolist())
        return [low + (high << 32) for low, high in zip(*halves, strict=True)]


def _gathered(panel: Panel, view: torch.Tensor) -> torch.Tensor:
    """Return a contiguous copy of a panel of a view; panels have at most 4 MiB."""
    size = panel.itemsize_bytes
    offset = (panel.address - view.data_ptr()) // size + view.storage_offset()
    strides = (panel.row_stride // size, panel.column_stride // size)
    return view.as_strided((panel.rows, panel.columns), strides, offset).contiguous()


@lru_cache(maxsize=8)
def _device_keys(key_seed: KeySeed, device: str) -> torch.Tensor:
    """Return the four plain tables on a device, 2 MiB."""
    return torch.from_numpy(key_tables(key_seed).tables.reshape(-1).copy()).to(device)


def interpreting() -> bool:
    """Return whether Triton interprets kernels on the CPU in this process."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def usable(device: str) -> bool:
    """Return whether the kernel can run on tensors of a device."""
    kind: Any = torch.device(device).type
    return (kind == "cuda" and torch.cuda.is_available()) or (kind == "cpu" and interpreting())
