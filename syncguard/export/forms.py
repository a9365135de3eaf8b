"""From tensors as a trainer exports them to the forms that a worker holds: casts and published quantizations.

Driven by what the workers say of themselves (`Gate.forms()`: logical name → dtype, `name#recipe` where they quantize).
An exported tensor that is held in another dtype is cast before it is hashed, and one that is held only in a computed form
is replaced by that form, if the forms together use all of it; else it stays, and the verdict says that nobody holds it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from syncguard.layout.published import FP8_REQUANTIZED, FP8_REQUANTIZED_HALF, MAX, recipe_of
from syncguard.manifest.observed import TARGET
from syncguard.spec import Box

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from syncguard.layout.model import RankLayout
    from syncguard.layout.published import Recipe, SourceBox


def forms_of(layouts: Iterable[RankLayout]) -> dict[str, str]:
    """Return the dtype of every logical tensor that ranks hold, by its name; names of computed forms hold their recipe.

    Those of a draft model are left out: it has other tensors under the same names.
    """
    served = [layout for layout in layouts if layout.rank.role == TARGET]
    return {shard.tensor.fqn: shard.tensor.dtype for layout in served for shard in layout.shards()}


FUSED: Final = (".experts.gate_up_proj", ".experts.down_proj")
"""Ends of names under which trainers export all experts of a layer in one tensor."""


@dataclass(frozen=True, slots=True)
class Formed:
    """A tensor to be hashed.

    Attributes:
        name: Logical name, with its recipe where it was computed.
        tensor: The tensor, torch where it was cast or computed.
        dtype: Canonical dtype name, empty for the tensor's own.
        lossy: Different exports can give the same bytes: a change need not show.
    """

    name: str
    tensor: Any
    dtype: str = ""
    lossy: bool = False


class ResidentForms:
    """Turns exported tensors into held ones, one after the other.

    Sources of a computed form are kept (not copied) until the last one of it has come; they must not change meanwhile.

    Args:
        forms: Logical name → dtype, as `forms_of` or `Gate.forms` give it. Empty: everything stays as exported.
    """

    def __init__(self, forms: Mapping[str, str]) -> None:
        """Read the recipes."""
        self._dtypes = dict(forms)
        self._pending: dict[str, Recipe] = {}
        self._waiting: dict[str, set[str]] = {}
        self._used: dict[str, list[Box | None]] = {}
        self._kept: dict[str, Any] = {}
        self._silent: set[str] = set()
        self._scale_of = _packed_scales(forms)
        self.lossy: set[str] = set()
        self.notes: Counter[str] = Counter()
        for name in forms:
            recipe = recipe_of(name)
            if recipe is None:
                continue
            self._pending[name] = recipe
            shown = _shown(recipe)
            for source in recipe.sources:
                self._waiting.setdefault(source.fqn, set()).add(name)
                if source in shown:
                    self._used.setdefault(source.fqn, []).append(source.box)

    def concerns(self, name: str, dtype: str) -> bool:
        """Return whether a tensor of this name and dtype is held in another form than it is exported in."""
        fused = name.endswith(FUSED) and name not in self._dtypes
        return name in self._waiting or fused or self._in_pair(name) or self._dtypes.get(name, dtype) != dtype

    def offer(self, name: str, tensor: Any, dtype: str) -> list[Formed]:
        """Take an exported tensor and return what can be hashed now: itself, cast, computed, or nothing yet.

        What waits for others is never lost: `rest` gives it back when they do not come.

        Raises:
            ManifestError: There is no published cast or quantization from its dtype.
        """
        made = self._offered(name, tensor, dtype)
        self._silent.add(name)
        self._silent -= {formed.name for formed in made}
        return made

    def rest(self) -> list[Formed]:
        """Return what still waits for tensors that did not come, as it was exported; to be asked when all were offered.

        No worker can be proven to hold it, since a form of it was not computed. Left out, nobody would miss it.
        """
        left = sorted(name for name in self._kept if name in self._silent)
        return [Formed(name, made := self._kept.pop(name), str(made.dtype).removeprefix("torch.")) for name in left]

    def _offered(self, name: str, tensor: Any, dtype: str) -> list[Formed]:
        parts = self._split(name, tensor)
        if parts:
            self.notes["tensors of all experts split"] += 1
            return [formed for part, view in parts for formed in self.offer(part, view, dtype)]
        if not self.concerns(name, dtype):
            return [Formed(name, tensor, dtype)]
        if self._in_pair(name):
            return self._paired(name, tensor, dtype)
        ready: list[Formed] = []
        held = name in self._dtypes
        if held:
            ready.append(self._cast(name, tensor, dtype))
        if name not in self._waiting:
            return ready or [Formed(name, tensor, dtype)]
        live = as_torch(tensor, dtype)
        if not held and not self._all_used(name, tuple(live.shape)):
            ready.append(Formed(name, tensor, dtype))
        self._kept[name] = live
        for computed in sorted(self._waiting.pop(name)):
            recipe = self._pending[computed]
            if all(source.fqn in self._kept for source in recipe.sources):
                ready.append(self._computed(computed, recipe))
        return ready

    def _in_pair(self, name: str) -> bool:
        return name in self._scale_of or name == self._scale_of.get(name.rpartition("_scale")[0])

    def _paired(self, name: str, tensor: Any, dtype: str) -> list[Formed]:
        """Wait for both values and scales where workers hold scales packed for DeepGEMM; requantize what is not so yet."""
        from syncguard.export.quantize import ue8m0

        live = as_torch(tensor, dtype)
        values = name if name in self._scale_of else name.rpartition("_scale")[0]
        scale = self._scale_of[values]
        self._kept[name] = live
        if values not in self._kept or scale not in self._kept:
            return []
        pair = self._kept.pop(values), self._kept.pop(scale)
        if str(pair[1].dtype) == "torch.int32":
            return [Formed(fqn, live, str(live.dtype)[6:]) for fqn, live in zip((values, scale), pair, strict=True)]
        self.notes["requantized to UE8M0 scales"] += 1
        self.lossy |= {values, scale}
        return [
            Formed(fqn, made, str(made.dtype).removeprefix("torch."), lossy=True)
            for fqn, made in zip((values, scale), ue8m0(*pair, values), strict=True)
        ]

    def _split(self, name: str, tensor: Any) -> list[tuple[str, Any]]:
        """Return one view an expert of a tensor that holds all of them, where workers are known to hold them apart.

        `[E, 2I, H]` with the gate in front and `[E, H, I]`, as Transformers 5 keeps them and SGLang 0.5.23 loads them
        (`qwen3_5.py`:2228-2300). Another order gives other digests, hence a mismatch.
        """
        prefix = name.rpartition(".")[0]
        if not name.endswith(FUSED) or name in self._dtypes or len(tensor.shape) != 3:  # noqa: PLR2004 - experts, rows, columns
            return []
        experts, rows = int(tensor.shape[0]), int(tensor.shape[1])
        last = f"{prefix}.{experts - 1}.gate_proj.weight"
        if last not in self._dtypes and last not in self._used:
            return []
        if name.endswith(FUSED[1]):
            return [(f"{prefix}.{expert}.down_proj.weight", tensor[expert]) for expert in range(experts)]
        return [
            (f"{prefix}.{expert}.{part}.weight", tensor[expert][start : start + rows // 2])
            for expert in range(experts)
            for part, start in (("gate_proj", 0), ("up_proj", rows // 2))
        ]

    def describe(self) -> str:
        """Return what was done, for the manifest's source: `12 cast bfloat16 to float32 exactly`, empty for nothing."""
        return ", ".join(f"{count} {note}" for note, count in sorted(self.notes.items()))

    def _cast(self, name: str, tensor: Any, dtype: str) -> Formed:
        from syncguard.export.quantize import EXACT, cast

        wanted = self._dtypes[name]
        if wanted == dtype:
            return Formed(name, tensor, dtype)
        import torch

        live = as_torch(tensor, dtype)
        made = cast(live, getattr(torch, wanted), name)
        exact = (live.dtype, made.dtype) in EXACT
        self.notes[f"cast {dtype} to {wanted} {'exactly' if exact else 'rounded to nearest even'}"] += 1
        if not exact:
            self.lossy.add(name)
        return Formed(name, made, wanted, lossy=not exact)

    def _computed(self, name: str, recipe: Recipe) -> Formed:
        from syncguard.export.quantize import computed

        sources = [_cut(self._kept[source.fqn], source.box, name) for source in recipe.sources]
        made = computed(recipe, sources, name)
        del self._pending[name]
        needed = {source.fqn for waiting in self._pending.values() for source in waiting.sources}
        for source in recipe.sources:
            if source.fqn not in needed:
                self._kept.pop(source.fqn, None)
        self.notes[f"computed by {recipe.function}"] += 1
        self.lossy.add(name)
        return Formed(name, made, str(made.dtype).removeprefix("torch."), lossy=True)

    def _all_used(self, name: str, shape: tuple[int, ...]) -> bool:
        """Return whether the forms of a tensor use every element of it."""
        boxes = self._used.get(name, [])
        if any(box is None for box in boxes):
            return True
        whole = {box for box in boxes if box is not None and box.inside(shape)}
        return covers(shape, whole)


