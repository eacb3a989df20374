"""Two ranks that take turns: a step of our loop, a step of the same loop written by hand on DDP, and again.

Started by torchrun from bench/train.py. Rank 0 prints how long each step took, one JSON object.
"""

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from twinhull.train.run import Run

STEPS, WARM_UP = 400, 40
BATCH, WIDTH, LAYERS = 128, 512, 6


class Samples:
    """Random rows that are fetched a batch at a time."""

    def __init__(self) -> None:
        chance = torch.Generator().manual_seed(0)
        self.x = torch.randn((STEPS + WARM_UP) * BATCH, WIDTH, generator=chance)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Tensor:
        return self.x[index]

    def __getitems__(self, indices: list[int]) -> Tensor:
        return self.x[indices]


class Net(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(LAYERS)))

    def loss(self, x: Tensor) -> Tensor:
        return (self(x) - x).pow(2).mean()


def ours(run: Run, samples: Samples) -> Iterator[None]:
    """Our loop; a step for each value."""
    model = run.wrap(Net())
    optimizer = run.wrap(torch.optim.AdamW(model.parameters(), lr=1e-3))
    for batch in run.steps(run.loader(samples, batch_size=BATCH)):
        loss = model.loss(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.report(loss=loss)
        yield


def by_hand(samples: Samples) -> Iterator[None]:
    """The same written on PyTorch alone."""
    net = Net()
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    given: Any = samples  # Any: PyTorch wants its own Dataset class
    sampler: Any = DistributedSampler(given)
    collate: Callable[[Any], Any] = as_it_is
    for batch in DataLoader(
        given, batch_size=BATCH // dist.get_world_size(), sampler=sampler, collate_fn=collate
    ):
        loss = (model(batch) - batch).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield


def as_it_is(batch: Tensor) -> Tensor:
    """A batch that came whole."""
    return batch


def main() -> None:
    """Time them in turns; who begins changes from round to round."""
    run, samples = Run.alone(name="bench"), Samples()
    loops = {"ours": ours(run, samples), "hand": by_hand(samples), "hand again": by_hand(samples)}
    seconds: dict[str, list[float]] = {name: [] for name in loops}
    names = list(loops)
    for number in range(STEPS + WARM_UP):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            dist.barrier()
            began = time.perf_counter()
            next(loops[name])
            if number >= WARM_UP:
                seconds[name].append(time.perf_counter() - began)
    if run.rank == 0:
        print(json.dumps(seconds), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
