"""Rules of embeddings, heads, norms and rotary caches.

Source: `sglang/srt/layers/vocab_parallel_embedding.py` 0.5.23:269-447, `layernorm.py`, `rotary_embedding/base.py`.
"""

from __future__ import annotations

from syncguard.layout.derived import WEIGHT_PLUS_ONE
from syncguard.layout.forms import refuse_packed
from syncguard.layout.rules import LayerView, Span, join, rule

FROM_CONFIG = "computed from the configuration when the engine starts; no update writes it"


@rule("VocabParallelEmbedding", "ParallelLMHead")
def vocab(view: LayerView) -> None:
    """Rank r holds vocabulary rows from its own shard indices; what is left of the resident rows is zero."""
    refuse_packed(view)
    if view.attr("use_presharded_weights", False):
        msg = "use_presharded_weights: the checkpoint is already split"
        raise ValueError(msg)
    method = view.attr("quant_method")
    if method is not None and type(method).__name__ not in {"UnquantizedEmbeddingMethod", "UnquantizedLinearMethod"}:
        msg = f"no form for quantization method {type(method).__name__}"
        raise ValueError(msg)
    shard = view.attr("shard_indices")
    total = int(view.attr("org_vocab_size") or view.attr("num_embeddings"))
    start, stop = int(shard.org_vocab_start_index), int(shard.org_vocab_end_index)
    added = getattr(shard, "added_vocab_end_index", 0) - getattr(shard, "added_vocab_start_index", 0)
    if added > 0:
        view.out.uncovered.append(f"{view.fqn}: {added} rows of added vocabulary")
    rows = Span(start, max(0, stop - start), total)
    for local in ("weight", "bias"):
        resident = view.tensor(local)
        if resident is None:
            continue
        rest = tuple(Span.whole(size) for size in resident.shape[1:])
        if len(resident.shape) > 1 and resident.shape[1] != int(view.attr("embedding_dim")):
            msg = f"rows of {resident.shape[1]}, its layer says {view.attr('embedding_dim')}"
            raise ValueError(msg)
        name = source_name(view)
        view.bind_spans(resident, f"{name}.{local}", (rows, *rest))
        view.pad_tail(resident, 0, rows.length, "vocabulary padding")


def source_name(view: LayerView) -> str:
    """Return the checkpoint module that an embedding or head is loaded from."""
    tied = view.family.tied_head and getattr(view.config, "tie_word_embeddings", False)
    is_head = any(base.__name__ == "ParallelLMHead" for base in type(view.module).__mro__)
    return view.family.tied_head if tied and is_head and not view.alias else view.name


@rule("RMSNorm", "LayerNorm", "Gemma3RMSNorm")
def norm(view: LayerView) -> None:
    """Every rank holds the whole vector, except where the layer says that it is split."""
    for local in ("weight", "bias"):
        resident = view.tensor(local)
        if resident is None:
            continue
        if view.attr("has_weight", True) is False:
            view.exempt(resident, "constant of a norm without weight")
            continue
        view.bind_spans(resident, join(view.name, local), tuple(Span.whole(size) for size in resident.shape))


@rule("GemmaRMSNorm")
def gemma_norm(view: LayerView) -> None:
    """The checkpoint's weight is kept beside a buffer `weight + 1`, which only the layer's own loader refreshes."""
    norm(view)
    weight, plus_one = view.tensors.get("weight"), view.tensor("gemma_weight")
    if weight is not None and plus_one is not None:
        view.derive(plus_one, WEIGHT_PLUS_ONE, weight.name)


@rule("RotaryEmbedding", "Gemma3RotaryEmbedding")
def rotary(view: LayerView) -> None:
    """Caches are computed from the configuration; no update writes them and no trainer exports them."""
    for resident in view.tensors.values():
        view.exempt(resident, FROM_CONFIG)


@rule("Gemma2Model")
def normalizer(view: LayerView) -> None:
    """The square root of the hidden size, as a buffer."""
    resident = view.tensor("normalizer")
    if resident is not None:
        view.exempt(resident, FROM_CONFIG)
