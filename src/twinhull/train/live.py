"""How a rank tells its launcher that it lives, how far it is and how it left: one small file a rank.

Writing a record costs one system call of 40 bytes, cheap enough for every step. A beat is written only when
something was completed, never from a thread in the background: a rank that hangs does not beat.
"""

import json
import os
import struct
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from twinhull.rundir import RunDirectory

_RECORD = struct.Struct("<qqqqq")


class Phase(IntEnum):
    """What a rank is doing, or how it left."""

    STARTING = 0
    RUNNING = 1
    DONE = 2
    STOPPED = 3
    FAILED = 4
    PEER_LOST = 5
    REFUSED = 6  # by an error that trying again cannot mend


@dataclass(frozen=True, slots=True)
class Record:
    """One rank as its file shows it. `started_at_step` is where this generation took up the work."""

    pid: int
    phase: Phase
    step: int
    beats: int
    started_at_step: int


@dataclass(frozen=True, slots=True)
class Failure:
    """What a rank says before it leaves with an error: the last line and the whole traceback."""

    step: int
    error: str
    traceback: str


def directory(run: RunDirectory, name: str) -> Path:
    """Where the ranks of a train workload keep their records while they live."""
    return run.checkpoints / name / ".live"


class Beat:
    """A rank's own record; `step` is the number of steps that it has completed."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._failure = folder / f"rank-{rank}.json"
        self._file = os.open(folder / f"rank-{rank}", os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o644)
        self._pid, self._phase, self.step, self._beats, self._started = os.getpid(), Phase.STARTING, 0, 0, 0
        self._write()

    def running(self, step: int) -> None:
        """The rank has joined its group and takes up the work at `step`."""
        self._phase, self._started = Phase.RUNNING, step
        self.completed(step)

    def completed(self, step: int) -> None:
        """Something was completed (a step, a checkpoint, a loop); `step` is the number of completed steps."""
        self.step = step
        self._beats += 1
        self._write()

    def left(self, phase: Phase, failure: Failure | None = None) -> None:
        """The rank is about to leave."""
        if failure is not None:
            said = {"step": failure.step, "error": failure.error, "traceback": failure.traceback}
            self._failure.write_text(json.dumps(said), encoding="utf-8")
        self._phase = phase
        self._write()

    def _write(self) -> None:
        os.pwrite(self._file, _RECORD.pack(self._pid, self._phase, self.step, self._beats, self._started), 0)


def read(folder: Path) -> dict[int, Record]:
    """All ranks that have spoken so far, by rank."""
    found: dict[int, Record] = {}
    for path in sorted(folder.glob("rank-*")) if folder.is_dir() else ():
        content = b""
        if not path.suffix:
            with suppress(FileNotFoundError):  # the launcher is clearing the folder for the next generation
                content = path.read_bytes()
        if len(content) == _RECORD.size:
            pid, phase, step, beats, started = _RECORD.unpack(content)
            found[int(path.name.removeprefix("rank-"))] = Record(pid, Phase(phase), step, beats, started)
    return found


def failure(folder: Path, rank: int) -> Failure | None:
    """What `rank` said about its failure."""
    path = folder / f"rank-{rank}.json"
    if not path.exists():
        return None
    said = json.loads(path.read_text(encoding="utf-8"))
    return Failure(said["step"], said["error"], said["traceback"])
