"""Whether, and after what wait, a training run is started again: pure decisions on what has happened so far.

A loss (a rank killed from outside, a host gone, a hang) is nobody's fault and never ends a run, nor does an
end that was asked for (a host about to go, one more that came). A crash (an exception in the user's code, a
broken native library, memory that runs out) would come again for ever: the third one at the same step without
progress ends it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

CRASHES = 3  # at the same step: one may be chance, two bad luck
FIRST_WAIT_S = 0.5
LONGEST_WAIT_S = 30.0
STEADY_S = 30.0  # a generation that trained this long owes no wait

Cause = Literal["host", "rank", "hang", "crash", "preempted", "growth"]
_ASKED_FOR = {"preempted", "growth"}


@dataclass(frozen=True, slots=True)
class Ended:
    """How one generation ended. `stepped_s` is how long it trained; `saved` if it left a new checkpoint."""

    cause: Cause
    step: int
    steps: int
    stepped_s: float
    saved: bool


@dataclass(frozen=True, slots=True)
class History:
    """What counts so far: steps of the crashes since the last new checkpoint, failures in a row.

    `by_cause` is how often generations have ended for each cause, `hangs` how many of the last ones have hung
    at the step `hung_at`.
    """

    crash_steps: tuple[int, ...] = ()
    in_a_row: int = 0
    by_cause: Mapping[str, int] = field(default_factory=dict)
    hangs: int = 0
    hung_at: int = -1

    def after(self, ended: Ended) -> "History":
        """The history with one more generation."""
        crash_steps = () if ended.saved else self.crash_steps
        rested = ended.saved or ended.stepped_s >= STEADY_S or (ended.cause != "crash" and ended.steps > 0)
        in_a_row = 1 if rested or ended.cause in _ASKED_FOR else self.in_a_row + 1
        if ended.cause == "crash":
            crash_steps = (*crash_steps, ended.step)
        by_cause = {**self.by_cause, ended.cause: self.by_cause.get(ended.cause, 0) + 1}
        hangs, hung_at = self.hangs, self.hung_at
        if ended.cause == "hang":
            hangs, hung_at = (hangs + 1 if ended.step == hung_at else 1), ended.step
        elif ended.step > hung_at:
            hangs, hung_at = 0, -1
        return History(crash_steps, in_a_row, by_cause, hangs, hung_at)

    @property
    def is_hopeless(self) -> bool:
        """Whether the last crash was one too many at its step."""
        return bool(self.crash_steps) and self.crash_steps.count(self.crash_steps[-1]) >= CRASHES

    @property
    def wait_s(self) -> float:
        """How long to wait before the next generation: not at all after the first failure in a row."""
        if self.in_a_row <= 1:
            return 0.0
        return min(FIRST_WAIT_S * 2.0 ** min(self.in_a_row - 2, 20), LONGEST_WAIT_S)


def until_next(started: float, every_s: float, now: float) -> float:
    """Seconds until the cycle after the one that started then; at most `every_s`, whatever the clock does."""
    return min(every_s, max(0.0, started + every_s - now))
