"""Where does the time of a step go? A clock that is read at the borders between the parts of a step.

A mark costs about 0.1 us on the processor. On a GPU the processor's time says when work was handed over, not
when it was done: there `device.py` has the same clock over the GPU's own events.
"""

from collections import deque
from dataclasses import dataclass
from enum import IntEnum
from time import perf_counter

KEPT = 1024  # steps; percentiles are taken over so many


class Part(IntEnum):
    """The parts of a step."""

    DATA = 0  # waits for a batch
    COPY = 1  # of the batch to the device
    COMPUTE = 2  # forward and backward
    COMMUNICATION = 3  # what backward does not hide of it
    OPTIMIZER = 4
    CHECKPOINT = 5  # waits for one
    OTHER = 6  # the user's code after the optimizer, and ours between two steps


DATA, COPY, COMPUTE, COMMUNICATION, OPTIMIZER, CHECKPOINT, OTHER = map(int, Part)  # a list finds these faster
PARTS = len(Part)


@dataclass(frozen=True, slots=True)
class Totals:
    """Seconds that each part has taken in so many steps."""

    steps: int
    seconds: tuple[float, ...]

    def since(self, earlier: "Totals") -> "Totals":
        """What was added to an earlier total."""
        pairs = zip(self.seconds, earlier.seconds, strict=True)
        return Totals(self.steps - earlier.steps, tuple(now - then for now, then in pairs))

    def mean_s(self, part: Part) -> float:
        """A step's mean time in that part; 0 if there was no step."""
        return self.seconds[part] / self.steps if self.steps else 0.0

    @property
    def step_s(self) -> float:
        """The mean time of a step."""
        return sum(self.seconds) / self.steps if self.steps else 0.0


class Times:
    """The parts of all steps so far as sums, and of the last KEPT steps one by one.

    `fresh` are the steps that are not yet summed up, the newest last.
    """

    def __init__(self) -> None:
        self.fresh: list[list[float]] = []
        self._kept: deque[list[float]] = deque([[0.0] * PARTS], maxlen=KEPT)
        self._steps, self._sums = 0, [0.0] * PARTS

    def add(self, parts: list[float]) -> None:
        """One more step; the list is kept, not copied."""
        self.fresh.append(parts)
        if len(self.fresh) == KEPT:
            self.fold()

    @property
    def last(self) -> list[float]:
        """The parts of the last step; zeros before the first."""
        return self.fresh[-1] if self.fresh else self._kept[-1]

    @property
    def step_s(self) -> float:
        """How long the last step took."""
        return sum(self.last)

    @property
    def own_s(self) -> float:
        """What of the last step this rank needed before it depended on the others."""
        last = self.last
        return last[DATA] + last[COPY] + last[COMPUTE]

    def totals(self) -> Totals:
        """All steps so far."""
        self.fold()
        return Totals(self._steps, tuple(self._sums))

    def percentile_s(self, part: int, percent: float) -> float:
        """The time of that part which so many of a hundred steps do not exceed; 0 if there was no step."""
        self.fold()
        times = sorted(parts[part] for parts in self._kept)
        return times[min(len(times) - 1, int(len(times) * percent / 100))]

    def fold(self) -> None:
        """Sum up what is fresh."""
        if not self.fresh:
            return
        if not self._steps:
            self._kept.clear()  # the zeros
        self._steps += len(self.fresh)
        self._sums = [sum(column) for column in zip(self._sums, *self.fresh, strict=True)]
        self._kept.extend(self.fresh)
        self.fresh.clear()


class StepClock:
    """The clock of a rank that computes on the processor.

    It runs on from one step to the next, so that the parts add up to the whole time. All time between two
    marks belongs to the part that the later one names. Within a step (micro-batches) the same parts add up.
    """

    __slots__ = ("_computed", "_fresh", "_last", "_own", "_parts", "times")

    def __init__(self) -> None:
        self.times = Times()
        self._fresh = self.times.fresh
        self.start()

    def start(self) -> None:
        """A loop begins: what was before it belongs to no step."""
        self._parts, self._computed, self._own = [0.0] * PARTS, False, 0.0
        self._last = perf_counter()

    def mark(self, part: int) -> None:
        """All since the last mark was `part`."""
        now = perf_counter()
        self._parts[part] += now - self._last
        self._last = now

    def own(self) -> None:
        """Gradients were handed to the network; the last time before `computed` counts."""
        self._own = perf_counter()

    def computed(self) -> None:
        """Forward and backward are over: until `own` they computed, from there on they waited for others."""
        now, own = perf_counter(), self._own
        if own > self._last:
            self._parts[COMPUTE] += own - self._last
            self._parts[COMMUNICATION] += now - own
        else:
            self._parts[COMPUTE] += now - self._last
        self._last, self._computed = now, True

    def stop(self) -> None:
        """The step is over, and the next begins."""
        if not self._computed:  # nobody has told of an optimizer
            self.computed()
        parts, now, fresh = self._parts, perf_counter(), self._fresh
        parts[OTHER] += now - self._last
        self._parts, self._computed, self._last = [0.0] * PARTS, False, now
        fresh.append(parts)  # as Times.add does it, without another call
        if len(fresh) == KEPT:
            self.times.fold()
