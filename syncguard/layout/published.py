"""Names of what an engine makes of exported tensors by a published quantization, where it keeps no exported bytes.

Such a resident is bound to a logical tensor of its own, whose name says exactly what must be computed of what:

    model.layers.0.mlp.down_proj.weight#fp8_per_row:bfloat16.values(model.layers.0.mlp.down_proj.weight[0:64, 0:32])

The exporter reads the name, computes it from the trainer's tensors (`export.quantize`) and puts the result into the
manifest in place of its sources. The comparison stays bitwise. It proves that the worker holds the quantized tensor, not
that it holds the trainer's values: those cannot be proven of bytes that no longer have them. The set of functions is
closed; a name with another one is an ordinary name, which no exporter exports.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from syncguard.errors import DigestInputError
from syncguard.spec import Box, dtype_named

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

MARK: Final = "#"
"""Stands between the name and the recipe; no checkpoint name has it."""

MAX: Final = "max"
"""Largest of several scalars: the scale of a merged layer, the static activation scale of its parts."""
FP8_REQUANTIZED: Final = "fp8_requantized"
"""fp8 with a scale of its own, to float16 and back to fp8 under the largest of several scales. Sources: the values, their
scale, the other scales (`requantize_with_max_scale`, `layers/quantization/utils.py` 0.5.23:164).

