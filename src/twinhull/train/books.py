"""What a step leaves in the books: how long its parts took, how far the run is, what the code reported."""

import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any

from twinhull.train.group import Group
from twinhull.train.job import Job
from twinhull.train.live import Beat
from twinhull.train.pace import Pace
from twinhull.train.progress import Progress


class Books:
    """Kept by every rank; what people see comes from rank 0."""

    def __init__(self, job: Job, group: Group, pace: Pace, beat: Beat | None) -> None:
        self._beat, self._rank = beat, group.rank
        self._progress = Progress(job.name)
        self.hooks: list[Callable[[Mapping[str, Any]], None]] = []
        self.step_s, self._began, self._data_s = 0.0, 0.0, 0.0

    def running(self, step: int) -> None:
        if self._beat is not None:
            self._beat.running(step)

    def looping(self, step: int, left: int | None) -> None:
        self.completed(step)

    def between(self, step: int) -> None:
        self.completed(step)

    def completed(self, step: int) -> None:
        if self._beat is not None:
            self._beat.completed(step)

    def begin(self) -> None:
        self._began = time.monotonic()

    def fetched(self) -> None:
        self._data_s = time.monotonic() - self._began

    def placed(self) -> None:
        pass

    def gradients_handed_over(self) -> None:
        pass

    def report(self, values: dict[str, Any]) -> None:
        if self._rank == 0:
            self._progress.report(values)

    def stepped(self, step: int, left: int | None) -> None:
        self.step_s = time.monotonic() - self._began
        self.completed(step)
        if self._rank == 0:
            self._progress.stepped(step, step + (left or 0), self.step_s, self._data_s)

    @contextmanager
    def saving(self) -> Generator[None]:
        yield

    def is_bad(self) -> bool:
        return False

    def close(self) -> None:
        pass
