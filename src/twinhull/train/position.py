"""Where does a run stand? Cycle, step, loop and data: what a checkpoint says, and what is taken up again."""

import sys
from dataclasses import dataclass
from typing import Any

from twinhull.train.checkpoints.manifest import Place
from twinhull.train.data.loader import Pass, Source, Start
from twinhull.train.group import Group
from twinhull.train.job import Job


@dataclass(slots=True)
class Loop:
    """One `run.steps` loop: its data, how many steps it has completed and may complete."""

    passing: Pass
    done: int
    most: int

    @property
    def left(self) -> int | None:
        """How many steps are still to come; None if nobody knows."""
        batches = self.passing.batches_left()
        by_count = self.most - self.done
        if batches is None:
            return by_count if self.most < sys.maxsize else None
        return min(batches, by_count)


class Position:
    """Counts what a run completes, from where its checkpoint was.

    `step` counts the steps of all cycles, `loops` those that the code has begun in this life. States: in a
    loop (from `begin` to `leave`), between loops.
    """

    def __init__(self, job: Job, group: Group, began: Place) -> None:
        self._job, self._group, self._began = job, group, began
        self.cycle, self.step, self.loops = began.cycle, began.step, 0
        self._number = began.loop
        self._offsets: dict[str, Any] = dict(began.events)  # Any: plain JSON
        self._loop: Loop | None = None

    def begin(self, loader: Source, epochs: int | None, most: int | None) -> Loop | None:
        """The next loop, taken up again if the checkpoint was in it; None if it was finished by then."""
        number, self.loops = self.loops, self.loops + 1
        if number < self._began.loop:
            return None
        saved = dict(self._began.passing or {}) if number == self._began.loop else {}
        done = int(saved.pop("loop_steps", 0))
        times = epochs or (1 if most is None else sys.maxsize)
        start = Start(self._group, self._job.seed, times, saved or None, self._offsets,
                      self._job.micro_batch, self._job.full_size)  # fmt: skip
        self._number = number
        self._loop = Loop(loader.start(start), done, sys.maxsize if most is None else most)
        return self._loop

    def advance(self) -> None:
        """The step was trained."""
        assert self._loop is not None
        self._loop.passing.advance()
        self._loop.done += 1
        self.step += 1

    def leave(self) -> None:
        """The loop is over."""
        assert self._loop is not None
        self._offsets = self._read()
        self._loop.passing.close()
        self._number, self._loop = self._number + 1, None

    def place(self, *, done: bool = False) -> Place:
        """What a checkpoint says of it."""
        loop = self._loop
        passing = {**loop.passing.state(), "loop_steps": loop.done} if loop is not None else None
        began = self._began.cycle_started
        return Place(self.step, self.cycle, self._number, passing, self._read(), began, done)

    def _read(self) -> dict[str, Any]:  # Any: plain JSON
        """How far each stream is trained."""
        now = self._loop.passing.offset if self._loop is not None else None
        return {**self._offsets, now[0]: now[1]} if now is not None else dict(self._offsets)