Here the scale keeps its float32 value in `values * scale`, as torch does for tensors on a CPU."""
FP8_REQUANTIZED_HALF: Final = "fp8_requantized_half"
"""The same with the scale rounded to float16 first, as torch does where the scalar tensor lies on a device too."""
FP8_PER_TENSOR: Final = "fp8_per_tensor"
"""fp8 under one scale, `amax / 448` over all sources; the first source is what is quantized (`scaled_fp8_quant`)."""
FP8_INPUT: Final = "fp8_input"
"""As `fp8_per_tensor` with the arithmetic of `input_to_float8` (`layers/quantization/fp8_utils.py` 0.5.23:1973)."""
FP8_PER_ROW: Final = "fp8_per_row"
"""fp8 under one scale a row, `amax / 448` of the columns that one rank holds (`per_token_quant_fp8`)."""

OUTPUTS: Final = {
    MAX: ("value",),
    FP8_REQUANTIZED: ("values",),
    FP8_REQUANTIZED_HALF: ("values",),
    FP8_PER_TENSOR: ("values", "scale"),
    FP8_INPUT: ("values", "scale"),
    FP8_PER_ROW: ("values", "scale"),
}
"""Every function, and what it gives."""

_NAME: Final = re.compile(
    r"(?P<function>[a-z0-9_]+)(?::(?P<dtype>[a-z0-9_]+))?\.(?P<output>[a-z]+)\((?P<sources>[^()]*)\)"
)
_SOURCE: Final = re.compile(r"(?P<fqn>[^\[\]; ]+)(?P<box>\[[0-9:, ]+\])?")
NAME_LENGTH_MAX: Final = 1 << 20
DIGITS_MAX: Final = 19
"""Digits of an index; more fits no tensor."""


@dataclass(frozen=True, slots=True)
class SourceBox:
    """A part of an exported tensor; all of it without a box."""

    fqn: str
    box: Box | None = None

    def __str__(self) -> str:
        """Return the name, with its box."""
        return self.fqn + (str(self.box) if self.box is not None else "")


@dataclass(frozen=True, slots=True)
class Recipe:
    """What must be computed of which exported tensors.

    Attributes:
        function: One of `OUTPUTS`.
        output: Which of its results.
        sources: What it is computed of, in the order that the function says.
        dtype: Dtype in which the engine held the sources before it quantized them; empty for that of the export.
    """

    function: str
    output: str
    sources: tuple[SourceBox, ...]
    dtype: str = ""

    def named(self, target: str) -> str:
        """Return the name of the logical tensor that a resident of this name must equal."""
        dtype = f":{self.dtype}" if self.dtype else ""
        return f"{target}{MARK}{self.function}{dtype}.{self.output}({'; '.join(map(str, self.sources))})"


def recipe_of(fqn: str) -> Recipe | None:
    """Return the recipe in a logical name, None when the name is an ordinary one or no recipe of the closed set."""
    _, mark, text = fqn.partition(MARK)
    if not mark or len(fqn) > NAME_LENGTH_MAX:
        return None
    found = _NAME.fullmatch(text)
    if found is None or found["output"] not in OUTPUTS.get(found["function"], ()):
        return None
    sources = []
    for part in found["sources"].split("; "):
        source = _SOURCE.fullmatch(part)
        box = _box(source["box"]) if source is not None and source["box"] else None
        if source is None or (source["box"] and box is None):
            return None
        sources.append(SourceBox(source["fqn"], box))
    if found["dtype"] and not _is_dtype(found["dtype"]):
        return None
    return Recipe(found["function"], found["output"], tuple(sources), found["dtype"] or "")


def requantized(values: str, own_scale: str, scales: Sequence[str], *, on_device: bool) -> Recipe:
    """Return the recipe of values under the largest of several scales.

    Args:
        values: Name of the fp8 values.
        own_scale: Name of their scale.
        scales: Names of all scales of the merged tensor.
        on_device: The engine's tensors do not lie on a CPU.
    """
    others = sorted({scale for scale in scales if scale != own_scale})
    function = FP8_REQUANTIZED_HALF if on_device else FP8_REQUANTIZED
    return Recipe(function, "values", tuple(map(SourceBox, (values, own_scale, *others))))


def largest(scales: Sequence[str]) -> Recipe:
    """Return the recipe of the largest of several scalars."""
    return Recipe(MAX, "value", tuple(map(SourceBox, sorted(set(scales)))))


def agreed_forms(workers: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Return what most workers say of the forms that they hold, so that one that is wrong does not decide for the others.

    Of a tensor's dtypes the one that most hold is taken; with as many for another one, none, and it stays as exported.
    Where some hold a tensor only in a computed form and others only as it is, the larger side counts, in a tie the plain
    one. What is left out shows in the verdicts of the workers that hold it.

    Args:
        workers: Logical name → dtype, of each worker.
    """
    votes: dict[str, Counter[str]] = {}
    for found in workers:
        for fqn, dtype in found.items():
            votes.setdefault(fqn, Counter())[dtype] += 1
    merged = {}
    for fqn, counts in votes.items():
        (dtype, most), *others = counts.most_common()
        if not others or others[0][1] < most:
            merged[fqn] = dtype
    for fqn, names in _forms_of_sources(votes).items():
        forms = [fqn in found for found in workers if not names.isdisjoint(found)]
        plain = sum(fqn in found and names.isdisjoint(found) for found in workers)
        outvoted = names if plain >= len(forms) else () if any(forms) else (fqn,)
        for name in outvoted:
            merged.pop(name, None)
    return merged


def _forms_of_sources(names: Iterable[str]) -> dict[str, set[str]]:
    """Return name → computed forms of it, for names that are held as they are too."""
    known = set(names)
    found: dict[str, set[str]] = {}
    for name in known:
        recipe = recipe_of(name)
        for source in recipe.sources if recipe is not None else ():
            if source.fqn in known:
                found.setdefault(source.fqn, set()).add(name)
    return found


def _box(text: str) -> Box | None:
    spans = [part.split(":") for part in text[1:-1].split(", ")]
    if any(len(span) != 2 or not all(span) for span in spans):  # noqa: PLR2004 - first and past the last
        return None
    if any(len(edge) > DIGITS_MAX or not edge.isdigit() for span in spans for edge in span):
        return None
    numbers = [(int(first), int(last)) for first, last in spans]
    if any(first > last for first, last in numbers):
        return None
    return Box(tuple(first for first, _ in numbers), tuple(last - first for first, last in numbers))


def _is_dtype(name: str) -> bool:
    try:
        return dtype_named(name).name == name
    except DigestInputError:
        return False
