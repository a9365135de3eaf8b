"""Cells whose values SGLang computes while it loads: machines, exports and kernels of the lossy forms.

SGLang's own `process_weights_after_loading` runs; only its two CUDA kernels that round are taken from their source text
(`kernels/jit/csrc/gemm/per_tensor_quant_fp8.cuh`, `per_token_quant_fp8.cuh`), statement by statement in numpy float32.
"""

from __future__ import annotations

import json
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import torch
from layout_checkpoints import CHECKPOINTS
from layout_quantize import fp8_tensor
from layout_ranks import Rank, Split

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

F = np.float32
MAX = F(448.0)


def _to_fp8(values: np.ndarray) -> torch.Tensor:
    clipped = np.maximum(np.minimum(values.astype(F), MAX), -MAX)
    return torch.from_numpy(clipped).to(torch.float8_e4m3fn)


def scaled_fp8_quant(x, scale=None, num_token_padding=None, use_per_token_if_dynamic=False):
    """`per_tensor_absmax_kernel`, then `per_tensor_quant_fp8_kernel`."""
    assert num_token_padding is None
    assert not use_per_token_if_dynamic
    values = x.float().numpy()
    if scale is None:
        scale = torch.tensor([np.abs(values).max() / MAX], dtype=torch.float32)
    scale_val = F(1.0) / scale.reshape(1).numpy()[0]
    return _to_fp8(values * scale_val), scale


def per_token_group_quant_fp8(x, group_size, eps=1e-10):
    """`per_token_quant_fp8_warp_kernel`, to which a group of a whole row is routed (`fp8_kernel.py` 0.5.23:509)."""
    del eps
    assert group_size == x.shape[-1]
    values = x.float().numpy()
    scale = np.abs(values).max(axis=1, keepdims=True) / MAX
    with np.errstate(divide="ignore"):
        scale_inv = np.where(scale == 0, F(0.0), F(1.0) / scale)
    return _to_fp8(values * scale_inv.astype(F)), torch.from_numpy(scale.astype(F))


class LossyRank(Rank):
    """A rank on a machine with or without fp8 matrix kernels."""

    cutlass = False

    @contextmanager
    def as_on_cuda(self) -> Iterator[None]:
        place = "sglang.srt.layers.quantization"
        with super().as_on_cuda(), ExitStack() as stack:
            stack.enter_context(mock.patch(f"{place}.fp8.cutlass_fp8_supported", return_value=self.cutlass))
            for module in ("utils", "fp8", "compressed_tensors.schemes.compressed_tensors_w8a8_fp8_moe"):
                stack.enter_context(mock.patch(f"{place}.{module}.scaled_fp8_quant", scaled_fp8_quant))
            stack.enter_context(mock.patch(f"{place}.fp8.per_token_group_quant_fp8", per_token_group_quant_fp8))
            yield


class CutlassRank(LossyRank):
    cutlass = True


def fp8_static(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """As `fp8_tensor`, with a static activation scale that differs from part to part."""
    exported = fp8_tensor(name, weight)
    scale = weight.abs().amax() + 0.25
    return exported | {f"{name.removesuffix('.weight')}.input_scale": scale}


def ct_tensor(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Compressed-tensors has its scale in one dimension."""
    return {key: value.reshape(1) if value.dim() == 0 else value for key, value in fp8_tensor(name, weight).items()}


def _compressed_tensor() -> dict[str, Any]:
    part = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor"}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**part, "dynamic": False},
                "input_activations": {**part, "dynamic": True},
            }
        },
        "ignore": ["lm_head", "re:.*mlp.gate$"],
        "quantization_status": "compressed",
    }


FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
STATIC = {"quant_method": "fp8", "activation_scheme": "static"}


@dataclass(frozen=True)
class Form:
    """A lossy form: what is exported, what config.json says, and on which machine."""

    name: str
    quantize: Any
    config: dict[str, Any] | None
    machine: type[LossyRank]


FORMS = {
    "requantized": Form("fp8 per tensor, requantized to one scale", fp8_tensor, FP8, LossyRank),
    "requantized-static": Form("fp8 per tensor, requantized, static activation scales", fp8_static, STATIC, LossyRank),
    "row-static": Form("fp8 per tensor, static activation scales", fp8_static, STATIC, CutlassRank),
    "ct-tensor": Form("compressed-tensors fp8 per tensor", ct_tensor, _compressed_tensor(), CutlassRank),
    "online-row": Form("fp8 quantized on line, a scale a row", None, None, CutlassRank),
    "online-tensor": Form("fp8 quantized on line, a scale a tensor", None, None, LossyRank),
}


@dataclass(frozen=True)
class LossyCell:
    """A family in a lossy form at a split."""

    name: str
    form: str
    split: Split

    def __str__(self):
        return f"{self.name} {self.form} {self.split}".replace(" ", "-")

    def export(self, folder: Path) -> dict[str, torch.Tensor]:
        from layout_quantize import _quantizable

        form = FORMS[self.form]
        checkpoint = replace(CHECKPOINTS[self.name])
        tensors = checkpoint.save(folder)
        path = folder / "config.json"
        extra = {"quantization_config": form.config} if form.config else {}
        path.write_text(json.dumps(json.loads(path.read_text()) | {"dtype": "bfloat16"} | extra))
        made: dict[str, torch.Tensor] = {}
        for name, tensor in tensors.items():
            if form.quantize and _quantizable(name, tensor):
                made.update(form.quantize(name, tensor))
            else:
                made[name] = tensor.to(torch.bfloat16)
        return made

    def rank(self, folder: Path, pp_rank: int, tp_rank: int) -> Rank:
        form = FORMS[self.form]
        args: dict[str, Any] = {"dtype": "bfloat16"} | ({} if form.config else {"quantization": "fp8"})
        return form.machine(folder, self.split, pp_rank, tp_rank, **args)


LOSSY = [
    LossyCell(name, form, split)
    for form, names in {
        "requantized": ("llama", "qwen3", "llama-bias"),
        "requantized-static": ("llama",),
        "row-static": ("llama",),
        "ct-tensor": ("llama",),
        "online-row": ("llama", "qwen3"),
        "online-tensor": ("llama", "qwen3"),
    }.items()
    for name in names
    for split in (Split(), Split(tp=2))
] + [
    LossyCell("qwen3-moe", form, split)
    for form in ("requantized", "ct-tensor", "online-row", "online-tensor")
    for split in (Split(tp=2), Split(tp=2, ep=2))
]
