"""Writes checkpoint folders byte by byte, so that each can be damaged in one place."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "intermediate_size": 12,
    "vocab_size": 10,
    "tie_word_embeddings": False,
}
NAMES = {"U8": np.uint8, "BF16": np.uint16, "F16": np.float16, "F32": np.float32, "F8_E4M3": np.uint8}


def expected_shapes(config=None):
    """The shapes of `CONFIG`, written down a second time and not computed by the code under test."""
    config = CONFIG if config is None else config
    shapes = {"model.embed_tokens.weight": (10, 8), "model.norm.weight": (8,), "lm_head.weight": (10, 8)}
    for layer in range(2):
        shapes |= {
            f"model.layers.{layer}.{name}.weight": shape
            for name, shape in {
                "input_layernorm": (8,),
                "post_attention_layernorm": (8,),
                "self_attn.q_proj": (16, 8),
                "self_attn.k_proj": (8, 8),
                "self_attn.v_proj": (8, 8),
                "self_attn.o_proj": (8, 16),
                "self_attn.q_norm": (4,),
                "self_attn.k_norm": (4,),
                "mlp.gate_proj": (12, 8),
                "mlp.up_proj": (12, 8),
                "mlp.down_proj": (8, 12),
            }.items()
        }
    return shapes


def random_tensors(shapes, *, seed=0, code="BF16"):
    """Return name → (code, array of raw bits)."""
    draw = np.random.default_rng(seed)
    itemsize = np.dtype(NAMES[code]).itemsize
    return {
        name: (code, draw.integers(0, 256, (*shape, itemsize), np.uint8).view(f"u{itemsize}").reshape(shape))
        for name, shape in shapes.items()
    }


def header_of(tensors):
    """Return the JSON header of tensors laid one after the other, and their bytes."""
    header, data = {}, b""
    for name, (code, array) in tensors.items():
        raw = np.ascontiguousarray(array).tobytes()
        header[name] = {
            "dtype": code,
            "shape": list(array.shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    return header, data


def write_file(path: Path, header, data: bytes, *, pad=True):
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    if pad:
        raw += b" " * (-len(raw) % 8)
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + data)


def write_folder(folder: Path, tensors, *, config=CONFIG, shards=1):
    """Write a checkpoint; with several shards, also its index."""
    folder.mkdir(parents=True, exist_ok=True)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    if shards == 1:
        write_file(folder / "model.safetensors", *header_of(tensors))
        return folder
    weight_map = {}
    for shard in range(shards):
        name = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        own = {key: tensors[key] for key in list(tensors)[shard::shards]}
        write_file(folder / name, *header_of(own))
        weight_map |= dict.fromkeys(own, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder
