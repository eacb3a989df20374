"""When all ranks save or stop: one decision, the same on every rank at the same step."""

import time

from twinhull.train.group import Group
from twinhull.train.job import Job

EVERY_S = 0.1  # how often the ranks compare notes; a small all-reduce each time would tax short steps
MOST_STEPS = 1000


class Agreement:
    """Asked after every step; talks to the other ranks only every EVERY_S, at a step they have agreed on.

    Rank 0's clock decides when a checkpoint is due; any rank may ask to stop.
    """

    def __init__(self, job: Job, group: Group, step: int) -> None:
        self.stop_asked = False
        self._job, self._group = job, group
        self._next = step + 1
        self._last = step, time.monotonic()

    def after(self, step: int, saved_at: float, *, is_last: bool) -> tuple[bool, bool]:
        """Whether to save and whether to stop after `step`; `saved_at` is when it was last saved.

        The last step of a loop always asks: what follows may be long and cannot be interrupted.
        """
        every = self._job.save_every_steps
        save = every is not None and step % every == 0
        if step < self._next and not is_last and self._group.world_size > 1:
            return save, False
        now = time.monotonic()
        due = self._job.save_every_s is not None and now - saved_at >= self._job.save_every_s
        mine = [int(self.stop_asked), 0, 0]
        if self._group.rank == 0:
            mine = [mine[0], int(due), self._steps_until_next(step, now)]
        stop, is_due, steps = self._group.most(mine)
        self._next = step + steps
        return save or bool(is_due), bool(stop)

    def _steps_until_next(self, step: int, now: float) -> int:
        then_step, then = self._last
        self._last = step, now
        step_s = max((now - then) / max(1, step - then_step), 1e-6)
        return min(max(1, int(EVERY_S / step_s)), MOST_STEPS)
