"""Packed rows: several samples one after another in one row, each seeing only itself.

`segment_ids` say which token belongs to which sample. A trainer that packs runs one forward with a block-diagonal mask (or
its varlen kernel), so a sample's rows are those of the sample alone; C is therefore computed segment by segment, which
needs no mask that a model might not understand and equals the packed forward. A rollout engine takes one context a
request: there a packed record is refused, and `unpacked` gives the records to send instead.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

import numpy as np

from syncguard.errors import RecordError, UnsupportedError
from syncguard.replay.record import ReplayRecord

if TYPE_CHECKING:
    from collections.abc import Sequence

    from syncguard.replay.scores import IntArray


def segments_of(record: ReplayRecord) -> list[IntArray]:
    """Return the token indices of each packed sample, in the order in which the samples begin; one for a plain record."""
    ids = np.asarray(record.segment_ids)
    _, first, inverse = np.unique(ids, return_index=True, return_inverse=True)
    return [np.flatnonzero(inverse == index).astype(np.int64) for index in np.argsort(first)]


def require_scorable(record: ReplayRecord) -> None:
    """Refuse a packed record whose loss mask takes the first token of a sample, which no row of that sample predicts.

    Raises:
        RecordError: It does.
    """
    for tokens in segments_of(record)[1:]:
        at = int(tokens[0]) - record.prompt_length
        if at >= 0 and record.loss_mask[at] == 1:
            raise RecordError(
                "the first token of a packed sample takes part in the loss",
                expected="mask 0: its prediction row belongs to another sample",
                found="mask 1",
                where=f"token {int(tokens[0])} of the row",
                todo="align the loss mask with the targets of each sample before packing",
            )


OTHER_INPUTS: Final = ("adapter", "images", "videos", "audio")
"""Inputs of a model call, named in `ReplayRecord.call`, without which its ids alone are another event."""


def require_one_context(records: Sequence[ReplayRecord]) -> None:
    """Refuse records that a request of ids alone does not describe.

    Raises:
        RecordError: A packed record: an engine takes one context a request.
        UnsupportedError: A record of a call with an adapter or with images.
    """
    for record in records:
        where = record.record_id or "record"
        if len(segments_of(record)) > 1:
            raise RecordError(
                "a packed record on a rollout worker",
                expected="one context a request",
                found=f"{len(segments_of(record))} samples in a row",
                where=where,
                todo="replay the records that replay.packing.unpacked gives",
            )
        beside = [name for name in OTHER_INPUTS if record.call.get(name)]
        if beside:
            raise UnsupportedError(
                "a replay of this model call",
                expected="a call of ids alone",
                found=f"a call with {', '.join(beside)}",
                where=where,
                todo="score it where these inputs can be given, and add the scores with ReplayRecord.with_scores",
            )


def packed(records: Sequence[ReplayRecord], **fields: object) -> ReplayRecord:
    """Put the ids, positions and masks of several records into one row; prompts after the first are masked out.

    Args:
        records: Plain records; their scores are not carried over, since a row has scores for its inner prompts too.
        **fields: Other fields of the packed record.

    Raises:
        RecordError: No records, or one that is packed already.
    """
    if not records or any(len(segments_of(record)) > 1 for record in records):
        raise RecordError("nothing to pack", expected="one plain record or more", found=len(records))
    first = records[0].prompt_length
    mask = np.concatenate([np.concatenate([np.zeros(r.prompt_length, np.int64), r.loss_mask]) for r in records])
    return ReplayRecord(
        input_ids=np.concatenate([record.input_ids for record in records]),
        prompt_length=first,
        mask=mask[first:],
        positions=np.concatenate([np.asarray(record.positions) for record in records]),
        segment_ids=np.repeat(np.arange(len(records)), [record.input_ids.size for record in records]),
        **fields,  # type: ignore[arg-type]
    )


def unpacked(record: ReplayRecord) -> list[ReplayRecord]:
    """Return one plain record a sample, with its part of every score; a sample without an active token is left out.

    The response of a sample begins at its first token in the loss, or at the row's boundary in the first sample.

    Raises:
        RecordError: The loss mask takes the first token of a sample.
    """
    require_scorable(record)
    parts = segments_of(record)
    if len(parts) == 1:
        return [record]
    active = np.concatenate([np.zeros(record.prompt_length, np.int64), record.loss_mask])
    found: list[ReplayRecord] = []
    for number, tokens in enumerate(parts):
        wanted = np.flatnonzero(active[tokens])
        if not wanted.size:
            continue
        inside = int((tokens < record.prompt_length).sum())
        boundary = inside or int(wanted[0])
        rows = tokens[boundary:] - record.prompt_length
        found.append(
            replace(
                record,
                input_ids=record.input_ids[tokens],
                prompt_length=boundary,
                mask=active[tokens][boundary:],
                positions=np.asarray(record.positions)[tokens],
                segment_ids=None,
                scores={key: values[rows] for key, values in record.scores.items()},
                record_id=f"{record.record_id}/{number}" if record.record_id else str(number),
            )
        )
    return found
