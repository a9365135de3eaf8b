"""Storage that moved: a graph captured at the start reads the old place, however often somebody looked since."""

from __future__ import annotations

import weakref
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from tiny_models import save_tiny_checkpoint

from syncguard.agent.core import Phase
from syncguard.agent.host import Agent
from syncguard.agent.verify import VerifyRequest
from syncguard.digest import DEFAULT_KEY_SEED
from syncguard.engines.faults import Fault, FaultKind
from syncguard.engines.local import LocalEngine, LocalWorker
from syncguard.engines.sglang_graphs import GRAPH_CALLS, RUNNER
from syncguard.engines.sglang_probe import WATCHED, ProcessProbes
from syncguard.export.checkpoint import export_checkpoint
from syncguard.manifest.verdict import FindingCode, Severity
from syncguard.spec import WeightVersion


@pytest.fixture
def worker(tmp_path):
    return LocalWorker(save_tiny_checkpoint(tmp_path))


def moved(worker):
    return worker.probes[0].observe(DEFAULT_KEY_SEED).moved


def test_a_second_look_does_not_use_up_the_warning(worker):
    assert moved(worker) == ()
    norm = worker.ranks[0].model.norm.weight
    norm.data = norm.data.clone()
    assert [moved(worker) for _ in range(3)] == [("model.norm.weight",)] * 3


def test_storage_that_is_back_in_its_place_is_no_warning(worker):
    norm = worker.ranks[0].model.norm.weight
    first = norm.data
    moved(worker)
    norm.data = first.clone()
    assert moved(worker) == ("model.norm.weight",)
    norm.data = first
    assert moved(worker) == ()


def test_a_restarted_engine_has_its_storage_where_it_is(worker):
    norm = worker.ranks[0].model.norm.weight
    moved(worker)
    norm.data = norm.data.clone()
    assert moved(worker)
    worker.restart()
    assert moved(worker) == ()


def verified(folder, *, graphs, moves):
    worker = LocalWorker(folder, tp_size=2, graphs=graphs)
    agent = Agent(LocalEngine(worker), worker="r0")
    version = WeightVersion("run", 1)
    agent.capture([3, 4], max_new_tokens=2, seed=1)
    agent.observe(DEFAULT_KEY_SEED)
    worker.update_from_disk(folder, label=str(version))
    if moves:
        worker.inject(Fault(FaultKind.STORAGE_MOVED, rank=1))
    outcome = agent.verify(
        VerifyRequest(export_checkpoint(folder, version=version), replay_waived_because="digests only")
    )
    return agent, outcome.verification.verdict.findings


def test_weights_that_moved_under_a_captured_graph_are_not_ready_and_named(tmp_path):
    agent, findings = verified(save_tiny_checkpoint(tmp_path), graphs=True, moves=True)
    assert (agent.state.phase, agent.state.reason) == (Phase.BLOCKED, "storage_moved")
    found = findings[0]
    assert (found.code, found.severity) == (FindingCode.STORAGE_MOVED, Severity.MISMATCH)
    assert (found.resident, found.rank) == ("model.norm.weight", "tp1/2")
    assert "decode graph" in found.text


def test_weights_that_moved_where_nothing_was_captured_are_a_warning(tmp_path):
    agent, findings = verified(save_tiny_checkpoint(tmp_path), graphs=False, moves=True)
    assert agent.state.phase is Phase.READY
    assert FindingCode.STORAGE_MOVED in {finding.code for finding in findings}


def test_a_captured_graph_over_weights_in_their_place_is_no_finding(tmp_path):
    agent, findings = verified(save_tiny_checkpoint(tmp_path), graphs=True, moves=False)
    assert agent.state.phase is Phase.READY
    assert FindingCode.STORAGE_MOVED not in {finding.code for finding in findings}


