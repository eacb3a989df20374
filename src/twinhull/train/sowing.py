"""Random numbers that need no saving: generators are seeded anew for each step from what is known anyway."""

import random

import numpy as np
import torch

from twinhull.train.cursor import step_seed
from twinhull.train.group import Group


def sow_step(seed: int, step: int, micro: int, group: Group) -> None:
    """Seed by (seed, step, rank), and by the micro-batch where a step has several."""
    _sow(step_seed(seed, step, group.rank + micro * group.world_size), group)


def sow_between(seed: int, cycle: int, loops: int, group: Group) -> None:
    """Seed what the function does outside its loops, the same on all ranks and in every life."""
    _sow(step_seed(seed, -cycle, loops), group)


def _sow(seed: int, group: Group) -> None:
    random.seed(seed)
    np.random.seed(seed)  # the user's code may use the old global generator
    torch.default_generator.manual_seed(seed)
    if group.device.type == "cuda":
        torch.cuda.manual_seed(seed)
