"""What happened, simulated or seen: events and time series of a run, and the journal that keeps them."""

import json
import math
import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from twinhull.errors import TwinhullError

FORMAT = 1
_SCHEMA = """
CREATE TABLE IF NOT EXISTS event
  (t REAL NOT NULL, kind TEXT NOT NULL, subject TEXT NOT NULL, fields TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS sample (t REAL NOT NULL, name TEXT NOT NULL, value REAL NOT NULL);
CREATE INDEX IF NOT EXISTS sample_by_name ON sample (name, t);
CREATE INDEX IF NOT EXISTS event_by_time ON event (t);
"""


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened: at `t` (unix seconds), `kind` in few words, to `subject`, with its facts."""

    t: float
    kind: str
    subject: str
    fields: Mapping[str, Any]  # Any: whatever the speaker added, as JSON


@dataclass(frozen=True, slots=True)
class Trace:
    """A stretch of a run: events in order of time, and for each name its (t, value) points."""

    events: tuple[Event, ...]
    samples: Mapping[str, tuple[tuple[float, float], ...]]

    def last(self, name: str) -> float | None:
        """The newest value of a series, None if it has none."""
        points = self.samples.get(name)
        return points[-1][1] if points else None

    def kinds(self, kind: str) -> tuple[Event, ...]:
        """The events of one kind."""
        return tuple(event for event in self.events if event.kind == kind)


@dataclass(slots=True)
class Journal:
    """Writes events and samples to one SQLite file; only the supervisor of a run holds one.

    Rows wait in memory until `flush`. A full disk loses rows, never the run: `lost` counts them.
    """

    path: Path
    lost: int = 0
    _events: list[tuple[float, str, str, str]] = field(default_factory=list)
    _samples: list[tuple[float, str, float]] = field(default_factory=list)
    _file: sqlite3.Connection = field(init=False)

    def __post_init__(self) -> None:
        self._file = _open(self.path)
        self._file.execute("PRAGMA journal_mode=WAL")
        self._file.execute("PRAGMA synchronous=NORMAL")
        self._file.executescript(_SCHEMA)
        self._file.execute(f"PRAGMA user_version={FORMAT}")
        self._file.commit()

    def event(self, t: float, kind: str, subject: str, fields: Mapping[str, Any]) -> None:  # Any: see Event
        """Note an event; `fields` is stored as JSON."""
        self._events.append((t, kind, subject, json.dumps(fields, default=str)))

    def sample(self, t: float, name: str, value: float) -> None:
        """Note a number of this moment; what is not finite is lost, since SQLite would store NULL."""
        if not math.isfinite(value):
            self.lost += 1
            return
        self._samples.append((t, name, value))

    def flush(self) -> None:
        """Write what waits."""
        if not (self._events or self._samples):
            return
        try:
            with self._file:
                self._file.executemany("INSERT INTO event VALUES (?, ?, ?, ?)", self._events)
                self._file.executemany("INSERT INTO sample VALUES (?, ?, ?)", self._samples)
        except sqlite3.Error:
            self.lost += len(self._events) + len(self._samples)
        self._events.clear()
        self._samples.clear()

    def close(self) -> None:
        """Write what waits and let go of the file."""
        self.flush()
        self._file.close()


def read(path: Path, *, since: float = 0.0) -> Trace:
    """The journal's content from `since` (unix seconds) on; works while the run goes on."""
    if not path.exists():
        raise TwinhullError(f"there is no journal at {path}.", hint="Has the run been started?")
    file = _open(path)
    try:
        rows = file.execute(
            "SELECT t, kind, subject, fields FROM event WHERE t >= ? ORDER BY t, rowid", (since,)
        )
        events = tuple(Event(t, kind, subject, json.loads(fields)) for t, kind, subject, fields in rows)
        samples: dict[str, list[tuple[float, float]]] = {}
        for t, name, value in file.execute(
            "SELECT t, name, value FROM sample WHERE t >= ? ORDER BY t, rowid", (since,)
        ):
            samples.setdefault(name, []).append((t, value))
    except sqlite3.DatabaseError as error:
        raise TwinhullError(f"the journal {path} cannot be read: {error}.") from error
    finally:
        file.close()
    return Trace(events, {name: tuple(points) for name, points in samples.items()})


def _open(path: Path) -> sqlite3.Connection:
    file: sqlite3.Connection | None = None
    try:
        file = sqlite3.connect(path, timeout=5.0)
        version: int = file.execute("PRAGMA user_version").fetchone()[0]
    except sqlite3.Error as error:
        if file is not None:
            file.close()
        raise TwinhullError(f"the journal {path} cannot be opened: {error}.", hint="Move it away.") from error
    if version > FORMAT:
        file.close()
        raise TwinhullError(
            f"the journal {path} has format {version}, this twinhull reads up to {FORMAT}.",
            hint="Use a newer twinhull or another run directory.",
        )
    return file
