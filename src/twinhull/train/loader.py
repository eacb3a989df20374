"""Where batches come from: a dataset read in shuffled epochs, or the stream of events read once.

A loader describes, a pass does: one pass stands for one `run.steps` loop. It gives this rank's part of each
global batch, moves on when the batch was trained, and can say where it stands in plain JSON.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from twinhull.errors import BrokerError, CheckpointError
from twinhull.handoff.events import START, Event, Offset, Reader
from twinhull.train import cursor as cursors
from twinhull.train.cursor import Cursor
from twinhull.train.group import Group

_CHUNK = 10_000
log = logging.getLogger(__name__)

Collate = Callable[[Any], Any]  # Any: samples and batches are the user's own


@dataclass(frozen=True, slots=True)
class Part:
    """This rank's part of a global batch, and the share of the batch that it is."""

    batch: Any  # Any: the user's own
    share: float


class Pass(Protocol):
    """One loop over its data. `fetch` gives None at the end, and again the same part until `advance`."""

    def fetch(self) -> Part | None:
        """This rank's part of the next global batch."""
        ...

    def advance(self) -> None:
        """The batch was trained."""
        ...

    def state(self) -> dict[str, Any]:  # Any: plain JSON
        """Where it stands."""
        ...

    def batches_left(self) -> int:
        """How many global batches are still to come."""
        ...


class Dataset(Protocol):
    """What can be trained on: it has a length and gives a sample by its number.

    With `__getitems__(numbers)` (PyTorch's own name) it gives a whole batch at once.
    """

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


@dataclass(frozen=True, slots=True)
class Loader:
    """A dataset in global batches. `collate` makes a batch of a list of samples."""

    dataset: Dataset
    batch_size: int
    shuffle: bool
    collate: Collate | None

    def start(self, group: Group, seed: int, epochs: int, saved: Mapping[str, Any] | None) -> "DatasetPass":
        """A pass of so many epochs, from the beginning or from where `saved` says."""
        begin = Cursor(size=len(self.dataset), seed=seed)
        if saved is not None:
            found = Cursor(**saved)
            if found.size != begin.size:
                raise CheckpointError(
                    f"the dataset has {begin.size} samples and had {found.size} when it was saved.",
                    hint="Put the old data back, or begin again in a new run directory.",
                )
            begin = found
        return DatasetPass(self, group, epochs, begin)


class DatasetPass:
    """Shuffled epochs over a dataset; each sample exactly once an epoch, whatever the number of ranks."""

    def __init__(self, loader: Loader, group: Group, epochs: int, begin: Cursor) -> None:
        self._loader, self._group, self._epochs, self._cursor = loader, group, epochs, begin
        self._order = cursors.order(begin, shuffle=loader.shuffle)
        self._collate = loader.collate or _default_collate

    def fetch(self) -> Part | None:
        """This rank's part of the batch at the cursor."""
        if self._cursor.size == 0 or self._cursor.epoch >= self._epochs:
            return None
        mine = cursors.part(
            self._cursor, self._order, self._loader.batch_size, self._group.rank, self._group.world_size
        )
        return Part(self._collate(_samples(self._loader.dataset, mine.indices.tolist())), mine.share)

    def advance(self) -> None:
        """The batch was trained."""
        before, self._cursor = self._cursor, cursors.advance(self._cursor, self._loader.batch_size)
        if self._cursor.epoch != before.epoch:
            self._order = cursors.order(self._cursor, shuffle=self._loader.shuffle)

    def state(self) -> dict[str, Any]:
        """The cursor."""
        return asdict(self._cursor)

    def batches_left(self) -> int:
        """How many global batches are still to come."""
        return cursors.batches_left(self._cursor, self._loader.batch_size, self._epochs)


def _samples(dataset: Dataset, numbers: list[int]) -> Any:  # Any: the user's own
    many: Callable[[list[int]], Any] | None = getattr(dataset, "__getitems__", None)
    return many(numbers) if many is not None else [dataset[number] for number in numbers]


def _default_collate(samples: Any) -> Any:  # Any: the user's own
    from torch.utils.data import default_collate

    return default_collate(samples) if isinstance(samples, list) else samples


@dataclass(frozen=True, slots=True)
class Events:
    """The events of one stream that training has not seen yet. `reader` is None when there is no broker."""

    name: str
    reader: Reader | None