def _packed_scales(forms: Mapping[str, str]) -> dict[str, str]:
    """Return values → scales of what workers hold as fp8 with packed UE8M0 scales."""
    found = {}
    for scale, dtype in forms.items():
        values, _, leaf = scale.rpartition("_scale")
        if dtype == "int32" and leaf in {"", "_inv"} and forms.get(values) == "float8_e4m3fn":
            found[values] = scale
    return found


def _shown(recipe: Recipe) -> tuple[SourceBox, ...]:
    """Return the sources whose content shows in a computed form: not those that only take part in a scale of values.

    The scales of a merged tensor count: no engine keeps the smaller ones, and each shows in its own values.
    """
    if recipe.output == "scale":
        return ()
    return recipe.sources if recipe.function in {MAX, FP8_REQUANTIZED, FP8_REQUANTIZED_HALF} else recipe.sources[:1]


def covers(shape: tuple[int, ...], boxes: Iterable[Box]) -> bool:
    """Return whether boxes, which may overlap, together hold every element of a shape."""
    rest = [Box.whole(shape)]
    for box in boxes:
        rest = [part for piece in rest for part in _outside(piece, box)]
    return not any(piece.count for piece in rest)


def _outside(piece: Box, box: Box) -> Iterable[Box]:
    common = piece.intersect(box)
    if not common.count:
        yield piece
        return
    offsets, sizes = list(piece.offsets), list(piece.sizes)
    for dim, (start, size) in enumerate(zip(common.offsets, common.sizes, strict=True)):
        for low, high in ((offsets[dim], start), (start + size, offsets[dim] + sizes[dim])):
            if high > low:
                yield Box((*offsets[:dim], low, *offsets[dim + 1 :]), (*sizes[:dim], high - low, *sizes[dim + 1 :]))
        offsets[dim], sizes[dim] = start, size


def as_torch(tensor: Any, dtype: str) -> Any:
    """Return a tensor as torch sees it: itself, or numpy's raw bits under their dtype, without a copy.

    Args:
        tensor: torch or numpy.
        dtype: Canonical dtype name of its elements.
    """
    import torch

    if isinstance(tensor, torch.Tensor):
        return tensor.detach()
    import numpy as np

    wanted = getattr(torch, dtype)
    raw = np.ascontiguousarray(tensor)
    flat = raw.reshape(-1).view(np.uint8)
    if not flat.flags.writeable:  # torch only warns; nothing here writes
        import warnings

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.from_numpy(flat).view(wanted).reshape(tensor.shape)
    return torch.from_numpy(flat).view(wanted).reshape(tensor.shape)


def _cut(tensor: Any, box: Box | None, name: str) -> Any:
    if box is None:
        return tensor
    if not box.inside(tuple(tensor.shape)):
        from syncguard.errors import ManifestError

        raise ManifestError(
            "part of an exported tensor", expected=f"a box inside {tuple(tensor.shape)}", found=box, where=name
        )
    return tensor[tuple(slice(start, start + size) for start, size in zip(box.offsets, box.sizes, strict=True))]
