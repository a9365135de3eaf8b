"""What `config.json` says of a checkpoint's tensors: names and shapes, for architectures that we know.

Sources: `modeling_llama.py`, `modeling_qwen2.py`, `modeling_qwen3.py`, `modeling_qwen3_moe.py` of Transformers 5.19 and the
names that their checkpoints use.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from syncguard.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping

DENSE: Final = frozenset({"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"})
KNOWN: Final = DENSE | {"Qwen3MoeForCausalLM"}
_LAYER: Final = re.compile(r"model\.layers\.(\d+)\.")

Shape = tuple[int, ...]


def expected_shapes(config: Mapping[str, Any]) -> dict[str, Shape] | None:
    """Return name → shape of every weight that the config asks for; None when it does not determine them.

    A quantized checkpoint stores other shapes, and an unknown architecture other names: neither is judged here.

    Raises:
        CheckpointError: A size is missing or not a positive integer.
    """
    names = config.get("architectures") or [""]
    if not isinstance(names, list) or names[0] not in KNOWN or config.get("quantization_config"):
        return None
    hidden, vocab = _size(config, "hidden_size"), _size(config, "vocab_size")
    shapes: dict[str, Shape] = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    if not config.get("tie_word_embeddings", False):
        shapes["lm_head.weight"] = (vocab, hidden)
    for layer in range(_size(config, "num_hidden_layers")):
        prefix = f"model.layers.{layer}."
        shapes |= {prefix + name: shape for name, shape in _attention(config, names[0]).items()}
        shapes |= {prefix + "mlp." + name: shape for name, shape in _mlp(config, layer).items()}
    return shapes


def check_shapes(found: Mapping[str, Shape], config: Mapping[str, Any], where: str) -> None:
    """Compare a checkpoint's tensors with its config; more tensors than asked for are fine, more layers are not.

    Args:
        found: Name → shape, as stored.
        config: Contents of `config.json`.
        where: Folder, for the message.

    Raises:
        CheckpointError: A shape differs, a tensor is missing, or a layer lies outside the model.
    """
    expected = expected_shapes(config)
    if expected is None:
        return
    todo = "config.json and weights are of two models, or the export is damaged"
    for name, shape in expected.items():
        if name in found and found[name] != shape:
            raise CheckpointError(
                "shape disagrees with config.json",
                expected=shape,
                found=found[name],
                where=f"{where}: {name}",
                todo=todo,
            )
    missing = [name for name in expected if name not in found]
    if missing:
        raise CheckpointError(
            "checkpoint lacks tensors that config.json asks for",
            expected=f"{len(expected)} tensors",
            found=f"{len(missing)} missing, first {missing[0]}",
            where=where,
            todo=todo,
        )
    layers = _size(config, "num_hidden_layers")
    for name in found:
        match = _LAYER.match(name)
        if match is not None and int(match[1]) >= layers:
            raise CheckpointError(
                "layer outside the model",
                expected=f"num_hidden_layers {layers} of config.json",
                found=name,
                where=where,
                todo=todo,
            )


def _attention(config: Mapping[str, Any], architecture: str) -> dict[str, Shape]:
    hidden, heads = _size(config, "hidden_size"), _size(config, "num_attention_heads")
    kv_heads = _size(config, "num_key_value_heads", heads)
    head = _size(config, "head_dim", hidden // heads)
    shapes: dict[str, Shape] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (heads * head, hidden),
        "self_attn.k_proj.weight": (kv_heads * head, hidden),
        "self_attn.v_proj.weight": (kv_heads * head, hidden),
        "self_attn.o_proj.weight": (hidden, heads * head),
    }
    if architecture.startswith("Qwen3"):
        shapes |= {"self_attn.q_norm.weight": (head,), "self_attn.k_norm.weight": (head,)}
    if architecture == "Qwen2ForCausalLM" or config.get("attention_bias", False):
        shapes |= {
            "self_attn.q_proj.bias": (heads * head,),
            "self_attn.k_proj.bias": (kv_heads * head,),
            "self_attn.v_proj.bias": (kv_heads * head,),
        }
    return shapes


def _mlp(config: Mapping[str, Any], layer: int) -> dict[str, Shape]:
    hidden = _size(config, "hidden_size")
    # Transformers 5 writes the number of experts under the name that Mixtral gave it.
    experts = config.get("num_experts", config.get("num_local_experts", 0)) or 0
    sparse = (
        experts > 0
        and layer not in (config.get("mlp_only_layers") or ())
        and (layer + 1) % _size(config, "decoder_sparse_step", 1) == 0
    )
    if not sparse:
        return _swiglu("", hidden, _size(config, "intermediate_size"))
    shapes: dict[str, Shape] = {"gate.weight": (experts, hidden)}
    for expert in range(experts):
        shapes |= _swiglu(f"experts.{expert}.", hidden, _size(config, "moe_intermediate_size"))
    return shapes


def _swiglu(prefix: str, hidden: int, inner: int) -> dict[str, Shape]:
    return {
        f"{prefix}gate_proj.weight": (inner, hidden),
        f"{prefix}up_proj.weight": (inner, hidden),
        f"{prefix}down_proj.weight": (hidden, inner),
    }


def _size(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = config.get(name)
    value = default if value is None else value
    if type(value) is not int or value < 1:
        raise CheckpointError(
            "size in config.json", expected="a positive integer", found=value, where=name, todo="fix config.json"
        )
    return value