class Checker:
    """What the probe needs of SGLang's `WeightChecker` (0.5.23)."""

    def __init__(self, model):
        self._get_model = lambda: model

    def _parallelism_info(self, *, role):
        fields = {"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "dp_rank": 0, "dp_size": 1, "role": role}
        return SimpleNamespace(model_dump=lambda: fields)


@pytest.fixture
def runner(worker):
    model = worker.ranks[0]
    eager = object()
    return SimpleNamespace(
        model=model,
        _weight_checker=Checker(model),
        eager_runner=eager,
        decode_cuda_graph_runner=eager,
        prefill_cuda_graph_runner=eager,
    )


class Graphs:
    """A runner of captured graphs."""


def capture(probes, runner, call, **runners):
    def original(held):
        vars(held).update(runners)

    probes.graphs.hook(GRAPH_CALLS[f"{RUNNER}.{call}"])(original, runner)


def replace_norm(runner):
    runner.model.model.norm.weight.data = runner.model.model.norm.weight.data.clone()


def test_an_sglang_runner_that_runs_layer_by_layer_has_no_graphs(runner):
    probes = ProcessProbes()
    capture(probes, runner, "init_cuda_graphs")
    assert probes.of(runner._weight_checker, "target").status().graphs == ()


def test_weights_that_moved_between_capture_and_the_first_look_are_seen(runner):
    probes = ProcessProbes()
    capture(probes, runner, "init_cuda_graphs", decode_cuda_graph_runner=Graphs())
    replace_norm(runner)
    probe = probes.of(runner._weight_checker, "target")
    assert probe.status().graphs == ("decode",)
    assert probe.observe(DEFAULT_KEY_SEED).moved == ("model.norm.weight",)


def test_a_graph_that_is_captured_again_reads_the_new_place_and_the_other_does_not(runner):
    probes = ProcessProbes()
    capture(probes, runner, "init_cuda_graphs", decode_cuda_graph_runner=Graphs(), prefill_cuda_graph_runner=Graphs())
    probe = probes.of(runner._weight_checker, "target")
    replace_norm(runner)
    capture(probes, runner, "init_decode_cuda_graph", decode_cuda_graph_runner=Graphs())
    assert probe.observe(DEFAULT_KEY_SEED).moved == ("model.norm.weight",)
    capture(probes, runner, "init_prefill_cuda_graph", prefill_cuda_graph_runner=Graphs())
    assert probe.observe(DEFAULT_KEY_SEED).moved == ()


@pytest.mark.parametrize("breaks", [False, True])
def test_a_graph_that_was_not_captured_again_after_all_reads_the_old_place(runner, breaks):
    # `_recapture_elastic_cuda_graphs` returns early where it has nothing to do, and may break before the old graph is dropped.
    probes = ProcessProbes()
    capture(probes, runner, "init_cuda_graphs", decode_cuda_graph_runner=Graphs())
    probe = probes.of(runner._weight_checker, "target")
    replace_norm(runner)

    def original(_held):
        if breaks:
            raise RuntimeError("ranks do not agree on the graphs")

    hook = probes.graphs.hook(GRAPH_CALLS[f"{RUNNER}._recapture_elastic_cuda_graphs"])
    with pytest.raises(RuntimeError) if breaks else nullcontext():
        hook(original, runner)
    assert probe.status().graphs == ("decode",)
    assert probe.observe(DEFAULT_KEY_SEED).moved == ("model.norm.weight",)


def test_watching_a_capture_does_not_keep_the_graphs_of_before(runner):
    probes = ProcessProbes()
    capture(probes, runner, "init_cuda_graphs", decode_cuda_graph_runner=Graphs())
    freed = []
    weakref.finalize(runner.decode_cuda_graph_runner, freed.append, 1)

    def original(held):
        held.decode_cuda_graph_runner = None
        assert freed == [1], "while the next graph is captured there is no room for two"
        held.decode_cuda_graph_runner = Graphs()

    probes.graphs.hook(GRAPH_CALLS[f"{RUNNER}.init_decode_cuda_graph"])(original, runner)
    assert freed == [1]


def test_a_capture_that_breaks_is_the_engines_own_error(runner):
    probes = ProcessProbes()

    def original(_held):
        raise torch.OutOfMemoryError("no room for a graph")

    with pytest.raises(torch.OutOfMemoryError):
        probes.graphs.hook(("decode",))(original, runner)


def test_an_sglang_without_these_calls_would_be_refused():
    assert set(GRAPH_CALLS) <= set(WATCHED)
