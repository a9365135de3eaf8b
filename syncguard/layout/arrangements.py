"""The arrangements that kernels want, by name: each as the `Rearrange` that leads back to the exported order.

Digits are written most significant first, as the engine's own code walks them; its tests compare each arrangement with that
code. Sources: SGLang 0.5.23 `quantization/{utils,marlin_utils,marlin_utils_fp4}.py`, `kernels/jit/csrc/gemm/marlin/
gptq_marlin_repack.cuh`; FlashInfer 0.7 `utils.py:1106-1200`, `fused_moe/core.py:682-780`.
"""

from __future__ import annotations

from enum import Enum

from syncguard.layout.repack import NIBBLE, Rearrange


class Packing(str, Enum):
    """How a checkpoint packs 4-bit or 8-bit values of a matrix `[n, k]` (outputs, inputs)."""

    GPTQ = "gptq"
    """int32 `[k / per, n]`, the lowest bits first."""
    AWQ = "awq"
    """int32 `[k, n / 8]`, values 0 2 4 6 1 3 5 7 of eight from the lowest bits on."""
    ROWS = "rows"
    """Bytes or int32 words `[n, k / per]`, the lowest bits first (compressed-tensors, NVFP4, MXFP4, fp8)."""


def swizzled_scales(rows: int, columns: int) -> Rearrange:
    """Return the way back from tiles of 128 rows and 4 columns (`swizzle_blockscale`, `quantization/utils.py`:574-603).

    Args:
        rows: A multiple of 128.
        columns: A multiple of 4.
    """
    _multiple(rows, 128)
    _multiple(columns, 4)
    return Rearrange(2, (rows // 128, columns // 4, 32, 4, 4), (0, 3, 2, 1, 4), (rows, columns))


def shuffled_rows(rows: int, columns: int, *, gated: bool, bits: int = 8) -> Rearrange:
    """Return the way back from rows shuffled for a transposed epilogue of 128 rows (`get_shuffle_matrix_a_row_indices`).

    Args:
        rows: A multiple of 32.
        columns: Elements of a row.
        gated: Rows of the two halves were made to alternate before.
        bits: Size of an element.
    """
    _multiple(rows, 32)
    digits, order = (rows // 32, 2, 2, 8, columns), (0, 3, 1, 2, 4)
    if gated:  # row = 32 * block + 16 * low + 8 * half + eighth, from row 16 * block + 2 * eighth + low of a half
        order = (2, 0, 3, 1, 4)
    return Rearrange(2, digits, order, (rows, columns), bits, bits, bits)


def blocked_rows(blocks: int, rows: int, width: int, *, gated: bool, bits: int = 16) -> Rearrange:
    """Return the way back from `[blocks, rows, width]`: columns in blocks, rows as in `shuffled_rows` (`unquant.py`:1013-1040)."""
    _multiple(rows, 32)
    digits = (blocks, rows // 32, 2, 2, 8, width)
    order = (3, 1, 4, 2, 0, 5) if gated else (1, 4, 2, 3, 0, 5)
    return Rearrange(3, digits, order, (rows, blocks * width), bits, bits, bits)


def shuffled_scales(rows: int, columns: int, *, gated: bool) -> Rearrange:
    """Return the way back from scales shuffled as `shuffled_rows` and then swizzled as `swizzled_scales`."""
    _multiple(rows, 128)
    _multiple(columns, 4)
    digits = (rows // 128, columns // 4, 2, 2, 8, 4, 4)  # tile, column tile, low, half, eighth, quarter, column
    order = (3, 0, 5, 4, 2, 1, 6) if gated else (0, 5, 4, 2, 3, 1, 6)
    return Rearrange(2, digits, order, (rows, columns))


def swapped_rows(rows: int, columns: int, *, pairs: bool, bits: int = 8) -> Rearrange:
    """Return the way back from `shuffled_rows` of rows whose neighbours were swapped before (`mxfp4.py`:782-793, 855-935).

    Args:
        rows: A multiple of 32.
        columns: Elements of a row.
        pairs: Neighbours were swapped; else only shuffled.
        bits: Size of an element.
    """
    _multiple(rows, 32)
    flips = (2,) if pairs else ()
    return Rearrange(2, (rows // 32, 2, 2, 8, columns), (0, 3, 1, 2, 4), (rows, columns), bits, bits, bits, flips)


def swapped_scales(rows: int, columns: int, *, pairs: bool) -> Rearrange:
    """Return the way back from scales whose rows went as in `swapped_rows` and were then swizzled."""
    _multiple(rows, 128)
    _multiple(columns, 4)
    digits = (rows // 128, columns // 4, 2, 2, 8, 4, 4)
    return Rearrange(2, digits, (0, 5, 4, 2, 3, 1, 6), (rows, columns), flips=(3,) if pairs else ())


def widened_bias(rows: int, *, pairs: bool) -> Rearrange:
    """Return the way from a float32 bias whose rows went as in `swapped_rows` to its lower and upper halves, `[2, rows]`."""
    _multiple(rows, 32)
    flips = (2,) if pairs else ()
    return Rearrange(1, (rows // 32, 2, 2, 8, 2), (4, 0, 3, 1, 2), (2, rows), 16, 32, 16, flips)


def marlin_weight(k: int, n: int, bits: int, packing: Packing, to_bits: int = 32, *, halves: bool = False) -> Rearrange:
    """Return the way back from int32 `[k / 16, n * 16 * bits / 32]` of Marlin tiles (`gptq_marlin_repack.cuh`).

    Args:
        k: Inputs, a multiple of 16.
        n: Outputs, a multiple of 64.
        bits: 4 or 8.
        packing: How the checkpoint packs them.
        to_bits: Element size of the checkpoint.
        halves: Outputs of the checkpoint alternate between those of the two halves of `n`, a multiple of 128 then.
    """
    _multiple(k, 16)
    _multiple(n, 64)
    per = to_bits // bits
    # k = 16 kt + 8 v1 + 4 t1 + 2 t0 + v0;  n = 64 nt + 16 w + 8 v2 + 4 c2 + 2 c1 + c0
    names: tuple[str, ...]
    if bits == NIBBLE:
        names = ("kt", "nt", "c2", "c1", "c0", "t1", "t0", "w", "v0", "v2", "v1")
    else:
        names = ("kt", "nt", "c2", "c1", "c0", "t1", "t0", "w", "v2", "v0", "v1")
    sizes = dict.fromkeys(names, 2) | {"kt": k // 16, "nt": n // 64, "w": 4}
    if halves:
        _multiple(n, 128)
        names, sizes = ("kt", "half", *names[1:]), sizes | {"half": 2, "nt": n // 128}
    inputs, outputs = ("kt", "v1", "t1", "t0", "v0"), ("nt", "w", "v2", "c2", "c1", "c0")
    if packing is Packing.GPTQ:
        inner = 3 if bits == NIBBLE else 2
        order, shape = (*inputs[:-inner], *outputs, *inputs[-inner:]), (k // per, n)
    elif packing is Packing.AWQ:
        nibbles = ("c0", "c2", "c1") if bits == NIBBLE else ("c0", "c1")
        order, shape = (*inputs, *outputs[: -len(nibbles)], *nibbles), (k, n // per)
    else:
        order, shape = (*outputs, *(("half",) if halves else ()), *inputs), (n, k // per)
    if halves and packing is not Packing.ROWS:
        msg = f"alternating outputs packed as {packing.value}"
        raise ValueError(msg)
    digits = tuple(sizes[name] for name in names)
    return Rearrange(2, digits, tuple(names.index(name) for name in order), shape, bits, 32, to_bits)


def marlin_scales(
    groups: int,
    n: int,
    *,
    grouped: bool,
    outputs_first: bool,
    fp4: bool = False,
    bits: int = 16,
    halves: bool = False,
) -> Rearrange:
    """Return the way back from Marlin's scales `[groups, n]` (`marlin_permute_scales`).

    Args:
        groups: Groups of inputs.
        n: Outputs, a multiple of 64.
        grouped: Several groups of inputs have scales of their own; else the permutation is that of one scale a row.
        outputs_first: The checkpoint has `[n, groups]`.
        fp4: Scales of 4-bit floats, whose pairs are swapped once more (`{nv,mx}fp4_marlin_process_scales`).
        bits: Size of an element.
        halves: As in `marlin_weight`; only where the checkpoint has outputs first.
    """
    _multiple(n, 64)
    digits: tuple[int, ...]
    order: tuple[int, ...]
    if grouped:
        digits, order = (groups, n // 64, 8, 2, 2, 2), (1, 3, 5, 4, 2) if fp4 else (1, 3, 4, 5, 2)
    elif fp4:
        msg = "one group of 4-bit floats"
        raise ValueError(msg)
    else:
        digits, order = (groups, n // 32, 4, 4, 2), (1, 3, 2, 4)
    if halves:
        _multiple(n, 128)
        digits = (groups, 2, digits[1] // 2, *digits[2:])
        order = (*(digit + 1 for digit in order), 1)
    place, shape = ((*order, 0), (n, groups)) if outputs_first else ((0, *order), (groups, n))
    return Rearrange(2, digits, place, shape, bits, bits, bits)


def marlin_zero_points(groups: int, n: int, packing: Packing) -> Rearrange:
    """Return the way back from Marlin's 4-bit zero points, int32 `[groups, n / 8]` (`marlin_zero_points`).

    AWQ has them as int32 `[groups, n / 8]` in its own order, compressed-tensors as `[n / 8, groups]`.
    """
    _multiple(n, 64)
    digits = (groups, n // 64, 2, 2, 2, 2, 2, 2)  # group, block, i2 i1 i0, j0 j2 j1 of output 8 j + i
    if packing is Packing.AWQ:
        return Rearrange(2, digits, (0, 1, 6, 7, 5, 4, 2, 3), (groups, n // 8), 4, 32, 32)
    return Rearrange(2, digits, (1, 6, 7, 5, 0, 2, 3, 4), (n // 8, groups), 4, 32, 32)


def marlin_bias(n: int, bits: int, *, halves: bool = False) -> Rearrange:
    """Return the way back from Marlin's bias `[n]` (`marlin_permute_bias`); `halves` as in `marlin_weight`."""
    _multiple(n, 64 if halves else 32)
    if halves:
        return Rearrange(1, (2, n // 64, 4, 4, 2), (1, 3, 2, 4, 0), (n,), bits, bits, bits)
    return Rearrange(1, (n // 32, 4, 4, 2), (0, 2, 1, 3), (n,), bits, bits, bits)


def _multiple(size: int, of: int) -> None:
    if size % of:
        msg = f"{size} is no multiple of {of}"
        raise ValueError(msg)
