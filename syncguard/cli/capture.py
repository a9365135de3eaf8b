"""`syncguard capture`: generate, replay and score against a live engine, into one record file."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Final

import typer
import xxhash

from syncguard.cli.engines import ADDRESS_HELP, load_trainer, open_engine
from syncguard.cli.output import console, print_json, progress_bar
from syncguard.engines.base import EngineAdapter
from syncguard.errors import UnsupportedError, UsageError
from syncguard.replay import ReplayRecord, load_many, save_many
from syncguard.replay.capture import decode_on_worker, replay_batch, score_with_trainer
from syncguard.replay.generate import capture_batch, capture_calls

_TOKENIZER_FILES: Final = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
)
_EXPERT: Final = re.compile(r"\.mlp\.experts\.(\d+)\.")


class AtState(str, Enum):
    """Policy state at which scores are taken."""

    OLD = "old"
    NEW = "new"


def capture(
    output: Annotated[Path, typer.Option("--output", "-o", help="Record file to write.")],
    *,
    engine: Annotated[str, typer.Option(help=ADDRESS_HELP)],
    prompt_ids: Annotated[
        list[str] | None, typer.Option(help="Prompt as token ids, such as 5,17,3; repeatable.")
    ] = None,
    prompt: Annotated[list[str] | None, typer.Option(help="Prompt as text; needs --tokenizer; repeatable.")] = None,
    tokenizer: Annotated[Path | None, typer.Option(help="The model's own tokenizer folder.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Apply the tokenizer's chat template.")] = False,
    record: Annotated[
        Path | None, typer.Option(help="Carry the records of this file on instead of generating.")
    ] = None,
    state: Annotated[
        AtState, typer.Option(help="old: as generated. new: after an update, with --record.")
    ] = AtState.OLD,
    follow_up: Annotated[
        list[str] | None,
        typer.Option(help="Ids that a further call is given after the response, such as a tool's answer; repeatable."),
    ] = None,
    batch: Annotated[
        bool, typer.Option("--batch", help="Generate and replay all prompts in one call, as a batch.")
    ] = False,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Limit of a response.")] = 128,
    seed: Annotated[int, typer.Option(help="Sampling seed of the first response; the next ones follow.")] = 0,
    cold: Annotated[int, typer.Option(min=1, help="Passes after a confirmed flush.")] = 2,
    warm: Annotated[int, typer.Option(min=0, help="Passes with a warm prefix cache.")] = 1,
    decode: Annotated[
        int, typer.Option(min=0, help="Passes of teacher-forced decode (D), where the engine can; 0 for none.")
    ] = 1,
    trainer: Annotated[Path | None, typer.Option(help="Checkpoint folder that scores C; Transformers.")] = None,
    trainer_dtype: Annotated[str, typer.Option(help="Its dtype, such as float32; auto takes the config's.")] = "auto",
    training_forward: Annotated[
        bool, typer.Option("--training-forward", help="Score C' too: the forward in training mode with gradients.")
    ] = False,
    vocab_size: Annotated[int, typer.Option(help="Vocabulary size; 0 asks the engine.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Keep exact ids and A, replay B cold and warm, decode the saved ids again, and score C where a trainer is given."""
    if (state is AtState.NEW) != (record is not None):
        raise UsageError(
            "scores after an update belong to a response from before it",
            expected="--state new together with --record, or neither",
            found=f"--state {state.value}" + (" without --record" if record is None else " with --record"),
        )
    prompts = [] if record else _prompts(prompt_ids or [], prompt or [], tokenizer, chat=chat)
    known = load_many(record) if record else []
    turns = _ids(follow_up or [])
    if batch and (turns or known):
        raise UsageError("a batch", expected="prompts of single calls", found="--follow-up or --record")
    if training_forward and trainer is None:
        raise UsageError("a training forward", expected="--trainer with the checkpoint", found="none")
    model = load_trainer(trainer, trainer_dtype) if trainer else None
    worker = open_engine(engine)
    facts = _facts(worker, engine)
    vocabulary = vocab_size or facts.vocab_size
    experts = facts.num_experts or int(getattr(getattr(model, "config", None), "num_experts", 0) or 0)
    meta = {"num_experts": experts} if experts else {}
    fields = {
        "worker": facts.identity,
        "tokenizer_revision": _revision(tokenizer, _TOKENIZER_FILES),
        "model_revision": _revision(trainer, ("config.json", "model.safetensors.index.json")),
        "meta": meta,
    }
    count = len(known) or len(prompts) * (1 + len(turns))
    steps = (0 if known else 1) + cold + warm + decode + (2 if model else 0) + training_forward
    done: list[ReplayRecord] = []
    with progress_bar("capturing", as_json=as_json) as progress:
        task = progress.task_ids[0]
        progress.update(task, description="generate, replay, score", total=count * steps)

        def advance(_: str) -> None:
            progress.advance(task)

        records = known or _generated(worker, prompts, turns, advance, fields, max_new_tokens, seed, batch=batch)
        rounds = [records] if batch else [[one] for one in records]
        for together in rounds:
            replayed = replay_batch(
                worker,
                together,
                state.value,
                vocab_size=vocabulary,
                cold=cold,
                warm=warm,
                version=facts.label,
                on_pass=advance,
            )
            for one in replayed:
                scored = decode_on_worker(worker, one, state.value, passes=decode, on_pass=advance) if decode else one
                if model is not None:
                    scored = _scored(model, scored, state, advance, training_forward=training_forward)
                done.append(scored)
    worker.close()
    save_many(output, [replace(one, worker=one.worker or facts.identity) for one in done])
    cannot = sorted({str(one.meta["decode"]["cannot"]) for one in done if one.meta.get("decode", {}).get("cannot")})
    if as_json:
        scores = [[str(k) for k in o.scores] for o in done]
        print_json({"record": str(output), "responses": len(done), "scores": scores, "no_decode": cannot})
    else:
        tokens = sum(one.response_length for one in done)
        console().print(
            f"{output}  {len(done)} responses, {tokens} tokens, scores {' '.join(map(str, done[0].scores))}"
        )
        for reason in cannot:
            console().print(f"no decode scores (D): {reason}", style="dim")


