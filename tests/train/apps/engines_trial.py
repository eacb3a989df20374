"""One rank that trains a small model with an engine, as `Run` would drive it, and writes down what it saw."""

import json
import os
import sys
import traceback
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from twinhull.train import engines
from twinhull.train.cursor import Cursor, advance, most_at_once, order, split
from twinhull.train.group import Group
from twinhull.train.job import Job
from twinhull.train.pace import Pace

SAMPLES, BATCH, STEPS = 203, 16, 50


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.inner, self.outer = nn.LayerNorm(width), nn.Linear(width, 8), nn.Linear(8, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.outer(torch.tanh(self.inner(self.norm(x))))


class Net(nn.Module):
    """Three equal blocks; its width divides by no number of ranks, and one weight is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(4, 5)
        self.blocks = nn.ModuleList(Block(5) for _ in range(3))
        self.leave = nn.Linear(5, 1)
        self.enter.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.leave(x)

    def loss(self, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        x, y = batch
        return ((self(x).squeeze(-1) - y).float() ** 2).mean()


class Trial:
    """An engine, a model and its optimizer; `losses` are those of the global batches."""

    def __init__(self, **facts: Any) -> None:
        self.job = Job(name="fit", **facts)
        self.group = Group.join(self.job)
        self.pace = Pace()
        self.engine = engines.choose(self.job, self.group, self.pace)
        torch.manual_seed(7 + self.group.rank * self.is_unequal)
        self.model: Any = self.engine.model(Net())
        self.optimizer = self.engine.optimizer(torch.optim.AdamW(self.model.parameters(), lr=1e-2))
        self.schedule = self.engine.optimizer(
            torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 0.99**step)
        )
        self.at = Cursor(SAMPLES, seed=3)
        self.losses: list[float] = []

    is_unequal = True  # ranks begin with different weights: the engine gives all those of rank 0

    def micro_batches(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        indices = order(self.at, shuffle=True)[self.at.consumed : self.at.consumed + BATCH]
        most = most_at_once(BATCH, self.job.micro_batch, self.job.full_size, self.group.world_size)
        parts = split(len(indices), self.group.rank, self.group.world_size, most)
        for number, (mine, share) in enumerate(parts):
            self.pace.enter(share, is_first=number == 0, is_last=number == len(parts) - 1)
            self.engine.begin()
            n = torch.from_numpy(indices[mine]).float()
            x = torch.stack([n % 7, n % 5, n % 3, torch.ones_like(n)], dim=1) / 7
            yield x, x.sum(1)
        self.at = advance(self.at, BATCH)

    def step(self, max_norm: float | None = None) -> float:
        """Train one global batch and give its loss."""
        total = torch.zeros(())
        norm = torch.zeros(())
        for batch in self.micro_batches():
            loss = self.model.loss(batch)
            loss.backward()
            if max_norm is not None:
                norm = self.engine.clip_grad_norm(self.model, max_norm)
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()
            total += loss.detach() * self.pace.share
        if self.group.world_size > 1:
            torch.distributed.all_reduce(total)
        self.norm = float(norm)
        self.losses.append(total.item())
        return self.losses[-1]


def agree(**facts: Any) -> dict[str, Any]:
    """Fifty steps, then the state."""
    trial = Trial(**facts)
    norms = []
    for number in range(STEPS):
        trial.step(max_norm=1.0 if number < 5 else None)
        norms.append(trial.norm)
    state = trial.engine.full_state(trial.model)
    return {
        "losses": trial.losses,
        "norms": norms[:5],
        "state": {name: value.flatten().tolist() for name, value in state.items()},
    }


def main(directory: Path, rank: int, world_size: int, facts: list[dict[str, Any]]) -> int:
    """All the runs that are asked for, one after the other in one group."""
    for number, asked in enumerate(facts):
        said = agree(**asked)
        if rank == 0:
            (directory / f"{number}.json").write_text(json.dumps(said))
    return 0
