"""The agent's memory across restarts: SQLite with a write-ahead log, one row a transition, written before it is told.

What is restored never makes a worker ready. It gives back the order of versions (so that a restarted trainer is noticed
by a restarted agent) and what earlier versions looked like (so that a stale shard can be named).
"""

from __future__ import annotations

import sqlite3
import threading
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from syncguard.digest import PartialDigest
from syncguard.errors import BadInputError, SpecVersionError, UsageError
from syncguard.manifest.model import KnownVersion
from syncguard.spec import Box, WeightVersion

if TYPE_CHECKING:
    from collections.abc import Sequence

JOURNAL_VERSION: Final = 1
_TRANSITIONS_KEPT: Final = 10_000
_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS transitions (
  id INTEGER PRIMARY KEY AUTOINCREMENT, at_s REAL NOT NULL, phase TEXT NOT NULL, reason TEXT NOT NULL,
  message TEXT NOT NULL, version TEXT NOT NULL, fence TEXT NOT NULL, event TEXT NOT NULL, evidence TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS accepted (
  run_id TEXT PRIMARY KEY, step INTEGER NOT NULL, manifest_id TEXT NOT NULL, position INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS known (
  label TEXT PRIMARY KEY, key_seed TEXT NOT NULL, algorithm TEXT NOT NULL, position INTEGER NOT NULL,
  body BLOB NOT NULL);
"""


@dataclass(frozen=True, slots=True)
class Transition:
    """One row.

    Attributes:
        at_s: Time, in seconds since the Unix epoch.
        phase: Phase after it.
        reason: Stable word.
        message: One sentence.
        version: Version label that the phase speaks of.
        fence: Engine fence, as text.
        event: Name of the event that caused it.
        evidence: JSON of what it rests on.
    """

    at_s: float
    phase: str
    reason: str
    message: str
    version: str
    fence: str
    event: str
    evidence: str = "{}"


@dataclass(frozen=True, slots=True)
class Remembered:
    """An earlier version and the digest key under which it can be compared."""

    known: KnownVersion
    key_seed_hex: str
    algorithm: str


class _Packed(msgspec.Struct, array_like=True):
    wholes: dict[str, tuple[int, int, int]]
    shards: list[tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, int, int]]]


def _pack(known: KnownVersion) -> bytes:
    packed = _Packed(
        {fqn: (p.count, p.coverage, p.data) for fqn, p in known.wholes.items()},
        [(fqn, box.offsets, box.sizes, (p.count, p.coverage, p.data)) for (fqn, box), p in known.shards.items()],
    )
    return zlib.compress(msgspec.msgpack.encode(packed), 1)


def _unpack(label: str, body: bytes) -> KnownVersion | None:
    try:
        packed = msgspec.msgpack.decode(zlib.decompress(body), type=_Packed)
    except (zlib.error, msgspec.MsgspecError, TypeError):
        return None
    return KnownVersion(
        label,
        {fqn: PartialDigest(*sums) for fqn, sums in packed.wholes.items()},
        {(fqn, Box(offsets, sizes)): PartialDigest(*sums) for fqn, offsets, sizes, sums in packed.shards},
    )


class Journal:
    """A journal file; safe to call from several threads, one writer at a time.

    Args:
        path: File; `None` keeps the journal in memory, for tests and for engines that live in this process.

    Raises:
        BadInputError: The file is no journal, is damaged, or another agent holds it.
        SpecVersionError: Written by another version.
    """

    def __init__(self, path: Path | None) -> None:
        """Open or create the journal and check it."""
        self._lock = threading.Lock()
        self._where = str(path) if path is not None else "memory"
        try:
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
            self._db = sqlite3.connect(
                str(path) if path is not None else ":memory:",
                isolation_level=None,
                check_same_thread=False,
                timeout=2.0,
            )
            # FULL: a commit is on the disk when it returns; the log is what survives a kill. EXCLUSIVE: one agent a file.
            for pragma in ("locking_mode=EXCLUSIVE", "journal_mode=WAL", "synchronous=FULL"):
                self._db.execute(f"PRAGMA {pragma}")
            (version,) = self._db.execute("PRAGMA user_version").fetchone()
            if version not in (0, JOURNAL_VERSION):
                raise SpecVersionError(
                    "journal version", expected=JOURNAL_VERSION, found=version, where=self._where, todo="move it away"
                )
            self._db.executescript("BEGIN IMMEDIATE;" + _SCHEMA + f"PRAGMA user_version={JOURNAL_VERSION}; COMMIT;")
            (health,) = self._db.execute("PRAGMA quick_check(1)").fetchone()
            if health != "ok":
                raise sqlite3.DatabaseError(health)
            # All readers once: what is damaged in a way that SQLite does not see is refused now, not in an update.
            self.accepted()
            self.known()
            self.transitions()
        except (sqlite3.Error, OSError, TypeError, ValueError, UsageError) as error:
            raise BadInputError(
                "cannot use the journal",
                expected="a SQLite file that no other agent holds",
                found=error,
                where=self._where,
                todo="stop the other agent, or move the file away: a new one starts without history, and not ready",
            ) from error

    def append(self, transition: Transition, accepted: Sequence[tuple[WeightVersion, str]] = ()) -> None:
        """Write one transition and the accepted versions after it; it is on the disk when this returns.

        Raises:
            sqlite3.Error: It could not be written.
        """
        row = (
            transition.at_s,
            transition.phase,
            transition.reason,
            transition.message,
            transition.version,
            transition.fence,
            transition.event,
            transition.evidence,
        )
        with self._lock, self._transaction() as db:
            cursor = db.execute(
                "INSERT INTO transitions (at_s, phase, reason, message, version, fence, event, evidence)"
                " VALUES (?,?,?,?,?,?,?,?)",
                row,
            )
            db.execute("DELETE FROM transitions WHERE id <= ?", ((cursor.lastrowid or 0) - _TRANSITIONS_KEPT,))
            db.execute("DELETE FROM accepted")
            db.executemany(
                "INSERT INTO accepted VALUES (?,?,?,?)",
                [(version.run_id, version.step, mid, i) for i, (version, mid) in enumerate(accepted)],
            )

    def remember(self, remembered: Sequence[Remembered]) -> None:
        """Replace the known versions, newest first.

        Raises:
            sqlite3.Error: They could not be written.
        """
        with self._lock, self._transaction() as db:
            kept = {label for (label,) in db.execute("SELECT label FROM known")}
            wanted = {r.known.label for r in remembered}
            db.executemany("DELETE FROM known WHERE label = ?", [(label,) for label in kept - wanted])
            for position, r in enumerate(remembered):
                if position > 0 and r.known.label in kept:  # only the newest can have changed
                    db.execute("UPDATE known SET position = ? WHERE label = ?", (position, r.known.label))
                    continue
                db.execute(
                    "INSERT OR REPLACE INTO known VALUES (?,?,?,?,?)",
                    (r.known.label, r.key_seed_hex, r.algorithm, position, _pack(r.known)),
                )

    def accepted(self) -> tuple[tuple[WeightVersion, str], ...]:
        """Return the newest accepted version of each run, newest run last."""
        with self._lock:
            rows = self._db.execute("SELECT run_id, step, manifest_id FROM accepted ORDER BY position").fetchall()
        return tuple((WeightVersion(run_id, step), manifest_id) for run_id, step, manifest_id in rows)

    def known(self) -> tuple[Remembered, ...]:
        """Return the known versions, newest first; a row that cannot be read is left out: it only explains."""
        with self._lock:
            rows = self._db.execute("SELECT label, key_seed, algorithm, body FROM known ORDER BY position").fetchall()
        found = ((_unpack(label, body), key_seed, algorithm) for label, key_seed, algorithm, body in rows)
        return tuple(
            Remembered(known, key_seed, algorithm) for known, key_seed, algorithm in found if known is not None
        )

    def transitions(self, limit: int = 100) -> tuple[Transition, ...]:
        """Return the last transitions, oldest first."""
        with self._lock:
            rows = self._db.execute(
                "SELECT at_s, phase, reason, message, version, fence, event, evidence FROM transitions"
                " ORDER BY id DESC LIMIT ?",
                (limit,),
            ).fetchall()
        return tuple(Transition(*row) for row in reversed(rows))

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._db.close()

    def _transaction(self) -> _Transaction:
        return _Transaction(self._db)


class _Transaction:
    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    def __enter__(self) -> sqlite3.Connection:
        self._db.execute("BEGIN IMMEDIATE")
        return self._db

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._db.execute("COMMIT" if kind is None else "ROLLBACK")
