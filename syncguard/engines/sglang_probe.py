"""The probe inside SGLang: an entry point of the group `sglang.srt.plugins`, no fork and no patch.

SGLang (0.5.23, `srt/plugins/__init__.py`) calls `install` in each of its processes. It registers

- an AROUND hook on `WeightChecker.handle`, so that our own actions on the `/weights_checker` route are answered by each
  rank's scheduler thread, gathered over the tensor-parallel group, and returned by HTTP (the one channel that reaches
  every rank, waits for no request, works while generation is paused, and needs no session that would rewrite weights);
- AROUND hooks on everything that can change weights, so that each rank counts its updates: the update calls and sessions
  of `SchedulerWeightUpdaterManager`, memory release and resume, moves of experts, and the checker's own `reset_tensors`;
- an AROUND hook on the flush of the prefix cache, so that each rank counts those that it did;
- AROUND hooks on the capture of graphs, which go on reading the places where weights lay then (`sglang_graphs`).

Observations and updates run on the same thread, so a single rank's reading never sees half an update.
"""

from __future__ import annotations

import logging
import pkgutil
from typing import TYPE_CHECKING, Any, Final

from syncguard.digest import warm_up
from syncguard.engines import sglang_inside
from syncguard.engines.probe_wire import (
    ACTION_PREFIX,
    ProbeAnswer,
    ProbeOp,
    decode_request,
    encode_answer,
    pack_observation,
)
from syncguard.engines.rank_probe import RankProbe
from syncguard.engines.sglang_graphs import GRAPH_CALLS, CapturedGraphs
from syncguard.engines.sglang_stages import ANSWER_KEY, StageBoard
from syncguard.errors import SyncguardError, UnsupportedError
from syncguard.layout.model import RankIdentity

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from syncguard.layout.recording import Recording

logger = logging.getLogger(__name__)

CHECKER: Final = "sglang.srt.utils.weight_checker.WeightChecker.handle"
MANAGER: Final = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
SCHEDULER: Final = "sglang.srt.managers.scheduler.Scheduler"
FLUSH: Final = f"{SCHEDULER}.flush_cache"
# Each call below is one update, finished when it returns, well or not: a failed one may have written a part.
UPDATE_CALLS: Final = (
    f"{MANAGER}.update_weights_from_disk",
    f"{MANAGER}.update_weights_from_ipc",
    f"{MANAGER}.release_memory_occupation",
    f"{MANAGER}.resume_memory_occupation",
    f"{SCHEDULER}.load_lora_adapter",
    f"{SCHEDULER}.load_lora_adapter_from_tensors",
    f"{SCHEDULER}.unload_lora_adapter",
    # Experts change places inside a forward pass (EPLB), or come back from disk or a backup (elastic EP).
    "sglang.srt.eplb.eplb_manager.update_expert_location_with_recovery",
    "sglang.srt.eplb.expert_location_updater.ExpertLocationUpdater.update",
)
# Outside a session these are refused before anything is touched; a refusal must not cost a worker its readiness.
SESSION_CALLS: Final = (
    f"{MANAGER}.update_weights_from_tensor",
    f"{MANAGER}.update_weights_from_distributed",
)
SESSION_BOUNDS: Final = (f"{MANAGER}.begin_weight_update", f"{MANAGER}.end_weight_update")
WATCHED: Final = (CHECKER, *SESSION_BOUNDS, *UPDATE_CALLS, *SESSION_CALLS, *GRAPH_CALLS)
WRITING_ACTIONS: Final = frozenset({"reset_tensors"})


