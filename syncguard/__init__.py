"""Proof, after each weight update, that every rollout worker holds the weights that the trainer exported.

The names below are the public Python interface of an RL loop; they are imported at first use, so that `import syncguard`
costs nothing in an engine's process.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from syncguard.export.checkpoint import export_checkpoint
    from syncguard.export.stream import ManifestBuilder
    from syncguard.gate.controller import Gate
    from syncguard.gate.readiness import GatePolicy
    from syncguard.manifest.verdict import ReadinessState, VerdictStatus
    from syncguard.replay import ReplayPolicy, ReplayRecord, c_key
    from syncguard.spec import WeightVersion

__all__ = [
    "Gate",
    "GatePolicy",
    "ManifestBuilder",
    "ReadinessState",
    "ReplayPolicy",
    "ReplayRecord",
    "VerdictStatus",
    "WeightVersion",
    "c_key",
    "export_checkpoint",
]

_HOMES = {
    "Gate": "syncguard.gate.controller",
    "GatePolicy": "syncguard.gate.readiness",
    "ManifestBuilder": "syncguard.export.stream",
    "ReadinessState": "syncguard.manifest.verdict",
    "ReplayPolicy": "syncguard.replay",
    "ReplayRecord": "syncguard.replay",
    "VerdictStatus": "syncguard.manifest.verdict",
    "WeightVersion": "syncguard.spec",
    "c_key": "syncguard.replay",
    "export_checkpoint": "syncguard.export.checkpoint",
}


def __getattr__(name: str) -> Any:
    """Import a public name from its home at first use."""
    home = _HOMES.get(name)
    if home is None:
        msg = f"module 'syncguard' has no attribute {name!r}"
        raise AttributeError(msg)
    return getattr(import_module(home), name)
