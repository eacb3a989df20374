"""How long does training wait for a checkpoint? Ours in turns with torch.save of the same state."""

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from twinhull.train.checkpoints.keep import Keeper
from twinhull.train.checkpoints.manifest import Place
from twinhull.train.group import Group
from twinhull.train.job import Job
from twinhull.train.pace import Pace

WIDTH, LAYERS, ROWS = 1024, 17, 64  # 17.8 million parameters in fp32 and AdamW's two moments: 214 MB
ROUNDS, QUIET = 9, 5


@dataclass(slots=True)
class Seconds:
    """What each round took. `stall` has the wait before the optimizer's update in it."""

    plain: list[float] = field(default_factory=list)
    stall: list[float] = field(default_factory=list)
    quiet_step: list[float] = field(default_factory=list)
    writing_step: list[float] = field(default_factory=list)


class Loop:
    """Steps that announce their updates, as the wrapped optimizer does."""

    def __init__(self, directory: Path) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.pace, self.batch, self.waited = Pace(), torch.randn(ROWS, WIDTH), 0.0
        job = Job(name="bench", directory=directory, keep=1)
        self.keeper = Keeper(job, Group(0, 1, torch.device("cpu")), self.pace)
        self.keeper.add(self.model, "Sequential")
        self.keeper.add(self.optimizer, "AdamW")

    def step(self) -> None:
        self.model(self.batch).pow(2).mean().backward()
        self.waited = _took(lambda: [announced() for announced in self.pace.before_update])
        self.optimizer.step()
        self.optimizer.zero_grad()


def measure() -> Seconds:
    """All rounds; the first, which pays for the buffers, is left out."""
    found = Seconds()
    with tempfile.TemporaryDirectory() as where:
        loop = Loop(Path(where))
        _round(loop, Path(where), Seconds(), 0)
        for number in range(1, ROUNDS + 1):
            _round(loop, Path(where), found, number)
    return found


def _round(loop: Loop, where: Path, found: Seconds, number: int) -> None:
    found.quiet_step += [_took(loop.step) for _ in range(QUIET)]
    found.plain.append(_took(lambda: _save_plainly(loop, where / "plain.pt")))
    loop.step()
    saved = _took(lambda: loop.keeper.save(Place(step=number + 1), required=True))
    loop.step()
    found.stall.append(saved + loop.waited)
    safe = loop.keeper.poll()
    while safe is None:
        took = _took(loop.step)
        if (safe := loop.keeper.poll()) is None:
            found.writing_step.append(took)


def _save_plainly(loop: Loop, path: Path) -> None:
    with path.open("wb") as file:
        torch.save([loop.model.state_dict(), loop.optimizer.state_dict()], file)
        file.flush()
        os.fsync(file.fileno())


def _took(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def slow_down(found: Seconds) -> float:
    """How many times as long a step takes while a checkpoint is written."""
    return statistics.median(found.writing_step) / statistics.median(found.quiet_step)


if __name__ == "__main__":
    print(measure(), file=sys.stderr)
