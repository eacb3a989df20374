"""Where batches come from: datasets, iterables, and processes that load ahead."""

import os
import random
import signal
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from twinhull.errors import CheckpointError, TwinhullError
from twinhull.train.ahead import Batches, Ticket
from twinhull.train.group import Group
from twinhull.train.iterable import IterableLoader
from twinhull.train.loader import Loader, Source, Start
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


class Drawing:
    """Its samples are random numbers of all three generators."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> tuple[int, float, float, float]:
        return index, random.random(), float(np.random.rand()), float(torch.rand(()))


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


def test_an_endless_iterable_is_left_by_a_number_of_steps() -> None:
    run = Run.alone()
    batches = list(run.steps(run.loader(count(), batch_size=3, collate=list), most=4))
    assert batches == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]


def test_what_has_no_length_is_not_shuffled_and_a_wish_for_it_is_refused() -> None:
    run = Run.alone()
    with pytest.raises(TwinhullError, match="Lines has no length: it cannot be shuffled"):
        run.loader(Lines(3), batch_size=1, shuffle=True)
    with pytest.raises(TwinhullError, match="nor loaded ahead"):
        run.loader(Lines(3), batch_size=1, workers=1)


def drawn(workers: int) -> list[Any]:
    run = Run.alone()
    loader = run.loader(Drawing(), batch_size=4, collate=list, workers=workers)
    return [(batch, float(torch.rand(()))) for batch in run.steps(loader, epochs=2)]


def test_random_numbers_of_samples_and_steps_do_not_depend_on_who_loads() -> None:
    assert drawn(workers=2) == drawn(workers=0)


def children() -> list[psutil.Process]:
    return [one for one in psutil.Process().children() if one.status() != psutil.STATUS_ZOMBIE]


def test_workers_end_with_their_loop_however_it_ends() -> None:
    before = len(children())
    run = Run.alone()
    loader = run.loader(Drawing(), batch_size=4, collate=list, workers=1)
    for _ in range(3):
        for _ in run.steps(loader):
            assert len(children()) == before + 1
            break
        list(run.steps(loader))
    assert len(children()) == before


def test_a_signal_to_stop_leaves_the_workers_at_work() -> None:
    run = Run.alone()
    loader = run.loader(Drawing(), batch_size=4, collate=list, workers=1)
    seen: list[int] = []
    for batch in run.steps(loader):
        for child in children():
            child.send_signal(signal.SIGTERM)
        seen += [sample[0] for sample in batch]
    assert sorted(seen) == list(range(20))


def test_a_killed_worker_is_an_error_and_no_hang() -> None:
    run = Run.alone()
    loader = run.loader(Drawing(), batch_size=1, collate=list, workers=1)
    with pytest.raises(RuntimeError, match="exited unexpectedly|killed by signal"):
        for _ in run.steps(loader):
            for child in children():
                os.kill(child.pid, signal.SIGKILL)


class Broken:
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        if index == 3:
            raise KeyError("no such picture")
        return index


def test_a_sample_that_raises_is_named() -> None:
    with pytest.raises(KeyError, match="no such picture") as caught:
        list(map(Batches(Broken(), list).__getitem__, [Ticket(0, [0, 1]), Ticket(0, [2, 3])]))
    assert caught.value.__notes__ == ["It was raised for sample 3 of Broken."]
    run = Run.alone()
    with pytest.raises(KeyError, match="It was raised for sample 3 of Broken"):
        list(run.steps(run.loader(Broken(), batch_size=2, collate=list, workers=1)))


def test_a_run_that_was_stopped_while_workers_were_ahead_goes_on_where_training_was(tmp_path: Path) -> None:
    def life(*, leave_at: int | None = None) -> list[int]:
        run, seen = Run.alone(directory=tmp_path), list[int]()
        loader = run.loader(list(range(40)), batch_size=4, collate=list, workers=2)
        for numbers in run.steps(loader):
            seen.extend(numbers)
            if run.step == leave_at:
                run.ask_to_stop()
        return seen

    with pytest.raises(SystemExit):
        life(leave_at=3)
    rest = life()
    whole = [n for step in trained(Loader(list(range(40)), 4, True, list), worlds=[1]) for n in step]
    assert len(rest) == 24
    assert sorted(rest) == sorted(whole[16:])
