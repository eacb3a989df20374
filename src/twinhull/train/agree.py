"""When all ranks save or stop: one decision, the same on every rank at the same step."""

import time
from dataclasses import dataclass

from twinhull.train.group import Group
from twinhull.train.job import Job

EVERY_S = 0.1  # how often the ranks compare notes; a small all-reduce each time would tax short steps
MOST_STEPS = 1000


@dataclass(frozen=True, slots=True)
class Agreed:
    """What all ranks do after a step. `is_bad`: some rank's loss is no number."""

    save: bool = False
    stop: bool = False
    is_bad: bool = False


class Agreement:
    """Asked after every step; talks to the other ranks only every EVERY_S, at a step they have agreed on.

    Rank 0's clock decides when a checkpoint is due; any rank may ask to stop, or say that its loss is bad.
    """

    def __init__(self, job: Job, group: Group, step: int) -> None:
        self.stop_asked = False
        self._every_steps, self._group = job.save_every_steps, group
        self._next = step + 1
        self._last = step, time.monotonic()

    def is_due(self, step: int, *, is_last: bool) -> bool:
        """Whether the ranks compare notes after `step`: the same on all, without asking.

        The last step of a loop always does: what follows may be long and cannot be interrupted. So does one
        that saves: what is bad must not be saved.
        """
        asked = self.stop_asked and self._group.world_size == 1
        return step >= self._next or is_last or asked or self._saves(step)

    def after(self, step: int, *, is_save_due: bool, is_bad: bool) -> Agreed:
        """What is done after `step`, asked where `is_due` says so; `is_save_due` counts on rank 0 only."""
        mine = [int(self.stop_asked), int(is_bad), 0, 0]
        if self._group.rank == 0:
            mine = [*mine[:2], int(is_save_due), self._steps_until_next(step, time.monotonic())]
        stop, bad, save, steps = self._group.most(mine)
        self._next = step + steps
        return Agreed(bool(save) or self._saves(step), bool(stop), bool(bad))

    def _saves(self, step: int) -> bool:
        return self._every_steps is not None and step % self._every_steps == 0

    def _steps_until_next(self, step: int, now: float) -> int:
        then_step, then = self._last
        self._last = step, now
        step_s = max((now - then) / max(1, step - then_step), 1e-6)
        return min(max(1, int(EVERY_S / step_s)), MOST_STEPS)
