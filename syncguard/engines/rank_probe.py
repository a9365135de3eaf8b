"""What every engine rank runs to show what it holds: walk the live model, digest it in place, answer in numbers.

Shared by the embedded engine and the SGLang plugin. Tensors are duck-typed (`data_ptr`, `shape`, `detach`): torch is
used where the engine has it, never imported here. All calls come from the thread that also applies weight updates.
"""

from __future__ import annotations

import secrets
import time
from dataclasses import replace
from functools import cache
from importlib import metadata
from typing import TYPE_CHECKING, Any, Final

from syncguard.digest import ALGORITHM, DEFAULT_KEY_SEED, PartialDigest
from syncguard.engines.base import RankScrub, RankStatus
from syncguard.engines.rank_reading import Bound, bound_of, derived_result, digest_jobs, padding_result
from syncguard.engines.rank_scratch import Reading
from syncguard.engines.rank_scrub import RankScrubber
from syncguard.errors import ObservationRacedError, UsageError
from syncguard.layout.rules import join
from syncguard.layout.walk import (
    FOLLOWED,
    REGISTRIES,
    is_tensor,
    live_expert_placement,
    live_modules,
    own_tensors,
    walk_model,
)
from syncguard.manifest.model import RankObservation

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from syncguard.layout.model import RankIdentity, RankLayout
    from syncguard.layout.recording import Recording

_PLAIN: Final = (bool, int, float, str, type(None))
_LAYOUTS_KEPT: Final = 4


@cache
def probe_version() -> str:
    """Return the version of the installed syncguard, `uninstalled` when run from a source tree without metadata."""
    try:
        return metadata.version("syncguard")
    except metadata.PackageNotFoundError:
        return "uninstalled"


