"""Where batches come from: a dataset, read in epochs in an order that any number of ranks can share.

A loader describes, a pass does: one pass stands for one `run.steps` loop. It gives this rank's part of each
global batch, moves on when the batch was trained, and can say where it stands in plain JSON.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from twinhull.errors import CheckpointError
from twinhull.train import cursor as cursors
from twinhull.train.cursor import Cursor
from twinhull.train.group import Group

Collate = Callable[[Any], Any]  # Any: samples and batches are the user's own


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


class Source(Protocol):
    """What `run.steps` takes: it starts a pass."""

    def start(self, at: Start) -> Pass:
        """A pass from the beginning, or from where it was saved."""
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

    def start(self, at: Start) -> "DatasetPass":
        """A pass from the beginning or from where it was saved."""
        saved = at.saved
        begin = Cursor(size=len(self.dataset), seed=at.seed)
        if saved is not None:
            found = Cursor(**saved)
            if found.size != begin.size:
                raise CheckpointError(
                    f"the dataset has {begin.size} samples and had {found.size} when it was saved.",
                    hint="Put the old data back, or begin again in a new run directory.",
                )
            begin = found
        return DatasetPass(self, at, begin)


class DatasetPass:
    """Shuffled epochs over a dataset; each sample exactly once an epoch, whatever the number of ranks."""

    def __init__(self, loader: Loader, at: Start, begin: Cursor) -> None:
        self._loader, self._at, self._epochs, self._cursor = loader, at, at.epochs, begin
        self._order = cursors.order(begin, shuffle=loader.shuffle)
        self._collate = loader.collate or _default_collate

    @property
    def offset(self) -> None:
        """A dataset is no stream."""
        return

    def fetch(self) -> list[Part] | None:
        """This rank's micro-batches of the batch at the cursor."""
        if self._cursor.size == 0 or self._cursor.epoch >= self._epochs:
            return None
        begin, size = self._cursor.consumed, self._loader.batch_size
        batch = self._order[begin : begin + size]
        return [
            Part(self._collate(_samples(self._loader.dataset, batch[mine].tolist())), share)
            for mine, share in self._at.split(len(batch), size)
        ]

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
    """The events of one stream that training has not seen yet, for `run.loader`."""

    name: str
