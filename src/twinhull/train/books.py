"""What a step leaves in the books: how long its parts took, how far the run is, what the code reported."""

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from functools import partial
from time import perf_counter
from typing import Any

from twinhull.profile.clock import CHECKPOINT, COPY, DATA, OPTIMIZER, OTHER, Part
from twinhull.profile.device import clock_of
from twinhull.rundir import RunDirectory
from twinhull.train.finite import Finite
from twinhull.train.group import Group
from twinhull.train.job import Job
from twinhull.train.metrics import Metrics
from twinhull.train.pace import Pace
from twinhull.train.progress import Progress
from twinhull.train.supervise.live import Beat, Doing

_NAMES = tuple(f"{part.name.lower()}_s" for part in Part)


class Books:
    """Kept by every rank; what people see comes from rank 0.

    States: in a loop (from `looping` to `between` or `broken_off`), outside of loops. `step_s` is what the
    last step took on the host, from `begin` to `stepped`; its parts are the clock's, and of a GPU those of a
    step before.
    """

    def __init__(self, job: Job, group: Group, pace: Pace, beat: Beat | None) -> None:
        self._beat, self._is_first, self._pace = beat, group.rank == 0, pace
        self._clock = clock_of(group.device.type)
        self._copies = group.device.type != "cpu"
        self._progress = Progress(job.name, self._clock.times)
        self._finite = Finite(stop=job.stop_on_nan)
        shown = RunDirectory(job.directory).metrics / f"{job.name}.jsonl" if job.directory else None
        self._metrics = Metrics(shown if self._is_first else None, job.generation)
        self._is_written = shown is not None and self._is_first
        self._reported: dict[str, Any] = {}  # Any: numbers, or tensors of one on a device
        self._step = 0
        self._began = self._ready_at = self._waited_s = 0.0
        self.hooks: list[Callable[[Mapping[str, Any]], None]] = []
        self.step_s = 0.0
        pace.before_update.insert(0, self._ready)
        pace.before_update.append(self._waited)
        pace.after_update.append(partial(self._clock.mark, OPTIMIZER))

    def running(self, step: int) -> None:
        """The rank takes up its work at `step`."""
        self._step = step
        if self._beat is not None:
            self._beat.running(step)

    def looping(self, step: int, left: int | None) -> None:
        """A loop begins."""
        self._book(step)
        self._step = step
        if self._beat is not None:
            self._beat.doing(Doing.FIRST)
        self._clock.start()

    def between(self, step: int) -> None:
        """A loop is over."""
        if self._beat is not None:
            self._beat.completed(step, Doing.BETWEEN)

    def broken_off(self) -> None:
        """The code has left its loop, by `break` or by an error; the step is booked when it goes on."""
        if self._beat is not None:
            self._beat.doing(Doing.BETWEEN)

    def completed(self, step: int) -> None:
        """Something other than a step was completed."""
        self._book(step)
        if self._beat is not None:
            self._beat.completed(step)

    def begin(self) -> None:
        """What comes now is fetching data; what was since the last step is no part of it."""
        self._clock.mark(OTHER)
        self._began = perf_counter()

    def fetched(self) -> None:
        """The data of a step is here."""
        self._clock.mark(DATA)

    def placed(self) -> None:
        """A micro-batch is on its device. All since the one before it was computing."""
        if self._copies and self._pace.is_first:
            self._clock.mark(COPY)

    def gradients_handed_over(self) -> None:
        """The last gradients of this rank are under way: what follows depends on the others."""
        self._clock.own()
        if self._beat is not None:
            self._beat.waits()

    def report(self, values: Mapping[str, Any]) -> None:  # Any: numbers or tensors of one number
        """Remember values by name for this step."""
        if self._is_first:
            kept = {name: _kept(value) for name, value in values.items()}
            self._reported.update(kept)
            self._progress.report(kept)
        if "loss" in values:
            self._finite.take(self._reported["loss"] if self._is_first else _kept(values["loss"]))

    def stepped(self, step: int, left: int | None) -> None:
        """A step is complete; so many are left, if that is known."""
        self._clock.stop()
        self._step, self.step_s = step, perf_counter() - self._began
        if (beat := self._beat) is not None:
            times = self._clock.times
            beat.stalled(self._waited_s)
            beat.timed(self.step_s - self._waited_s, times.own_s, times.last[DATA])
            beat.completed(step, Doing.STEPPING)
        self._waited_s = 0.0
        if self._is_first:
            self._show(step, left)

    @contextmanager
    def saving(self) -> Generator[None]:
        """While the rank waits for a checkpoint."""
        beat, began = self._beat, perf_counter()
        before = beat.doing(Doing.SAVING) if beat is not None else Doing.BETWEEN
        self._clock.mark(OTHER)
        try:
            yield
        finally:
            self._clock.mark(CHECKPOINT)
            if beat is not None:
                beat.stalled(perf_counter() - began)
                beat.doing(before)

    def is_bad(self) -> bool:
        """Whether a loss of this rank was no number, and training shall not go on."""
        bad = self._finite.is_bad()
        if bad:
            self.close()  # the last steps are what one will want to see
        return bad

    def close(self) -> None:
        """Write what is not written yet."""
        self._metrics.flush()

    def _book(self, step: int) -> None:
        """The last step of a loop that was broken off, unless it is booked."""
        if step > self._step:
            self.stepped(step, None)

    def _ready(self) -> None:
        """Gradients are there; before they change anything, a snapshot may have to become whole."""
        self._clock.computed()
        self._ready_at = perf_counter()

    def _waited(self) -> None:
        self._clock.mark(CHECKPOINT)
        self._waited_s += perf_counter() - self._ready_at

    def _show(self, step: int, left: int | None) -> None:
        self._progress.stepped(step, left)
        if self._is_written or self.hooks:
            numbers: dict[str, Any] = {"step": step, "step_s": self.step_s}  # Any: as reported
            numbers.update(zip(_NAMES, self._clock.times.last, strict=True))
            numbers.update(self._reported)
            self._metrics.stepped(numbers)
            for hook in self.hooks:
                hook(numbers)
        self._reported.clear()


def _kept(value: Any) -> Any:  # Any: a number, or a tensor of one
    """The number as it is now; one on a device as a copy, since the code may write over it."""
    if getattr(value, "is_cpu", True):
        return float(value.item() if hasattr(value, "item") else value)
    return value.detach().clone()