class RankProbe:
    """Observes one rank of an engine, from inside its process.

    Args:
        rank: Which rank this is, by its own process groups.
        get_model: Returns the live model; called at each use, since engines may replace it.
        record: Records what the engine's own loader does with a model, for layers without a rule; None without a recorder.

    Attributes:
        incarnation: Random identity of this process's rank; a restarted rank makes another probe.
    """

    def __init__(
        self,
        rank: RankIdentity,
        get_model: Callable[[], Any],
        *,
        record: Callable[[Any], Recording] | None = None,
    ) -> None:
        """Start at epoch 0 under a fresh incarnation."""
        self.rank = rank
        self.incarnation = secrets.token_hex(8)
        self._get_model = get_model
        self._record = record
        self._recordings: dict[tuple[Any, ...], Recording] = {}
        self._version = probe_version()
        self._epoch = 0
        self._open_updates = 0
        self._flushes = 0
        self._bound: dict[tuple[Any, ...], Bound] = {}
        self._places: tuple[Any, ...] = ()
        self._addresses: dict[str, int] = {}
        self._graphs: dict[str, Mapping[str, int]] = {}
        self._exempt: dict[tuple[Any, ...], PartialDigest] = {}
        self._scrubber: RankScrubber | None = None

    def update_started(self) -> None:
        """Note that weights may change from now on; calls nest (a session and the transfers inside it)."""
        self._open_updates += 1

    def update_finished(self) -> None:
        """Note that the innermost update ended, well or not; each call is a new epoch.

        A call without a start (an update seen only afterwards) counts as an update too.
        """
        self._open_updates = max(0, self._open_updates - 1)
        self._epoch += 1
        self._scrubber = None
        if not self._open_updates and self._bound and _signature(self._get_model())[1] != self._places:
            self._bound.clear()

    def cache_flushed(self) -> None:
        """Note that this rank emptied its prefix cache."""
        self._flushes += 1

    def graphs_captured(self, addresses: Mapping[str, Mapping[str, int]]) -> None:
        """Note which graphs the engine replays from now on.

        Args:
            addresses: By kind of graph, where each tensor lay when it was captured (`tensor_addresses`); a graph that was
                captured again reads the new places.
        """
        self._graphs = dict(addresses)
        self._addresses.clear()

    def status(self) -> RankStatus:
        """Return the cheap part of an observation."""
        return RankStatus(
            rank=self.rank,
            incarnation=self.incarnation,
            epoch=self._epoch,
            updating=self._open_updates > 0,
            probe_version=self._version,
            flushes=self._flushes,
            graphs=tuple(sorted(self._graphs)),
        )

    def layout(self) -> RankLayout:
        """Return the sealed layout of the live model, walked again when storages or layers changed.

        Raises:
            UnsupportedError: The model cannot be walked at all; single layers without a rule are `unbound` instead.
        """
        return self._bind().layout

    def observe(self, key_seed: bytes) -> RankObservation:
        """Digest all resident memory of the rank in place.

        Args:
            key_seed: Key seed of the digest, 16 to 1024 bytes.

        Raises:
            DigestInputError: The key seed, or a view, cannot be digested.
            ObservationRacedError: An update started or finished meanwhile (an engine with other threads).
        """
        start = time.perf_counter()
        before = self.status()
        bound = self._bind()
        partials = digest_jobs(bound.jobs, key_seed)
        reading = bound.scratch.read(key_seed) if bound.scratch else Reading((), ())
        moved_partials, moved_paddings = iter(reading.partials), iter(reading.paddings)
        paddings = tuple(
            next(moved_paddings) if job is None else padding_result(claim, bound.jobs[job].view, partials[job])
            for claim, job in zip(bound.layout.paddings, bound.padding_job, strict=True)
        )
        derived = tuple(derived_result(claim, bound.tensors) for claim in bound.layout.derived)
        moved = self._moved(bound.tensors)
        altered = self._altered(bound)
        if self.status() != before:
            raise ObservationRacedError(
                "weights changed while they were read",
                expected=f"epoch {before.epoch}",
                found=f"epoch {self._epoch}",
                where=self.rank,
                todo="observe again",
            )
        return RankObservation(
            rank=self.rank,
            incarnation=self.incarnation,
            epoch=self._epoch,
            updating=before.updating,
            layout_fingerprint=bound.layout.fingerprint,
            algorithm=ALGORITHM,
            key_seed_hex=key_seed.hex(),
            partials=tuple(next(moved_partials) if job is None else partials[job] for job in bound.binding_job),
            paddings=paddings,
            derived=derived,
            moved=moved,
            read_bytes=bound.read_bytes,
            duration_s=time.perf_counter() - start,
            probe_version=self._version,
            altered=altered,
        )

    def scrub(self, key_seed: bytes, *, turn: int, budget_bytes: int) -> RankScrub:
        """Digest what is due in one turn; all that is resident is read in `turns` of them.

        Layers and their storages are looked for again at the start of each cycle only: that costs as much as a small turn.

        Args:
            key_seed: Key seed of the digest, 16 to 1024 bytes.
            turn: Number of the turn, modulo the turns of this rank.
            budget_bytes: Bytes of a turn.

        Raises:
            UsageError: Less than one byte a turn.
            ObservationRacedError: An update started or finished meanwhile (an engine with other threads).
        """
        if budget_bytes < 1 or turn < 0:
            raise UsageError("a scrub", expected="a turn from 0 on, of 1 byte or more", found=f"{turn}, {budget_bytes}")
        before = self.status()
        place = RankScrub(self.rank, self.incarnation, self._epoch, before.updating)
        if before.updating:
            return place
        scrubber = self._scrubber
        moved: tuple[str, ...] = ()
        if scrubber is None or scrubber.budget_bytes != budget_bytes or turn % scrubber.turns == 0:
            bound = self._bind()
            moved = self._moved(bound.tensors)
            if scrubber is None or scrubber.budget_bytes != budget_bytes or scrubber.bound is not bound:
                scrubber = RankScrubber(bound, budget_bytes=budget_bytes, digest=digest_jobs, first_exempt=self._exempt)
                self._scrubber = scrubber
        slices, wrong, read_bytes = scrubber.read(turn, key_seed)
        if self.status() != before:
            raise ObservationRacedError("weights changed while they were read", where=self.rank, todo="scrub again")
        return replace(
            place,
            layout_fingerprint=scrubber.bound.layout.fingerprint,
            turns=scrubber.turns,
            slices=slices,
            wrong=wrong,
            moved=moved,
            read_bytes=read_bytes,
        )

    def _bind(self) -> Bound:
        model = self._get_model()
        settings, places = _signature(model)
        if places != self._places:
            # Views keep storages alive: an engine that replaced its tensors must not pay for both.
            self._bound.clear()
            self._scrubber = None
            self._places = places
        bound = self._bound.get(settings)
        if bound is None:
            layout, tensors = walk_model(
                model, rank=self.rank, architecture=type(model).__name__, record=self._recorder(settings)
            )
            bound = bound_of(layout if layout.fingerprint else layout.sealed(), tensors)
            if len(self._bound) >= _LAYOUTS_KEPT:
                self._bound.clear()
            self._bound[settings] = bound
        return bound

    def _recorder(self, settings: tuple[Any, ...]) -> Callable[[Any], Recording] | None:
        """Return the recorder, which runs once for each set of settings: what a loader does depends on no address.

        A tensor of another shape than at the recording is unbound by the recording itself.
        """
        record = self._record
        if record is None:
            return None

        def recorded(model: Any) -> Recording:
            if settings not in self._recordings:
                self._recordings.clear()
                self._recordings[settings] = record(model)
            return self._recordings[settings]

        return recorded

    def _altered(self, bound: Bound) -> tuple[str, ...]:
        """Return exempt tensors with other bytes than when they were first seen in this form.

        No trainer exports them, so their first content is the reference; always under one key, whatever the manifest's.
        """
        partials = digest_jobs(bound.exempt_jobs, DEFAULT_KEY_SEED)
        forms = ((job.fqn, job.dtype.name, job.shape) for job in bound.exempt_jobs)
        found = dict(zip(forms, partials, strict=True))
        altered = tuple(form[0] for form, partial in found.items() if self._exempt.setdefault(form, partial) != partial)
        return tuple(sorted(altered))

    def _moved(self, tensors: Mapping[str, Any]) -> tuple[str, ...]:
        """Return tensors that are no longer where a graph was captured, or where this incarnation first showed them.

        Not "since the last time": a graph that was captured at the start reads the old place for ever, and a scrub or a
        second try must not use up the warning.
        """
        found = {name: int(tensor.data_ptr()) for name, tensor in tensors.items()}
        moved = {n for n, address in found.items() if self._addresses.setdefault(n, address) != address}
        for captured in self._graphs.values():
            moved |= {n for n, address in found.items() if captured.get(n, address) != address}
        return tuple(sorted(moved))


