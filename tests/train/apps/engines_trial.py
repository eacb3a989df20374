"""One rank that trains a small model with an engine, as `Run` would drive it, and writes down what it saw."""

import json
import os
import socket
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from twinhull.errors import TwinhullError
from twinhull.train import engines
from twinhull.train.checkpoints.keep import Keeper
from twinhull.train.checkpoints.manifest import Place
from twinhull.train.data.cursor import Cursor, advance, most_at_once, order, split
from twinhull.train.group import Group
from twinhull.train.job import Job
from twinhull.train.pace import Pace

SAMPLES, BATCH = 203, 16
CLIPPED = range(20, 25)


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

    def make_optimizer(self, lr: float) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=lr)

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
        torch.manual_seed(7 + self.group.rank)  # ranks begin with different weights
        self.model: Any = self.engine.model(Net())
        self.optimizer = self.engine.optimizer(self.model.make_optimizer(lr=1e-2))
        self.schedule = self.engine.optimizer(
            torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 0.99**step)
        )
        self.at = Cursor(SAMPLES, seed=3)
        self.losses: list[float] = []

    def keep(self) -> None:
        """Wrap all that is to be saved; it gets its state back if there is one."""
        self.keeper = Keeper(self.job, self.group, self.pace)
        for thing, kind in ((self.model, "Net"), (self.optimizer, "AdamW"), (self.schedule, "LambdaLR")):
            self.keeper.add(thing, kind)

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
            dist.all_reduce(total)
        self.norm = float(norm)
        self.losses.append(total.item())
        return self.losses[-1]


def agree(steps: int = 50, **facts: Any) -> dict[str, Any]:
    """So many steps, some in the middle with their gradients clipped; then the state."""
    trial = Trial(**facts)
    told: set[int] = set()
    trial.engine.on_local_gradients = lambda: told.add(len(trial.losses))
    norms: list[float] = []
    for number in range(steps):
        trial.step(max_norm=0.1 if number in CLIPPED else None)
        norms += [trial.norm] if number in CLIPPED else []
    whole = trial.engine.full_state(trial.model)
    return {
        "losses": trial.losses,
        "norms": norms,
        "state": {name: value.float().flatten().tolist() for name, value in whole.items()},
        "types": [str(value.dtype) for value in whole.values()],
        "steps_told": len(told),
    }


def resume(directory: str, **facts: Any) -> dict[str, Any]:
    """Ten steps from the checkpoint that is there, after ten that lead to it if there is none."""
    place = {"directory": Path(directory)}
    if not Path(directory).exists():
        first = Trial(**place, **facts)
        first.keep()
        for _ in range(10):
            first.step()
        first.keeper.save(Place(step=10, cycle=0, loop=0), required=True)
        first.keeper.settle()
        for _ in range(10):
            first.step()
        gone_on = first.losses[10:]
    else:
        gone_on = []
    again = Trial(**place, **facts)
    again.keep()
    again.at = Cursor(SAMPLES, seed=3, consumed=10 * BATCH)
    for _ in range(10):
        again.step()
    return {"gone_on": gone_on, "resumed": again.losses, "lr": again.optimizer.param_groups[0]["lr"]}


def refused(directory: str, **facts: Any) -> str:
    """What is said to a checkpoint that does not fit."""
    trial = Trial(directory=Path(directory), **facts)
    try:
        trial.keep()
    except TwinhullError as error:
        return str(error)
    return ""


def optimizer_first(**facts: Any) -> str:
    """What is said to an optimizer that is made and wrapped before its model, or made before it."""
    job = Job(name="fit", **facts)
    engine = engines.choose(job, Group.join(job), Pace())
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    try:
        if job.engine == "fsdp":
            engine.model(model)
        engine.optimizer(optimizer)
    except TwinhullError as error:
        return str(error)
    return ""


def unfit(how: str, **facts: Any) -> str:
    """What is said to a model whose blocks share a weight, or that has no weights yet."""
    job = Job(name="fit", **facts)
    engine = engines.choose(job, Group.join(job), Pace())
    with torch.device("meta" if how == "empty" else "cpu"):
        model: Any = Net()
    if how == "tied":
        model.blocks[1].inner.weight = model.blocks[0].inner.weight
    try:
        engine.model(model)
    except TwinhullError as error:
        return str(error)
    return ""


KINDS: dict[str, Callable[..., Any]] = {
    "agree": agree,
    "resume": resume,
    "refused": refused,
    "optimizer_first": optimizer_first,
    "unfit": unfit,
}


def rank(directory: Path, asked: list[Any]) -> None:
    """All that is asked for, one after the other in one group; rank 0 writes it down."""
    for number, (kind, facts) in enumerate(asked):
        said = KINDS[kind](**facts)
        if os.environ["RANK"] == "0":
            (directory / f"{number}.json").write_text(json.dumps(said))


def main() -> int:
    """Ranks that are forked, as those of a launcher are. 1 if any of them ends with another status than 0."""
    directory, world_size, asked = Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", str(free_port())
    children = [fork(number, world_size, lambda: rank(directory, asked)) for number in range(world_size)]
    return int(any(os.waitpid(child, 0)[1] for child in children))


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def fork(number: int, world_size: int, work: Callable[[], None]) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        os.environ.update(RANK=str(number), WORLD_SIZE=str(world_size), LOCAL_RANK=str(number))
        work()
        if dist.is_initialized():
            dist.destroy_process_group()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # as a rank leaves


if __name__ == "__main__":
    sys.exit(main())