class ProcessProbes:
    """The probes of one engine process, one a model role, with the updates that happened before they were made."""

    def __init__(self) -> None:
        """Start without probes and without updates."""
        self._probes: dict[str, RankProbe] = {}
        self._checkers: dict[str, Any] = {}
        self.graphs = CapturedGraphs(self._graphs_changed)
        self._finished = 0
        self._open = 0
        self._flushes = 0

    def started(self) -> None:
        """Count an update that began."""
        self._open += 1
        for probe in self._probes.values():
            probe.update_started()

    def finished(self) -> None:
        """Count an update that ended."""
        self._open = max(0, self._open - 1)
        self._finished += 1
        for probe in self._probes.values():
            probe.update_finished()

    def flushed(self) -> None:
        """Count a prefix cache that was emptied."""
        self._flushes += 1
        for probe in self._probes.values():
            probe.cache_flushed()

    def of(self, checker: Any, role: str) -> RankProbe:
        """Return the probe of a role, made at its first use from SGLang's own `WeightChecker`.

        A probe that is made late counts the same updates as one made at the start.
        """
        probe = self._probes.get(role)
        if probe is None:
            placement = checker._parallelism_info(role=role).model_dump()  # noqa: SLF001 - the checker's own identity
            probe = RankProbe(
                rank_identity(placement, role),
                checker._get_model,  # noqa: SLF001 - as above
                record=recorder_of(role),
            )
            for _ in range(self._finished):
                probe.update_finished()
            for _ in range(self._open):
                probe.update_started()
            for _ in range(self._flushes):
                probe.cache_flushed()
            # Choosing and compiling the digest is paid at the agent's first question, not in the first verification.
            warm_up(device_of(checker._get_model()))  # noqa: SLF001 - as above
            probe.graphs_captured(self.graphs.of(checker))
            self._probes[role], self._checkers[role] = probe, checker
        return probe

    def _graphs_changed(self, checker: Any) -> None:
        for role, probe in self._probes.items():
            if self._checkers[role] is checker:
                probe.graphs_captured(self.graphs.of(checker))


def device_of(model: Any) -> str:
    """Return the device type of a live model's first parameter, `cpu` without any."""
    first = next(iter(model.parameters()), None)
    return "cpu" if first is None else str(first.device.type)


def recorder_of(role: str) -> Callable[[Any], Recording] | None:
    """Return what records SGLang's own loader for layers without a rule, None for a draft model.

    Names and shapes come from the headers of the server's own checkpoint. A draft model has another one.
    """
    if role != "target":
        return None

    def record(model: Any) -> Recording:
        from sglang.srt.runtime_context import get_server_args

        from syncguard.engines.loader_record import record_from_folder

        return record_from_folder(model, str(get_server_args().model_path))

    return record


def rank_identity(placement: dict[str, Any], role: str) -> RankIdentity:
    """Return the rank that SGLang's `ParallelismInfo` (0.5.23) describes.

    Its `dp_size` is that of DP attention, whose ranks are a part of the tensor-parallel ones; its `dp_rank` counts whole
    replicas only where there is no DP attention.
    """
    attention_dp = int(placement.get("dp_size") or 1) > 1
    return RankIdentity(
        tp_rank=int(placement["tp_rank"]),
        tp_size=int(placement["tp_size"]),
        pp_rank=int(placement["pp_rank"]),
        pp_size=int(placement["pp_size"]),
        dp_rank=0 if attention_dp else int(placement.get("dp_rank") or 0),
        role=role,
    )


def answer(probe: RankProbe, action: str) -> ProbeAnswer:
    """Answer one request; an error becomes a part of the answer, so that one rank never hangs the others."""
    try:
        request = decode_request(action)
        if request.op is ProbeOp.STATUS:
            return ProbeAnswer(status=probe.status())
        if request.op is ProbeOp.LAYOUT:
            layout = probe.layout()
            known = layout.fingerprint in request.known_layouts
            return ProbeAnswer(known_layout=layout.fingerprint) if known else ProbeAnswer(layout=layout)
        key_seed = bytes.fromhex(request.key_seed_hex)
        if request.op is ProbeOp.SCRUB:
            return ProbeAnswer(scrub=probe.scrub(key_seed, turn=request.turn, budget_bytes=request.budget_bytes))
        return pack_observation(probe.observe(key_seed))
    except SyncguardError as error:
        return ProbeAnswer(error=error.as_dict())
    except Exception as error:  # raised, it would leave the other ranks waiting in the gather
        logger.exception("syncguard probe failed")
        return failed(error, str(probe.rank))


def failed(error: Exception, where: str) -> ProbeAnswer:
    """Return the answer of a probe that met an error of the engine's."""
    return ProbeAnswer(
        error={
            "code": "ENGINE",
            "what": "in-rank probe failed",
            "found": f"{type(error).__name__}: {error}",
            "where": where,
            "todo": "see the engine's log",
        }
    )


def missing_targets(targets: Sequence[str]) -> tuple[str, ...]:
    """Return the calls that this SGLang does not have; its hook registry only logs them."""
    return tuple(target for target in targets if not _resolves(target))


def _resolves(target: str) -> bool:
    try:
        pkgutil.resolve_name(target)
    except Exception:  # noqa: BLE001 - whatever an import does, the call was not hooked
        return False
    return True


