import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinhull.train.data.cursor import Cursor, advance, batches_left, most_at_once, order, split, step_seed


@given(
    size=st.integers(1, 200),
    batch_size=st.integers(1, 64),
    worlds=st.lists(st.integers(1, 4), min_size=1, max_size=8),
    seed=st.integers(0, 5),
    micro=st.none() | st.integers(1, 20),
)
def test_each_sample_comes_once_an_epoch_however_the_number_of_ranks_changes(
    size: int, batch_size: int, worlds: list[int], seed: int, micro: int | None
) -> None:
    cursor, seen, step = Cursor(size, seed), [], 0
    while cursor.epoch == 0:
        world = worlds[step % len(worlds)]
        batch = order(cursor, shuffle=True)[cursor.consumed : cursor.consumed + batch_size]
        most = most_at_once(batch_size, micro, max(worlds), world)
        parts = [split(len(batch), rank, world, most) for rank in range(world)]
        assert len({len(of_rank) for of_rank in parts}) == 1
        assert sum(share for of_rank in parts for _, share in of_rank) == pytest.approx(1)
        for of_rank in parts:
            assert all(len(batch[mine]) <= most for mine, _ in of_rank)
            assert sorted(share > 0 for _, share in of_rank) == [share > 0 for _, share in of_rank]
            sizes = [len(batch[mine]) for mine, share in of_rank if share]
            assert not sizes or max(sizes) - min(sizes) <= 1
            seen += [int(i) for mine, share in of_rank if share for i in batch[mine]]
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
    assert split(1, rank=1, world_size=2, most=2) == [(slice(0, 1), 0.0)]


def test_epochs_are_shuffled_differently_and_repeatably() -> None:
    first, second = (order(Cursor(50, seed=3, epoch=epoch), shuffle=True).tolist() for epoch in (0, 1))
    assert first != second
    assert first == order(Cursor(50, seed=3), shuffle=True).tolist()
    assert order(Cursor(4), shuffle=False).tolist() == [0, 1, 2, 3]


def test_with_all_nodes_there_a_step_is_one_micro_batch_and_with_half_of_them_two() -> None:
    for world, count in ((4, 1), (2, 2), (1, 4), (3, 2)):
        most = most_at_once(16, None, full_size=4, world_size=world)
        assert len(split(16, 0, world, most)) == count


def test_seeds_of_steps_and_ranks_all_differ() -> None:
    seeds = {step_seed(seed, step, rank) for seed in range(3) for step in range(500) for rank in range(4)}
    assert len(seeds) == 3 * 500 * 4
