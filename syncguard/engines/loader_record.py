"""Record what an engine's own loader does with a checkpoint, inside a live rank, without touching what it holds.

The loader runs on a twin: the same module objects' classes and attributes, every tensor of them on the meta device, so
that there is no memory to write and none is needed. A dispatch mode follows each copy as strides (`layout.recorded`) and
stops the recording before any operation that would write a tensor with memory. Checkpoint names, shapes and dtypes come
from the headers of the engine's own checkpoint; no weight is read. Nothing is built anew and no group is joined.
Seen with SGLang 0.5.23, whose `load_weights` an update calls on the live model in the same way.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from syncguard.engines.loader_guard import LiveState
from syncguard.engines.loader_twin import META, Twin, storage_id
from syncguard.layout.model import LogicalTensor
from syncguard.layout.recorded import UNKNOWN, ZERO, Contents, Piece, Strided
from syncguard.layout.recording import Recording
from syncguard.spec import DTYPES, Box

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_DTYPES: Final = {
    str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)
}
_WIDER: Final = frozenset(
    {
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float64),
        (torch.float16, torch.float64),
        (torch.float32, torch.float64),
    }
)
"""Casts that keep every value."""


class RecordingError(Exception):
    """The loader cannot be followed safely; nothing of it is believed."""


def record_loader(model: Any, checkpoint: Mapping[str, LogicalTensor]) -> Recording:
    """Run the live model's own `load_weights` on a twin without memory and return where everything went.

    Args:
        model: The live model of a rank; neither it nor its tensors are written.
        checkpoint: What the checkpoint holds, by name; the loader sees these in this order.

    Returns:
        The recording; with `failed` set and nothing else when the loader could not be followed.
    """
    try:
        live = LiveState.of(model)
        try:
            twin = Twin(model)
            mode = _Follower(twin)
            with torch.no_grad(), mode:
                twin.model.load_weights(mode.checkpoint(checkpoint))
        finally:
            live.put_back()
    except Exception as error:  # noqa: BLE001 - whatever a loader does on tensors without memory is a reason, not a crash
        return Recording(failed=f"{type(error).__name__}: {error}"[:500])
    shapes = {name: tensor.shape for name, tensor in checkpoint.items()}
    contents = {name: found for name, tensor in twin.named().items() if (found := mode.of_tensor(tensor)) is not None}
    return Recording(contents=contents, sources=shapes)


@dataclass(slots=True)
class _Storage:
    """What is known of one storage; it is kept, so that its identity is not given to another."""

    storage: torch.UntypedStorage
    itemsize: int
    tensors: list[Contents] = field(default_factory=list)


class _Follower(TorchDispatchMode):  # type: ignore[misc] # torch may be absent where this is checked
    """Follows copies between tensors of the meta device."""

    def __init__(self, twin: Twin) -> None:
        super().__init__()
        self._storages: dict[int, _Storage] = {}
        self._dtypes: dict[str, torch.dtype] = {}
        for tensor in twin.named().values():
            known = self._known(tensor)
            view = _strided(tensor)
            if known.itemsize != tensor.element_size():
                msg = "tensors of two item sizes share a storage"
                raise RecordingError(msg)
            if not any(view == other.view for other in known.tensors):
                known.tensors.append(Contents(view))

    def checkpoint(self, checkpoint: Mapping[str, LogicalTensor]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the checkpoint's tensors, without memory, each known as itself."""
        for name, tensor in checkpoint.items():
            dtype = _DTYPES[tensor.dtype]
            made = torch.empty(tensor.shape, dtype=dtype, device=META)
            self._known(made).tensors = [Contents.of_checkpoint(name, tensor.shape)]
            self._dtypes[name] = dtype
            yield name, made

    def of_tensor(self, tensor: torch.Tensor) -> Contents | None:
        """Return the contents of exactly this tensor, None when it has no memory of its own."""
        known = self._storages.get(storage_id(tensor))
        view = _strided(tensor)
        return next((found for found in known.tensors if found.view == view), None) if known else None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation on shapes alone and note where elements went."""
        del types
        kwargs = dict(kwargs or {})
        name = func._schema.name  # noqa: SLF001 - the operation's own description
        written = _written(func, args, kwargs)
        for tensor in written:
            if tensor.device.type != "meta":
                msg = f"{name} would write a tensor with memory, on {tensor.device}"
                raise RecordingError(msg)
        if name == "aten::_to_copy":
            kwargs["device"] = META  # a copy to where weights live stays a copy of shapes
        if name == "aten::copy_":
            self._write(args[0], self._trace(args[1], args[0].dtype, last=True), args[1].shape)
            return args[0]
        result = func(*args, **kwargs)
        if name in _ZEROING or (name == "aten::fill_" and _fills_zero(args)):
            self._write(args[0], [Piece.constant(tuple(args[0].shape), ZERO)], args[0].shape)
        elif written:
            for tensor in written:
                self._write(tensor, [Piece.constant(tuple(tensor.shape), UNKNOWN)], tensor.shape)
        else:
            self._note_fresh(name, args, result)
        return result

    def _note_fresh(self, name: str, args: Any, result: Any) -> None:
        """Note what a tensor in a storage of its own was made from."""
        if not isinstance(result, torch.Tensor) or result.device.type != "meta" or not _dense(result):
            return
        if storage_id(result) in self._storages and not name.startswith("aten::empty"):
            return  # a view
        view = _strided(result)
        whole = tuple(result.shape)
        if name in {"aten::clone", "aten::_to_copy", "aten::contiguous"}:
            pieces = self._trace(args[0], result.dtype)
        elif name in {"aten::cat", "aten::constant_pad_nd"}:
            pieces = self._joined(name, args, result)
        elif name in _ZEROS:
            pieces = [Piece.constant(whole, ZERO)]
        elif name in _EMPTY:
            pieces = []
        else:
            pieces = [Piece.constant(whole, UNKNOWN)]
        made = Contents(view)
        if prod(whole):
            made.write(view, pieces)
        self._known(result).tensors = [made]

    def _joined(self, name: str, args: Any, result: torch.Tensor) -> list[Piece]:
        if name == "aten::constant_pad_nd":
            source, pad = args[0], list(args[1])
            start = [0] * source.dim()
            for index in range(len(pad) // 2):
                start[source.dim() - 1 - index] = pad[2 * index]
            if min(pad, default=0) < 0 or any(args[2:]):
                return [Piece.constant(tuple(result.shape), UNKNOWN)]
            inner = Contents(_strided(result), [Piece.constant(tuple(result.shape), ZERO)])
            strides = inner.view.strides
            first = sum(s * t for s, t in zip(start, strides, strict=True))
            inner.write(Strided(first, tuple(source.shape), strides), self._trace(source, result.dtype))
            return inner.pieces
        parts = [part for part in args[0] if part.shape != torch.Size([0])]  # torch takes an empty vector for nothing
        dim = (args[1] if len(args) > 1 else 0) % result.dim()
        pieces, at = [], 0
        for part in parts:
            start = [0] * result.dim()
            start[dim] = at
            pieces += [_moved(piece, start) for piece in self._trace(part, result.dtype)]
            at += part.shape[dim]
        return pieces

    def _trace(self, tensor: torch.Tensor, into: torch.dtype, *, last: bool = False) -> list[Piece]:
        """Return where a tensor's elements came from, after a cast to `into`.

        A cast on the way must keep every value; the last one, into the resident dtype, is the engine's own rounding.
        """
        shape = tuple(tensor.shape)
        if tensor.device.type != "meta" or not prod(shape):
            return [Piece.constant(shape, UNKNOWN)] if prod(shape) else []
        known = self._storages.get(storage_id(tensor))
        view = _strided(tensor)
        holder = next((c for c in known.tensors if c.holds(view.offset)), None) if known else None
        if known is None or holder is None or known.itemsize != tensor.element_size():
            return [Piece.constant(shape, UNKNOWN)]
        pieces = holder.read(view)
        return [piece if self._kept_by(piece, into, last=last) else _unknown(piece) for piece in pieces]

    def _kept_by(self, piece: Piece, into: torch.dtype, *, last: bool) -> bool:
        own = self._dtypes.get(piece.source)
        if own is None or own == into or (own, into) in _WIDER:
            return True
        rounds = own.is_floating_point and into.is_floating_point and min(own.itemsize, into.itemsize) > 1
        return last and bool(rounds)

    def _write(self, target: torch.Tensor, pieces: list[Piece], shape: Any) -> None:
        view = _strided(target)
        if tuple(shape) != view.sizes:
            pieces = [_broadcast(piece, tuple(shape), view.sizes) for piece in pieces]
        if not prod(view.sizes):
            return
        known = self._known(target)
        if known.itemsize != target.element_size():
            msg = f"a write through a view of another item size, {target.dtype}"
            raise RecordingError(msg)
        holder = next((c for c in known.tensors if c.holds(view.offset)), None)
        if holder is None:
            known.tensors.append(holder := Contents(view))
        holder.write(view, pieces)

    def _known(self, tensor: torch.Tensor) -> _Storage:
        return self._storages.setdefault(storage_id(tensor), _Storage(tensor.untyped_storage(), tensor.element_size()))


_ZEROING: Final = frozenset({"aten::zero_"})
_ZEROS: Final = frozenset({"aten::zeros", "aten::zeros_like", "aten::new_zeros"})
_EMPTY: Final = frozenset(
    {"aten::empty", "aten::empty_like", "aten::new_empty", "aten::empty_strided", "aten::new_empty_strided"}
)


def _fills_zero(args: Any) -> bool:
    return bool(len(args) > 1 and not isinstance(args[1], torch.Tensor) and args[1] == 0)


def _written(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for index, name in _writes(func):
        value = args[index] if index < len(args) else kwargs.get(name)
        values = value if isinstance(value, (list, tuple)) else [value]
        found += [item for item in values if isinstance(item, torch.Tensor)]
    return found


@cache
def _writes(func: Any) -> tuple[tuple[int, str], ...]:
    """Return place and name of the arguments that an operation writes to, from its own schema."""
    arguments = func._schema.arguments  # noqa: SLF001 - the operation's own description
    return tuple(
        (index, argument.name)
        for index, argument in enumerate(arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def _strided(tensor: torch.Tensor) -> Strided:
    return Strided(int(tensor.storage_offset()), tuple(tensor.shape), tuple(tensor.stride()))


def _dense(tensor: torch.Tensor) -> bool:
    return bool(tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes())


def _moved(piece: Piece, start: list[int]) -> Piece:
    box = Box(tuple(o + s for o, s in zip(piece.box.offsets, start, strict=True)), piece.box.sizes)
    return Piece(box, piece.source, piece.offset, piece.strides)


def _unknown(piece: Piece) -> Piece:
    return Piece(piece.box, UNKNOWN, 0, (0,) * len(piece.strides))


def _broadcast(piece: Piece, shape: tuple[int, ...], sizes: tuple[int, ...]) -> Piece:
    """Return a piece of a tensor that a copy repeats over more elements."""
    lead = len(sizes) - len(shape)
    offsets = (0,) * lead + piece.box.offsets
    held = tuple(n for n in sizes[:lead]) + tuple(
        own if whole == size else size for own, whole, size in zip(piece.box.sizes, shape, sizes[lead:], strict=True)
    )
    strides = (0,) * lead + tuple(
        stride if whole == size else 0 for stride, whole, size in zip(piece.strides, shape, sizes[lead:], strict=True)
    )
    return Piece(Box(offsets, held), piece.source, piece.offset, strides)


class _Index(msgspec.Struct):
    """The part of a checkpoint's index that is read."""

    weight_map: dict[str, str]


