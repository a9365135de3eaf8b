"""Capturing intermediate outputs and operator inputs of a torch model by module name, through forward hooks.

Works on Transformers and on the model inside an SGLang rank, whose layers hold back the residual: some return
`(hidden, residual)`, Qwen3 of 0.5.23 leaves it in `forward_batch.residual_stream` (`layers/layer_boundary/residual`). The residual
stream is the sum. Not imported by the package itself: the agent runs without torch.
"""

from __future__ import annotations

import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from safetensors.torch import load_file, save_file

from syncguard.errors import RecordError, ScoreError

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator, Sequence

MAX_BYTES: Final = 1 << 30
"""Most that one capture may keep; a capture is a magnifying glass, not a recorder."""


class Capture:
    """Outputs of modules, in float32 on the CPU, tokens of several forwards one after another.

    Attributes:
        values: Module name → [tokens, channels].
    """

    def __init__(self) -> None:
        """Start empty."""
        self.values: dict[str, torch.Tensor] = {}
        self._bytes = 0

    def add(self, name: str, output: Any) -> None:
        """Keep one output of a module.

        Raises:
            ScoreError: Not a tensor of tokens by channels, or more than `MAX_BYTES` in all.
        """
        stream = residual_stream(output)
        rows = stream.detach().reshape(-1, stream.shape[-1]).to("cpu", torch.float32)
        self._bytes += rows.numel() * 4
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


def usual_points(model: Any) -> list[str]:
    """Return embedding, decoder layers and final norm, in the order of the computation.

    Raises:
        ScoreError: The model is not laid out as `model.embed_tokens`, `model.layers.N`, `model.norm`.
    """
    names = dict(model.named_modules())
    layers = sorted((name for name in names if _is_layer(name)), key=lambda name: int(name.rpartition(".")[2]))
    if "model.embed_tokens" not in names or "model.norm" not in names or not layers:
        raise ScoreError(
            "no usual points", expected="model.embed_tokens, model.layers.N, model.norm", found=type(model).__name__
        )
    return ["model.embed_tokens", *layers, "model.norm"]


def _is_layer(name: str) -> bool:
    head, _, number = name.rpartition(".")
    return head == "model.layers" and number.isdigit()


def stream_of(name: str, inputs: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> Any:
    """Return the part of an output that is compared.

    A final norm's second output is its input, not its result. A layer's output lacks the residual that a batch object
    among its inputs carries.
    """
    if name.endswith("norm") and isinstance(output, tuple):
        return output[0]
    if _is_layer(name) and isinstance(output, torch.Tensor):
        for value in (*inputs, *keywords.values()):
            held = getattr(getattr(value, "residual_stream", None), "residual", None)
            if isinstance(held, torch.Tensor) and held.shape == output.shape:
                return output, held
    return output


@contextmanager
def capturing(model: Any, names: Sequence[str]) -> Iterator[Capture]:
    """Capture the outputs of named modules while the block runs; the hooks are removed in any case.

    Raises:
        ScoreError: The model has no such module.
    """
    modules = dict(model.named_modules())
    unknown = [name for name in names if name not in modules]
    if unknown:
        raise ScoreError("no such module", expected="names of the live model", found=", ".join(unknown[:3]))
    kept = Capture()

    def hook(name: str) -> Callable[..., None]:
        return lambda _module, inputs, keywords, output: kept.add(name, stream_of(name, inputs, keywords, output))

    handles = [modules[name].register_forward_hook(hook(name), with_kwargs=True) for name in names]
    try:
        yield kept
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def saving_operator_input(model: Any, name: str, path: str | os.PathLike[str]) -> Iterator[None]:
    """Save the tensor inputs and the output of one module's first call in the block, for `replay_operator`.

    Positional tensors become `input.0`, …, keyword tensors `input.NAME`, the output `output`.

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
        tensors["output"] = residual_stream(output)
        saved.update({key: value.detach().cpu().clone().contiguous() for key, value in tensors.items()})

    handle = modules[name].register_forward_hook(keep, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
    if not saved:
        raise ScoreError("the operator was not called", where=name, todo="run the forward inside the block")
    target = Path(path)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as folder:
        beside = Path(folder) / "operator"
        save_file(saved, beside, {"module": name})
        beside.replace(target)


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
    try:
        saved = load_file(path)
        expected = saved.pop("output")
    except Exception as error:  # safetensors and the file system raise many kinds
        raise RecordError("not a saved operator", found=error, where=path) from error
    names = [name.removeprefix("input.") for name in saved]
    positional = [saved[f"input.{i}"] for i in sorted(int(name) for name in names if name.isdigit())]
    keywords = {name: saved[f"input.{name}"] for name in names if not name.isdigit()}
    with torch.no_grad():
        return residual_stream(operator(*positional, **keywords)), expected
