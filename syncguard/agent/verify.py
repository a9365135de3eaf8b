"""One verification of one worker: fence, digests, replay, fence again, and one verdict over all of it.

A thin shell over an adapter, without a state of its own and without retries: what the engine showed at one fence is
judged once, and an observation that overlaps an update is thrown away. Every failure becomes a finding; nothing that
an engine does can make this raise.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from syncguard.agent.events import Fence
from syncguard.agent.graph_places import moved_under_graphs
from syncguard.agent.rekeyed import asks_for_earlier_versions, told_under_new_key
from syncguard.agent.replay_pass import (
    Passes,
    ReplayRunner,
    evidence_of,
    record_key,
    vocabulary_of,
    with_passes,
)
from syncguard.agent.verification import Cancelled, Verification, VerifyRequest
from syncguard.errors import (
    EngineError,
    ObservationRacedError,
    RecordError,
    ScoreError,
    SpecVersionError,
    SyncguardError,
    UnreachableError,
    UnsupportedError,
)
from syncguard.manifest.compare import compare
from syncguard.manifest.model import WorkerObservation
from syncguard.manifest.recorded import recorded_findings
from syncguard.manifest.verdict import Finding, FindingCode, Severity, Verdict, VerdictStatus, status_of
from syncguard.replay import ReplayRecord, ReplayStatus, ReplayVerdict, judge_replay
from syncguard.replay.packing import require_one_context

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from syncguard.engines.base import EngineAdapter, EngineStatus
    from syncguard.manifest.model import KnownVersion, Manifest

_GRAVITY = (Severity.MISMATCH, Severity.UNSUPPORTED, Severity.INCOMPLETE, Severity.WARNING)
_SERIOUS = (
    ReplayStatus.PASS,
    ReplayStatus.NO_POWER,
    ReplayStatus.INCOMPLETE,
    ReplayStatus.UNSTABLE,
    ReplayStatus.FAIL,
)
_FAILED_REPLAY = {
    "stale": FindingCode.REPLAY_STALE,
    "partial update": FindingCode.REPLAY_STALE,
    "stale prefix cache": FindingCode.REPLAY_CACHE_STALE,
}


@dataclass(slots=True)
class Verifier:
    """Runs verifications and audits over one adapter, one at a time (the caller serializes).

    Attributes:
        adapter: The engine.
        worker: Name of the worker.
        seen: Called with each status that is read, before anything else is done with it.
        check_cancelled: Raises `Cancelled` between steps when the result can no longer count.
        progress: Called with a step's name and the finished fraction.
        sleep: Waits, in seconds.
    """

    adapter: EngineAdapter
    worker: str
    seen: Callable[[EngineStatus], None] = lambda _status: None
    check_cancelled: Callable[[], None] = lambda: None
    progress: Callable[[str, float], None] = lambda _step, _fraction: None
    sleep: Callable[[float], object] = time.sleep

    def verify(
        self,
        request: VerifyRequest,
        *,
        history: Sequence[KnownVersion] = (),
        rekeyed: Sequence[tuple[bytes, KnownVersion]] = (),
        old: Passes | None = None,
    ) -> Verification:
        """Check digests, replay, flush and label at one fence.

        Args:
            request: The claim.
            history: Earlier versions under the same digest key, newest first.
            rekeyed: Earlier versions under other keys, each with its key seed, newest first; where something is left to
                explain, the worker is read once more under each key.
            old: B passes at the verified state before the update.

        Raises:
            Cancelled: A newer request took over.
        """
        run = _Run(self, request, old, rekeyed)
        return run.finish(run.attempt(history, replayed=True, require_label=True))

    def audit(
        self,
        manifest: Manifest,
        *,
        history: Sequence[KnownVersion] = (),
        rekeyed: Sequence[tuple[bytes, KnownVersion]] = (),
    ) -> Verification:
        """Compare with a manifest from outside the loop: digests and coverage only."""
        run = _Run(self, VerifyRequest(manifest, replay_waived_because="an audit compares digests only"), None, rekeyed)
        return run.finish(run.attempt(history, replayed=False, require_label=False))

    def observe(self, status: EngineStatus, key_seed: bytes) -> WorkerObservation:
        """Read every rank once.

        Raises:
            ObservationRacedError: A rank answered from another incarnation or epoch than the status said.
        """
        layouts = tuple(self.adapter.layouts())
        ranks = tuple(self.adapter.observe(key_seed))
        observed = Fence(tuple(sorted((str(r.rank), r.incarnation, r.epoch) for r in ranks)), status.expected_ranks)
        if ranks and observed != Fence.of(status):
            raise ObservationRacedError(
                "the engine changed while it was read", expected=Fence.of(status), found=observed, where=self.worker
            )
        return WorkerObservation(self.worker, status.expected_ranks, layouts, ranks, status.weight_version_label)


class _Run:
    """The steps of one verification and what they have found so far."""

    def __init__(
        self,
        verifier: Verifier,
        request: VerifyRequest,
        old: Passes | None,
        rekeyed: Sequence[tuple[bytes, KnownVersion]],
    ) -> None:
        self.verifier = verifier
        self.request = request
        self.old = old
        self.rekeyed = tuple(rekeyed)
        self.findings: list[Finding] = []
        self.seconds: dict[str, float] = {}
        self.digests: Verdict | None = None
        self.replay: ReplayVerdict | None = None
        self.records: tuple[ReplayRecord, ...] = ()
        self.passes: Passes | None = None
        self.observation: WorkerObservation | None = None
        self.evidence: dict[str, str] = {}
        self.answered = True
        self.was_raced = False

    def attempt(self, history: Sequence[KnownVersion], *, replayed: bool, require_label: bool) -> Fence | None:
        before = self.status("status")
        if before is None:
            return None
        fence = Fence.of(before)
        if any(rank.updating for rank in before.ranks):
            self.raced(FindingCode.UPDATE_RUNNING, "an update session is open; end it, then verify again", fence, fence)
            return None
        self.evidence |= {"engine": before.engine, "fence": str(fence), "label": before.weight_version_label}
        self.evidence["exported_from"] = self.request.manifest.source
        self.timed("observe", 0.1, lambda: self.observe(before))
        if self.observation is not None:
            self.digested(before, self.observation, history, require_label=require_label)
        if replayed and self.answered:
            self.timed("replay", 0.5, lambda: self.replayed(before))
        elif replayed:
            self.missing("the engine stopped answering before the replay")
        if self.observation is not None:
            self.recorded(self.observation, required=replayed)
        after = self.status("fence")
        if after is None:
            return None
        self.verifier.progress("fence", 1.0)
        if Fence.of(after) != fence or any(rank.updating for rank in after.ranks):
            code = (
                FindingCode.INCARNATION_CHANGED
                if fence.difference(Fence.of(after)) == "engine_restarted"
                else FindingCode.UPDATE_RUNNING
            )
            self.raced(
                code,
                "the engine changed while it was verified; the observation was thrown away",
                fence,
                Fence.of(after),
            )
            return None
        if after.weight_version_label != before.weight_version_label:
            self.raced(FindingCode.UPDATE_RUNNING, "the version label changed while it was verified", fence, fence)
            return None
        return fence

    def status(self, step: str) -> EngineStatus | None:
        self.verifier.check_cancelled()
        started = time.perf_counter()
        try:
            status = self.verifier.adapter.status()
        except Exception as error:  # noqa: BLE001 - whatever an engine does becomes a finding
            self.failed(error, step)
            return None
        finally:
            self.seconds["status"] = self.seconds.get("status", 0.0) + time.perf_counter() - started
        self.verifier.seen(status)
        return status

    def timed(self, step: str, fraction: float, work: Callable[[], None]) -> None:
        self.verifier.check_cancelled()
        self.verifier.progress(step, fraction)
        started = time.perf_counter()
        try:
            work()
        except Cancelled:
            raise
        except Exception as error:  # noqa: BLE001 - whatever an engine does becomes a finding
            self.failed(error, step)
        finally:
            self.seconds[step] = time.perf_counter() - started

    def observe(self, status: EngineStatus) -> None:
        self.observation = self.verifier.observe(status, self.request.manifest.key_seed)

    def compare(self, observation: WorkerObservation, history: Sequence[KnownVersion], *, require_label: bool) -> None:
        self.digests = compare(self.request.manifest, observation, history=history, require_label=require_label)

    def digested(
        self,
        status: EngineStatus,
        observation: WorkerObservation,
        history: Sequence[KnownVersion],
        *,
        require_label: bool,
    ) -> None:
        """Compare digests, and ask earlier versions where something is left to explain."""
        self.timed("compare", 0.4, lambda: self.compare(observation, history, require_label=require_label))
        self.findings.extend(moved_under_graphs(status, observation))
        verdict = self.digests
        if self.rekeyed and verdict is not None and asks_for_earlier_versions(self.request.manifest, verdict):
            self.timed(
                "history", 0.45, lambda: self.explained(status, observation, history, require_label=require_label)
            )

    def explained(
        self,
        status: EngineStatus,
        observation: WorkerObservation,
        history: Sequence[KnownVersion],
        *,
        require_label: bool,
    ) -> None:
        """Read the worker again under the keys of earlier versions, and compare once more with what they then say."""
        read: dict[bytes, WorkerObservation] = {}
        told: list[KnownVersion] = []
        try:
            for key_seed, known in self.rekeyed:
                if key_seed not in read:
                    self.verifier.check_cancelled()
                    read[key_seed] = self.verifier.observe(status, key_seed)
                told.append(told_under_new_key(known, read[key_seed], observation))
        except SyncguardError as error:  # it only explains; the comparison stands
            self.evidence["history"] = f"not read again under earlier keys: {error.text()}"
            return
        self.evidence["history"] = f"read again under {len(read)} earlier keys"
        self.compare(observation, (*history, *told), require_label=require_label)

    def replayed(self, status: EngineStatus) -> None:
        request = self.request
        layouts = self.observation.layouts if self.observation is not None else ()
        runner = ReplayRunner(
            self.verifier.adapter,
            worker=self.verifier.worker,
            vocab_size=status.vocab_size or vocabulary_of(layouts),
            sleep=self.verifier.sleep,
        )
        if request.replay_waived_because:
            # Without a replay the cache still holds keys and values of the old weights, unless it is emptied now.
            self.findings.extend(runner.empty_cache())
            self.add(
                FindingCode.REPLAY_MISSING, Severity.WARNING, f"no replay, by waiver: {request.replay_waived_because}"
            )
            return
        if not request.records:
            self.missing("no saved response was sent; send a record with C scores, or waive the replay by name")
            return
        try:
            require_one_context(request.records)
        except (RecordError, UnsupportedError) as error:
            self.missing(error.text())
            return
        warm = 1 if request.policy.require_warm else 0
        replicas = max(1, status.replicas)
        self.passes = runner.take(request.records, label=status.weight_version_label, warm=warm, replicas=replicas)
        self.findings.extend(self.passes.findings)
        old = self.old
        # B_old and C_old must be of one state, or their difference is no noise.
        if old is not None and not all(
            record_key(record) in old.cold and record.versions.get("old", old.label) == old.label
            for record in request.records
        ):
            old = None
        judged = [self.of_replica(self.passes, old, replica, replicas) for replica in range(replicas)]
        # What is reported is the replica that speaks most against the worker.
        self.records, self.replay = max(judged, key=lambda one: _SERIOUS.index(one[1].status))
        self.evidence["replicas_replayed"] = str(len(judged))
        self.evidence["old_scores"] = f"of {old.label}, verified" if old is not None else "none of a verified state"
        self.evidence["warm_cache_used"] = "yes" if self.passes.warm_seen else "the engine did not say so"

    def of_replica(
        self, passes: Passes, old: Passes | None, replica: int, replicas: int
    ) -> tuple[tuple[ReplayRecord, ...], ReplayVerdict]:
        """Judge one data-parallel replica: each has weights and a prefix cache of its own."""
        new = passes.of_replica(replica)
        assert new is not None
        before = old.of_replica(replica) if old is not None else None
        records = tuple(
            with_passes(record, new, before, worker=self.verifier.worker) for record in self.request.records
        )
        verdict = judge_replay(evidence_of(records), self.request.policy)
        self.judged(verdict, f" of replica {replica}" if replicas > 1 else "")
        return records, verdict

    def recorded(self, observation: WorkerObservation, *, required: bool) -> None:
        """Demand a replay that agreed where bindings trust the engine's own loader.

        Without power it agreed too, and only cannot tell this version from the last, which digests do; a first version has
        no other outcome.
        """
        judged = self.replay
        passed = judged is not None and judged.status in {ReplayStatus.PASS, ReplayStatus.NO_POWER}
        waived = self.request.replay_waived_because
        why_not = f"it ended as {judged.status.value}" if judged is not None else f"waived: {waived}" if waived else ""
        found = recorded_findings(observation.layouts, required=required, passed=passed, why_not=why_not)
        self.findings.extend(replace(finding, worker=self.verifier.worker) for finding in found)

    def judged(self, replay: ReplayVerdict, where: str = "") -> None:
        if replay.status is ReplayStatus.PASS:
            return
        code, severity = {
            ReplayStatus.FAIL: (
                _FAILED_REPLAY.get(replay.fingerprint, FindingCode.REPLAY_MISMATCH),
                Severity.MISMATCH,
            ),
            ReplayStatus.UNSTABLE: (FindingCode.REPLAY_UNSTABLE, Severity.MISMATCH),
            ReplayStatus.NO_POWER: (FindingCode.REPLAY_NO_POWER, Severity.WARNING),
            ReplayStatus.INCOMPLETE: (FindingCode.REPLAY_MISSING, Severity.INCOMPLETE),
        }[replay.status]
        self.add(code, severity, f"replay{where}: {replay.reason}")

    def failed(self, error: Exception, step: str) -> None:
        """Turn an error into the finding that keeps the worker from READY."""
        text = f"{step}: {error.text() if isinstance(error, SyncguardError) else f'{type(error).__name__}: {error}'}"
        if isinstance(error, ObservationRacedError):
            self.was_raced = True
            self.add(FindingCode.UPDATE_RUNNING, Severity.INCOMPLETE, text)
        elif isinstance(error, UnsupportedError):
            self.add(FindingCode.UNBOUND, Severity.UNSUPPORTED, text)
        elif isinstance(error, SpecVersionError):
            self.add(FindingCode.PROBE_VERSION, Severity.UNSUPPORTED, text)
        elif isinstance(error, ScoreError):
            self.add(FindingCode.REPLAY_MISMATCH, Severity.MISMATCH, text)
        else:
            silent = isinstance(error, UnreachableError) and not isinstance(error, EngineError)
            self.answered = self.answered and not silent
            self.add(FindingCode.ENGINE_UNREACHABLE, Severity.INCOMPLETE, text)

    def raced(self, code: FindingCode, text: str, before: Fence, after: Fence) -> None:
        self.was_raced = True
        # What was read is of no single state: only the race itself may be reported.
        self.findings.clear()
        self.digests = self.replay = self.passes = self.observation = None
        self.records = ()
        self.add(code, Severity.INCOMPLETE, text, expected=str(before), observed=str(after))

    def missing(self, text: str) -> None:
        self.add(FindingCode.REPLAY_MISSING, Severity.INCOMPLETE, text)

    def add(self, code: FindingCode, severity: Severity, text: str, **places: Any) -> None:
        self.findings.append(Finding(code, severity, text, worker=self.verifier.worker, **places))

    def finish(self, fence: Fence | None) -> Verification:
        digests = self.digests
        if digests is None and not any(f.severity is not Severity.WARNING for f in self.findings):
            self.add(FindingCode.ENGINE_UNREACHABLE, Severity.INCOMPLETE, "nothing was read")
        findings = [*(digests.findings if digests is not None else ()), *self.findings]
        findings.sort(key=lambda finding: _GRAVITY.index(finding.severity))
        status = status_of(tuple(findings))
        if status is VerdictStatus.MATCH and digests is not None:
            status = digests.status  # a comparison is believed even where it names no finding
        seconds = {f"{step}_s": f"{seconds:.6f}" for step, seconds in self.seconds.items()}
        verdict = Verdict(
            status,
            self.reason(status, findings),
            tuple(findings),
            **({"coverage": digests.coverage} if digests is not None else {}),
            evidence={**(digests.evidence if digests is not None else {}), **self.evidence, **seconds},
        )
        return Verification(
            fence if self.answered else None,
            verdict,
            self.replay,
            self.records,
            self.passes,
            self.observation,
            self.seconds,
            self.was_raced,
        )

    def reason(self, status: VerdictStatus, findings: Sequence[Finding]) -> str:
        digests = self.digests.reason if self.digests is not None else "no digests were read"
        if status is VerdictStatus.MATCH:
            judged = self.replay
            replay = "no replay, by waiver" if judged is None else f"replay {judged.status.value}: {judged.reason}"
            return f"{digests}; {replay}"
        if self.digests is not None and self.digests.status is status:
            return digests
        gravest = findings[0]
        return f"{gravest.code.value}: {gravest.text}"