FILES_MAX: Final = 4096
"""Weight files of one checkpoint whose headers are read."""


def record_from_folder(model: Any, path: str) -> Recording:
    """Record a loader over the names in a checkpoint folder's safetensors headers; no weight is read.

    Args:
        model: The live model of a rank.
        path: Folder, or the name of a repository that the engine has downloaded already; nothing is downloaded.

    Returns:
        The recording, `failed` when the folder cannot be read.
    """
    try:
        checkpoint = checkpoint_names(path)
    except Exception as error:  # noqa: BLE001 - no checkpoint is a reason, not a crash of the rank
        return Recording(failed=f"names of the checkpoint {path}: {type(error).__name__}: {error}"[:500])
    return record_loader(model, checkpoint)


def checkpoint_names(path: str) -> dict[str, LogicalTensor]:
    """Return names, dtypes and shapes of all tensors of a checkpoint folder, in the order of its files.

    Raises:
        RecordingError: No safetensors file, too many of them, a name twice, or a dtype without a rule.
    """
    from safetensors import safe_open

    folder = Path(path)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        folder = Path(snapshot_download(path, local_files_only=True))
    files = sorted(folder.glob("*.safetensors"))
    index = folder / "model.safetensors.index.json"
    if index.is_file():  # as SGLang does: a folder may hold the same tensors in another naming beside them
        listed = set(msgspec.json.decode(index.read_bytes(), type=_Index).weight_map.values())
        files = [file for file in files if file.name in listed]
    if not 0 < len(files) <= FILES_MAX:
        msg = f"{len(files)} safetensors files"
        raise RecordingError(msg)
    codes = {dtype.safetensors: dtype.name for dtype in DTYPES.values()}
    found: dict[str, LogicalTensor] = {}
    for file in files:
        with safe_open(file, framework="numpy") as opened:
            for name in opened.keys():  # noqa: SIM118 - not a mapping
                part = opened.get_slice(name)
                if name in found or part.get_dtype() not in codes:
                    msg = f"{name} twice, or of dtype {part.get_dtype()}"
                    raise RecordingError(msg)
                found[name] = LogicalTensor(name, codes[part.get_dtype()], tuple(part.get_shape()))
    return found
