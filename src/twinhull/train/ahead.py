"""Samples into batches, here or in processes that load ahead: the same numbers are drawn either way."""

import atexit
import signal
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, default_collate

from twinhull import processes
from twinhull.train.sowing import sow

_MOST_NAMED = 8
Collate = Callable[[Any], Any]  # Any: samples and batches are the user's own


class Dataset(Protocol):
    """What can be trained on: it has a length and gives a sample by its number.

    With `__getitems__(numbers)` (PyTorch's own name) it gives a whole batch at once.
    """

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


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
        samples = self._fetch(ticket.numbers)
        if self._collate is not None:
            return self._collate(samples)
        return default_collate(samples) if isinstance(samples, list) else samples

    def ahead(self, tickets: Iterable[Ticket], workers: int) -> Iterator[Any]:  # Any: as above
        """The batches of these tickets in their order, loaded by so many processes.

        The processes end with the iterator, and with this process however it ends.
        """
        if workers == 0:
            return map(self.__getitem__, tickets)
        given: Any = self  # Any: PyTorch wants its own Dataset class and has a use for two of its methods
        sampler: Any = tickets
        return _loaded(
            DataLoader(
                given,
                batch_size=None,  # a ticket is a whole batch
                sampler=sampler,
                num_workers=workers,
                collate_fn=_as_it_is,
                worker_init_fn=_begin_worker,
                pin_memory=torch.accelerator.is_available(),
            )
        )

    def _fetch(self, numbers: list[int]) -> Any:  # Any: as above
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


def _as_it_is(batch: Any) -> Any:  # Any: the user's own
    return batch


def _begin_worker(_number: int) -> None:
    """A signal to stop is the rank's to answer: it still needs the batches that are under way."""
    processes.die_with_parent()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)


def _loaded(loader: DataLoader[Any]) -> Iterator[Any]:  # Any: the user's own
    """What the loader's processes load. They start with the first batch and end with this iterator."""
    batches: Any = iter(loader)  # Any: the one way to end it at once is not public
    end = partial(_end, batches)
    atexit.register(end)  # an error's traceback may keep this alive until then
    try:
        yield from batches
    finally:
        atexit.unregister(end)
        end()


def _end(batches: Any) -> None:  # Any: as above
    """End the processes, also those that are busy.

    At exit `multiprocessing` would send them SIGTERM, which they ignore, and wait for ever. PyTorch must know
    first: to it a worker that is killed is an error, which it raises wherever the rank happens to be.
    """
    batches._shutdown_workers()
    for worker in batches._workers:
        worker.kill()
        worker.join()
