"""Where does the time of a step go on a GPU? The step clock, over events that the GPU itself passes.

An event is recorded in the stream of work where the processor would look at its clock. Its time is asked for
one step later, and only if the GPU has passed it by then: measuring never makes anybody wait. Time in which
the GPU had nothing to do counts for the part that it waited for.
"""

from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from twinhull.profile.clock import COMMUNICATION, COMPUTE, OTHER, PARTS, StepClock, Times

BEHIND = 4  # steps that may be unread: a host further ahead of its GPU gives up the oldest


class Event(Protocol):
    """What is needed of `torch.cuda.Event(enable_timing=True)`."""

    def record(self) -> None:
        """Be passed when the work handed over so far is done."""
        ...

    def query(self) -> bool:
        """Whether it was passed."""
        ...

    def elapsed_time(self, end_event: "Event") -> float:
        """Milliseconds from here to there."""
        ...


Border = tuple[int, Event]  # a part, and the event at its end


class DeviceClock:
    """The clock of a rank that computes on a GPU; used like a StepClock.

    States of a step: under way, over (its events are recorded), read or given up. The law: no call waits for
    the GPU.
    """

    def __init__(self, new_event: Callable[[], Event] | None = None) -> None:
        self.times = Times()
        self.given_up = 0
        self._new_event = new_event or _cuda_event
        self._spare: list[Event] = []
        self._over: deque[tuple[Event, list[Border]]] = deque()
        self.start()

    def start(self) -> None:
        """A loop begins: what was before it belongs to no step."""
        self._begin, self._borders = self._recorded(), list[Border]()
        self._own: Event | None = None
        self._computed = False

    def mark(self, part: int) -> None:
        """All since the last mark was `part`."""
        self._borders.append((part, self._recorded()))

    def own(self) -> None:
        """Gradients were handed to the network; the last time before `computed` counts."""
        if self._own is None:
            self._own = self._spare.pop() if self._spare else self._new_event()
        self._own.record()

    def computed(self) -> None:
        """Forward and backward are over: until `own` they computed, from there on they waited for others."""
        if self._own is not None:
            self._borders.append((COMPUTE, self._own))
        self.mark(COMPUTE if self._own is None else COMMUNICATION)
        self._own, self._computed = None, True

    def stop(self) -> None:
        """The step is over, and the next begins."""
        if not self._computed:
            self.computed()
        self.mark(OTHER)
        self._over.append((self._begin, self._borders))
        self._begin, self._borders, self._computed = self._borders[-1][1], list[Border](), False
        self._read()

    def _read(self) -> None:
        """Take the times of steps that the GPU has done; of the last it is hardly ever, and is not asked."""
        while len(self._over) > 1 and all(event.query() for _, event in self._over[0][1]):
            begin, borders = self._over.popleft()
            self.times.add(_parts(begin, borders))
            self._reuse(begin, borders)
        if len(self._over) > BEHIND:
            self._reuse(*self._over.popleft())
            self.given_up += 1

    def _reuse(self, begin: Event, borders: list[Border]) -> None:
        """The last event stays in use: the next step begins with it."""
        self._spare += [begin, *(event for _, event in borders[:-1])]

    def _recorded(self) -> Event:
        event = self._spare.pop() if self._spare else self._new_event()
        event.record()
        return event


def clock_of(device: str) -> StepClock | DeviceClock:
    """The clock for a kind of device: `cpu`, `cuda`."""
    return DeviceClock() if device == "cuda" else StepClock()


def _cuda_event() -> Event:
    import torch

    event: Any = torch.cuda.Event(enable_timing=True)  # Any: its types are narrower than what it takes
    return event


def _parts(begin: Event, borders: list[Border]) -> list[float]:
    """Seconds of each part. `own` may be of another stream, which can be late: no part takes less than 0."""
    parts, at_ms = [0.0] * PARTS, 0.0
    for part, event in borders:
        later_ms = max(at_ms, begin.elapsed_time(event))
        parts[part] += (later_ms - at_ms) / 1000
        at_ms = later_ms
    return parts
