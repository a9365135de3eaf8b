"""What every engine adapter must do, whatever engine is behind it; a test class inherits it and gives a `rig`."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import load_file

from syncguard.digest import ALGORITHM, DEFAULT_KEY_SEED, PartialDigest
from syncguard.engines.base import EngineAdapter
from syncguard.export.checkpoint import export_checkpoint
from syncguard.manifest.compare import compare
from syncguard.manifest.model import WorkerObservation
from syncguard.manifest.verdict import VerdictStatus
from syncguard.spec import WeightVersion

PROMPT = (3, 17, 42, 99, 5)
OTHER_KEY_SEED = b"another key seed of 32 bytes ..."


@dataclass(frozen=True)
class Rig:
    """An engine under test.

    Attributes:
        adapter: Its adapter.
        first: Checkpoint folder.
        second: Checkpoint folder of the same model with other weights.
        load: Loads a folder into the engine under a label, as its own interface does.
        push: Pushes named tensors in a session under a label.
        restart: Restarts the engine from `first`; None when that is too slow to try.
        noise_nats: Largest |A-B| that this engine shows on this model.
        ranks: Ranks that it must have.
        forces: Whether it decodes saved ids.
    """

    adapter: EngineAdapter
    first: Path
    second: Path
    load: Callable[[Path, str], Any]
    push: Callable[[dict[str, Any], str], Any]
    restart: Callable[[], Any] | None
    noise_nats: float
    ranks: int
    forces: bool = True


def observed(adapter: EngineAdapter, key_seed: bytes = DEFAULT_KEY_SEED) -> WorkerObservation:
    status = adapter.status()
    return WorkerObservation(
        worker="worker",
        expected_ranks=status.expected_ranks,
        layouts=tuple(adapter.layouts()),
        ranks=tuple(adapter.observe(key_seed)),
        weight_version_label=status.weight_version_label,
    )


def flushed(adapter: EngineAdapter) -> None:
    """Flush; an engine that has just sent its last token may take a moment to be idle, and refuses until then."""
    deadline_s = time.monotonic() + 20
    while not (said := adapter.flush()).confirmed:
        assert time.monotonic() < deadline_s, said.detail


def manifest_of(folder: Path, label: str, key_seed: bytes = DEFAULT_KEY_SEED, **options):
    return export_checkpoint(folder, version=WeightVersion.parse(label), key_seed=key_seed, **options)


def judged(expected, manifest, observation, **options):
    verdict = compare(manifest, observation, **options)
    assert verdict.status is expected, (verdict.reason, verdict.findings[:3])


class EngineContract:
    """Inherit it under a name that pytest collects, with a fixture `rig`."""

    def test_status_is_stable_while_nothing_happens(self, rig: Rig):
        before, after = rig.adapter.status(), rig.adapter.status()
        assert before == after
        assert before.fence == after.fence
        assert before.expected_ranks == len(before.ranks) == rig.ranks
        assert not any(rank.updating for rank in before.ranks)
        assert len({rank.rank for rank in before.ranks}) == rig.ranks
        assert all(rank.incarnation and rank.probe_version for rank in before.ranks)
        assert before.engine

    def test_the_epoch_rises_on_every_rank_with_each_update(self, rig: Rig):
        epochs = [[rank.epoch for rank in rig.adapter.status().ranks]]
        for step, folder in enumerate((rig.second, rig.first)):
            rig.load(folder, f"run@{step}")
            epochs.append([rank.epoch for rank in rig.adapter.status().ranks])
        rig.push(load_file(rig.second / "model.safetensors"), "run@2")
        epochs.append([rank.epoch for rank in rig.adapter.status().ranks])
        for before, after in pairwise(epochs):
            assert all(low < high for low, high in zip(before, after, strict=True)), epochs

    def test_an_update_keeps_the_incarnation(self, rig: Rig):
        before = [rank.incarnation for rank in rig.adapter.status().ranks]
        rig.load(rig.second, "run@1")
        assert [rank.incarnation for rank in rig.adapter.status().ranks] == before

    def test_the_label_is_the_one_that_was_pushed(self, rig: Rig):
        rig.load(rig.second, "run@7")
        assert rig.adapter.status().weight_version_label == "run@7"

    def test_layouts_leave_no_tensor_without_a_rule(self, rig: Rig):
        for layout in rig.adapter.layouts():
            claimed = {
                claim.resident for claim in (*layout.bindings, *layout.paddings, *layout.derived, *layout.exempt)
            }
            left = [tensor.name for tensor in layout.residents if tensor.name not in claimed and not tensor.alias_of]
            assert (left, layout.unbound) == ([], ())
            assert layout.fingerprint

    def test_layouts_stay_the_same_across_updates_and_name_the_observations(self, rig: Rig):
        before = rig.adapter.layouts()
        rig.load(rig.second, "run@1")
        # The same objects: what was proven of a layout is kept with it, and a large one is not sent again.
        assert all(new is old for new, old in zip(rig.adapter.layouts(), before, strict=True))
        observed = [rank.layout_fingerprint for rank in rig.adapter.observe(DEFAULT_KEY_SEED)]
        assert observed == [layout.fingerprint for layout in before]

    def test_the_turns_of_a_scrub_read_what_an_observation_reads_once(self, rig: Rig):
        rig.load(rig.first, "run@1")
        whole, layouts = rig.adapter.observe(DEFAULT_KEY_SEED), rig.adapter.layouts()
        budget_bytes = 20_000  # less than the larger tensors
        turns = [answer.turns for answer in rig.adapter.scrub(DEFAULT_KEY_SEED, turn=0, budget_bytes=budget_bytes)]
        assert min(turns) > 2
        sums: list[dict[int, PartialDigest]] = [{} for _ in turns]
        for turn in range(max(turns)):
            answers = rig.adapter.scrub(DEFAULT_KEY_SEED, turn=turn, budget_bytes=budget_bytes)
            assert [(a.rank, a.epoch, a.wrong) for a in answers] == [(o.rank, o.epoch, ()) for o in whole]
            for of_rank, answer, last in zip(sums, answers, turns, strict=True):
                for part in answer.slices if turn < last else ():
                    of_rank[part.binding] = of_rank.get(part.binding, PartialDigest.zero()) + part.partial
        for of_rank, observation, layout in zip(sums, whole, layouts, strict=True):
            assert {at: observation.partials[at] for at in of_rank} == of_rank
            # Bindings on the same memory are read once, for one of them.
            read = {layout.bindings[at].resident for at in of_rank}
            own = {binding.resident for binding in layout.bindings if not binding.alias}
            assert own <= read

    def test_an_observation_matches_the_export_of_what_was_loaded_and_only_that(self, rig: Rig):
        rig.load(rig.first, "run@1")
        first, second = manifest_of(rig.first, "run@1"), manifest_of(rig.second, "run@1")
        shown = observed(rig.adapter)
        judged(VerdictStatus.MATCH, first, shown)
        judged(VerdictStatus.MISMATCH, second, shown)
        rig.load(rig.second, "run@1")
        shown = observed(rig.adapter)
        judged(VerdictStatus.MATCH, second, shown)
        judged(VerdictStatus.MISMATCH, first, shown)

    def test_pushed_tensors_match_their_export_as_a_loaded_folder_does(self, rig: Rig):
        rig.push(load_file(rig.second / "model.safetensors"), "run@2")
        judged(VerdictStatus.MATCH, manifest_of(rig.second, "run@2"), observed(rig.adapter))

    def test_two_observations_of_one_state_are_equal_but_for_the_time_taken(self, rig: Rig):
        first, second = rig.adapter.observe(DEFAULT_KEY_SEED), rig.adapter.observe(DEFAULT_KEY_SEED)
        for one, other in zip(first, second, strict=True):
            assert one.partials == other.partials
            assert (one.epoch, one.incarnation, one.paddings) == (other.epoch, other.incarnation, other.paddings)
            assert one.algorithm == ALGORITHM
            assert other.moved == ()
            assert one.read_bytes > 0

    def test_another_key_seed_gives_other_sums_and_the_same_verdict(self, rig: Rig):
        rig.load(rig.first, "run@1")
        plain, keyed = rig.adapter.observe(DEFAULT_KEY_SEED), observed(rig.adapter, OTHER_KEY_SEED)
        for one, other in zip(plain, keyed.ranks, strict=True):
            assert other.key_seed_hex == OTHER_KEY_SEED.hex()
            assert [partial.count for partial in one.partials] == [partial.count for partial in other.partials]
            assert all(a.data != b.data for a, b in zip(one.partials, other.partials, strict=True))
        judged(VerdictStatus.MATCH, manifest_of(rig.first, "run@1", OTHER_KEY_SEED), keyed)

    def test_a_flush_is_confirmed_and_the_next_score_is_cold(self, rig: Rig):
        ids = (*PROMPT, 7, 8, 9)
        rig.adapter.score(ids, prompt_length=len(PROMPT))
        flushed(rig.adapter)
        assert rig.adapter.score(ids, prompt_length=len(PROMPT)).cached_tokens <= 0

    def test_prefill_scores_agree_with_those_of_generation(self, rig: Rig):
        rig.load(rig.first, "run@1")
        made = rig.adapter.generate(PROMPT, max_new_tokens=12, seed=5)
        assert len(made.response_ids) == len(made.logprobs_nats) == 12
        assert made.weight_version_label == "run@1"
        flushed(rig.adapter)
        scored = rig.adapter.score((*PROMPT, *made.response_ids), prompt_length=len(PROMPT))
        difference = np.abs(np.subtract(made.logprobs_nats, scored.logprobs_nats))
        assert difference.max() <= rig.noise_nats
        assert max(made.logprobs_nats) <= 0

    def test_teacher_forced_decode_repeats_generation_to_the_last_bit_or_says_why_it_cannot(self, rig: Rig):
        rig.load(rig.first, "run@1")
        flushed(rig.adapter)
        made = rig.adapter.generate(PROMPT, max_new_tokens=12, seed=6)
        flushed(rig.adapter)
        found = rig.adapter.score_by_decode((*PROMPT, *made.response_ids), prompt_length=len(PROMPT))
        assert bool(found.cannot) != bool(found.scoring), found
        if found.scoring is None:
            assert not rig.forces, found.cannot
            return
        assert found.scoring.response_ids == made.response_ids
        assert found.scoring.logprobs_nats == made.logprobs_nats
        assert found.scoring.cached_tokens <= 0
        other = tuple((token + 1) % 100 for token in made.response_ids)
        forced = rig.adapter.score_by_decode((*PROMPT, *other), prompt_length=len(PROMPT)).scoring
        assert forced.response_ids == other
        flushed(rig.adapter)
        prefilled = rig.adapter.score((*PROMPT, *other), prompt_length=len(PROMPT))
        assert np.abs(np.subtract(forced.logprobs_nats, prefilled.logprobs_nats)).max() <= rig.noise_nats
        again = rig.adapter.generate(PROMPT, max_new_tokens=12, seed=6)
        assert again.response_ids != other

    def test_the_scored_ids_come_back(self, rig: Rig):
        response = (11, 64, 2, 101)
        scored = rig.adapter.score((*PROMPT, *response), prompt_length=len(PROMPT))
        assert scored.response_ids == response
        assert len(scored.logprobs_nats) == len(response)

    def test_scores_follow_the_weights(self, rig: Rig):
        ids = (*PROMPT, 11, 64, 2, 101)
        scores = []
        for folder in (rig.first, rig.second, rig.first):
            rig.load(folder, "run@1")
            flushed(rig.adapter)
            scores.append(np.array(rig.adapter.score(ids, prompt_length=len(PROMPT)).logprobs_nats))
        moved, back = np.abs(scores[0] - scores[1]).max(), np.abs(scores[0] - scores[2]).max()
        assert moved > 0.5
        assert back < moved / 10

    def test_an_observation_changes_nothing_of_what_it_reads(self, rig: Rig):
        ids = (*PROMPT, 11, 64, 2)
        rig.adapter.flush()
        before = rig.adapter.score(ids, prompt_length=len(PROMPT)).logprobs_nats
        status = rig.adapter.status()
        rig.adapter.observe(DEFAULT_KEY_SEED)
        assert rig.adapter.status() == status
        rig.adapter.flush()
        after = rig.adapter.score(ids, prompt_length=len(PROMPT)).logprobs_nats
        assert np.abs(np.subtract(before, after)).max() <= rig.noise_nats

    def test_a_restart_is_another_incarnation(self, rig: Rig):
        if rig.restart is None:
            return  # tried on the embedded engine only: a real server needs a minute for it
        before = rig.adapter.status()
        rig.restart()
        after = rig.adapter.status()
        assert not {rank.incarnation for rank in before.ranks} & {rank.incarnation for rank in after.ranks}
        judged(VerdictStatus.MATCH, manifest_of(rig.first, "run@1"), observed(rig.adapter), require_label=False)
