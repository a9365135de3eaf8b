"""The second witness: what SGLang's own loader does, told by tensors whose elements say where they come from.

Every checkpoint element has a number. Its digits are loaded in one pass each through the model's real
`load_weights` and post-processing; reading the digits back gives for every resident element the checkpoint element that
it was copied from. The rules are compared with that, element by element, and nothing of them is used to make it.
Digits are written as values from 1 on (bytes, for 8-bit types), so that 0 is padding and anything else was never written.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from syncguard.layout.ops import apply_ops
from syncguard.layout.padding import wrong_padding
from syncguard.layout.repack import Rearrange, moves_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from layout_ranks import Rank

    from syncguard.layout.model import RankLayout

NARROW, WIDE = 100, 1 << 23
"""Digits that every dtype holds exactly, and those of float32 alone."""

ZERO, UNWRITTEN = -1, -2


@dataclass
class Provenance:
    """Where every resident element came from.

    `ids[name]` has the shape of the resident tensor and holds checkpoint element numbers, `ZERO` or `UNWRITTEN`.
    `numbers[fqn]` are the numbers of a checkpoint tensor's elements. `passes` are the resident tensors after each digit was
    loaded: what lies in parts of several resident elements is read from them after it was put together again. `as_made` are
    the padded ones of a rank in which nothing was overwritten before it was loaded.
    """

    numbers: dict[str, np.ndarray]
    ids: dict[str, np.ndarray]
    layout: RankLayout
    passes: list[dict[str, torch.Tensor]]
    base: int
    as_made: dict[str, torch.Tensor]

    def through(self, resident: str, ops: tuple[Any, ...], dtype: str = "") -> np.ndarray:
        """Return the checkpoint element numbers that a chain of operations leads to, as elements of the logical dtype."""
        if not moves_bytes(ops) or (all(op.whole for op in ops if isinstance(op, Rearrange)) and not recoded(ops)):
            return apply_ops(self.ids[resident], ops)
        held = None
        for digit, live in enumerate(self.passes):
            found = apply_ops(live[resident], ops)
            got = digits_of(found.contiguous().view(getattr(torch, dtype)) if dtype else found, self.base)
            held = np.zeros(got.shape, np.int64) if held is None else held
            held = np.where((held < 0) | (got < 0), np.minimum(held, got), held + got * self.base**digit)
        assert held is not None
        return held


def recoded(ops: tuple[Any, ...]) -> bool:
    return any(hasattr(op, "table") for op in ops)


def kept_as(name: str) -> str:
    """Return one name for scales that an export has to have equal, since SGLang keeps one of them.

    The input scales of an expert's gate and up are both written over both places (MOE:1127-1133), and of the global scales
    of fused shards the largest is kept (`compressed_tensors_w4a4_nvfp4.py`:95-101).
    """
    if (name.endswith("_global_scale") and ".experts." not in name) or (
        name.endswith(".input_scale") and ".experts." in name
    ):
        for shard, first in ((".k_proj.", ".q_proj."), (".v_proj.", ".q_proj."), (".up_proj.", ".gate_proj.")):
            name = name.replace(shard, first)
    return name


def element_numbers(tensors: Mapping[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """Number all elements of a checkpoint; scales of which the engine keeps one for several tensors have one number."""
    numbers, shared, start = {}, {}, 0
    for name, tensor in tensors.items():
        key = kept_as(name)
        if key not in shared:
            shared[key] = np.arange(start, start + tensor.numel(), dtype=np.int64).reshape(tuple(tensor.shape))
            start += tensor.numel()
        numbers[name] = shared[key]
    return numbers


def digit_tensor(numbers: np.ndarray, base: int, digit: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a checkpoint tensor of one digit of its element numbers."""
    values = torch.from_numpy(np.asarray((numbers // base**digit) % base + 1))
    if dtype.itemsize == 1 and dtype.is_floating_point:
        return values.to(torch.uint8).view(dtype)
    return values.to(dtype)


def digits_of(tensor: torch.Tensor, base: int) -> np.ndarray:
    """Return the digit of every element, `ZERO` for zero and `UNWRITTEN` for what no loader wrote."""
    plain = tensor.detach()
    if plain.dtype.itemsize == 1 and plain.dtype.is_floating_point:
        plain = plain.view(torch.uint8)
    values = plain.to(torch.float64).numpy()
    whole = (values >= 0) & (values <= base) & (values == np.floor(values))
    return np.where(whole, np.nan_to_num(values) - 1, UNWRITTEN).astype(np.int64)


def fill_unwritten(model: torch.nn.Module) -> None:
    """Put a value that no digit has into every parameter."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dtype.itemsize == 1:
                parameter.data.view(torch.uint8).fill_(0xFF if parameter.dtype.is_floating_point else 0x7F)
            else:
                parameter.data.fill_(-1 if parameter.dtype.is_floating_point or parameter.dtype.is_signed else 255)


def record(
    tensors: Mapping[str, torch.Tensor],
    build: Callable[[], Rank],
    walk: Callable[[Rank], tuple[RankLayout, dict[str, Any]]],
) -> Provenance:
    """Load numbered elements through the engine's loader into fresh ranks and read back where they went."""
    numbers = element_numbers(tensors)
    total = sum(array.size for array in numbers.values())
    ids: dict[str, np.ndarray] = {}
    layout = None
    rank = build()
    wide = all(parameter.dtype == torch.float32 for parameter in rank.model.parameters())
    base = WIDE if wide and all(tensor.dtype == torch.float32 for tensor in tensors.values()) else NARROW
    passes = next(n for n in range(1, 9) if base**n >= total)
    loaded: list[dict[str, torch.Tensor]] = []
    for digit in range(passes):
        rank = build() if digit else rank
        fill_unwritten(rank.model)
        rank.load({name: digit_tensor(numbers[name], base, digit, tensor.dtype) for name, tensor in tensors.items()})
        layout, live = walk(rank)
        moved = {claim.resident for claim in (*layout.bindings, *layout.paddings) if moves_bytes(claim.ops)}
        loaded.append({name: live[name].detach().clone() for name in moved})
        for name, tensor in live.items():
            got = digits_of(tensor, base)
            held = ids.setdefault(name, np.zeros(got.shape, np.int64))
            ids[name] = np.where((held < 0) | (got < 0), np.minimum(held, got), held + got * base**digit)
    assert layout is not None
    made: dict[str, torch.Tensor] = {}
    if layout.paddings:  # some are written when the engine makes the tensor and never again: keep those
        fresh = build()
        fresh.load(tensors)
        made = walk(fresh)[1]
    return Provenance(numbers, ids, layout, loaded, base, {p.resident: made[p.resident] for p in layout.paddings})


def disagreements(provenance: Provenance) -> list[str]:
    """Say where the rules and the loader differ, one line a binding or padding."""
    found = []
    for binding in provenance.layout.bindings:
        tensor, box = binding.shard.tensor, binding.shard.box
        numbers = provenance.numbers.get(tensor.fqn)
        if numbers is None:
            if not binding.alias:
                found.append(f"{binding.resident}: the checkpoint has no {tensor.fqn}")
            continue
        if numbers.shape != tensor.shape:
            found.append(f"{tensor.fqn}: the rule says {tensor.shape}, the checkpoint {numbers.shape}")
            continue
        due = numbers[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))]
        got = provenance.through(binding.resident, binding.ops, tensor.dtype)
        if not np.array_equal(got, due):
            at = tuple(int(i) for i in np.argwhere(got != due)[0])
            found.append(f"{binding.resident} as {tensor.fqn}{box}: at {at} the loader put {got[at]}, rule {due[at]}")
    for padding in provenance.layout.paddings:
        got = provenance.through(padding.resident, padding.ops)
        as_made = apply_ops(provenance.as_made[padding.resident], padding.ops)
        if (got >= 0).any() or wrong_padding(as_made, padding.value_byte)[0]:
            found.append(f"{padding.resident}: padding ({padding.reason}) holds {sorted(set(got[got != ZERO]))[:4]}")
    return found
