"""C from a torch model: a frozen forward, the gradient-enabled one (C'), and vocabulary-parallel logits.

Not imported by the package itself: the agent runs without torch.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from syncguard.errors import ScoreError
from syncguard.replay.packing import require_one_context, require_scorable, segments_of
from syncguard.replay.scores import checked_scores

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from syncguard.replay.record import ReplayRecord
    from syncguard.replay.scores import FloatArray

_ROWS_AT_ONCE: Final = 256  # 256 rows of 150k float64 logits are 0.3 GB


@contextmanager
def frozen(model: Any) -> Iterator[None]:
    """Put a model into eval mode without gradients; every submodule's own mode is restored, also after an error."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode


def trainer_forward(model: Any) -> Callable[[ReplayRecord], FloatArray]:
    """Return a frozen forward for `score_with_trainer`.

    Args:
        model: A causal model called as `model(input_ids=, attention_mask=, position_ids=, use_cache=False).logits`, as
            Transformers' are. A packed record is run sample by sample.
    """

    def forward(record: ReplayRecord) -> FloatArray:
        with frozen(model):
            return response_scores(model, record)

    return forward


def gradient_forward(model: Any) -> Callable[[ReplayRecord], FloatArray]:
    """Return the forward as training runs it (C'): the model's own mode, gradients enabled, nothing stepped."""

    def forward(record: ReplayRecord) -> FloatArray:
        with torch.enable_grad():
            return response_scores(model, record)

    return forward


def response_scores(model: Any, record: ReplayRecord) -> FloatArray:
    """Return raw response scores from one forward in the model's present mode.

    A packed record is run sample by sample: its rows are those of a packed forward with a block-diagonal mask, whatever
    masks the model understands. The score of a sample's first token comes from the row before it, as a packed trainer
    gives it, and must be masked out.

    Returns:
        float64 [response], in nats. The log-softmax is in float64, the forward in the model's own precision.

    Raises:
        RecordError: The loss mask takes the first token of a packed sample.
        ScoreError: Logits that do not cover the ids, or a score that is not finite.
    """
    require_scorable(record)
    rows = _rows_before_response(model, record)
    targets = torch.tensor(record.response_ids, device=rows.device)
    parts = []
    for start in range(0, rows.shape[0], _ROWS_AT_ONCE):
        block = torch.log_softmax(rows[start : start + _ROWS_AT_ONCE].double(), dim=-1)
        parts.append(block.gather(1, targets[start : start + _ROWS_AT_ONCE].unsqueeze(1)).squeeze(1))
    return checked_scores(torch.cat(parts).cpu().numpy(), label="C", count=record.response_length)


def response_logits(model: Any, record: ReplayRecord) -> Any:
    """Return the logits of one frozen forward of a plain record, float32 array [length, vocabulary], for `check_definition`.

    Raises:
        RecordError: A packed record.
        ScoreError: Logits that do not cover the ids.
    """
    require_one_context([record])
    with frozen(model):
        rows = _rows_before_response(model, record).float().cpu().numpy()
    whole = np.zeros((record.input_ids.size, rows.shape[1]), dtype=np.float32)
    whole[record.prompt_length - 1 : -1] = rows
    return whole


def _rows_before_response(model: Any, record: ReplayRecord) -> Any:
    """Return the logit rows that predict the response, [response, vocabulary], in the order of the row."""
    device = next(model.parameters()).device
    whole = torch.tensor(record.input_ids, device=device)
    places = torch.tensor(np.asarray(record.positions), device=device)
    rows: Any = None
    before = torch.arange(whole.numel(), device=device) - 1
    for part in segments_of(record):
        tokens = torch.tensor(part, device=device)
        ids = whole[tokens].unsqueeze(0)
        given = {"attention_mask": torch.ones_like(ids), "position_ids": places[tokens].unsqueeze(0)}
        logits = model(input_ids=ids, use_cache=False, **given).logits
        if logits.ndim != 3 or tuple(logits.shape[:2]) != tuple(ids.shape):  # noqa: PLR2004 - batch, length, vocabulary
            raise ScoreError(
                "logits do not cover the sequence",
                expected=f"[1, {ids.shape[1]}, vocabulary]",
                found=tuple(logits.shape),
            )
        if rows is None:
            rows = logits.new_empty((whole.numel(), logits.shape[2]))
        rows[tokens] = logits[0].detach()
        before[tokens[1:]] = tokens[:-1]
    return rows[before[record.prompt_length :]]


def vocabulary_parallel_scores(local_logits: Any, first_column: int, targets: Any, group: Any = None) -> Any:
    """Return target scores from logits whose vocabulary is split over a process group.

    One maximum, one sum and one target logit per row are all-reduced: the normalizer is global. Each rank calls this.

    Args:
        local_logits: [rows, local columns] this rank's logits, padding columns cut off; row i predicts `targets[i]`.
        first_column: Vocabulary index of this rank's first column.
        targets: int64 [rows] token ids, equal on all ranks.
        group: Process group; the default one where None.

    Returns:
        float64 tensor [rows], in nats, equal on all ranks.

    Raises:
        ScoreError: A target lies in no rank's columns or in several.
    """
    from torch import distributed

    values = local_logits.double()
    top = values.max(dim=-1).values
    distributed.all_reduce(top, op=distributed.ReduceOp.MAX, group=group)
    mine = (targets >= first_column) & (targets < first_column + values.shape[1])
    column = (targets - first_column).clamp(0, values.shape[1] - 1)
    chosen = values.gather(1, column.unsqueeze(1)).squeeze(1)
    zero = torch.zeros_like(chosen)
    sums = torch.stack([(values - top.unsqueeze(1)).exp().sum(-1), torch.where(mine, chosen, zero), mine.double()])
    distributed.all_reduce(sums, group=group)
    if not bool((sums[2] == 1).all()):
        raise ScoreError(
            "target not in exactly one vocabulary shard",
            expected="one owner",
            found=f"{int((sums[2] != 1).sum())} targets without",
            todo="check the first columns of the ranks",
        )
    return sums[1] - top - sums[0].log()