def _generated(
    worker: EngineAdapter,
    prompts: list[list[int]],
    turns: list[list[int]],
    advance: Callable[[str], None],
    fields: dict[str, Any],
    max_new_tokens: int,
    seed: int,
    *,
    batch: bool,
) -> list[ReplayRecord]:
    """Generate all responses: in one call, or each in its own, with further calls of the same conversation."""
    names = [f"sample-{index}" for index in range(len(prompts))]
    if batch:
        made = capture_batch(worker, prompts, max_new_tokens=max_new_tokens, seed=seed, names=names, **fields)
        for _ in made:
            advance("A")
        return made
    found: list[ReplayRecord] = []

    def following(calls: Sequence[ReplayRecord]) -> list[int] | None:
        advance("A")
        if len(calls) > len(turns):
            return None
        return [*calls[-1].input_ids.tolist(), *turns[len(calls) - 1]]

    for index, prompt in enumerate(prompts):
        calls = capture_calls(
            worker,
            prompt,
            following,
            max_new_tokens=max_new_tokens,
            seed=seed + index * (1 + len(turns)),
            record_id=names[index],
            **fields,
        )
        found += [replace(calls[0], record_id=names[index], batch=(names[index],), call={})] if not turns else calls
    return found


@dataclass(frozen=True, slots=True)
class _Facts:
    identity: str
    label: str = ""
    vocab_size: int = 0
    num_experts: int = 0


def _facts(worker: EngineAdapter, address: str) -> _Facts:
    """Ask who the engine is and what it holds; an engine without our probe can still be scored."""
    try:
        tensors = {shard.tensor.fqn: shard.tensor.shape for layout in worker.layouts() for shard in layout.shards()}
        status = worker.status()
    except UnsupportedError:
        return _Facts(address)
    vocabulary = next((shape[0] for fqn, shape in tensors.items() if fqn.endswith("embed_tokens.weight")), 0)
    experts = {int(found[1]) for fqn in tensors if (found := _EXPERT.search(fqn))}
    identity = f"{address} {status.engine} {status.model}"
    return _Facts(identity, status.weight_version_label, vocabulary or status.vocab_size, len(experts))


def _scored(
    model: Any, record: ReplayRecord, state: AtState, advance: Callable[[str], None], *, training_forward: bool
) -> ReplayRecord:
    from syncguard.replay.trainer import gradient_forward, trainer_forward

    scored = score_with_trainer(record, trainer_forward(model), state.value, on_pass=advance)
    if not training_forward:
        return scored
    model.train()
    try:
        return score_with_trainer(scored, gradient_forward(model), state.value, path="G", passes=1, on_pass=advance)
    finally:
        model.eval()


def _revision(folder: Path | None, names: Sequence[str]) -> str:
    """Return `NAME@xxh3-…` of a folder's files: what a record was tokenized and scored with, wherever the folder lay."""
    if folder is None:
        return ""
    state = xxhash.xxh3_64()
    for name in names:
        if (folder / name).is_file():
            state.update(f"{name}:".encode())
            state.update((folder / name).read_bytes())
    return f"{folder.resolve().name}@xxh3-{state.hexdigest()}"


def _prompts(ids: list[str], texts: list[str], folder: Path | None, *, chat: bool) -> list[list[int]]:
    prompts = _ids(ids)
    if texts:
        if folder is None:
            raise UsageError("a text prompt", expected="--tokenizer with the model's own tokenizer", found="none")
        prompts += [_encode(folder, text, chat=chat) for text in texts]
    if not prompts or not all(prompts):
        raise UsageError("nothing to generate from", expected="--prompt-ids or --prompt", found=json.dumps(prompts))
    return prompts


def _ids(texts: list[str]) -> list[list[int]]:
    try:
        return [[int(part) for part in text.replace(",", " ").split()] for text in texts]
    except ValueError as error:
        raise UsageError("prompt ids", expected="integers such as 5,17,3", found=error) from error


def _encode(folder: Path, text: str, *, chat: bool) -> list[int]:
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise UnsupportedError(
            "text prompts", expected="transformers", found=error, todo="give --prompt-ids"
        ) from error
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    if not chat:
        return list(tokenizer(text)["input_ids"])
    encoded = tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=True
    )
    return list(encoded["input_ids"])
