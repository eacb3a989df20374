"""Batches from what can only be read from its beginning to its end: a file, a generator, a queue of others.

Every rank reads all of it and keeps its own part: reading is paid for on each. The position is the number of
samples trained, so another number of ranks can go on from it.
"""

import logging
import math
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from twinhull.errors import CheckpointError, TwinhullError
from twinhull.train.data.ahead import Collate
from twinhull.train.data.loader import Part, Start
from twinhull.train.sowing import data_seed, sow

_SLOW_S = 2.0
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class IterableLoader:
    """An iterable in global batches, in its own order.

    With a method `start_at(number)`, which gives an iterator from that sample on, taking it up again need not
    read what was trained. It must give the same samples in the same order each time.
    """

    source: Iterable[Any]  # Any: the user's own
    batch_size: int
    collate: Collate

    def start(self, at: Start) -> "IterablePass":
        """A pass from the beginning or from where it was saved."""
        return IterablePass(self, at, at.saved or {"epoch": 0, "trained": 0})


class IterablePass:
    """Epochs over an iterable; each sample exactly once an epoch, whatever the number of ranks."""

    def __init__(self, loader: IterableLoader, at: Start, saved: Mapping[str, int]) -> None:
        self._loader, self._at = loader, at
        self._epoch, self._trained = saved["epoch"], saved["trained"]
        self._samples: Iterator[Any] | None = None
        self._next: list[Part] | None = None
        self._size = 0  # samples in the next global batch

    @property
    def offset(self) -> None:
        """It is no stream of events."""
        return

    def fetch(self) -> list[Part] | None:
        """This rank's micro-batches of the next samples."""
        while self._next is None and self._epoch < self._at.epochs:
            if self._samples is None:
                self._samples = self._from(self._trained)
            samples = self._take(self._samples, self._trained, self._loader.batch_size)
            if samples:
                self._size = len(samples)
                parts = self._at.split(len(samples), self._loader.batch_size)
                self._next = [Part(self._loader.collate(samples[mine]), share) for mine, share in parts]
            elif self._trained == 0:  # nothing in it: another epoch would have nothing either
                self._refuse_second_reading()
                return None
            else:
                self._epoch, self._trained, self._samples = self._epoch + 1, 0, None
        return self._next

    def advance(self) -> None:
        """The batch was trained."""
        self._trained, self._next = self._trained + self._size, None

    def state(self) -> dict[str, int]:
        """The epoch and the samples of it that are trained."""
        return {"epoch": self._epoch, "trained": self._trained}

    def batches_left(self) -> None:
        """Nobody knows before the end."""
        return

    def close(self) -> None:
        """Nothing is kept open."""

    def _from(self, number: int) -> Iterator[Any]:
        """The samples from `number` on."""
        source: Any = self._loader.source  # Any: it may have `start_at`
        if number and hasattr(source, "start_at"):
            return iter(source.start_at(number))
        sow(data_seed(self._at.seed, self._epoch, 0))
        samples = iter(source)
        self._skip(samples, number)
        return samples

    def _skip(self, samples: Iterator[Any], number: int) -> None:
        """Read what is trained, batch by batch as it was read before: it may draw random numbers."""
        size, tell_at = self._loader.batch_size, time.monotonic() + _SLOW_S
        for first in range(0, number, size):
            wanted = min(size, number - first)
            if (found := len(self._take(samples, first, wanted))) < wanted:
                raise CheckpointError(
                    f"{self._name} has {first + found} samples, and {number} of this epoch were trained.",
                    hint="Put the old data back, or begin again in a new run directory.",
                )
            if time.monotonic() > tell_at:
                facts = {"source": self._name, "skipped": first + found, "samples": number}
                log.info("skipping what is trained; start_at(number) would be quicker", extra=facts)
                tell_at = math.inf

    def _take(self, samples: Iterator[Any], first: int, wanted: int) -> list[Any]:
        """The next samples, as many as wanted and there; `first` is the number of the first one."""
        sow(data_seed(self._at.seed, self._epoch, first))
        taken: list[Any] = []
        try:
            taken.extend(islice(samples, wanted))
        except Exception as error:
            error.add_note(f"It was raised for sample {first + len(taken)} of {self._name}.")
            raise
        return taken

    def _refuse_second_reading(self) -> None:
        """What is its own iterator is used up after an epoch; a loop that is shorter than asked says so."""
        if self._epoch and isinstance(self._loader.source, Iterator):
            raise TwinhullError(
                f"{self._name} can be read only once, and epoch {self._epoch + 1} was to begin.",
                hint="Give an object whose __iter__ begins anew, or ask for one epoch.",
            )

    @property
    def _name(self) -> str:
        return type(self._loader.source).__name__
