"""How a rank tells its launcher that it lives, how far it is and how it left: one small file a rank.

The file is mapped into the rank's memory: writing a record costs half a microsecond and no system call, and
what was written outlives the rank. A beat is written only when something was completed or begun, never from a
thread in the background: a rank that hangs does not beat.
"""

import json
import mmap
import os
import struct
import sys
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from twinhull.rundir import RunDirectory

_RECORD = struct.Struct("=qqqqqqdddddq")  # each number is one aligned store, never seen half written
_WAITS_AT = _RECORD.size - 8 if sys.byteorder == "little" else _RECORD.size - 1
_STEPS = 16  # that the moving means of a rank's times go back


class Phase(IntEnum):
    """What has become of a rank: it starts, it runs, or how it left."""

    STARTING = 0
    RUNNING = 1
    DONE = 2
    STOPPED = 3
    FAILED = 4
    PEER_LOST = 5
    REFUSED = 6  # by an error that trying again cannot mend


class Doing(IntEnum):
    """What a running rank is busy with, and so how long it may take."""

    BETWEEN = 0  # the user's code outside of loops
    FIRST = 1  # the first step of a loop: compilation, starting workers
    STEPPING = 2
    SAVING = 3  # waits for a checkpoint


@dataclass(frozen=True, slots=True)
class Record:
    """One rank as its file shows it. `started_at_step` is where this generation took up the work.

    `step_s`, `own_s` and `data_s` are moving means over the last steps of a loop: the whole step, the part
    until its gradients were handed over, the part that data took. `waits` is 1 once it has handed over the
    gradients of the step under way: what it does now depends on the others. `worked_s` and `stalled_s` are
    what steps took in this generation, and what waiting for checkpoints took besides.
    """

    pid: int
    phase: Phase
    step: int
    beats: int
    started_at_step: int
    doing: Doing = Doing.BETWEEN
    step_s: float = 0.0
    own_s: float = 0.0
    data_s: float = 0.0
    worked_s: float = 0.0
    stalled_s: float = 0.0
    waits: int = 0


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
        self.folder, self.rank = folder, rank
        self._pid, self._phase, self.step, self._beats, self._started = os.getpid(), Phase.STARTING, 0, 0, 0
        self._doing, self._timed = Doing.BETWEEN, 0
        self._step_s, self._own_s, self._data_s = 0.0, 0.0, 0.0
        self._worked_s, self._stalled_s = 0.0, 0.0
        self._map = _mapped(folder / f"rank-{rank}", _RECORD.pack(*self._numbers()))

    def running(self, step: int) -> None:
        """The rank has joined its group and takes up the work at `step`."""
        self._phase, self._started = Phase.RUNNING, step
        self.completed(step)

    def completed(self, step: int, doing: Doing | None = None) -> None:
        """Something was completed (a step, a version); `step` is the number of completed steps."""
        self.step = step
        if doing is not None:
            self._doing = doing
        self._beats += 1
        self._write()

    def doing(self, what: Doing) -> Doing:
        """The rank turns to something else; gives what it did before."""
        before, self._doing = self._doing, what
        if what is Doing.FIRST:
            self._timed = 0  # the steps of another loop say nothing about this one's
        self._beats += 1
        self._write()
        return before

    def timed(self, step_s: float, own_s: float, data_s: float) -> None:
        """Note the times of a step before it is `completed`. The first of a loop gives way to the second."""
        weight = 1.0 / min(max(1, self._timed), _STEPS)
        self._timed += 1
        self._worked_s += step_s
        self._step_s += weight * (step_s - self._step_s)
        self._own_s += weight * (own_s - self._own_s)
        self._data_s += weight * (data_s - self._data_s)

    def stalled(self, seconds: float) -> None:
        """Note that the rank has waited for a checkpoint, before something is `completed`."""
        self._stalled_s += seconds

    def waits(self) -> None:
        """The rank has done its part of the step: the rest depends on the others, too."""
        self._map[_WAITS_AT] = 1

    def left(self, phase: Phase, failure: Failure | None = None) -> None:
        """The rank is about to leave."""
        if failure is not None:
            said = {"step": failure.step, "error": failure.error, "traceback": failure.traceback}
            (self.folder / f"rank-{self.rank}.json").write_text(json.dumps(said), encoding="utf-8")
        self._phase = phase
        self._write()

    def _write(self) -> None:
        _RECORD.pack_into(self._map, 0, *self._numbers())

    def _numbers(self) -> tuple[float, ...]:
        return (
            self._pid, self._phase, self.step, self._beats, self._started, self._doing,
            self._step_s, self._own_s, self._data_s, self._worked_s, self._stalled_s, 0,
        )  # fmt: skip


def _mapped(path: Path, content: bytes) -> mmap.mmap:
    """A new file with this content, in memory. It is written before it is mapped: so it has its room."""
    beside = path.with_suffix(".new")
    with beside.open("wb+") as file:
        file.write(content)
        file.flush()
        mapped = mmap.mmap(file.fileno(), len(content))
    beside.rename(path)
    return mapped


def read(folder: Path) -> dict[int, Record]:
    """All ranks that have spoken so far, by rank."""
    found: dict[int, Record] = {}
    for path in sorted(folder.glob("rank-*")) if folder.is_dir() else ():
        content = b""
        if not path.suffix:
            with suppress(FileNotFoundError):  # the launcher is clearing the folder for the next generation
                content = path.read_bytes()
        if len(content) == _RECORD.size:
            pid, phase, step, beats, started, doing, *rest = _RECORD.unpack(content)
            rank = int(path.name.removeprefix("rank-"))
            found[rank] = Record(pid, Phase(phase), step, beats, started, Doing(doing), *rest)
    return found


def failure(folder: Path, rank: int) -> Failure | None:
    """What `rank` said about its failure."""
    path = folder / f"rank-{rank}.json"
    if not path.exists():
        return None
    said = json.loads(path.read_text(encoding="utf-8"))
    return Failure(said["step"], said["error"], said["traceback"])
