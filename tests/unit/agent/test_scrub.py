"""Scrubs: which turns speak against a proof, which say nothing, and how long READY lasts without them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from simulated_engine import ENGINE, F32, SimulatedEngine, manifest_of, record_of, weights_of

from syncguard.agent.core import Phase
from syncguard.agent.events import Fence
from syncguard.agent.host import Agent
from syncguard.agent.scrub import ScrubBook, ScrubOutcome, cycle_s, judge_scrub
from syncguard.agent.service import AgentServer, ListenOptions
from syncguard.agent.settings import AgentConfig
from syncguard.agent.verify import VerifyRequest
from syncguard.agent.web import web_sources
from syncguard.digest import DEFAULT_KEY_SEED, DigestJob
from syncguard.engines.base import RankScrub, ScrubSlice
from syncguard.errors import EngineError
from syncguard.gate.client import AgentClient
from syncguard.manifest.model import WorkerObservation
from syncguard.spec import Box

T0, T1 = weights_of(0), weights_of(1)
ROWS = 4


class Clock:
    """Time that tests move."""

    def __init__(self):
        self.now_s = 1000.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def engine():
    return SimulatedEngine(T0, label="run@0")


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def agent(engine, clock):
    config = AgentConfig(race_wait_s=0.0, lease_s=5.0, scrub_lease_s=20.0)
    made = Agent(engine, worker="w", clock=clock, config=config)
    made.verify(VerifyRequest(manifest_of(T0, "run@0"), (record_of(T0, T0),)))
    assert made.state.phase is Phase.READY
    yield made
    made.close()


# --- the judgement alone


def turn_of(engine, *parts, turns=4, **changes):
    """A turn of the only rank that read these runs of rows of its first binding."""
    layout = engine.layouts()[0]
    tensor = layout.bindings[0].shard.tensor
    view = engine.shards[0][tensor.fqn]
    jobs = [
        DigestJob(view[low:high], F32, tensor.shape, Box((low, 0), (high - low, tensor.shape[1])))
        for low, high in parts
    ]
    partials = ENGINE.partials(jobs, key_seed=DEFAULT_KEY_SEED)
    slices = tuple(ScrubSlice(0, low, high, ROWS, p) for (low, high), p in zip(parts, partials, strict=True))
    answer = RankScrub(layout.rank, engine.incarnations[0], 0, False, layout.fingerprint, turns, slices)
    return replace(answer, **changes)


def judge(engine, proven, book, *answers, graphs=()):
    return judge_scrub(proven, Fence.of(engine.status()), book, answers, graphs=graphs)


@pytest.fixture
def proven(engine):
    return WorkerObservation("w", 1, tuple(engine.layouts()), tuple(engine.observe(DEFAULT_KEY_SEED)), "run@0")


def read(engine, proven, book, *parts):
    found = judge(engine, proven, book, turn_of(engine, *parts))
    return found.outcome, found.book, found.words


def test_runs_of_rows_that_add_up_to_the_proof_are_known_afterwards(engine, proven):
    book = ScrubBook()
    for part in ((0, 1), (1, 3), (3, 4)):
        outcome, book, _ = read(engine, proven, book, part)
        assert outcome is ScrubOutcome.SAME
    assert (book.turn, book.turns, len(book.known), dict(book.sums)) == (3, 4, 3, {})


def test_a_byte_changed_before_its_first_reading_shows_when_its_tensor_was_read(engine, proven):
    engine.shards[0]["layers.0.weight"][0, 0] += 1
    book = ScrubBook()
    outcome, book, _ = read(engine, proven, book, (0, 2))
    assert outcome is ScrubOutcome.SAME, "a part alone cannot be told from the proof of the whole"
    outcome, _, words = read(engine, proven, book, (2, 4))
    assert outcome is ScrubOutcome.DIFFERENT
    assert "layers.0.weight [0:4, 0:6]" in words


def test_a_byte_changed_after_its_reading_shows_in_the_very_turn_that_reads_it_again(engine, proven):
    book = ScrubBook()
    for part in ((0, 2), (2, 4)):
        _, book, _ = read(engine, proven, book, part)
    engine.shards[0]["layers.0.weight"][1, 0] += 1
    outcome, _, words = read(engine, proven, book, (0, 2))
    assert outcome is ScrubOutcome.DIFFERENT
    assert "layers.0.weight [0:2, 0:6]" in words


def test_runs_with_a_gap_between_them_conclude_nothing(engine, proven):
    book = ScrubBook()
    _, book, _ = read(engine, proven, book, (0, 1))
    outcome, book, _ = read(engine, proven, book, (3, 4))
    assert outcome is ScrubOutcome.SAME
    assert not book.known
    assert not book.sums


@pytest.mark.parametrize("change", [{"epoch": 1}, {"incarnation": "another"}, {"updating": True}])
def test_a_turn_read_at_another_state_is_dropped_whatever_it_shows(engine, proven, change):
    engine.shards[0]["layers.0.weight"][0, 0] += 1
    found = judge(engine, proven, ScrubBook(), turn_of(engine, (0, ROWS), **change))
    assert (found.outcome, found.book) == (ScrubOutcome.RACED, ScrubBook())


def test_a_turn_that_a_rank_did_not_answer_is_dropped(engine, proven):
    assert judge(engine, proven, ScrubBook()).outcome is ScrubOutcome.RACED


def test_another_layout_asks_for_a_whole_look(engine, proven):
    found = judge(engine, proven, ScrubBook(), turn_of(engine, layout_fingerprint="other"))
    assert (found.outcome, found.book) == (ScrubOutcome.OTHER_LAYOUT, ScrubBook())


def test_state_that_the_rank_judges_itself_is_named_with_its_rank(engine, proven):
    found = judge(engine, proven, ScrubBook(), turn_of(engine, wrong=("padding of lm_head.weight at (3, 0)",)))
    assert found.outcome is ScrubOutcome.DIFFERENT
    assert found.words == "padding of lm_head.weight at (3, 0) of rank tp0/1"


def test_moved_storage_matters_only_under_a_captured_graph(engine, proven):
    moved = turn_of(engine, moved=("norm.weight",))
    assert judge(engine, proven, ScrubBook(), moved).outcome is ScrubOutcome.SAME
    found = judge(engine, proven, ScrubBook(), moved, graphs={moved.rank})
    assert (found.outcome, found.reason) == (ScrubOutcome.DIFFERENT, "storage_moved")


def test_a_binding_that_was_never_proven_is_a_difference(engine, proven):
    answer = turn_of(engine, (0, ROWS))
    strange = replace(answer, slices=(replace(answer.slices[0], binding=99),))
    assert judge(engine, proven, ScrubBook(), strange).outcome is ScrubOutcome.DIFFERENT


def test_a_cycle_takes_its_turns_times_the_interval(engine, proven):
    assert cycle_s(ScrubBook(), 2.0) == 0
    _, book, _ = read(engine, proven, ScrubBook(), (0, 1))
    assert cycle_s(book, 2.0) == 8.0
    assert book.cycles == 0


# --- the watcher


def test_an_update_in_the_midst_discards_the_scrub(agent, engine):
    def push(name):
        if name == "scrub":
            engine.before = lambda _name: None
            engine.push(T1, "run@0")

    engine.before = push
    agent.watcher.scrub()
    assert agent.state.phase is Phase.READY, "it is the next poll that sees the update"
    assert agent.watcher.scrub_progress()["cycles"] == 0
    agent.watcher.poll()
    assert (agent.state.phase, agent.state.reason) == (Phase.INSTALLED, "update_unannounced")


def test_a_scrub_never_falls_into_a_verification(agent, engine):
    engine.calls.clear()

    def scrub_meanwhile(name):
        if name in ("observe", "score", "flush"):
            with ThreadPoolExecutor(1) as pool:
                pool.submit(agent.watcher.scrub).result(5)

    engine.before = scrub_meanwhile
    agent.verify(VerifyRequest(manifest_of(T0, "run@0"), (record_of(T0, T0),)))
    assert agent.state.phase is Phase.READY
    assert "scrub" not in engine.calls
    engine.before = lambda _name: None
    agent.watcher.scrub()
    assert engine.calls[-1] == "scrub"


def test_a_new_proof_begins_a_new_cycle(agent, engine):
    for _ in range(4):
        agent.watcher.scrub()
    assert agent.watcher.scrub_progress()["cycles"] == 1
    engine.push(T1, "run@1")
    agent.verify(VerifyRequest(manifest_of(T1, "run@1"), (record_of(T0, T1),)))
    assert agent.state.phase is Phase.READY
    agent.watcher.scrub()
    assert agent.state.phase is Phase.READY
    assert agent.watcher.scrub_progress()["cycles"] == 0


def wait(agent, clock, seconds, *, scrub):
    for _ in range(seconds):
        clock.now_s += 1
        agent.watcher.poll()
        if scrub:
            agent.watcher.scrub()


def test_ready_lasts_while_scrubs_find_nothing(agent, clock):
    wait(agent, clock, 60, scrub=True)
    assert agent.state.phase is Phase.READY
    assert agent.watcher.scrub_progress()["cycles"] == 20


def test_ready_ends_when_no_scrub_is_made_though_the_engine_answers(agent, engine, clock):
    def refuse(name):
        if name == "scrub":
            raise EngineError("the rank cannot digest")

    engine.before = refuse
    wait(agent, clock, 19, scrub=True)
    assert agent.state.phase is Phase.READY
    wait(agent, clock, 1, scrub=True)
    assert (agent.state.phase, agent.state.reason) == (Phase.UNKNOWN, "lease_expired")
    agent.watcher.reprove()
    assert (agent.state.phase, agent.state.reason) == (Phase.READY, "reproved"), (
        "a whole comparison is more than a scrub"
    )


def test_an_audit_by_the_proven_manifest_counts_as_a_scrub(agent, clock):
    wait(agent, clock, 15, scrub=False)
    agent.audit(manifest_of(T0, "run@0"))
    wait(agent, clock, 15, scrub=False)
    assert agent.state.phase is Phase.READY
    wait(agent, clock, 5, scrub=False)
    assert agent.state.reason == "lease_expired"


def test_without_scrubs_asked_for_the_answers_alone_hold_the_lease(engine, clock):
    agent = Agent(engine, worker="w", clock=clock, config=AgentConfig(scrub_interval_s=0, scrub_lease_s=20.0))
    agent.verify(VerifyRequest(manifest_of(T0, "run@0"), (record_of(T0, T0),)))
    wait(agent, clock, 60, scrub=False)
    assert agent.state.phase is Phase.READY


def test_the_seconds_of_a_cycle_are_told_over_the_wire_and_over_http(agent):
    server = AgentServer(agent, ListenOptions("127.0.0.1:0"))
    server.start()
    with AgentClient(server.address) as client:
        assert client.status(brief=True).scrub_cycle_s == 0
        agent.watcher.scrub()
        assert client.status(brief=True).scrub_cycle_s == len(T0) * agent.config.scrub_interval_s
    server.stop(0)
    sources = web_sources(agent)
    assert sources.status()["workers"][0]["scrub"]["cycle_s"] == 3.0
    assert sources.registry.get_sample_value("syncguard_scrub_cycle_seconds", {"worker": "w"}) == 3.0
