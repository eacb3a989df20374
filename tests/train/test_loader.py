"""Where batches come from: datasets, and what can only be read from its beginning to its end."""

import random
from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import IterableDataset, TensorDataset

from twinhull.errors import CheckpointError, TwinhullError
from twinhull.train.data.ahead import is_dataset
from twinhull.train.data.iterable import IterableLoader
from twinhull.train.data.loader import Loader, Source, Start
from twinhull.train.group import Group
from twinhull.train.run import Run

CPU = torch.device("cpu")


class Lines:
    """An iterable that counts how often it is read."""

    def __init__(self, size: int) -> None:
        self.size, self.read = size, 0

    def __iter__(self) -> Iterator[int]:
        for number in range(self.size):
            self.read += 1
            yield number


class Seeking(Lines):
    def start_at(self, number: int) -> Iterator[int]:
        return iter(range(number, self.size))


class Buffered:
    """A stream that shuffles in a buffer, by the generator that a script would use."""

    def __iter__(self) -> Iterator[int]:
        buffer: list[int] = []
        for number in range(40):
            buffer.append(number)
            if len(buffer) == 8:
                yield buffer.pop(random.randrange(8))
        while buffer:
            yield buffer.pop(random.randrange(len(buffer)))


class Broken:
    """A stream that breaks off."""

    def __iter__(self) -> Iterator[int]:
        yield from range(5)
        raise KeyError("no such picture")


def trained(
    source: Source, *, worlds: list[int], epochs: int = 1, full_size: int | None = None
) -> list[list[int]]:
    """The samples of each step, over ranks and micro-batches, while the number of ranks changes."""
    saved: Any = None
    steps: list[list[int]] = []
    for number in count():
        world = worlds[number % len(worlds)]
        passes = [
            source.start(Start(Group(rank, world, CPU), 0, epochs, saved, {}, None, full_size))
            for rank in range(world)
        ]
        fetched = [one.fetch() for one in passes]
        if fetched[0] is None:
            assert fetched == [None] * world
            return steps
        parts = [part for of_rank in fetched if of_rank for part in of_rank]
        assert sum(part.share for part in parts) == pytest.approx(1)
        steps.append(sorted(n for part in parts if part.share for n in part.batch))
        for one in passes:
            one.advance()
        saved = passes[0].state()
    raise AssertionError


