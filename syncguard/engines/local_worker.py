"""The embedded engine: a rollout worker in plain torch, one process, CPU, with an engine's resident forms.

Its load path, update sessions, generation and replay. Update calls mirror SGLang's: a session for tensors, one call for
a folder, a label that anyone may set.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch
from safetensors import SafetensorError, safe_open

from syncguard.engines.base import FlushResult, Generation, Scoring
from syncguard.engines.faults import RESIDENT_FAULTS, FaultKind, FaultPlan, FaultyStream
from syncguard.engines.local_cache import PrefixCache
from syncguard.engines.local_config import LocalConfig
from syncguard.engines.local_damage import damage
from syncguard.engines.local_model import build_ranks, forward_ranks
from syncguard.engines.rank_probe import RankProbe, tensor_addresses
from syncguard.errors import CheckpointError, EngineError, UnreachableError, UsageError
from syncguard.layout.model import RankIdentity
from syncguard.spec import dtype_named

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from syncguard.engines.base import RankScrub
    from syncguard.engines.faults import Fault
    from syncguard.manifest.model import RankObservation

LAUNCH_LABEL: Final = "default"
"""The weight version label of a worker that nobody updated, as in SGLang."""


class LocalWorker:
    """One embedded rollout worker.

    Args:
        folder: Checkpoint folder, read at start and at each restart.
        tp_size: Tensor-parallel ranks, all in this process.
        ep_size: Expert-parallel ranks among them; divides `tp_size`.
        dtype: Canonical dtype of the resident weights; empty takes the config's.
        faults: What shall go wrong.
        graphs: Say that a decode graph was captured at each start, as an engine with CUDA graphs would.

    Raises:
        CheckpointError: The folder cannot be loaded.
        EngineError: The model cannot be sharded so.
        UnsupportedError: Not a Qwen3 model.
    """

    def __init__(
        self,
        folder: Path,
        *,
        tp_size: int = 1,
        ep_size: int = 1,
        dtype: str = "",
        faults: FaultPlan | None = None,
        graphs: bool = False,
    ) -> None:
        """Load the checkpoint and start at epoch 0."""
        self.folder = folder
        self.config = LocalConfig.from_folder(folder)
        if tp_size < 1 or ep_size < 1 or tp_size % ep_size:
            raise UsageError("parallel sizes", expected="ep_size dividing tp_size", found=f"{ep_size}, {tp_size}")
        self._tp_size, self._ep_size = tp_size, ep_size
        self._dtype = _torch_dtype(dtype or self.config.dtype)
        self.faults = faults or FaultPlan()
        self._captures_graphs = graphs
        self._lock = threading.RLock()
        self._alive = True
        self._boot()

    def _boot(self) -> None:
        self.ranks = build_ranks(self.config, tp_size=self._tp_size, ep_size=self._ep_size, dtype=self._dtype)
        self.label = LAUNCH_LABEL
        self.ignored: list[str] = []
        self._stream: FaultyStream | None = None
        self._cache = PrefixCache(self._tp_size)
        self._expected = sum(1 for _ in self._load(_named_tensors(self.folder), FaultyStream(FaultPlan(), 0)))
        self.probes = [
            RankProbe(RankIdentity(tp_rank=index, tp_size=self._tp_size), lambda model=model: model)  # type: ignore[misc]
            for index, model in enumerate(self.ranks)
        ]
        if self._captures_graphs:
            for probe, model in zip(self.probes, self.ranks, strict=True):
                probe.graphs_captured({"decode": tensor_addresses(model)})

    @property
    def alive(self) -> bool:
        """Whether the worker answers."""
        return self._alive

    def stop(self) -> None:
        """Stop answering, as a worker whose process died."""
        self._alive = False

    def resume(self) -> None:
        """Answer again, as a worker that was cut off and kept its memory."""
        self._alive = True

    def restart(self) -> None:
        """Come up again with the weights on disk, a new incarnation, epoch 0 and the launch label."""
        with self._lock:
            self._alive = True
            self._boot()

    def begin_update(self) -> None:
        """Open an update session.

        Raises:
            EngineError: One is open already.
        """
        with self._lock:
            self._require_alive()
            if self._stream is not None:
                raise EngineError("update session", expected="none open", found="one open", todo="end it first")
            self._stream = FaultyStream(self.faults, self._expected)
            for probe in self.probes:
                probe.update_started()

    def update(
        self, named_tensors: Iterable[tuple[str, torch.Tensor]], *, label: str | None = None, flush: bool = True
    ) -> None:
        """Load tensors under checkpoint names inside the open session; may be called for many buckets.

        Args:
            named_tensors: Name and whole tensor; only read, nothing of it is kept.
            label: New weight version label, None keeps it.
            flush: Drop the prefix cache, as the engine's update calls do by default.

        Raises:
            EngineError: No session is open, a shape does not fit, or the worker restarted meanwhile.
        """
        with self._lock:
            self._require_alive()
            stream = self._stream
            if stream is None:
                raise EngineError("weights pushed outside a session", todo="begin the update first")
            for _ in self._load(named_tensors, stream):
                if self._restart_due(stream):
                    self.restart()
                    raise EngineError("worker restarted during the update", todo="push again from the start")
            self.label = self.label if label is None else label
            if flush:
                self._flush_after_update()

    def end_update(self) -> None:
        """Close the session; the epoch advances on every rank.

        Raises:
            EngineError: None is open.
        """
        with self._lock:
            self._require_alive()
            if self._stream is None:
                raise EngineError("update session", expected="one open", found="none", todo="begin the update first")
            self._stream.finish()
            self._stream = None
            self._fire_rank_stale()
            for probe in self.probes:
                probe.update_finished()
            for fault in [fault for fault in self.faults.armed if fault.kind in RESIDENT_FAULTS]:
                self.inject(fault)

    def push(self, named_tensors: Iterable[tuple[str, torch.Tensor]], *, label: str | None = None) -> None:
        """Run a whole session: begin, update, end. A failed update leaves the session open, as the engine does."""
        self.begin_update()
        self.update(named_tensors, label=label)
        self.end_update()

    def update_from_disk(self, folder: Path, *, label: str | None = None) -> None:
        """Load a whole checkpoint folder in one call; when it fails, what was loaded so far stays, as in the engine.

        Raises:
            CheckpointError: The folder cannot be read.
            EngineError: A shape does not fit.
        """
        self.begin_update()
        try:
            self.update(_named_tensors(folder), label=label)
        finally:
            if self._stream is not None:
                self.end_update()

    def set_label(self, label: str) -> None:
        """Set the weight version label alone."""
        with self._lock:
            self.label = label

    def inject(self, fault: Fault) -> str:
        """Do a resident fault now and return what it did; silent, but for `UNANNOUNCED`, which is an epoch."""
        with self._lock:
            announced = fault.kind is FaultKind.UNANNOUNCED
            for probe in self.probes if announced else []:
                probe.update_started()
            detail = damage(self.ranks, fault)
            for probe in self.probes if announced else []:
                probe.update_finished()
            if fault not in self.faults.armed:
                self.faults.arm(fault)
            self.faults.fire(fault, detail)
            return detail

    def observe_rank(self, index: int, key_seed: bytes) -> RankObservation:
        """Digest one rank's resident memory; no update call runs meanwhile, but a session may be open."""
        with self._lock:
            self._require_alive()
            return self.probes[index].observe(key_seed)

    def scrub_rank(self, index: int, key_seed: bytes, *, turn: int, budget_bytes: int) -> RankScrub:
        """Digest what is due of one rank's resident memory."""
        with self._lock:
            self._require_alive()
            return self.probes[index].scrub(key_seed, turn=turn, budget_bytes=budget_bytes)

    def flush(self) -> FlushResult:
        """Empty the prefix cache."""
        with self._lock:
            self._require_alive()
            refused = self.faults.pending(FaultKind.FLUSH_REFUSED)
            if refused is not None:
                self.faults.fire(refused, "flush refused")
                return FlushResult(confirmed=False, detail="Flush cache failed: requests are running.")
            ignored = self.faults.pending(FaultKind.FLUSH_IGNORED)
            if ignored is not None:
                self.faults.fire(ignored, f"flush confirmed, {len(self._cache)} requests kept")
            else:
                self._cache.clear()
            return FlushResult(confirmed=True, detail="Cache flushed.")

    def generate(self, prompt_ids: Sequence[int], *, max_new_tokens: int, seed: int) -> Generation:
        """Decode token by token at temperature 1 with no filter; the stop token is not looked at.

        Raises:
            EngineError: Empty prompt, ids outside the vocabulary, or too many positions.
        """
        with self._lock, torch.no_grad():
            self._require_alive()
            ids = self._checked(prompt_ids, extra=max_new_tokens)
            draw = torch.Generator().manual_seed(seed)
            response, scores, _ = self._decoded(
                ids, max_new_tokens, lambda logprobs, _: int(torch.multinomial(logprobs.exp(), 1, generator=draw))
            )
            return Generation(
                tuple(response),
                self._shifted(scores),
                self.label,
                {"temperature": 1.0, "max_new_tokens": max_new_tokens, "seed": seed},
            )

    def score_by_decode(self, input_ids: Sequence[int], *, prompt_length: int) -> Scoring:
        """Score the response as generation does, step by step over the key/value cache, with the saved ids forced.

        Raises:
            EngineError: Ids outside the vocabulary, too many positions, or no response.
        """
        with self._lock, torch.no_grad():
            self._require_alive()
            ids = self._checked_response(input_ids, prompt_length)
            saved = ids[prompt_length:]
            response, scores, cached = self._decoded(ids[:prompt_length], len(saved), lambda _, step: saved[step])
            return Scoring(tuple(response), tuple(scores), cached_tokens=cached)

    def _decoded(
        self, ids: list[int], count: int, choose: Callable[[torch.Tensor, int], int]
    ) -> tuple[list[int], list[float], int]:
        """Prefill the prompt, then decode: tokens chosen, their scores, and prompt tokens that were cached."""
        cached, caches = self._cache.match(ids, limit=len(ids) - 1)
        start, pending = cached, ids[cached:]
        response: list[int] = []
        scores: list[float] = []
        for step in range(count):
            logits = forward_ranks(self.ranks, torch.tensor(pending), caches, start=start, logits_from=len(pending) - 1)
            start += len(pending)
            logprobs = torch.log_softmax(logits[-1], dim=-1)
            token = choose(logprobs, step)
            response.append(token)
            scores.append(float(logprobs[token]))
            pending = [token]
        self._cache.keep((ids + response)[:start], caches)
        return response, scores, cached

    def score(self, input_ids: Sequence[int], *, prompt_length: int) -> Scoring:
        """Score the response by one prefill pass; the kept prefix may cover the prompt but for its last token.

        Raises:
            EngineError: Ids outside the vocabulary, too many positions, or no response.
        """
        with self._lock, torch.no_grad():
            self._require_alive()
            ids = self._checked_response(input_ids, prompt_length)
            start, caches = self._cache.match(ids, limit=prompt_length - 1)
            logits = forward_ranks(
                self.ranks, torch.tensor(ids[start:-1]), caches, start=start, logits_from=prompt_length - 1 - start
            )
            response = torch.tensor(ids[prompt_length:])
            scores = torch.log_softmax(logits, dim=-1).gather(1, response.unsqueeze(1)).squeeze(1)
            self._cache.keep(ids[:-1], caches)
            return Scoring(tuple(ids[prompt_length:]), tuple(scores.tolist()), cached_tokens=start)

    def _require_alive(self) -> None:
        if not self._alive:
            raise UnreachableError("embedded worker does not answer", where=self.folder.name, todo="restart it")

    def _checked(self, ids: Sequence[int], *, extra: int = 0) -> list[int]:
        limit, room = self.config.vocab_size, self.config.max_position_embeddings
        if not ids or not all(0 <= token < limit for token in ids) or len(ids) + extra > room:
            raise EngineError(
                "request refused", expected=f"1 to {room} ids below {limit}", found=f"{len(ids)} ids, {extra} new"
            )
        return [int(token) for token in ids]

    def _checked_response(self, input_ids: Sequence[int], prompt_length: int) -> list[int]:
        ids = self._checked(input_ids)
        if not 1 <= prompt_length < len(ids):
            raise EngineError("nothing to score", expected="a prompt and a response", found=f"{prompt_length=}")
        return ids

    def _load(self, named: Iterable[tuple[str, torch.Tensor]], stream: FaultyStream) -> Iterator[str]:
        """Load what arrives on every rank that listens; yields the names."""
        stale = self.faults.pending(FaultKind.RANK_STALE) if self._stream is not None else None
        deaf = None if stale is None else self.ranks[stale.rank]
        for name, tensor in stream.passed(named):
            with torch.no_grad():
                placed = [rank.load_one(name, tensor) for rank in self.ranks if rank is not deaf]
            if not all(placed):
                self.ignored.append(name)
            yield name

    def _fire_rank_stale(self) -> None:
        fault = self.faults.pending(FaultKind.RANK_STALE)
        if fault is not None:
            self.faults.fire(fault, f"rank {fault.rank % self._tp_size} ignored the update")

    def _restart_due(self, stream: FaultyStream) -> bool:
        fault = self.faults.pending(FaultKind.RESTART_IN_UPDATE)
        if fault is None or stream.seen < self._expected // 2:
            return False
        self.faults.fire(fault, f"restarted after {stream.seen} tensors")
        return True

    def _flush_after_update(self) -> None:
        fault = self.faults.pending(FaultKind.UPDATE_KEEPS_CACHE)
        if fault is None:
            self._cache.clear()
        else:
            self.faults.fire(fault, f"{len(self._cache)} requests kept")

    def _shifted(self, scores: list[float]) -> tuple[float, ...]:
        fault = self.faults.pending(FaultKind.A_SHIFT)
        if fault is None:
            return tuple(scores)
        self.faults.fire(fault, f"{fault.nats:+g} nat from response index {fault.position}")
        return tuple(score + fault.nats * (index >= fault.position) for index, score in enumerate(scores))


def _torch_dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, dtype_named(name).name)
    return dtype


def _named_tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of every safetensors file of a folder."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError("checkpoint without weights", expected="*.safetensors", found="none", where=folder)
    for path in files:
        yield from _file_tensors(path)


def _file_tensors(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    try:
        with safe_open(path, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - not a mapping
                yield name, opened.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise CheckpointError("safetensors file cannot be read", found=error, where=path.name) from error