def tensor_addresses(model: Any) -> dict[str, int]:
    """Return where each tensor of a live model lies, by its resident name."""
    return {
        join(name, local): int(tensor.data_ptr())
        for name, module, alias_of in live_modules(model)
        if not alias_of
        for local, tensor, _ in own_tensors(module)
    }


def _signature(model: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return all that a layout depends on: layer classes with their plain settings, and every tensor's place and form.

    Storage addresses are among the places, so views made from a layout are never older than the storage they read.
    """
    settings: list[Any] = []
    places: list[Any] = []
    placement = live_expert_placement()
    for name, module, alias_of in live_modules(model):
        settings += (name, type(module), alias_of)
        if alias_of:
            continue
        for key, value in module.__dict__.items():
            if key not in REGISTRIES:
                _sign(key, value, settings)
        for local, tensor, _ in own_tensors(module):
            places += (name, local, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if placement is not None and "_num_local_routed" in module.__dict__:
            first = module._expert_storage_rank * module._num_local_routed  # noqa: SLF001 - the live slots
            settings += [placement(module.layer_id, first + slot) for slot in range(module._num_local_routed)]  # noqa: SLF001
            # Some tensors have a place for the experts of other ranks too.
            everywhere = getattr(module, "num_experts", 0) - (getattr(module, "num_fused_shared_experts", 0) or 0)
            settings += [placement(module.layer_id, physical) for physical in range(everywhere)]
    return tuple(settings), tuple(places)


def _sign(key: str, value: Any, settings: list[Any]) -> None:
    if isinstance(value, _PLAIN):
        settings += (key, value)
    elif isinstance(value, list | tuple | dict):
        items = list(value.values()) if isinstance(value, dict) else value
        settings += (key, tuple(item for item in items if isinstance(item, _PLAIN)))
    elif key in FOLLOWED and hasattr(value, "__dict__") and not (is_tensor(value) or hasattr(value, "_modules")):
        settings.append(type(value))
        for inner, held in vars(value).items():
            _sign(inner, held, settings)
