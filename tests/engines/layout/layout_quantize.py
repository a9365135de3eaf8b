"""Quantized exports of the tiny checkpoints: each scheme's published arithmetic and its entry in config.json."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from layout_machines import (
    BLACKWELL_CUTLASS,
    BLACKWELL_MXFP4,
    BLACKWELL_TRTLLM,
    HOPPER,
    HOPPER_MARLIN,
    XPU,
    Machine,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

KEPT = ("norm.weight", "embed_tokens.weight", "lm_head.weight", "mlp.gate.weight", ".bias", "e_score_correction_bias")
FP8_MAX = 448.0


def _quantizable(name: str, tensor: torch.Tensor) -> bool:
    return tensor.dim() == 2 and name.endswith(".weight") and not name.endswith(KEPT)


def fp8_block(name: str, weight: torch.Tensor, block: int = 128) -> dict[str, torch.Tensor]:
    """DeepSeek's 128 x 128 blocks: `weight` e4m3fn, `weight_scale_inv` float32 `[ceil(N/128), ceil(K/128)]`."""
    rows, columns = (-(-n // block) for n in weight.shape)
    padded = torch.zeros(rows * block, columns * block)
    padded[: weight.shape[0], : weight.shape[1]] = weight
    blocks = padded.reshape(rows, block, columns, block)
    scale = blocks.abs().amax(dim=(1, 3)) / FP8_MAX
    values = (blocks / scale[:, None, :, None]).reshape(rows * block, columns * block)
    return {
        name: values[: weight.shape[0], : weight.shape[1]].to(torch.float8_e4m3fn).contiguous(),
        f"{name}_scale_inv": scale,
    }


def fp8_tensor(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """One scale for the whole tensor, `weight_scale` float32 scalar."""
    scale = weight.abs().amax() / FP8_MAX
    return {name: (weight / scale).to(torch.float8_e4m3fn), f"{name}_scale": scale}


def channel(name: str, weight: torch.Tensor, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """One scale for each output row, `weight_scale` float32 `[N, 1]` (compressed-tensors)."""
    limit = 127.0 if dtype is torch.int8 else FP8_MAX
    scale = weight.abs().amax(dim=1, keepdim=True) / limit
    values = weight / scale
    return {name: (values.round() if dtype is torch.int8 else values).to(dtype), f"{name}_scale": scale}


def nvfp4(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """ModelOpt's NVFP4: two values a byte, an e4m3 scale of 16, float32 scales of the tensor and of its input."""
    module = name.removesuffix(".weight")
    generator = torch.Generator().manual_seed(sum(name.encode()))
    rows, columns = weight.shape
    scale = torch.randint(1, 127, (rows, columns // 16), dtype=torch.uint8, generator=generator)
    scale[0, 0] = 1  # a subnormal
    return {
        name: torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8, generator=generator),
        f"{module}.weight_scale": scale.view(torch.float8_e4m3fn),
        f"{module}.weight_scale_2": torch.rand((), generator=generator) + 0.5,
        # Gate and up of an expert see the same input, and SGLang keeps one of the two scales.
        f"{module}.input_scale": torch.tensor(0.5 + sum(module.replace("gate_", "up_").encode()) % 97 / 100),
    }


def mxfp4(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """gpt-oss's experts `[E, in, out]` as blocks of 32 inputs: 16 bytes and an e8m0 exponent each."""
    generator = torch.Generator().manual_seed(sum(name.encode()))
    experts, inputs, outputs = weight.shape
    blocks = (experts, outputs, inputs // 32)
    return {
        f"{name}_blocks": torch.randint(0, 256, (*blocks, 16), dtype=torch.uint8, generator=generator),
        f"{name}_scales": torch.randint(0, 255, blocks, dtype=torch.uint8, generator=generator),
    }


def _fused_experts(name: str, tensor: torch.Tensor) -> bool:
    return tensor.dim() == 3 and name.endswith(("gate_up_proj", "down_proj"))


MXFP4 = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}

NVFP4 = {
    "quant_method": "modelopt_fp4",
    "quant_algo": "NVFP4",
    "group_size": 16,
    "ignore": ["lm_head", "*.mlp.gate"],
}


@dataclass(frozen=True)
class Scheme:
    """A quantization scheme: how one weight is exported, what config.json says, and where SGLang is to think it runs.

    `sizes` replace those of the checkpoints; by default they are made of whole 128 x 128 blocks.
    """

    name: str
    quantize: Callable[[str, torch.Tensor], dict[str, torch.Tensor]]
    config: dict[str, Any]
    machine: Machine = HOPPER
    applies: Callable[[str, torch.Tensor], bool] = _quantizable
    sizes: dict[str, Any] | None = None

    def export(self, folder: Path, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the quantized tensors and add the scheme to the folder's config.json."""
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": self.config}))
        exported: dict[str, torch.Tensor] = {}
        for name, tensor in tensors.items():
            exported.update(self.quantize(name, tensor) if self.applies(name, tensor) else {name: tensor})
        return exported


def _compressed(bits: int, kind: str) -> dict[str, Any]:
    def scheme(dynamic: bool, strategy: str) -> dict[str, Any]:
        return {"num_bits": bits, "type": kind, "symmetric": True, "dynamic": dynamic, "strategy": strategy}

    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized" if kind == "float" else "int-quantized",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": scheme(False, "channel"),
                "input_activations": scheme(True, "token"),
            }
        },
        "ignore": ["lm_head", "re:.*mlp.gate$"],
        "quantization_status": "compressed",
    }


SCHEMES = {
    "fp8-block": Scheme(
        "fp8 block 128x128",
        fp8_block,
        {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
    ),
    "fp8-tensor": Scheme(
        "fp8 per tensor",
        fp8_tensor,
        {"quant_method": "fp8", "activation_scheme": "dynamic"},
    ),
    "ct-fp8-channel": Scheme(
        "compressed-tensors fp8 per channel",
        lambda name, weight: channel(name, weight, torch.float8_e4m3fn),
        _compressed(8, "float"),
    ),
    "ct-int8-channel": Scheme(
        "compressed-tensors int8 per channel",
        lambda name, weight: channel(name, weight, torch.int8),
        _compressed(8, "int"),
    ),
    "w8a8-int8": Scheme(
        "w8a8_int8 per channel",
        lambda name, weight: channel(name, weight, torch.int8),
        {"quant_method": "w8a8_int8"},
    ),
    "nvfp4": Scheme("NVFP4, CUTLASS", nvfp4, NVFP4, BLACKWELL_CUTLASS),
    "nvfp4-padded": Scheme("NVFP4, CUTLASS, padded", nvfp4, NVFP4, BLACKWELL_CUTLASS, sizes={}),
    "nvfp4-trtllm": Scheme("NVFP4, TRT-LLM", nvfp4, NVFP4, BLACKWELL_TRTLLM),
    "nvfp4-marlin": Scheme("NVFP4, Marlin", nvfp4, NVFP4, HOPPER_MARLIN, sizes={}),
    "mxfp4": Scheme("MXFP4 as exported (XPU)", mxfp4, MXFP4, XPU, _fused_experts, {}),
    "mxfp4-trtllm": Scheme("MXFP4, TRT-LLM", mxfp4, MXFP4, BLACKWELL_MXFP4, _fused_experts, {}),
    "mxfp4-marlin": Scheme("MXFP4, Marlin", mxfp4, MXFP4, HOPPER_MARLIN, _fused_experts, {}),
}
