"""`syncguard capture`: generate, replay and score against a live engine, into one record file."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from syncguard.cli.output import console, print_json, progress_bar
from syncguard.engines.sglang import SglangEngine
from syncguard.errors import CheckpointError, UnsupportedError, UsageError
from syncguard.replay import ReplayRecord, load_many, save_many
from syncguard.replay.capture import capture_generation, replay_on_worker, score_with_trainer


class AtState(str, Enum):
    """Policy state at which scores are taken."""

    OLD = "old"
    NEW = "new"


def capture(
    output: Annotated[Path, typer.Option("--output", "-o", help="Record file to write.")],
    *,
    engine: Annotated[str, typer.Option(help="Engine address, such as http://127.0.0.1:30000.")],
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
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Limit of a response.")] = 128,
    seed: Annotated[int, typer.Option(help="Sampling seed of the first response; the next ones follow.")] = 0,
    cold: Annotated[int, typer.Option(min=1, help="Passes after a confirmed flush.")] = 2,
    warm: Annotated[int, typer.Option(min=0, help="Passes with a warm prefix cache.")] = 1,
    trainer: Annotated[Path | None, typer.Option(help="Checkpoint folder that scores C; Transformers.")] = None,
    trainer_dtype: Annotated[str, typer.Option(help="Its dtype, such as float32; auto takes the config's.")] = "auto",
    vocab_size: Annotated[int, typer.Option(help="Vocabulary size; 0 asks the engine.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Keep exact ids and A, replay B cold and warm, and score C where a trainer checkpoint is given."""
    if (state is AtState.NEW) != (record is not None):
        raise UsageError(
            "scores after an update belong to a response from before it",
            expected="--state new together with --record, or neither",
            found=f"--state {state.value}" + (" without --record" if record is None else " with --record"),
        )
    prompts = [] if record else _prompts(prompt_ids or [], prompt or [], tokenizer, chat=chat)
    known = load_many(record) if record else []
    count = len(known) or len(prompts)
    forward = _forward(trainer, trainer_dtype) if trainer else None
    worker = SglangEngine(engine)
    identity, label, vocabulary = _identity(worker, engine)
    vocabulary = vocab_size or vocabulary
    steps = (0 if known else 1) + cold + warm + (2 if forward else 0)
    names = tuple(f"sample-{index}" for index in range(count))
    done: list[ReplayRecord] = []
    with progress_bar("capturing", as_json=as_json) as progress:
        task = progress.add_task("generate, replay, score", total=count * steps)

        def advance(_: str) -> None:
            progress.advance(task)

        for index in range(count):
            if known:
                one = known[index]
            else:
                one = capture_generation(
                    worker,
                    prompts[index],
                    max_new_tokens=max_new_tokens,
                    seed=seed + index,
                    worker=identity,
                    record_id=names[index],
                    batch=(names[index],),  # each response is scored in a call of its own
                    tokenizer_revision=str(tokenizer or ""),
                    model_revision=str(trainer or ""),
                )
                advance("A")
            one = replay_on_worker(
                worker,
                one,
                state.value,
                vocab_size=vocabulary,
                cold=cold,
                warm=warm,
                version=label,
                on_pass=advance,
            )
            if forward is not None:
                one = score_with_trainer(one, forward, state.value, on_pass=advance)
            done.append(one)
    worker.close()
    save_many(output, [replace(one, worker=one.worker or identity) for one in done])
    if as_json:
        print_json(
            {"record": str(output), "responses": len(done), "scores": [[str(k) for k in o.scores] for o in done]}
        )
    else:
        tokens = sum(one.response_length for one in done)
        console().print(
            f"{output}  {len(done)} responses, {tokens} tokens, scores {' '.join(map(str, done[0].scores))}"
        )


def _identity(worker: SglangEngine, address: str) -> tuple[str, str, int]:
    """Ask who the engine is; an engine without our probe can still be scored."""
    try:
        status = worker.status()
    except UnsupportedError:
        return address, "", 0
    return f"{address} {status.engine} {status.model}", status.weight_version_label, status.vocab_size


def _prompts(ids: list[str], texts: list[str], folder: Path | None, *, chat: bool) -> list[list[int]]:
    try:
        prompts = [[int(part) for part in text.replace(",", " ").split()] for text in ids]
    except ValueError as error:
        raise UsageError("prompt ids", expected="integers such as 5,17,3", found=error) from error
    if texts:
        if folder is None:
            raise UsageError("a text prompt", expected="--tokenizer with the model's own tokenizer", found="none")
        prompts += [_encode(folder, text, chat=chat) for text in texts]
    if not prompts or not all(prompts):
        raise UsageError("nothing to generate from", expected="--prompt-ids or --prompt", found=json.dumps(prompts))
    return prompts


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


def _forward(folder: Path, dtype: str) -> Callable[[ReplayRecord], Any]:
    try:
        from transformers import AutoModelForCausalLM

        from syncguard.replay.trainer import trainer_forward
    except ImportError as error:
        raise UnsupportedError(
            "scores of a trainer", expected="torch and transformers", found=error, todo="pip install 'syncguard[torch]'"
        ) from error
    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, trust_remote_code=False, local_files_only=True
        )
    except (OSError, ValueError) as error:
        raise CheckpointError("cannot load the trainer's checkpoint", found=error, where=folder) from error
    return trainer_forward(model)
