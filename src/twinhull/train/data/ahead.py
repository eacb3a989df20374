"""Samples into batches, here or in processes that load ahead: the same numbers are drawn either way."""

import atexit
import pickle
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sized
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeGuard

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate

from twinhull import processes
from twinhull.train.sowing import sow

Collate = Callable[[Any], Any]  # Any: samples and batches are the user's own
_MOST_NAMED = 8


class Dataset(Protocol):
    """What can be trained on: it has a length and gives a sample by its number.

    With `__getitems__(numbers)` (PyTorch's own name) it gives a whole batch at once.
    """

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


def is_dataset(source: object) -> TypeGuard[Dataset]:
    """Whether it gives a sample by its number, rather than all in a row.

    PyTorch's `IterableDataset` may have both methods and means neither.
    """
    return (
        isinstance(source, Sized)
        and hasattr(source, "__getitem__")
        and not isinstance(source, IterableDataset)
    )


@dataclass(frozen=True, slots=True)
class Ticket:
    """A micro-batch to be loaded: its samples' numbers and the seed for whatever its dataset draws."""

    seed: int
    numbers: list[int]


class Batches:
    """The batch for each ticket. `collate` makes it of a list of samples."""

    def __init__(self, dataset: Dataset, collate: Collate | None) -> None:
        self._dataset, self._collate = dataset, collate
        self._many: Callable[[list[int]], Any] | None = getattr(dataset, "__getitems__", None)

    def __getitem__(self, ticket: Ticket) -> Any:  # Any: the user's own
        sow(ticket.seed)
        samples = self._samples(ticket.numbers)
        if self._collate is not None:
            return self._collate(samples)
        return default_collate(samples) if isinstance(samples, list) else samples

    def ahead(self, tickets: Iterable[Ticket], workers: int) -> Iterator[Any]:  # Any: as above
        """The batches of these tickets in their order, loaded by so many processes.

        The processes end with the iterator, and with this process however it ends.
        """
        return map(self.__getitem__, tickets) if workers == 0 else _loaded(self, tickets, workers)

    def _samples(self, numbers: list[int]) -> Any:  # Any: as above
        asked = numbers
        try:
            if self._many is not None:
                return self._many(numbers)
            samples: list[Any] = []
            for number in numbers:
                asked = [number]
                samples.append(self._dataset[number])
            return samples
        except Exception as error:
            error.add_note(f"It was raised for {_named(asked)} of {type(self._dataset).__name__}.")
            raise


def _named(numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:_MOST_NAMED]))
    return f"sample{'s' * (len(numbers) > 1)} {shown}{', ...' * (len(numbers) > _MOST_NAMED)}"


def _loaded(batches: Batches, tickets: Iterable[Ticket], workers: int) -> Iterator[Any]:  # Any: as above
    """The batches as processes load them. These start with the first batch and end with this iterator."""
    given: Any = _Remote(batches)  # Any: PyTorch wants its own classes and has a use for two methods of them
    sampler: Any = tickets
    loader = DataLoader(
        given,
        batch_size=None,  # a ticket is a whole batch
        sampler=sampler,
        num_workers=workers,
        collate_fn=_as_it_is,
        worker_init_fn=_begin_worker,
        pin_memory=torch.cuda.is_available(),
        # Nothing has to be pickled, and the dataset is shared. A worker never touches the GPU.
        multiprocessing_context="fork" if sys.platform == "linux" else None,
    )
    loading: Any = iter(loader)  # Any: the one way to end it at once is not public
    end = partial(_end, loading)
    atexit.register(end)  # an error's traceback may keep this iterator alive until then
    try:
        for batch in loading:
            if isinstance(batch, _Raised):
                raise batch.error from RuntimeError(batch.told)
            yield batch
    finally:
        atexit.unregister(end)
        end()


def _end(loading: Any) -> None:  # Any: as above
    """End the processes, also those that are busy.

    At exit `multiprocessing` would send them SIGTERM, which they ignore, and wait for ever. PyTorch must know
    first: to it a worker that is killed is an error, which it raises wherever the rank happens to be.
    """
    loading._shutdown_workers()
    for worker in loading._workers:
        worker.kill()
        worker.join()


def _as_it_is(batch: Any) -> Any:  # Any: the user's own
    return batch


def _begin_worker(_number: int) -> None:
    """A signal to stop is the rank's to answer: it still needs the batches that are under way."""
    processes.die_with_parent()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)


@dataclass(frozen=True, slots=True)
class _Raised:
    """An error on its way from a process that loads, and its traceback there."""

    error: Exception
    told: str


class _Remote:
    """The batches with errors sent rather than raised: PyTorch would give them another message."""

    def __init__(self, batches: Batches) -> None:
        self._batches = batches

    def __getitem__(self, ticket: Ticket) -> Any:  # Any: the user's own
        try:
            return self._batches[ticket]
        except Exception as error:
            return _Raised(_portable(error), "\n" + "".join(traceback.format_exception(error)))


def _portable(error: Exception) -> Exception:
    """The error, or what is left of one that cannot travel between processes."""
    try:
        return pickle.loads(pickle.dumps(error))  # noqa: S301  our own bytes
    except Exception:  # whatever the user's class does when it is made again
        plain = RuntimeError(f"{type(error).__name__}: {error}")
        for note in getattr(error, "__notes__", ()):
            plain.add_note(note)
        return plain
