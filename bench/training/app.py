"""Training functions for the benches: small steps, each noted with its time, so that one can see it go on."""

import os
import time
from pathlib import Path

import torch
from torch import nn

from twinhull.train.run import Run

BATCH = 24  # divides among 2, 3 and 4 ranks


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(4))
        self.out = nn.Linear(32, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.out(x).squeeze(-1)

    def loss(self, numbers: torch.Tensor) -> torch.Tensor:
        return (self(features(numbers)) - (numbers % 7) / 7).pow(2).mean()


def features(numbers: torch.Tensor) -> torch.Tensor:
    """What is known of a sample: waves of its number."""
    return torch.sin(numbers[:, None] * torch.arange(1, 33) / 10)


class Numbers:
    """A sample is its own number."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return index

    def __getitems__(self, indices: list[int]) -> torch.Tensor:
        return torch.tensor(indices)


def fit(run: Run) -> None:
    """STEPS steps, one at least every PAUSE_S; NOTES gets a line a step: time, pid, step, loss, samples."""
    model = run.wrap(Net())
    optimizer = run.wrap(torch.optim.AdamW(model.parameters(), lr=1e-2))
    pause_s = float(os.environ.get("PAUSE_S", "0"))
    samples = Numbers(int(os.environ.get("SAMPLES", "4096")))
    for numbers in run.steps(run.loader(samples, batch_size=BATCH), most=int(os.environ["STEPS"])):
        loss = model.loss(numbers)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        note(run.step, run.rank, float(loss.detach()), numbers)
        time.sleep(pause_s)
    run.publish(model)


def note(step: int, rank: int, loss: float, numbers: torch.Tensor) -> None:
    """One line of NOTES.RANK, if NOTES is asked for."""
    if base := os.environ.get("NOTES"):
        line = f"{time.time():.4f} {os.getpid()} {step} {loss:.9g} {','.join(map(str, numbers.tolist()))}\n"
        with Path(f"{base}.{rank}").open("a") as file:
            file.write(line)
