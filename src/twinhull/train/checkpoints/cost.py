"""What does a checkpoint cost? The time that training waits for it, and by what its writing slows steps."""

from collections import deque
from statistics import median

from twinhull.policy import checkpoint_interval
from twinhull.train.job import Job

FIRST_S = 30.0  # until the first save, when the interval follows from a cost that nobody knows yet
STEPS = 20  # from whose median a step's usual time is taken


class Cost:
    """The measured cost of saving, and how often saving is worth it."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._usual: deque[float] = deque(maxlen=STEPS)
        self._stall_s = self._waited_s = self._slow_s = 0.0
        self.cost_s: float | None = None

    @property
    def due_s(self) -> float | None:
        """Seconds from one save to the next, from the file or from what saving costs; None: never by time."""
        if not self._job.save_auto or self._job.mtbf_s is None:
            return self._job.save_every_s
        return FIRST_S if self.cost_s is None else checkpoint_interval(self.cost_s, self._job.mtbf_s)

    def stalled(self, stall_s: float, *, in_step: bool) -> None:
        """Training has waited; within a step it is part of that step's time."""
        self._stall_s += stall_s
        self._waited_s += stall_s if in_step else 0.0

    def stepped(self, step_s: float, *, writing: bool) -> None:
        """A step has taken so long, while a checkpoint was being written or not."""
        if not writing:
            self._usual.append(step_s)
        elif self._usual:
            self._slow_s += step_s - self._waited_s - median(self._usual)
        self._waited_s = 0.0

    def saved(self, *, worked: bool) -> tuple[float, float]:
        """Stall and slow-down of the save that has now ended, in seconds; one that failed teaches nothing."""
        stall_s, slow_s = self._stall_s, max(0.0, self._slow_s)
        self._stall_s = self._waited_s = self._slow_s = 0.0
        if worked:
            spent = stall_s + slow_s
            self.cost_s = spent if self.cost_s is None else (self.cost_s + spent) / 2
        return stall_s, slow_s
