"""What all ranks of a run keep together: rank 0 writes, everybody learns whether it worked."""

import logging
import time
from typing import Any

from twinhull.errors import CheckpointError, TwinhullError
from twinhull.rundir import RunDirectory
from twinhull.train.checkpoint import Checkpoint, Place, State, Store, unfit
from twinhull.train.group import Group
from twinhull.train.job import Job

log = logging.getLogger(__name__)


class Keeper:
    """Holds what was wrapped, gives it the state of the newest checkpoint and saves it.

    `place` is where the run takes up its work, `saved_step` the step of the last checkpoint if there is one.
    The state that ranks hold is the same on all of them, so one copy is saved.
    """

    def __init__(self, job: Job, group: Group) -> None:
        self._job, self._group = job, group
        self._store = (
            Store(RunDirectory(job.directory).checkpoints / job.name, job.keep) if job.directory else None
        )
        self._wrapped: list[Any] = []  # Any: has state_dict and load_state_dict
        self._kinds: list[str] = []
        self._last = self._find()
        self._restoring: list[State] | None = None
        self.place = self._take_up()
        self.saved_step = self._last.place.step if self._last else None
        self.saved_at = time.monotonic()

    def add(self, thing: Any, kind: str) -> None:  # Any: has state_dict and load_state_dict
        """One more thing to keep; gets its state back if there is one. Raises TwinhullError."""
        for where in unfit(thing.state_dict(), "its state"):
            raise TwinhullError(
                f"{kind} cannot be wrapped: {where}, which a checkpoint cannot hold.",
                hint="Keep tensors, numbers and text in its state_dict.",
            )
        number = len(self._wrapped)
        if self._restoring is not None:
            self._check_kind(number, kind)
            thing.load_state_dict(self._restoring[number])
            self._restoring[number] = {}  # one copy is enough
        self._wrapped.append(thing)
        self._kinds.append(kind)

    def save(self, place: Place, *, required: bool) -> None:
        """Save at `place` on all ranks. A failure is logged and the next try comes in its time.

        Raises CheckpointError on all ranks if a required one fails.
        """
        if self._store is None:
            return
        self.saved_at = time.monotonic()
        problem, took_s = "", 0.0
        if self._group.rank == 0:
            try:
                states = [thing.state_dict() for thing in self._wrapped]
                self._last = self._store.save(
                    place, tuple(self._kinds), states, world_size=self._group.world_size
                )
                took_s = time.monotonic() - self.saved_at
            except CheckpointError as error:
                problem = str(error)
        self._learn(problem, place, required=required)
        if self._group.rank == 0 and not problem:
            log.info("checkpoint saved", extra={"step": place.step, "took_s": round(took_s, 4)})

    def finish(self, place: Place) -> None:
        """Leave a checkpoint that marks the cycle as done. Raises CheckpointError on all ranks."""
        if self._store is None:
            return
        if self.saved_step != place.step:
            self.save(place, required=True)
        else:
            problem = ""
            if self._group.rank == 0:
                assert self._last is not None
                try:
                    self._last = self._store.change(self._last, place)
                except CheckpointError as error:
                    problem = str(error)
            self._learn(problem, place, required=True)
        if self._group.rank == 0:
            log.info("cycle finished", extra={"cycle": place.cycle, "step": place.step})

    def _learn(self, problem: str, place: Place, *, required: bool) -> None:
        problem = str(self._group.share(problem))
        if problem and required:
            raise CheckpointError(problem)
        if problem:
            if self._group.rank == 0:
                log.error("checkpoint failed", extra={"step": place.step, "reason": problem})
        else:
            self.saved_step = place.step

    def _find(self) -> Checkpoint | None:
        """The newest checkpoint that rank 0 could verify, on all ranks."""
        if self._store is None:
            return None
        found: Checkpoint | None = None
        if self._group.rank == 0:
            self._store.clean()
            found = self._store.newest()
        name = self._group.share(found.path.name if found else None)
        return self._store.named(name) if name is not None and found is None else found

    def _take_up(self) -> Place:
        """A new cycle after a finished one, or the unfinished one with its state."""
        if self._last is None or self._store is None:
            return Place(cycle_started=self._job.cycle_started)
        place = self._last.place
        if place.done:
            began = self._job.cycle_started
            return Place(place.step, place.cycle + 1, events=place.events, cycle_started=began)
        self._restoring = self._store.load(self._last)
        if self._group.rank == 0:
            repeated = max(0, self._job.furthest_step - place.step)
            log.info("resumed", extra={"step": place.step, "repeated_steps": repeated, "cycle": place.cycle})
        return place

    def _check_kind(self, number: int, kind: str) -> None:
        assert self._last is not None
        saved = self._last.parts
        if number >= len(saved) or saved[number] != kind:
            was = saved[number] if number < len(saved) else "nothing"
            raise CheckpointError(
                f"{self._last.path.name} holds {was} as wrapped thing {number + 1}, the code wraps {kind}.",
                hint="Put the code back as it was, or begin again in a new run directory.",
            )
