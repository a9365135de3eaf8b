"""Capturing intermediate outputs, expert choices and operator inputs of a torch model by module name, through hooks.

Works on Transformers and on the model inside an SGLang rank, whose layers hold back the residual: some return
`(hidden, residual)`, Qwen3 of 0.5.23 leaves it in `forward_batch.residual_stream` (`layers/layer_boundary/residual`). The residual
stream is the sum. Of several ranks a layer may return an opaque `OwedOutput`, whose reduction runs later: the stream is then
read where the next attention, or the final norm, is given it. Not imported by the package itself: the agent runs without torch.
"""

from __future__ import annotations

import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from safetensors.torch import load_file, save_file

from syncguard.errors import RecordError, ScoreError, SyncguardError
from syncguard.replay.inside import CHOSEN, LOGITS, WEIGHTS, is_layer, is_router

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator, Mapping, Sequence

MAX_BYTES: Final = 1 << 30
"""Most that one capture may keep; a capture is a magnifying glass, not a recorder."""


class Capture:
    """Outputs of modules, in float32 on the CPU, tokens of several forwards one after another.

    Attributes:
        values: Point → [tokens, channels]; a router has two, `NAME#chosen` (int64) and `NAME#weights`, [tokens, top_k] each.
        error: Why a point could not be kept, of a guarded capture; empty where all could.
        owed: Layers whose stream is not complete before the next module reads it.
    """

    def __init__(self, *, guarded: bool = False) -> None:
        """Start empty; a guarded capture never raises into the forward that it watches."""
        self.values: dict[str, torch.Tensor] = {}
        self.error = ""
        self.owed: set[str] = set()
        self._guarded = guarded
        self._bytes = 0

    def hook(self, keep: Callable[..., None]) -> Callable[..., None]:
        """Return a forward hook that keeps something."""

        def run(*args: Any) -> None:
            try:
                keep(*args)
            except Exception as error:
                if not self._guarded:
                    raise
                self.error = self.error or (error.text() if isinstance(error, SyncguardError) else str(error))

        return run

    def add(self, name: str, output: Any) -> None:
        """Keep one output of a module.

        Raises:
            ScoreError: Not a tensor of tokens by channels, or more than `MAX_BYTES` in all.
        """
        stream = residual_stream(output)
        self._keep(name, stream.detach().reshape(-1, stream.shape[-1]).to("cpu", torch.float32))

    def add_routing(self, name: str, inputs: Sequence[Any]) -> None:
        """Keep expert ids and routing weights, as the experts of a layer were given them.

        Raises:
            ScoreError: The inputs hold no routing, or too much is kept.
        """
        chosen, weights = routing_of(name, inputs)
        self._keep(f"{name}{CHOSEN}", chosen.detach().to("cpu", torch.int64))
        self._keep(f"{name}{WEIGHTS}", weights.detach().to("cpu", torch.float32))

    def _keep(self, name: str, rows: torch.Tensor) -> None:
        self._bytes += rows.numel() * rows.element_size()
        if self._bytes > MAX_BYTES:
            raise ScoreError("capture too large", expected=f"at most {MAX_BYTES} bytes", found=self._bytes, where=name)
        known = self.values.get(name)
        self.values[name] = rows.clone() if known is None else torch.cat((known, rows))

    def arrays(self) -> dict[str, Any]:
        """Return numpy arrays for `find_growth`."""
        return {name: value.numpy() for name, value in self.values.items()}


def residual_stream(output: Any) -> torch.Tensor:
    """Return the hidden states of a module's output; `(hidden, residual)` of equal shape are added.

    Raises:
        ScoreError: The output holds no tensor first.
    """
    first = output[0] if isinstance(output, tuple | list) else output
    if not isinstance(first, torch.Tensor):
        raise ScoreError("a module's output is no tensor", expected="hidden states", found=type(first).__name__)
    if isinstance(output, tuple) and len(output) > 1:
        second = output[1]
        if isinstance(second, torch.Tensor) and second.shape == first.shape and second.dtype == first.dtype:
            return first.float() + second.float()
    return first


