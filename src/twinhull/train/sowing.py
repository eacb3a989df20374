"""Random numbers that need no saving: generators are seeded anew for each step from what is known anyway."""

import random

import numpy as np
import torch

from twinhull.train.data.cursor import step_seed
from twinhull.train.group import Group

_DATA = 0x5EED  # so that a sample and the step that trains it draw different numbers


def sow_step(seed: int, step: int, micro: int, group: Group) -> None:
    """Seed by (seed, step, rank), and by the micro-batch where a step has several."""
    sow(step_seed(seed, step, group.rank + micro * group.world_size))
    if group.device.type == "cuda":
        torch.cuda.manual_seed(torch.initial_seed())


def sow_between(seed: int, cycle: int, loops: int, group: Group) -> None:
    """Seed what the function does outside its loops, the same on all ranks and in every life."""
    sow(step_seed(seed, -cycle, loops))
    if group.device.type == "cuda":
        torch.cuda.manual_seed(torch.initial_seed())


def data_seed(seed: int, epoch: int, first_sample: int) -> int:
    """The seed for loading a micro-batch, whoever loads it: a rank, or a process that loads ahead for it."""
    return step_seed(seed ^ _DATA, epoch, first_sample)


def sow(seed: int) -> None:
    """Seed the generators of Python, NumPy and PyTorch on the CPU."""
    random.seed(seed)
    np.random.seed(seed)  # the user's code may use the old global generator
    torch.default_generator.manual_seed(seed)
