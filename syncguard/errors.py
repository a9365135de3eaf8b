"""Every error that syncguard raises, with its stable code and exit code.

    SyncguardError                      2   base; never raised itself
    ├── UsageError                      2   the call or the command line is wrong
    ├── BadInputError                   2   a file or message cannot be used as it is
    │   ├── CheckpointError             2   a safetensors folder is damaged or disagrees with its config
    │   ├── ManifestError               2   a manifest is damaged or contradicts itself
    │   ├── RecordError                 2   a replay record is damaged, or would overwrite evidence
    │   ├── ScoreError                  2   scores cannot be compared (ids, lengths, definition, non-finite)
    │   └── DigestInputError            2   a box, dtype, key or tensor that has no digest
    ├── VersionOrderError              10   a manifest older than, or contradicting, the resident version
    ├── IncompleteError                11   evidence is missing; nothing may be concluded
    ├── UnsupportedError               12   there is no rule for this layer, dtype or engine
    ├── UnreachableError               13   an agent or an engine did not answer
    │   ├── EngineError                13   the engine answered, but refused or broke
    │   └── ObservationRacedError      13   the engine changed while it was read; try again
    └── SpecVersionError               14   the other side speaks another version of the specification

Verdicts are values and never raised: exit code 10 (mismatch) of a *verdict* comes from its status. The text
of an error is one line that says what was compared, what was expected, what was found, where, and what to do.
"""

from __future__ import annotations

from enum import IntEnum
from typing import ClassVar


class ExitCode(IntEnum):
    """Exit codes of every command; an interface, never renumbered."""

    OK = 0
    WARNING = 1
    USAGE = 2
    MISMATCH = 10
    INCOMPLETE = 11
    UNSUPPORTED = 12
    UNREACHABLE = 13
    SPEC_VERSION = 14


class SyncguardError(Exception):
    """Base of the tree: one line with both values, the place and the remedy.

    Args:
        what: What was compared or attempted.
        expected: The value that would have been right.
        found: The value that was there.
        where: File, tensor, worker, rank or address.
        todo: What the reader should do next.
    """

    code: ClassVar[str] = "SYNCGUARD"
    exit_code: ClassVar[ExitCode] = ExitCode.USAGE

    def __init__(
        self, what: str, *, expected: object = "", found: object = "", where: object = "", todo: str = ""
    ) -> None:
        """Keep the parts; the text is made of those that are not empty."""
        self.what = what
        self.expected = str(expected)
        self.found = str(found)
        self.where = str(where)
        self.todo = todo
        super().__init__(self.text())

    def text(self) -> str:
        """Return the one-line message, without the code."""
        parts = [self.what]
        if self.where:
            parts.append(f"at {self.where}")
        if self.expected:
            parts.append(f"expected {self.expected}")
        if self.found:
            parts.append(f"found {self.found}")
        if self.todo:
            parts.append(f"do: {self.todo}")
        return "; ".join(part.replace("\n", " ") for part in parts)

    def as_dict(self) -> dict[str, str | int]:
        """Return the parts for `--json` and for gRPC details."""
        return {
            "code": self.code,
            "exit_code": int(self.exit_code),
            "what": self.what,
            "expected": self.expected,
            "found": self.found,
            "where": self.where,
            "todo": self.todo,
        }


class UsageError(SyncguardError):
    """The call or the command line is wrong."""

    code = "USAGE"


class BadInputError(SyncguardError):
    """A file or message cannot be used as it is."""

    code = "BAD_INPUT"


class CheckpointError(BadInputError):
    """A safetensors folder is damaged or disagrees with its config."""

    code = "CHECKPOINT"


class ManifestError(BadInputError):
    """A manifest is damaged or contradicts itself."""

    code = "MANIFEST"


class RecordError(BadInputError):
    """A replay record is damaged, or the call would overwrite evidence."""

    code = "RECORD"


class ScoreError(BadInputError):
    """Scores that cannot be compared: ids, lengths, definition or non-finite values."""

    code = "SCORES"


class DigestInputError(BadInputError):
    """A box, dtype, key or tensor that has no digest."""

    code = "DIGEST_INPUT"


class VersionOrderError(SyncguardError):
    """A manifest older than the resident version, or a second one that contradicts the first."""

    code = "VERSION_ORDER"
    exit_code = ExitCode.MISMATCH


class IncompleteError(SyncguardError):
    """Evidence is missing, so nothing may be concluded."""

    code = "INCOMPLETE"
    exit_code = ExitCode.INCOMPLETE


class UnsupportedError(SyncguardError):
    """There is no rule for this layer, dtype or engine."""

    code = "UNSUPPORTED"
    exit_code = ExitCode.UNSUPPORTED


class UnreachableError(SyncguardError):
    """An agent or an engine did not answer."""

    code = "UNREACHABLE"
    exit_code = ExitCode.UNREACHABLE


class EngineError(UnreachableError):
    """The engine answered, but refused the request or broke while serving it."""

    code = "ENGINE"


class ObservationRacedError(UnreachableError):
    """The engine changed while it was read; the observation was thrown away."""

    code = "OBSERVATION_RACED"


class SpecVersionError(SyncguardError):
    """The other side speaks another version of the specification."""

    code = "SPEC_VERSION"
    exit_code = ExitCode.SPEC_VERSION
