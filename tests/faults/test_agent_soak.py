"""A short run of the soak program of tests/bench; the long one is run by hand and its table is in the README."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import torch

PROGRAM = Path(__file__).parents[1] / "bench" / "gate_soak.py"


def test_clean_updates_are_ready_and_each_fault_is_caught(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("gate_soak", PROGRAM)
    soak = importlib.util.module_from_spec(spec)
    sys.modules["gate_soak"] = soak
    spec.loader.exec_module(soak)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        clean, faulty = soak.soak(60, 130, 7, tmp_path)
    finally:
        torch.set_num_threads(threads)
    assert (clean.updates, clean.ready, clean.false_ready, clean.false_blocked) == (60, 60, 0, 0), clean.notes
    assert (faulty.updates, faulty.false_ready, sum(faulty.missed.values())) == (130, 0, 0), (
        faulty.missed,
        faulty.notes,
    )
    assert len(faulty.caught) >= 15, "too few kinds of faults were tried"
