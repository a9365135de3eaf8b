"""The state machine against a naive oracle that reads the whole history again after every event."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from syncguard.agent.core import AgentState, CoreConfig, Phase, step
from syncguard.agent.events import (
    Begin,
    EngineLost,
    EngineSeen,
    EvidenceAgainst,
    Fence,
    Refuse,
    Reproved,
    Scrubbed,
    Tick,
    UpdateAnnounced,
    VerifyFinished,
    VerifyRequested,
)
from syncguard.manifest.verdict import ReadinessState, VerdictStatus
from syncguard.spec import WeightVersion

LEASE_S = 5.0
SCRUB_LEASE_S = 12.0
FENCES = [Fence((("tp0/1", inc, epoch),), 1) for inc, epoch in (("a", 0), ("a", 1), ("b", 0))]
VERSIONS = [WeightVersion("run", 0), WeightVersion("run", 1), WeightVersion("run", 2), WeightVersion("other", 0)]
MANIFESTS = ["m0", "m1"]


def oracle_ready(  # noqa: C901, PLR0912 - one branch an event, so that it can be read from top to bottom
    history: list[tuple[object, float, bool]],
) -> bool:
    """Whether the worker may serve, by reading the history from its start.

    A proof is (fence, version, manifest). It is made by a MATCH of the newest accepted request when nothing moved since
    that request, and it ends with anything that speaks against it.
    """
    seen = updating = label = None
    request = proof = lapsed = None
    renewed_s = scrubbed_s = 0.0
    newest_ticket = 0
    for event, now_s, accepted in history:
        over = now_s - renewed_s >= LEASE_S or now_s - scrubbed_s >= SCRUB_LEASE_S
        if isinstance(event, EngineSeen):
            moved = seen is not None and event.fence != (proof[0] if proof else seen)
            seen, updating, label = event.fence, event.updating, event.label
            if moved or updating:
                request = proof = lapsed = None
            if proof and label != str(proof[1]):
                proof = None
            if proof and over:
                proof, lapsed = None, proof
            if proof:
                renewed_s = now_s
        elif isinstance(event, Scrubbed):
            if proof and (proof[0], proof[2]) == (event.fence, event.manifest_id):
                if over:
                    proof, lapsed = None, proof
                else:
                    scrubbed_s = max(scrubbed_s, event.asked_s)
        elif isinstance(event, Tick | EngineLost):
            if proof and over:
                proof, lapsed = None, proof
        elif isinstance(event, UpdateAnnounced):
            if accepted:
                request = proof = lapsed = None
        elif isinstance(event, VerifyRequested):
            if accepted:
                newest_ticket += 1
                request, proof, lapsed = (newest_ticket, event), None, None
            elif event.version == _newest_of(history, event):
                request = proof = lapsed = None  # a contradiction: nobody knows what the worker should hold
        elif isinstance(event, VerifyFinished):
            if request and request[0] == event.ticket:
                asked = request[1]
                request = lapsed = None
                good = event.status is VerdictStatus.MATCH and event.fence == seen and seen is not None and not updating
                proof = (event.fence, asked.version, asked.manifest_id) if good else None
                renewed_s = scrubbed_s = now_s
        elif isinstance(event, EvidenceAgainst):
            subject = proof or lapsed
            if subject and (subject[0], subject[2]) == (event.fence, event.manifest_id):
                request = proof = lapsed = None
        elif isinstance(event, Reproved):
            fits = lapsed and (lapsed[0], lapsed[2]) == (event.fence, event.manifest_id)
            if fits and seen == event.fence and not updating and label == str(lapsed[1]):
                proof, lapsed, renewed_s, scrubbed_s = lapsed, None, now_s, now_s
    return proof is not None


def _newest_of(history, event):
    """Version of the last accepted request of the same run before this very event."""
    newest = None
    for other, _, accepted in history:
        if other is event:
            break
        if isinstance(other, VerifyRequested) and accepted and other.version.run_id == event.version.run_id:
            newest = other.version
        rolled_back = isinstance(other, UpdateAnnounced) and accepted and other.rollback_because
        if rolled_back and newest is not None and other.version.older_than(newest):
            newest = None
    return newest


def goes_back(history: list[tuple[object, float, bool]]) -> bool:
    """Whether the last event asks for an older step than one that was accepted since the last named rollback."""
    *before, (asked, _, _) = history
    newest = -1
    for event, _, accepted in before:
        if not accepted or getattr(getattr(event, "version", None), "run_id", "") != asked.version.run_id:
            continue
        if isinstance(event, UpdateAnnounced) and event.rollback_because and event.version.step < newest:
            newest = event.version.step
        if isinstance(event, VerifyRequested):
            newest = max(newest, event.version.step)
    return asked.version.step < newest


class AgainstOracle(RuleBasedStateMachine):
    """Any order of events, with the ones that matter made likely."""

    def __init__(self) -> None:
        super().__init__()
        self.state = AgentState()
        self.now_s = 0.0
        self.history: list[tuple[object, float, bool]] = []
        self.versions_accepted: dict[str, WeightVersion] = {}

    def feed(self, event: object) -> None:
        before = self.state
        done = step(before, event, self.now_s, CoreConfig(LEASE_S, SCRUB_LEASE_S))
        self.state = done.state
        accepted = not any(isinstance(effect, Refuse) for effect in done.effects)
        self.history.append((event, self.now_s, accepted))
        if isinstance(event, VerifyRequested):
            assert not (accepted and goes_back(self.history)), "an older manifest was accepted"
            assert accepted == any(isinstance(effect, Begin) for effect in done.effects)
        if before.phase is not Phase.READY and done.state.phase is Phase.READY:
            assert isinstance(event, VerifyFinished | Reproved)
            assert done.transition
        if before.readiness != done.state.readiness and before.readiness.state is not done.state.readiness.state:
            assert done.transition, "a change that others see was not journaled"

    def around(self) -> tuple[Fence, WeightVersion, str]:
        """What the state speaks of, so that events come close to it."""
        held = self.state.held or self.state.lapsed
        if held is not None:
            return held.fence, held.version, held.manifest_id
        return self.state.seen or FENCES[0], self.state.version or VERSIONS[0], MANIFESTS[0]

    @initialize(verified=st.booleans())
    def start(self, verified):
        if verified:
            self.a_whole_verification(FENCES[0], VERSIONS[1])

    @rule(fence=st.sampled_from(FENCES), version=st.sampled_from(VERSIONS))
    def a_whole_verification(self, fence, version):
        self.feed(EngineSeen(fence, updating=False, label=str(version)))
        self.feed(VerifyRequested(version, MANIFESTS[0]))
        if self.state.running is not None:
            number = self.state.running.number
            self.feed(VerifyFinished(number, fence, VerdictStatus.MATCH, "verified", "said"))

    @rule(change=st.sampled_from(["none", "none", "none", "label", "updating", "fence"]), other=st.sampled_from(FENCES))
    def engine_answers_nearly_the_same(self, change, other):
        fence, version, _ = self.around()
        self.feed(
            EngineSeen(
                other if change == "fence" else fence,
                updating=change == "updating",
                label="someone@9" if change == "label" else str(version),
            )
        )

    @rule()
    def engine_is_silent(self):
        self.feed(EngineLost("silent"))

    @rule(version=st.sampled_from(VERSIONS), because=st.sampled_from(["", "", "", "restored"]))
    def trainer_announces(self, version, because):
        self.feed(UpdateAnnounced(version, because))

    @rule(version=st.sampled_from(VERSIONS), manifest=st.sampled_from(MANIFESTS))
    def trainer_asks(self, version, manifest):
        self.feed(VerifyRequested(version, manifest))

    @rule()
    def trainer_asks_while_a_session_is_open(self):
        fence, version, manifest = self.around()
        self.feed(EngineSeen(fence, updating=True, label=str(version)))
        self.feed(VerifyRequested(version, manifest))
        if self.state.running is not None:
            self.feed(VerifyFinished(self.state.running.number, fence, VerdictStatus.MATCH, "verified", "said"))

    @rule()
    def trainer_sends_another_manifest_of_the_same_version(self):
        _, version, manifest = self.around()
        self.feed(VerifyRequested(version, MANIFESTS[1 - MANIFESTS.index(manifest)]))

    @rule(status=st.sampled_from([VerdictStatus.MATCH] * 3 + list(VerdictStatus)))
    def running_verification_ends(self, status):
        if self.state.running is not None:
            self.feed(VerifyFinished(self.state.running.number, self.state.seen, status, "verified", "said"))

    @rule(back=st.integers(0, 2), fence=st.sampled_from([*FENCES, None]))
    def a_verdict_arrives_late(self, back, fence):
        ticket = max(1, self.state.ticket_count - back)
        self.feed(VerifyFinished(ticket, fence or self.state.seen, VerdictStatus.MATCH, "verified", "said"))

    @rule(change=st.sampled_from(["none", "fence", "manifest"]), other=st.sampled_from(FENCES))
    def evidence_against_arrives(self, change, other):
        fence, _, manifest = self.around()
        manifest = MANIFESTS[1 - MANIFESTS.index(manifest)] if change == "manifest" else manifest
        self.feed(EvidenceAgainst(other if change == "fence" else fence, manifest, "unknown_content", "said"))

    @rule(change=st.sampled_from(["none", "none", "fence", "manifest"]), other=st.sampled_from(FENCES))
    def proof_again_arrives(self, change, other):
        fence, _, manifest = self.around()
        manifest = MANIFESTS[1 - MANIFESTS.index(manifest)] if change == "manifest" else manifest
        self.feed(Reproved(other if change == "fence" else fence, manifest, "said"))

    @rule(
        change=st.sampled_from(["none"] * 3 + ["fence", "manifest"]),
        other=st.sampled_from(FENCES),
        ago_s=st.integers(0, 9),
    )
    def a_scrub_finds_nothing(self, change, other, ago_s):
        fence, _, manifest = self.around()
        manifest = MANIFESTS[1 - MANIFESTS.index(manifest)] if change == "manifest" else manifest
        self.feed(Scrubbed(other if change == "fence" else fence, manifest, self.now_s - ago_s))

    @rule(answers=st.integers(1, 4))
    def the_engine_answers_and_nobody_scrubs(self, answers):
        for _ in range(answers):
            self.now_s += 4.0
            self.engine_answers_nearly_the_same("none", FENCES[0])

    @rule(seconds=st.sampled_from([0.5, 2.0, 4.75]))
    def time_goes_by(self, seconds):
        self.now_s += seconds
        self.feed(Tick())

    @rule(event=st.sampled_from([Tick(), EngineLost("silent"), None]))
    def the_lease_ends(self, event):
        self.now_s += LEASE_S
        if event is not None:
            self.feed(event)

    @invariant()
    def is_ready_exactly_when_the_history_proves_it(self):
        assert (self.state.phase is Phase.READY) == oracle_ready(self.history), self.state
        assert (self.state.readiness.state is ReadinessState.READY) == (self.state.phase is Phase.READY)

    @invariant()
    def says_what_it_holds_only_while_ready(self):
        assert (self.state.held is not None) == (self.state.phase is Phase.READY)
        assert (self.state.running is not None) == (self.state.phase is Phase.VERIFYING)


AgainstOracle.TestCase.settings = settings(max_examples=120, stateful_step_count=25, deadline=None)
test_state_machine_agrees_with_the_oracle = AgainstOracle.TestCase