def unwatched(missing: Sequence[str]) -> ProbeAnswer:
    """Return the answer of a rank in which weights could change unseen: no epoch of it means anything."""
    return ProbeAnswer(
        error=UnsupportedError(
            "updates that the probe cannot watch",
            expected="every update call of SGLang 0.5.23",
            found=f"{len(missing)} missing: {', '.join(missing)}",
            where="in-rank probe",
            todo="install the SGLang that this syncguard supports, or a syncguard that supports this SGLang",
        ).as_dict()
    )


class ProbeHooks:
    """The AROUND hooks of one process: each takes the original function, then its arguments, `self` first."""

    def __init__(self, probes: ProcessProbes, watched: Sequence[str] = ()) -> None:
        """Keep the probes that the hooks count for, and the names of all calls that must be hooked."""
        self._probes = probes
        self._watched = tuple(watched)
        self._unwatched: tuple[str, ...] | None = None
        self._board = StageBoard()

    def on_check(self, original: Any, checker: Any, action: str, *args: Any, **kwargs: Any) -> Any:
        """Answer our actions; let SGLang answer its own, counting those that write."""
        if action in WRITING_ACTIONS:
            return self.counted(original, checker, action, *args, **kwargs)
        if not action.startswith(ACTION_PREFIX):
            return original(checker, action, *args, **kwargs)
        role = kwargs["role"]
        if self._unwatched is None:  # now every module is imported, so a call that is missing is missing for good
            self._unwatched = missing_targets(self._watched)
        placement = checker._parallelism_info(role=role).model_dump()  # noqa: SLF001 - required field
        return {
            "checksums": self._said(checker, role, action, placement),
            "per_gpu_checksum": "",
            "parallelism_info": placement,
        }

    def _said(self, checker: Any, role: str, action: str, placement: dict[str, Any]) -> dict[str, str]:
        """Return our entries of the reply: this rank's answer, or those that later stages left for the first one."""
        collecting = action.startswith(f"{ACTION_PREFIX}{ProbeOp.COLLECT.value}:")
        stage = int(placement.get("pp_rank") or 0)
        try:
            if collecting and not self._unwatched:
                if stage or int(placement["tp_rank"]):
                    return {}
                return self._board.collect(decode_request(action).nonce, int(placement["size"]), role)
            said = unwatched(self._unwatched) if self._unwatched else answer(self._probes.of(checker, role), action)
            text = encode_answer(said)
            if stage:
                self._board.leave(decode_request(action).nonce, int(placement["rank"]), role, text)
        except Exception as error:  # raised, it would leave the other ranks waiting in the gather
            logger.exception("syncguard probe failed")
            return {ANSWER_KEY: encode_answer(failed(error, str(placement)))}
        return {ANSWER_KEY: text}

    def counted(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Count one update, whether it returns or raises."""
        self._probes.started()
        try:
            return original(*args, **kwargs)
        finally:
            self._probes.finished()

    def on_flush(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Count a flush that this rank did and did not refuse."""
        done = original(*args, **kwargs)
        if done:
            self._probes.flushed()
        return done

    def in_session(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Count an update call that only works inside a session."""
        if getattr(args[0], "_session", None) is None:
            return original(*args, **kwargs)
        return self.counted(original, *args, **kwargs)

    def on_begin(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Open a session from before its first write; it stays open when beginning broke half-way."""
        if getattr(args[0], "_session", None) is None:
            self._probes.started()
        return original(*args, **kwargs)

    def on_end(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Close a session that was open and now is not."""
        was_open = getattr(args[0], "_session", None) is not None
        result = original(*args, **kwargs)
        if was_open and getattr(args[0], "_session", None) is None:
            self._probes.finished()
        return result


def install() -> None:
    """Register the hooks; called by SGLang in each of its processes.

    A target that this SGLang does not have is logged by SGLang and ignored. The agent sees a missing probe as
    UNSUPPORTED, and so does a probe that cannot watch one of the calls below: never as ready.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    probes = ProcessProbes()
    hooks = ProbeHooks(probes, WATCHED)
    targets = {
        CHECKER: hooks.on_check,
        FLUSH: hooks.on_flush,
        SESSION_BOUNDS[0]: hooks.on_begin,
        SESSION_BOUNDS[1]: hooks.on_end,
        **dict.fromkeys(UPDATE_CALLS, hooks.counted),
        **dict.fromkeys(SESSION_CALLS, hooks.in_session),
        **{call: probes.graphs.hook(kinds) for call, kinds in GRAPH_CALLS.items()},
    }
    for target, hook in targets.items():
        HookRegistry.register(target, hook, HookType.AROUND)
    sglang_inside.install()