def routing_of(name: str, inputs: Sequence[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return expert ids and routing weights, [tokens, top_k] each, out of the inputs of a layer's experts.

    SGLang hands one object with `topk_ids` and `topk_weights` (`layers/moe/topk.py`, 0.5.23), Transformers two tensors.

    Raises:
        ScoreError: The inputs hold neither.
    """
    for value in inputs:
        ids, weights = getattr(value, "topk_ids", None), getattr(value, "topk_weights", None)
        if isinstance(ids, torch.Tensor) and isinstance(weights, torch.Tensor):
            return ids, weights
    tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
    if len(tensors) == 3 and not tensors[1].is_floating_point():  # noqa: PLR2004 - hidden states, ids, weights
        return tensors[1], tensors[2]
    raise ScoreError("no routing among the inputs of experts", expected="expert ids and weights", where=name)


def usual_points(model: Any) -> list[str]:
    """Return embedding, decoder layers, final norm and logits, in the order of the computation.

    Raises:
        ScoreError: The model is not laid out as `model.embed_tokens`, `model.layers.N`, `model.norm`.
    """
    names = dict(model.named_modules())
    layers = sorted((name for name in names if is_layer(name)), key=lambda name: int(name.rpartition(".")[2]))
    if "model.embed_tokens" not in names or "model.norm" not in names or not layers:
        raise ScoreError(
            "no usual points", expected="model.embed_tokens, model.layers.N, model.norm", found=type(model).__name__
        )
    return ["model.embed_tokens", *layers, "model.norm", LOGITS]


def routers_of(model: Any) -> list[str]:
    """Return the names of the experts whose routing can be captured; none for a dense model."""
    return [name for name, _ in model.named_modules() if is_router(name)]


def stream_of(name: str, inputs: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> Any:
    """Return the part of an output that is compared.

    A final norm's second output is its input, not its result. A layer's output lacks the residual that a batch object
    among its inputs carries.
    """
    if name.endswith("norm") and isinstance(output, tuple):
        return output[0]
    if is_layer(name) and isinstance(output, torch.Tensor):
        held = _held_residual(inputs, keywords)
        if held is not None and held.shape == output.shape:
            return output, held
    return output


def _held_residual(inputs: tuple[Any, ...], keywords: dict[str, Any]) -> torch.Tensor | None:
    for value in (*inputs, *keywords.values()):
        held = getattr(getattr(value, "residual_stream", None), "residual", None)
        if isinstance(held, torch.Tensor):
            return held
    return None


def response_rows(name: str, output: torch.Tensor, prompt_length: int) -> torch.Tensor:
    """Return the rows of a point that are compared: all, and of logits those that an engine computes for a response."""
    rows = output.reshape(-1, output.shape[-1])
    return rows[prompt_length - 1 :] if name == LOGITS else rows


@contextmanager
def capturing(model: Any, names: Sequence[str], *, prompt_length: int = 1, guarded: bool = False) -> Iterator[Capture]:
    """Capture the outputs of named points while the block runs; the hooks are removed in any case.

    Args:
        model: Transformers' model or that of an SGLang rank.
        names: Module names; `logits` and the experts of a layer (`….mlp.experts`, for its routing) are understood too.
        prompt_length: Of a model that returns the logits of all tokens, the first row kept is that before the response.
        guarded: Keep errors in `Capture.error` instead of raising them into the forward, which would end an engine.

    Raises:
        ScoreError: The model has no such module.
    """
    modules = dict(model.named_modules())
    engine = getattr(modules.get("logits_processor"), "_get_logits", None)
    named = ["lm_head" if name == LOGITS else name for name in names if not (name == LOGITS and engine)]
    unknown = [name for name in named if name not in modules]
    if unknown:
        raise ScoreError("no such module", expected="names of the live model", found=", ".join(unknown[:3]))
    kept = Capture(guarded=guarded)
    handles = [
        modules[name].register_forward_hook(kept.hook(_keeper(kept, name, prompt_length)), with_kwargs=True)
        for name in named
    ]
    for name in filter(is_layer, named):
        reader = modules.get(f"{_following(name)}.self_attn", modules.get("model.norm"))
        if reader is not None:
            handles.append(reader.register_forward_pre_hook(kept.hook(_owed_keeper(kept, name)), with_kwargs=True))
    tapped = modules["logits_processor"] if engine is not None and LOGITS in names else None
    if tapped is not None:
        keep_logits = kept.hook(lambda output: kept.add(LOGITS, output))

        def logits(*args: Any, **kwargs: Any) -> Any:
            output = engine(*args, **kwargs)  # type: ignore[misc]
            keep_logits(output)
            return output

        tapped._get_logits = logits  # noqa: SLF001 - the head is no call of a module there
    try:
        yield kept
    finally:
        for handle in handles:
            handle.remove()
        if tapped is not None:
            del tapped._get_logits  # noqa: SLF001 - the method of the class shows again


def _keeper(kept: Capture, name: str, prompt_length: int) -> Callable[..., None]:
    def keep(_: Any, inputs: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> None:
        if is_router(name):
            kept.add_routing(name, [*inputs, *keywords.values()])
        elif name == "lm_head":
            kept.add(LOGITS, response_rows(LOGITS, residual_stream(output), prompt_length))
        elif is_layer(name) and not isinstance(output, torch.Tensor | tuple | list):
            kept.owed.add(name)
        else:
            kept.add(name, stream_of(name, inputs, keywords, output))

    return keep


def _owed_keeper(kept: Capture, name: str) -> Callable[..., None]:
    """Return a hook of the module after a layer, which is given the completed stream."""

    def keep(_: Any, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        if name not in kept.owed:
            return
        kept.owed.discard(name)
        held = _held_residual(inputs, keywords)
        kept.add(name, inputs if held is None else held)

    return keep


def _following(layer: str) -> str:
    head, _, number = layer.rpartition(".")
    return f"{head}.{int(number) + 1}"


@contextmanager
def saving_operator_input(
    model: Any, name: str, path: str | os.PathLike[str], *, guarded: bool = False
) -> Iterator[None]:
    """Save the tensor inputs and the output of one module's first call in the block, for `replay_operator`.

    Positional tensors become `input.0`, …, keyword tensors `input.NAME`, the output `output`. A guarded one raises only at
    the end of the block, never into the forward.

    Raises:
        ScoreError: The model has no such module, or it was not called.
    """
    modules = dict(model.named_modules())
    if name not in modules:
        raise ScoreError("no such module", found=name)
    saved: dict[str, torch.Tensor] = {}

    def keep(_: Any, inputs: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> None:
        if saved:
            return
        given = {str(i): value for i, value in enumerate(inputs)} | keywords
        tensors = {f"input.{key}": value for key, value in given.items() if isinstance(value, torch.Tensor)}
        tensors["output"] = residual_stream(stream_of(name, inputs, keywords, output))
        saved.update({key: value.detach().cpu().clone() for key, value in tensors.items()})

    watched = Capture(guarded=guarded)
    handle = modules[name].register_forward_hook(watched.hook(keep), with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
    if not saved:
        found = watched.error or "no call"
        raise ScoreError(
            "the operator was not called", found=found, where=name, todo="run the forward inside the block"
        )
    save_operator(path, name, saved)


def save_operator(path: str | os.PathLike[str], name: str, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write an operator's input and output, whole or not at all."""
    target = Path(path)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as folder:
        beside = Path(folder) / "operator"
        save_file({key: value.detach().cpu().contiguous() for key, value in tensors.items()}, beside, {"module": name})
        beside.replace(target)


def load_operator(path: str | os.PathLike[str]) -> dict[str, torch.Tensor]:
    """Read what `save_operator` wrote.

    Raises:
        RecordError: The file is damaged or of another kind.
    """
    try:
        saved: dict[str, torch.Tensor] = load_file(path)
    except Exception as error:  # safetensors and the file system raise many kinds
        raise RecordError("not a saved operator", found=error, where=path) from error
    if "output" not in saved:
        raise RecordError("not a saved operator", expected="an output", found=sorted(saved)[:3], where=path)
    return saved


def replay_operator(operator: Callable[..., Any], path: str | os.PathLike[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """Run another implementation on the saved input.

    Both get the same input, so a difference is this operator's own and not inherited from earlier layers.

    Args:
        operator: Called with the saved positional and keyword tensors.
        path: File of `saving_operator_input`.

    Returns:
        The operator's output and the saved one.

    Raises:
        RecordError: The file is damaged or of another kind.
    """
    saved = load_operator(path)
    expected = saved.pop("output")
    names = [name.removeprefix("input.") for name in saved]
    positional = [saved[f"input.{i}"] for i in sorted(int(name) for name in names if name.isdigit())]
    keywords = {name: saved[f"input.{name}"] for name in names if not name.isdigit()}
    with torch.no_grad():
        return residual_stream(operator(*positional, **keywords)), expected
