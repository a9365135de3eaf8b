"""What a verdict says, and demands, where bindings were recorded from the engine's own loader instead of given by rules.

Equal digests under such a binding prove that the loader's work is there, not that the loader is right: it may put a
tensor in the wrong place at each update alike. Only the replay can show that, so that without one that passed there is
no READY.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncguard.layout.model import BindingSource
from syncguard.layout.recording import LOADER_ZERO
from syncguard.manifest.verdict import Finding, FindingCode, Severity

if TYPE_CHECKING:
    from collections.abc import Iterable

    from syncguard.layout.model import RankLayout

NAMES_SHOWN = 16
"""Recorded tensors named in a finding; `syncguard layout --explain` names the source of each binding."""


def recorded_tensors(layouts: Iterable[RankLayout]) -> tuple[str, ...]:
    """Return the names of logical tensors with a recorded binding on any rank, sorted; of recorded zeros, the resident's."""
    found: set[str] = set()
    for layout in layouts:
        found.update(b.shard.tensor.fqn for b in layout.bindings if b.source is BindingSource.RECORDED)
        found.update(padding.resident for padding in layout.paddings if padding.reason == LOADER_ZERO)
    return tuple(sorted(found))


def recorded_findings(
    layouts: Iterable[RankLayout], *, required: bool, passed: bool, why_not: str = ""
) -> list[Finding]:
    """Return the finding about recorded bindings, none when there is no recorded one.

    Args:
        layouts: Those of the ranks that were read.
        required: Whether readiness depends on the verdict; an audit only says it.
        passed: Whether a replay was made and agreed with the trainer.
        why_not: Why none passed, for people.

    Returns:
        At most one finding: INCOMPLETE where a replay is due and none passed, else a warning.
    """
    names = recorded_tensors(layouts)
    if not names:
        return []
    listed = ", ".join(names[:NAMES_SHOWN]) + (
        f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    )
    text = f"{len(names)} tensors have no rule; their places were recorded from the engine's own loader"
    if passed:
        text += ", and the replay, the only check of those that its responses use, agreed with the trainer"
    elif required:
        text += f", whose only check is a replay that passes: {why_not or 'there was none'}"
    else:
        text += ", and no replay checked it"
    severity = Severity.WARNING if passed or not required else Severity.INCOMPLETE
    return [Finding(FindingCode.RECORDED, severity, text, observed=listed)]
