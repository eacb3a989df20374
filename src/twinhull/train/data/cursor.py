"""Where in its data a training run stands: a position that does not depend on how many ranks share it.

A position is (seed, epoch, samples consumed). Any number of ranks can go on from it, and together they see
each sample of an epoch exactly once: a rank takes every `world_size`-th sample of the global batch.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Cursor:
    """A position between two global batches. `size` is the number of samples in an epoch."""

    size: int
    seed: int = 0
    epoch: int = 0
    consumed: int = 0


def order(cursor: Cursor, *, shuffle: bool) -> Indices:
    """The samples of the cursor's epoch, in the order in which they are trained."""
    if not shuffle:
        return np.arange(cursor.size, dtype=np.int64)
    return np.random.default_rng((cursor.seed, cursor.epoch)).permutation(cursor.size).astype(np.int64)


def most_at_once(batch_size: int, micro: int | None, full_size: int | None, world_size: int) -> int:
    """The most samples that a rank takes at a time: `micro`, else what it takes when all nodes are there."""
    return micro if micro is not None else math.ceil(batch_size / max(full_size or 0, world_size))


def split(num_samples: int, rank: int, world_size: int, most: int) -> list[tuple[slice, float]]:
    """A rank's micro-batches of `num_samples`: which samples, and the share of all that they are.

    They are equally many on all ranks, and the shares of all add up to 1. One without samples has share 0 and
    repeats a sample, so that every rank takes part in every collective; these come first.
    """
    count = math.ceil(math.ceil(num_samples / world_size) / most)
    own = len(range(rank, num_samples, world_size))
    size, larger = divmod(own, count)
    found: list[tuple[slice, float]] = []
    begin = rank
    for number in range(count):
        held = size + (number >= count - larger)
        end = begin + held * world_size
        found.append((slice(begin, end, world_size), held / num_samples) if held else (slice(0, 1), 0.0))
        begin = end
    return found


def advance(cursor: Cursor, batch_size: int) -> Cursor:
    """The position after the global batch at the cursor; the last batch of an epoch is the shorter rest."""
    consumed = cursor.consumed + batch_size
    if consumed < cursor.size:
        return Cursor(cursor.size, cursor.seed, cursor.epoch, consumed)
    return Cursor(cursor.size, cursor.seed, cursor.epoch + 1)


def batches_left(cursor: Cursor, batch_size: int, epochs: int) -> int:
    """How many global batches there are from the cursor to the end of the last epoch."""
    if cursor.size == 0 or cursor.epoch >= epochs:
        return 0
    per_epoch = -(-cursor.size // batch_size)
    return (epochs - cursor.epoch) * per_epoch - cursor.consumed // batch_size


def step_seed(seed: int, step: int, rank: int) -> int:
    """A 32-bit seed for the random numbers of one step on one rank, the same for the same three numbers."""
    mixed = (seed * 0x9E3779B97F4A7C15 + step * 0xBF58476D1CE4E5B9 + rank * 0x94D049BB133111EB) & (2**64 - 1)
    mixed ^= mixed >> 31
    mixed = (mixed * 0xD6E8FEB86659FD93) & (2**64 - 1)
    return (mixed ^ (mixed >> 32)) & 0xFFFFFFFF
