import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinhull.train.cursor import Cursor, advance, batches_left, order, part, split, step_seed


@given(
    size=st.integers(1, 200),
    batch_size=st.integers(1, 64),
    worlds=st.lists(st.integers(1, 4), min_size=1, max_size=8),
    seed=st.integers(0, 5),
)
def test_each_sample_comes_once_an_epoch_however_the_number_of_ranks_changes(
    size: int, batch_size: int, worlds: list[int], seed: int
) -> None:
    cursor, seen, step = Cursor(size, seed), [], 0
    while cursor.epoch == 0:
        world = worlds[step % len(worlds)]
        parts = [part(cursor, order(cursor, shuffle=True), batch_size, rank, world) for rank in range(world)]
        assert sum(p.share for p in parts) == pytest.approx(1)
        seen += [int(i) for p in parts if p.share for i in p.indices]
        cursor, step = advance(cursor, batch_size), step + 1
    assert sorted(seen) == list(range(size))


@given(
    size=st.integers(0, 100), batch_size=st.integers(1, 40), epochs=st.integers(1, 3), done=st.integers(0, 9)
)
def test_batches_left_is_what_is_left(size: int, batch_size: int, epochs: int, done: int) -> None:
    cursor = Cursor(size)
    for _ in range(done if size else 0):
        cursor = advance(cursor, batch_size)
    left, expected = 0, batches_left(cursor, batch_size, epochs)
    while size and cursor.epoch < epochs:
        cursor, left = advance(cursor, batch_size), left + 1
    assert left == expected


def test_a_rank_without_samples_repeats_one_that_counts_for_nothing() -> None:
    tail = part(Cursor(9, consumed=8), np.arange(9), batch_size=4, rank=1, world_size=2)
    assert tail.indices.tolist() == [8]
    assert tail.share == 0


def test_epochs_are_shuffled_differently_and_repeatably() -> None:
    first, second = (order(Cursor(50, seed=3, epoch=epoch), shuffle=True).tolist() for epoch in (0, 1))
    assert first != second
    assert first == order(Cursor(50, seed=3), shuffle=True).tolist()
    assert order(Cursor(4), shuffle=False).tolist() == [0, 1, 2, 3]


@given(num_samples=st.integers(1, 20), world=st.integers(1, 5))
def test_shares_add_up_to_one(num_samples: int, world: int) -> None:
    assert sum(split(num_samples, rank, world)[1] for rank in range(world)) == pytest.approx(1)


def test_seeds_of_steps_and_ranks_all_differ() -> None:
    seeds = {step_seed(seed, step, rank) for seed in range(3) for step in range(500) for rank in range(4)}
    assert len(seeds) == 3 * 500 * 4
