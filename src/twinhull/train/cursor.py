"""Where in its data a training run stands: a position that does not depend on how many ranks share it.

A position is (seed, epoch, samples consumed). Any number of ranks can go on from it, and together they see
each sample of an epoch exactly once: a rank takes every `world_size`-th sample of the global batch.
"""

from dataclasses import dataclass, replace

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


@dataclass(frozen=True, slots=True)
class Part:
    """One rank's part of a global batch: which samples, and the share of the batch that they are.

    The shares of all ranks add up to 1. A rank without samples repeats one with share 0, so that it takes
    part in every collective.
    """

    indices: Indices
    share: float


def order(cursor: Cursor, *, shuffle: bool) -> Indices:
    """The samples of the cursor's epoch, in the order in which they are trained."""
    if not shuffle:
        return np.arange(cursor.size, dtype=np.int64)
    return np.random.default_rng((cursor.seed, cursor.epoch)).permutation(cursor.size).astype(np.int64)


def part(cursor: Cursor, epoch_order: Indices, batch_size: int, rank: int, world_size: int) -> Part:
    """What `rank` of `world_size` takes from the global batch at the cursor."""
    batch = epoch_order[cursor.consumed : cursor.consumed + batch_size]
    positions, share = split(len(batch), rank, world_size)
    return Part(batch[positions], share)


def split(num_samples: int, rank: int, world_size: int) -> tuple[slice, float]:
    """Which of `num_samples` samples a rank takes, and the share of all that they are."""
    if rank >= num_samples:
        return slice(0, 1), 0.0
    return slice(rank, None, world_size), len(range(rank, num_samples, world_size)) / num_samples


def advance(cursor: Cursor, batch_size: int) -> Cursor:
    """The position after the global batch at the cursor; the last batch of an epoch is the shorter rest."""
    consumed = cursor.consumed + batch_size
    if consumed < cursor.size:
        return replace(cursor, consumed=consumed)
    return replace(cursor, epoch=cursor.epoch + 1, consumed=0)


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
