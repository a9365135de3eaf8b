"""One worker's agent: what callers ask of it, each in its turn at the engine.

Its state, journal and subscribers are in `agent.shell`; what happens by itself is in `agent.watch`.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from syncguard.agent.core import Phase, Step
from syncguard.agent.events import (
    EngineLost,
    EvidenceAgainst,
    Fence,
    Refuse,
    Scrubbed,
    UpdateAnnounced,
    VerifyFinished,
    VerifyRequested,
)
from syncguard.agent.journal import Journal, Remembered
from syncguard.agent.replay_pass import Passes, ReplayRunner
from syncguard.agent.settings import AgentConfig
from syncguard.agent.shell import Shell
from syncguard.agent.verification import (
    Cancelled,
    Verification,
    VerifyRequest,
    given_up,
    gravest_code,
    refused_manifest,
)
from syncguard.agent.verify import Verifier
from syncguard.agent.watch import Proven, Watcher
from syncguard.errors import ScoreError, SyncguardError, UnreachableError, VersionOrderError
from syncguard.manifest.compare import known_version
from syncguard.manifest.verdict import (
    Readiness,
    VerdictStatus,
)
from syncguard.replay import A, ReplayRecord

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from syncguard.engines.base import EngineAdapter, EngineStatus
    from syncguard.layout.model import RankLayout
    from syncguard.manifest.model import KnownVersion, Manifest, RankObservation
    from syncguard.spec import WeightVersion

log = logging.getLogger("syncguard.agent")


@dataclass(frozen=True, slots=True)
class Outcome:
    """A finished verification with the readiness that followed."""

    verification: Verification
    readiness: Readiness


class Agent(Shell):
    """The agent of one worker.

    Args:
        adapter: The engine.
        worker: Name of the worker.
        journal: Journal; None keeps it in memory.
        config: Times and bounds.
        watch_adapter: A second connection for polling, so that a long call does not hide the engine; None shares the
            first one, and polls then wait for it.
        clock: Seconds that never go back, for leases and for the order of answers.
        wall: Seconds since the Unix epoch, for what people read.
    """

    def __init__(
        self,
        adapter: EngineAdapter,
        *,
        worker: str,
        journal: Journal | None = None,
        config: AgentConfig | None = None,
        watch_adapter: EngineAdapter | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """Restore the history; the state starts UNKNOWN, whatever the journal says."""
        super().__init__(
            worker=worker,
            journal=journal if journal is not None else Journal(None),
            config=config if config is not None else AgentConfig(),
            clock=clock,
            wall=wall,
        )
        self.adapter = adapter
        self.engine_lock = threading.Lock()
        self._stop = threading.Event()
        self._known = list(self.journal.known())
        self._old: Passes | None = None
        self._old_before: WeightVersion | None = None
        self._verified_passes: Passes | None = None
        self.proven: Proven | None = None
        self._verdict_counts: Counter[str] = Counter()
        self.last: Verification | None = None
        self.watcher = Watcher(self, watch_adapter)

    def live(self) -> tuple[bool, str]:
        """Return whether the watcher does its work, and in words what it did last."""
        return self.watcher.live()

    def verdict_counts(self) -> dict[str, int]:
        """Return how many verifications ended with each status since the start."""
        with self._state_lock:
            return dict(self._verdict_counts)

    def start(self) -> None:
        """Start watching the engine."""
        self.watcher.start()

    def close(self) -> None:
        """Stop watching, and close the journal; the adapters are closed too."""
        self._stop.set()
        self.watcher.stop()
        self.adapter.close()
        self.journal.close()

    # --- what callers ask for -------------------------------------------------------------------------------------

    def announce(
        self, version: WeightVersion, records: Sequence[ReplayRecord] = (), *, rollback_because: str = ""
    ) -> tuple[Readiness, str]:
        """Leave READY before a push; while a verified state is still resident, take its B scores.

        Returns:
            The readiness, and in words whether old scores were taken.

        Raises:
            VersionOrderError: The version goes back without a named rollback.
        """
        with self._state_lock:
            was_ready = self.state.phase is Phase.READY
            verified_label = str(self.state.held.version) if self.state.held is not None else ""
            fence = self.state.held.fence if self.state.held is not None else None
            # A push after a failed one still follows the state that was verified before it, if the trainer's old scores
            # are of that state: it is the one the noise was measured at.
            self._old = self._verified_passes if was_ready else self._old_of(version, records)
            self._old_before = version
            refused = self._refusal(self.apply(UpdateAnnounced(version, rollback_because)))
            if refused is not None:
                raise refused
        if not records:
            return self.readiness, self._old_words()
        if not was_ready or fence is None:
            said = self._old_words() if self._old is not None else "not taken: the resident weights were not verified"
            return self.readiness, said
        with self.engine_lock:
            said = self._take_old(records, verified_label, fence)
        return self.readiness, said

    def verify(self, request: VerifyRequest, progress: Callable[[str, float], None] | None = None) -> Outcome:
        """Verify the worker after a push; the only way to READY."""
        outcome: Outcome | None = None
        for attempt in range(1, self.config.race_attempts + 1):
            outcome = self._verify_once(request, progress or (lambda _step, _fraction: None), attempt)
            state = self.state
            if not outcome.verification.raced or state.running is not None or state.announced is not None:
                break  # concluded, or a newer request took over
            if attempt < self.config.race_attempts:
                self._stop.wait(self.config.race_wait_s)
        assert outcome is not None
        return outcome

    def audit(self, manifest: Manifest, progress: Callable[[str, float], None] | None = None) -> Verification:
        """Compare with a manifest from outside the loop; never makes the worker ready, but may block it.

        It blocks only when it is the very manifest that the worker was proven to hold, under the same fence.
        """
        with self.engine_lock:
            began_s = self.now_s()
            verifier = Verifier(
                self.adapter, self.worker, seen=self.seen_now(), progress=progress or (lambda _s, _f: None)
            )
            found = verifier.audit(manifest, history=self._history(manifest), rekeyed=self._rekeyed(manifest))
        if found.verdict.status is VerdictStatus.MISMATCH and found.fence is not None:
            self.apply(
                EvidenceAgainst(found.fence, manifest.manifest_id, gravest_code(found.verdict), found.verdict.reason)
            )
        elif found.verdict.status is VerdictStatus.MATCH and found.fence is not None:
            self.apply(Scrubbed(found.fence, manifest.manifest_id, began_s))
        return found

    def compare_again(self, manifest: Manifest) -> Verification | None:
        """Compare in full without blocking anyone; None while another call holds the engine."""
        if not self.engine_lock.acquire(blocking=False):
            return None
        try:
            return Verifier(self.adapter, self.worker, seen=self.seen_now()).audit(manifest)
        finally:
            self.engine_lock.release()

    def layouts(self) -> Sequence[RankLayout]:
        """Return the live layouts."""
        with self.engine_lock:
            return self.adapter.layouts()

    def observe(self, key_seed: bytes) -> Sequence[RankObservation]:
        """Digest every rank once; judges nothing."""
        with self.engine_lock:
            return self.adapter.observe(key_seed)

    def status(self, wait_s: float = -1.0) -> EngineStatus | None:
        """Read the engine's status now and feed it.

        Args:
            wait_s: Longest wait for a call that holds the engine, in seconds; below 0 without an end.

        Returns:
            The status; None where another call went on holding the engine.
        """
        if not self.engine_lock.acquire(timeout=wait_s):
            return None
        try:
            return self.status_now()
        finally:
            self.engine_lock.release()

    def status_now(self) -> EngineStatus:
        """Read the engine's status and feed it; for a caller that has the engine."""
        began = self._clock()
        status = self.adapter.status()
        self.feed(status, began)
        return status

    def capture(self, prompt_ids: Sequence[int], *, max_new_tokens: int, seed: int) -> ReplayRecord:
        """Generate one response and return it as a record with A."""
        with self.engine_lock:
            status = self.adapter.status()
            generation = self.adapter.generate(prompt_ids, max_new_tokens=max_new_tokens, seed=seed)
        if not generation.response_ids:
            raise ScoreError("the engine generated nothing", expected="one token or more", where=self.worker)
        return ReplayRecord(
            input_ids=[*prompt_ids, *generation.response_ids],  # type: ignore[arg-type]
            prompt_length=len(prompt_ids),
            scores={A: generation.logprobs_nats},  # type: ignore[dict-item]
            sampling=dict(generation.settings),
            worker=self.worker,
            model_revision=status.model,
            versions={"old": generation.weight_version_label or status.weight_version_label},
            record_id=f"{self.worker}-{seed}",
        )

    def _verify_once(self, request: VerifyRequest, progress: Callable[[str, float], None], attempt: int) -> Outcome:
        manifest = request.manifest
        began = self._clock()
        with self.engine_lock:
            # Seen first, so that a push that finished a moment ago is not taken for one during the verification.
            try:
                self.feed(self.adapter.status(), began)
            except UnreachableError as error:
                self.apply(EngineLost(error.text()))
            except SyncguardError as error:
                log.warning("%s: %s", self.worker, error)
            done = self.apply(VerifyRequested(manifest.version, manifest.manifest_id))
            refused = self._refusal(done)
            if refused is not None:
                return Outcome(refused_manifest(self.worker, refused), self.readiness)
            ticket = self.state.ticket_count

            def check_cancelled() -> None:
                running = self.state.running
                if running is None or running.number != ticket:
                    raise Cancelled

            verifier = Verifier(
                self.adapter,
                self.worker,
                seen=self.seen_now(),
                check_cancelled=check_cancelled,
                progress=progress,
            )
            try:
                found = verifier.verify(
                    request, history=self._history(manifest), rekeyed=self._rekeyed(manifest), old=self._old
                )
            except Cancelled:
                found = given_up(self.worker, self.state.message)
            verdict = found.verdict
            evidence = {"manifest_id": manifest.manifest_id, "attempt": attempt, **verdict.evidence}
            self.apply(
                VerifyFinished(ticket, found.fence, verdict.status, gravest_code(verdict), verdict.reason), evidence
            )
            ready = self.state.phase is Phase.READY
            if ready:
                self._remember(manifest, found)
            self.last = found
            with self._state_lock:
                self._verdict_counts[verdict.status.value] += 1
        return Outcome(found, self.readiness)

    def _refusal(self, done: Step) -> VersionOrderError | None:
        for effect in done.effects:
            if isinstance(effect, Refuse):
                return VersionOrderError(
                    effect.what, expected=effect.expected, found=effect.found, where=self.worker, todo=effect.todo
                )
        return None

    def _remember(self, manifest: Manifest, found: Verification) -> None:
        assert found.observation is not None
        self._verified_passes = found.passes
        self.proven = Proven(manifest, found.observation)
        self._old = None
        newest = Remembered(known_version(manifest, found.observation), manifest.key_seed_hex, manifest.algorithm)
        rest = [r for r in self._known if r.known.label != newest.known.label]
        self._known = [newest, *rest][: self.config.known_versions]
        try:
            self.journal.remember(self._known)
        except sqlite3.Error as error:  # it only explains; the verdict stands
            log.warning("%s: the history cannot be written: %s", self.worker, error)

    def _history(self, manifest: Manifest) -> tuple[KnownVersion, ...]:
        # Sums under two keys are unrelated numbers: only versions digested under this key can explain anything.
        return tuple(
            r.known
            for r in self._known
            if (r.key_seed_hex, r.algorithm) == (manifest.key_seed_hex, manifest.algorithm)
            and r.known.label != str(manifest.version)
        )

    def _rekeyed(self, manifest: Manifest) -> tuple[tuple[bytes, KnownVersion], ...]:
        return tuple(
            (bytes.fromhex(r.key_seed_hex), r.known)
            for r in self._known
            if r.algorithm == manifest.algorithm
            and r.key_seed_hex != manifest.key_seed_hex
            and r.known.label != str(manifest.version)
        )

    def _take_old(self, records: Sequence[ReplayRecord], label: str, fence: Fence) -> str:
        try:
            began = self._clock()
            before = self.adapter.status()
            self.feed(before, began)
            runner = ReplayRunner(self.adapter, worker=self.worker, vocab_size=before.vocab_size, sleep=time.sleep)
            passes = runner.take(records, label=label, warm=0, replicas=before.replicas)
            after = self.adapter.status()
        except SyncguardError as error:
            return f"not taken: {error.text()}"
        if Fence.of(before) != fence or Fence.of(after) != fence or passes.findings:
            return "not taken: the engine changed, or a flush was not confirmed"
        self._old = passes
        return self._old_words()

    def _old_of(self, version: WeightVersion, records: Sequence[ReplayRecord]) -> Passes | None:
        """Return the passes of the last verified state where this announcement still follows that state."""
        old = self._old
        if old is None or version == self._old_before:
            return old
        follows = records and all(record.versions.get("old") == old.label for record in records)
        return old if follows else None

    def _old_words(self) -> str:
        return f"of {self._old.label}" if self._old is not None else "none"
