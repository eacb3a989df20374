"""Where batches come from: a dataset, read in epochs in an order that any number of ranks can share.

A loader describes, a pass does: one pass stands for one `run.steps` loop. It gives this rank's part of each
global batch, moves on when the batch was trained, and can say where it stands in plain JSON.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import tee
from typing import Any, Protocol

from twinhull.errors import CheckpointError
from twinhull.train.data import cursor as cursors
from twinhull.train.data.ahead import Batches, Collate, Dataset, Ticket
from twinhull.train.data.cursor import Cursor, Indices
from twinhull.train.group import Group
from twinhull.train.sowing import data_seed


@dataclass(frozen=True, slots=True)
class Part:
    """A micro-batch of this rank, and the share of the global batch that it is."""

    batch: Any  # Any: the user's own
    share: float


@dataclass(frozen=True, slots=True)
class Start:
    """What a pass starts with: `saved` is what its earlier life said, `offsets` how far streams are read."""

    group: Group
    seed: int
    epochs: int
    saved: Mapping[str, Any] | None  # Any: plain JSON
    offsets: Mapping[str, Any]  # Any: plain JSON
    micro: int | None = None  # the most samples that a rank takes at a time
    full_size: int | None = None  # ranks when all nodes are there

    def split(self, num_samples: int, batch_size: int) -> list[tuple[slice, float]]:
        """This rank's micro-batches of a global batch that has `num_samples` of its `batch_size` samples."""
        world_size = self.group.world_size
        most = cursors.most_at_once(batch_size, self.micro, self.full_size, world_size)
        return cursors.split(num_samples, self.group.rank, world_size, most)


class Pass(Protocol):
    """One loop over its data. `fetch` gives None at the end, and again the same parts until `advance`."""

    @property
    def offset(self) -> tuple[str, Mapping[str, Any]] | None:
        """The stream that it reads and how far this was trained; None if it reads none."""
        ...

    def fetch(self) -> list[Part] | None:
        """This rank's micro-batches of the next global batch, equally many on all ranks."""
        ...

    def advance(self) -> None:
        """The batch was trained."""
        ...

    def state(self) -> dict[str, Any]:  # Any: plain JSON
        """Where it stands."""
        ...

    def batches_left(self) -> int | None:
        """How many global batches are still to come; None if nobody knows."""
        ...

    def close(self) -> None:
        """The loop is over, whether or not its data is."""
        ...


class Source(Protocol):
    """What `run.steps` takes: it starts a pass."""

    def start(self, at: Start) -> Pass:
        """A pass from the beginning, or from where it was saved."""
        ...


@dataclass(frozen=True, slots=True)
class Loader:
    """A dataset in global batches; `workers` processes a rank load ahead."""

    dataset: Dataset
    batch_size: int
    shuffle: bool
    collate: Collate | None
    workers: int = 0

    def start(self, at: Start) -> "DatasetPass":
        """A pass from the beginning or from where it was saved."""
        begin = Cursor(size=len(self.dataset), seed=at.seed)
        if at.saved is not None:
            found = Cursor(**at.saved)
            if found.size != begin.size:
                raise CheckpointError(
                    f"the dataset has {begin.size} samples and had {found.size} when it was saved.",
                    hint="Put the old data back, or begin again in a new run directory.",
                )
            begin = found
        return DatasetPass(self, at, begin)


@dataclass(frozen=True, slots=True)
class _Step:
    """What one rank loads for one step: a ticket for each micro-batch, the shares, and the position after."""

    tickets: list[Ticket]
    shares: list[float]
    after: Cursor


class DatasetPass:
    """Shuffled epochs over a dataset; each sample exactly once an epoch, whatever the number of ranks.

    The cursor counts what was trained; loading may be ahead of it.
    """

    def __init__(self, loader: Loader, at: Start, begin: Cursor) -> None:
        self._loader, self._at, self._cursor = loader, at, begin
        plan, again = tee(_plan(loader, at, begin))
        self._plans = plan
        tickets = (ticket for step in again for ticket in step.tickets)
        self._batches = Batches(loader.dataset, loader.collate).ahead(tickets, loader.workers)
        self._next: list[Part] | None = None
        self._after = begin  # the position when `_next` is trained

    @property
    def offset(self) -> None:
        """A dataset is no stream."""
        return

    def fetch(self) -> list[Part] | None:
        """This rank's micro-batches of the batch at the cursor."""
        if self._next is None and (step := next(self._plans, None)) is not None:
            self._next = [Part(next(self._batches), share) for share in step.shares]
            self._after = step.after
        return self._next

    def advance(self) -> None:
        """The batch was trained."""
        self._cursor, self._next = self._after, None

    def state(self) -> dict[str, Any]:
        """The cursor."""
        return asdict(self._cursor)

    def close(self) -> None:
        """End the processes that load ahead: they go with the last one who holds their iterator."""
        self._batches = iter(())

    def batches_left(self) -> int:
        """How many global batches are still to come."""
        return cursors.batches_left(self._cursor, self._loader.batch_size, self._at.epochs)


def _plan(loader: Loader, at: Start, cursor: Cursor) -> Iterator[_Step]:
    """What to load for each step from the cursor to the end of the last epoch."""
    order, epoch = cursors.order(cursor, shuffle=loader.shuffle), cursor.epoch
    while cursor.size and cursor.epoch < at.epochs:
        if cursor.epoch != epoch:
            order, epoch = cursors.order(cursor, shuffle=loader.shuffle), cursor.epoch
        batch = order[cursor.consumed : cursor.consumed + loader.batch_size]
        parts = at.split(len(batch), loader.batch_size)
        tickets = [_ticket(cursor, batch, mine) for mine, _ in parts]
        cursor = cursors.advance(cursor, loader.batch_size)
        yield _Step(tickets, [share for _, share in parts], cursor)


def _ticket(cursor: Cursor, batch: Indices, mine: slice) -> Ticket:
    seed = data_seed(cursor.seed, cursor.epoch, cursor.consumed + int(mine.start))
    return Ticket(seed, batch[mine].tolist())


@dataclass(frozen=True, slots=True)
class Events:
    """The events of one stream that training has not seen yet, for `run.loader`."""

    name: str
