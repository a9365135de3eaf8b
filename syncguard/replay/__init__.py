"""One saved response, scored three ways: A generation, B rollout prefill replay, C frozen trainer forward."""

from syncguard.replay.compare import (
    Difference,
    Interval,
    ObjectiveEffect,
    RepeatNoise,
    WorstToken,
    bootstrap_mae,
    compare_scores,
    measure_repeat_noise,
    objective_effect,
)
from syncguard.replay.diagnose import diagnose
from syncguard.replay.evidence import ReplayEvidence
from syncguard.replay.explain import ADVICE, Diagnosis, Kind
from syncguard.replay.judge import judge_replay, most_telling
from syncguard.replay.policy import Power, ReplayPolicy, ReplayStatus, ReplayVerdict
from syncguard.replay.record import A, ReplayRecord, ScoreKey, b_key, c_key
from syncguard.replay.record_file import load_many, save_many
from syncguard.replay.run import PairSummary, RunStudy, StudyGroup, study_run, summarize_run
from syncguard.replay.scores import (
    RAW,
    DefinitionCheck,
    ScoreDefinition,
    check_definition,
    check_returned_ids,
    checked_scores,
    combine_normalizers,
    logsumexp_rows,
    require_same_definition,
    response_scores_from_logits,
    restore_order,
    scores_from_vocabulary_shards,
)

__all__ = [
    "ADVICE",
    "RAW",
    "A",
    "DefinitionCheck",
    "Diagnosis",
    "Difference",
    "Interval",
    "Kind",
    "ObjectiveEffect",
    "PairSummary",
    "Power",
    "RepeatNoise",
    "ReplayEvidence",
    "ReplayPolicy",
    "ReplayRecord",
    "ReplayStatus",
    "ReplayVerdict",
    "RunStudy",
    "ScoreDefinition",
    "ScoreKey",
    "StudyGroup",
    "WorstToken",
    "b_key",
    "bootstrap_mae",
    "c_key",
    "check_definition",
    "check_returned_ids",
    "checked_scores",
    "combine_normalizers",
    "compare_scores",
    "diagnose",
    "judge_replay",
    "load_many",
    "logsumexp_rows",
    "measure_repeat_noise",
    "most_telling",
    "objective_effect",
    "require_same_definition",
    "response_scores_from_logits",
    "restore_order",
    "save_many",
    "scores_from_vocabulary_shards",
    "study_run",
    "summarize_run",
]