@given(
    size=st.integers(0, 60),
    batch_size=st.integers(1, 20),
    worlds=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    seeks=st.booleans(),
)
def test_an_iterable_is_trained_once_an_epoch_however_the_number_of_ranks_changes(
    size: int, batch_size: int, worlds: list[int], *, seeks: bool
) -> None:
    source = IterableLoader(Seeking(size) if seeks else Lines(size), batch_size, list)
    steps = trained(source, worlds=worlds, epochs=2)
    assert [n for step in steps for n in step] == [*range(size), *range(size)]
    assert all(len(step) == batch_size for step in steps[: size // batch_size])


@given(size=st.integers(0, 60), batch_size=st.integers(1, 20), worlds=st.lists(st.integers(1, 4), min_size=1))
def test_a_step_of_a_dataset_is_the_same_samples_however_many_ranks_there_are(
    size: int, batch_size: int, worlds: list[int]
) -> None:
    loader = Loader(list(range(size)), batch_size, shuffle=True, collate=list)
    assert trained(loader, worlds=worlds, full_size=4) == trained(loader, worlds=[1])


@pytest.mark.parametrize(("size", "batch_size", "world"), [(0, 4, 2), (3, 8, 2), (5, 2, 4), (6, 1, 4)])
def test_few_samples_are_trained_once_by_many_ranks(size: int, batch_size: int, world: int) -> None:
    steps = trained(Loader(list(range(size)), batch_size, shuffle=True, collate=list), worlds=[world])
    assert sorted(n for step in steps for n in step) == list(range(size))
    assert len(steps) == -(-size // batch_size)


def test_a_dataset_of_another_length_than_it_had_is_refused() -> None:
    saved = Loader([1, 2, 3], 1, shuffle=True, collate=list).start(Start(Group(0, 1, CPU), 0, 1, None, {}))
    with pytest.raises(CheckpointError, match="the dataset has 2 samples and had 3 when it was saved"):
        Loader([1, 2], 1, True, list).start(Start(Group(0, 1, CPU), 0, 1, saved.state(), {}))


def test_an_iterable_that_seeks_is_not_read_again() -> None:
    run = Run.alone()
    source = Seeking(100)
    start = Start(Group(0, 1, CPU), 0, 1, {"epoch": 0, "trained": 60}, {})
    parts = IterableLoader(source, 10, list).start(start).fetch()
    assert parts is not None
    assert parts[0].batch == list(range(60, 70))
    assert source.read == 0
    assert run.step == 0


def test_an_iterable_that_has_become_shorter_than_what_was_trained_is_told_so() -> None:
    start = Start(Group(0, 1, CPU), 0, 1, {"epoch": 0, "trained": 60}, {})
    with pytest.raises(CheckpointError, match="Lines has 50 samples, and 60 of this epoch were trained"):
        IterableLoader(Lines(50), 10, list).start(start).fetch()


def test_a_stream_that_draws_random_numbers_is_taken_up_as_if_it_had_gone_on() -> None:
    changing = trained(IterableLoader(Buffered(), 6, list), worlds=[1, 2])
    starting = Start(Group(0, 1, CPU), 0, 1, None, {})
    going, undisturbed = IterableLoader(Buffered(), 6, list).start(starting), list[list[int]]()
    while parts := going.fetch():
        undisturbed.append(sorted(parts[0].batch))
        going.advance()
    assert changing == undisturbed
    assert sorted(n for step in changing for n in step) == list(range(40))


def test_an_error_of_a_stream_names_the_sample() -> None:
    passing = IterableLoader(Broken(), 4, list).start(Start(Group(0, 1, CPU), 0, 1, None, {}))
    assert passing.fetch() is not None
    passing.advance()
    with pytest.raises(KeyError, match="no such picture") as caught:
        passing.fetch()
    assert caught.value.__notes__ == ["It was raised for sample 5 of Broken."]


def test_an_iterator_can_be_read_once_and_more_is_refused() -> None:
    run = Run.alone()
    assert list(run.steps(run.loader(iter(range(3)), batch_size=2, collate=list))) == [[0, 1], [2]]
    with pytest.raises(TwinhullError, match="range_iterator can be read only once, and epoch 2 was to begin"):
        list(run.steps(run.loader(iter(range(3)), batch_size=2, collate=list), epochs=2))


def test_what_was_trained_of_an_epoch_that_is_over_is_not_trained_again() -> None:
    start = Start(Group(0, 1, CPU), 0, 2, {"epoch": 0, "trained": 5}, {})
    parts = IterableLoader(Lines(5), 5, list).start(start).fetch()
    assert parts is not None
    assert parts[0].batch == list(range(5))


class Either(IterableDataset[int]):
    """It has a length and, from PyTorch, a method for one sample; that one only raises."""

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


def test_a_dataset_gives_samples_by_number_and_an_iterable_of_pytorch_does_not() -> None:
    assert is_dataset([1, 2])
    assert is_dataset(TensorDataset(torch.zeros(2)))
    assert not is_dataset(Either())
    assert not is_dataset({1, 2})
    assert not is_dataset(count())


def test_an_endless_iterable_is_left_by_a_number_of_steps() -> None:
    run = Run.alone()
    batches = list(run.steps(run.loader(count(), batch_size=3, collate=list), most=4))
    assert batches == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]


def test_what_has_no_length_is_not_shuffled_and_a_wish_for_it_is_refused() -> None:
    run = Run.alone()
    with pytest.raises(TwinhullError, match="Lines gives no samples by number: it cannot be shuffled"):
        run.loader(Lines(3), batch_size=1, shuffle=True)
    with pytest.raises(TwinhullError, match="nor loaded ahead"):
        run.loader(Lines(3), batch_size=1, workers=1)
