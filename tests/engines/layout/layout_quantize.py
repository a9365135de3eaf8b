"""Quantized exports of the tiny checkpoints: each scheme's published arithmetic and its entry in config.json."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from layout_machines import (
    AWQ_PLAIN,
    BLACKWELL_BLOCKS,
    BLACKWELL_CUTLASS,
    BLACKWELL_MXFP4,
    BLACKWELL_MXFP8,
    BLACKWELL_MXFP8_TRTLLM,
    BLACKWELL_TRTLLM,
    HOPPER,
    HOPPER_MARLIN,
    TRITON_KERNELS,
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


GROUP = 32


def _words(name: str, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(name.encode()))
    return torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32, generator=generator)


def _scales(name: str, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(name.encode()) + 1)
    return (torch.rand(shape, generator=generator) + 0.5).to(torch.bfloat16)


def awq(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """AWQ: words of eight outputs, `qweight` `[K, N / 8]`, with zero points and scales of groups of inputs."""
    module, (outputs, inputs) = name.removesuffix(".weight"), weight.shape
    return {
        f"{module}.qweight": _words(name, inputs, outputs // 8),
        f"{module}.qzeros": _words(f"{name}0", inputs // GROUP, outputs // 8),
        f"{module}.scales": _scales(name, inputs // GROUP, outputs).to(torch.float16),
    }


def gptq(name: str, weight: torch.Tensor, bits: int = 4) -> dict[str, torch.Tensor]:
    """GPTQ: words of inputs, `qweight` `[K / per, N]`; constant zero points and g_idx, which no engine in Marlin tiles holds."""
    module, (outputs, inputs) = name.removesuffix(".weight"), weight.shape
    return {
        f"{module}.qweight": _words(name, inputs * bits // 32, outputs),
        f"{module}.scales": _scales(name, inputs // GROUP, outputs).to(torch.float16),
        f"{module}.qzeros": torch.full((inputs // GROUP, outputs * bits // 32), 0x77777777, dtype=torch.int32),
        f"{module}.g_idx": torch.arange(inputs, dtype=torch.int32) // GROUP,
    }


def pack_quantized(name: str, weight: torch.Tensor, group: int = GROUP) -> dict[str, torch.Tensor]:
    """compressed-tensors: `weight_packed` `[N, K / 8]` and `weight_scale` `[N, groups]`.

    Of layers that are fused with others SGLang keeps the last `weight_shape` that it loads.
    """
    module, (outputs, inputs) = name.removesuffix(".weight"), weight.shape
    return {
        f"{module}.weight_packed": _words(name, outputs, inputs // 8),
        f"{module}.weight_scale": _scales(name, outputs, inputs // group if group else 1),
        f"{module}.weight_shape": torch.tensor([outputs, inputs]),
    }


def asymmetric(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """The same with zero points, `weight_zero_point` int32 `[N / 8, groups]`."""
    module, (outputs, inputs) = name.removesuffix(".weight"), weight.shape
    zeros = _words(f"{name}0", outputs // 8, inputs // GROUP)
    return pack_quantized(name, weight) | {f"{module}.weight_zero_point": zeros}


def _pack_quantized_config(group: int, *, symmetric: bool = True) -> dict[str, Any]:
    weights = {
        "num_bits": 4,
        "type": "int",
        "symmetric": symmetric,
        "dynamic": False,
        "strategy": "group" if group else "channel",
        "group_size": group or None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head", "re:.*mlp.gate$"],
        "quantization_status": "compressed",
    }


AWQ = {
    "quant_method": "awq",
    "bits": 4,
    "group_size": GROUP,
    "zero_point": True,
    "version": "gemm",
    "modules_to_not_convert": ["lm_head"],
}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True, "lm_head": False}


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


BIAS = {"_proj_bias": torch.bfloat16}

MXFP4 = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}


def ct_nvfp4(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """compressed-tensors' NVFP4: as ModelOpt's under other names; shards that are fused have one global scale."""
    module, made = name.removesuffix(".weight"), nvfp4(name, weight)
    fused = (
        "qkv" if module.endswith(("q_proj", "k_proj", "v_proj")) else module.rpartition(".")[2].replace("up_", "gate_")
    )
    value = 0.5 + sum(f"{module.rpartition('.')[0]}{fused}".encode()) % 97 / 100
    return {
        f"{module}.weight_packed": made[name],
        f"{module}.weight_scale": made[f"{module}.weight_scale"],
        f"{module}.weight_global_scale": torch.tensor([value]),
        f"{module}.input_global_scale": torch.tensor([value + 1]),
    }


CT_NVFP4 = {
    "quant_method": "compressed-tensors",
    "format": "nvfp4-pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 4,
                "type": "float",
                "symmetric": True,
                "dynamic": False,
                "strategy": "tensor_group",
                "group_size": 16,
            },
            "input_activations": {
                "num_bits": 4,
                "type": "float",
                "symmetric": True,
                "dynamic": "local",
                "strategy": "tensor_group",
                "group_size": 16,
            },
        }
    },
    "ignore": ["lm_head", "re:.*mlp.gate$"],
    "quantization_status": "compressed",
}


def mxfp8(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """e4m3 values and an e8m0 byte for each 32 inputs, `weight_scale_inv`."""
    generator = torch.Generator().manual_seed(sum(name.encode()))
    outputs, inputs = weight.shape
    return {
        name: weight.to(torch.float8_e4m3fn),
        f"{name}_scale_inv": torch.randint(1, 255, (outputs, inputs // 32), dtype=torch.uint8, generator=generator),
    }


MXFP8 = {"quant_method": "mxfp8", "activation_scheme": "dynamic", "weight_block_size": [1, 32]}


def _as_it_is(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    return {name: weight}


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
    dtype: str = "bfloat16"
    casts: dict[str, torch.dtype] = field(default_factory=dict)

    def export(self, folder: Path, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the quantized tensors and add the scheme to the folder's config.json."""
        path = folder / "config.json"
        if self.config:
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
    "mxfp4": Scheme("MXFP4 as exported (XPU)", mxfp4, MXFP4, XPU, _fused_experts, {}, casts=BIAS),
    "mxfp4-trtllm": Scheme("MXFP4, TRT-LLM", mxfp4, MXFP4, BLACKWELL_MXFP4, _fused_experts, {}, casts=BIAS),
    "mxfp4-marlin": Scheme("MXFP4, Marlin", mxfp4, MXFP4, HOPPER_MARLIN, _fused_experts, {}, casts=BIAS),
    "awq": Scheme("AWQ", awq, AWQ, AWQ_PLAIN, dtype="float16"),
    "awq-marlin": Scheme("AWQ, Marlin", awq, AWQ, HOPPER, dtype="float16"),
    "gptq-marlin": Scheme("GPTQ, Marlin", gptq, GPTQ, HOPPER, dtype="float16"),
    "gptq-8-marlin": Scheme(
        "GPTQ 8 bits, Marlin",
        lambda name, weight: gptq(name, weight, 8),
        GPTQ | {"bits": 8},
        HOPPER,
        dtype="float16",
    ),
    "ct-wna16": Scheme(
        "compressed-tensors W4A16, Marlin", pack_quantized, _pack_quantized_config(GROUP), HOPPER_MARLIN
    ),
    "ct-wna16-channel": Scheme(
        "compressed-tensors W4A16 per channel, Marlin",
        lambda name, weight: pack_quantized(name, weight, 0),
        _pack_quantized_config(0),
        HOPPER_MARLIN,
    ),
    "ct-wna16-asymmetric": Scheme(
        "compressed-tensors W4A16 with zero points, Marlin",
        asymmetric,
        _pack_quantized_config(GROUP, symmetric=False),
        HOPPER_MARLIN,
    ),
    "trtllm-blocks": Scheme("bfloat16, experts in TRT-LLM blocks", _as_it_is, {}, BLACKWELL_BLOCKS, sizes={}),
    "triton-kernels": Scheme("bfloat16, experts turned for triton kernels", _as_it_is, {}, TRITON_KERNELS, sizes={}),
    "mxfp8": Scheme("MXFP8, CUTLASS", mxfp8, MXFP8, BLACKWELL_MXFP8, sizes={"intermediate_size": 128}),
    "mxfp8-trtllm": Scheme("MXFP8, TRT-LLM", mxfp8, MXFP8, BLACKWELL_MXFP8_TRTLLM),
    "ct-nvfp4": Scheme("compressed-tensors NVFP4, CUTLASS", ct_nvfp4, CT_NVFP4, BLACKWELL_CUTLASS, sizes={}),
    "ct-nvfp4-blocks": Scheme("compressed-tensors NVFP4, CUTLASS", ct_nvfp4, CT_NVFP4, BLACKWELL_CUTLASS),
    "ct-nvfp4-trtllm": Scheme("compressed-tensors NVFP4, TRT-LLM", ct_nvfp4, CT_NVFP4, BLACKWELL_TRTLLM),
}
