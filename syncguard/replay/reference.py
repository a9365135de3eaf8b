"""The trainer's side of looking inside: points of a Transformers model, and its operators as references.

Not imported by the package itself: the agent runs without torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from syncguard.errors import UnsupportedError
from syncguard.replay.inside import join_ranks
from syncguard.replay.intermediates import capturing, load_operator, residual_stream, save_operator
from syncguard.replay.trainer import frozen

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    from syncguard.replay.record import ReplayRecord


def trainer_points(model: Any, record: ReplayRecord, names: Sequence[str]) -> dict[str, Any]:
    """Return the named points of one frozen forward of the record's ids, as `find_growth` takes them."""
    device = next(model.parameters()).device
    ids = torch.tensor(record.input_ids, device=device).unsqueeze(0)
    positions = torch.tensor(np.asarray(record.positions), device=device).unsqueeze(0)
    with frozen(model), capturing(model, names, prompt_length=record.prompt_length) as kept:
        model(input_ids=ids, attention_mask=torch.ones_like(ids), position_ids=positions, use_cache=False)
    return kept.arrays()


@dataclass(frozen=True, slots=True)
class OwnError:
    """What an operator adds by itself, on input that both implementations share.

    Attributes:
        module: The operator.
        relative: |engine - reference| over |reference|, Frobenius norms, on the engine's input.
        maximum: Largest absolute difference.
        worst_token: Token of it, from 0.
    """

    module: str
    relative: float
    maximum: float
    worst_token: int


def has_reference(name: str) -> bool:
    """Return whether a point is an operator that can be replayed on a Transformers model."""
    return name == "model.embed_tokens" or name.endswith((".self_attn", ".mlp", "norm"))


def own_error(model: Any, name: str, path: str | os.PathLike[str], record: ReplayRecord) -> OwnError:
    """Run the trainer's operator on the engine's captured input and compare with the engine's output.

    Args:
        model: Transformers' model.
        name: Point whose input was saved: embedding, a layer's `self_attn` or `mlp`, or the final norm.
        path: File of the engine's input and output.
        record: Record whose ids were run; its positions are used.

    Raises:
        UnsupportedError: No reference is known for this operator.
        RecordError: The file is damaged.
    """
    saved = load_operator(path)
    theirs = saved["output"].reshape(-1, saved["output"].shape[-1]).double()
    with frozen(model):
        ours = _reference(model, name, _given(name, saved), record).reshape(-1, theirs.shape[-1]).double()
    delta = (theirs - ours).abs()
    norm = float(ours.norm())
    relative = float((theirs - ours).norm()) / norm if norm > 0 else float(delta.max())
    per_token = delta.max(dim=1).values
    return OwnError(name, relative, float(per_token.max()), int(per_token.argmax()))


def join_operators(paths: Sequence[str | os.PathLike[str]], target: str | os.PathLike[str], name: str) -> None:
    """Write one file of an operator that several ranks ran: the first one's input, and the sum of outputs that are addends.

    Raises:
        RecordError: A file is damaged.
    """
    saved = [load_operator(path) for path in paths]
    joined, _ = join_ranks([{f"{name}": one["output"].float().numpy()} for one in saved])
    save_operator(target, name, {**saved[0], "output": torch.tensor(np.asarray(joined[name], dtype=np.float32))})


def _given(name: str, saved: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the hidden states among an operator's inputs; a fused norm's residual is added, positions are left out."""
    tensors = [value for key, value in sorted(saved.items()) if key.startswith("input.")]
    if name == "model.embed_tokens":
        return tensors[0]
    rows = [value for value in tensors if value.is_floating_point() and value.shape[-1] == saved["output"].shape[-1]]
    if not rows:
        raise UnsupportedError(
            "a reference for this operator", expected="hidden states among its inputs", found=sorted(saved), where=name
        )
    if len(rows) > 1 and name.endswith("norm"):
        return residual_stream(tuple(rows[:2]))
    return rows[0]


def _reference(model: Any, name: str, given: torch.Tensor, record: ReplayRecord) -> torch.Tensor:
    parameter = next(model.parameters())
    module = model.get_submodule(name)
    if name == "model.embed_tokens":
        return residual_stream(module(given.to(parameter.device)))
    hidden = given.reshape(1, -1, given.shape[-1]).to(parameter)
    if name.endswith((".mlp", "norm")):
        return residual_stream(module(hidden))
    if name.endswith(".self_attn"):
        positions = torch.tensor(np.asarray(record.positions), device=hidden.device).unsqueeze(0)
        length = hidden.shape[1]
        mask = torch.full((length, length), torch.finfo(hidden.dtype).min, dtype=hidden.dtype, device=hidden.device)
        turned = model.model.rotary_emb(hidden, positions)
        return residual_stream(
            module(hidden, position_embeddings=turned, attention_mask=mask.triu(1)[None, None], position_ids=positions)
        )
    raise UnsupportedError("a reference for this operator", expected="embedding, attention, mlp, norm", found=name)