@dataclass(frozen=True, slots=True)
class EventLoader:
    """Events in global batches, in the order in which they came."""

    source: Events
    batch_size: int
    collate: Collate | None

    def start(
        self, group: Group, offset: Mapping[str, Any] | None, epochs: int, saved: Mapping[str, Any] | None
    ) -> "EventPass":
        """A pass from `offset` to the end of what has settled now, or the pass that `saved` describes.

        The end is fixed when the pass begins, so a pass that is taken up again has the same batches.
        """
        if saved is None:
            begin = Offset(**offset) if offset else START
            end = asdict(_settled_end(self.source, begin)) if group.rank == 0 else None
            saved = {"begin": asdict(begin), "end": group.share(end), "at": asdict(begin), "epoch": 0}
        return EventPass(self, group, epochs, saved)


class EventPass:
    """From one offset of a stream to another. Rank 0 reads and shares, so all ranks see the same events."""

    def __init__(self, loader: EventLoader, group: Group, epochs: int, saved: Mapping[str, Any]) -> None:
        self.name = loader.source.name
        self._loader, self._group, self._epochs = loader, group, epochs
        self._begin, self._end = Offset(**saved["begin"]), Offset(**saved["end"])
        self._at, self._epoch = Offset(**saved["at"]), int(saved["epoch"])
        self._next: tuple[list[Any], Offset] | None = None

    @property
    def offset(self) -> dict[str, Any]:
        """Where the stream is trained to; the next pass begins here."""
        return asdict(self._at if self._epoch == 0 else self._end)

    def fetch(self) -> Part | None:
        """This rank's part of the next events."""
        while self._next is None:
            if self._at.index >= self._end.index:
                self._end = self._at if self._epoch == 0 else self._end
                self._epoch += 1
                self._at = self._begin
            if self._epoch >= self._epochs or self._begin.index >= self._end.index:
                return None
            bodies, after = self._read()
            if bodies:
                self._next = bodies, after
            else:  # what is unreadable or gone is logged and counted by the reader
                if after.index <= self._at.index or after.born != self._at.born:
                    self._end = after
                self._at = after
        bodies = self._next[0]
        mine, share = cursors.split(len(bodies), self._group.rank, self._group.world_size)
        picked = bodies[mine]
        return Part(self._loader.collate(picked) if self._loader.collate else picked, share)

    def advance(self) -> None:
        """The batch was trained."""
        assert self._next is not None
        self._at = self._next[1]
        self._next = None

    def state(self) -> dict[str, Any]:
        """Begin, end and position of the pass."""
        ends = {"begin": asdict(self._begin), "end": asdict(self._end), "at": asdict(self._at)}
        return {**ends, "epoch": self._epoch}

    def batches_left(self) -> int:
        """How many global batches are still to come, if nothing is dropped unread."""
        size = self._loader.batch_size
        whole = -(-(self._end.index - self._begin.index) // size)
        return max(0, self._epochs - self._epoch - 1) * whole + -(-(self._end.index - self._at.index) // size)

    def _read(self) -> tuple[list[Any], Offset]:
        limit = min(self._loader.batch_size, self._end.index - self._at.index)
        read: Any = None
        if self._group.rank == 0:
            assert self._loader.source.reader is not None
            reader, at = self._loader.source.reader, self._at
            events, after = _patiently(lambda: reader.read(at, limit))
            read = [[event.body for event in events], asdict(after)]
        bodies, said = self._group.share(read)
        return bodies, Offset(**said)


def _settled_end(source: Events, begin: Offset) -> Offset:
    """The offset behind the last settled event; `begin` when there is none, or no broker."""
    if source.reader is None:
        log.warning("no broker, no events", extra={"stream": source.name})
        return begin
    reader, at = source.reader, begin
    while True:
        here = at
        events, at = _patiently(lambda here=here: reader.read(here, _CHUNK))
        if not events:
            return at


def _patiently(read: Callable[[], tuple[Sequence[Event], Offset]]) -> tuple[Sequence[Event], Offset]:
    """Read as soon as the broker answers. Training floats without it; only this read has to wait."""
    wait_s = 0.1
    while True:
        try:
            return read()
        except BrokerError as error:
            if wait_s == 0.1:
                log.warning("waiting for the broker", extra={"reason": str(error)})
            time.sleep(wait_s)
            wait_s = min(wait_s * 2, 2.0)
