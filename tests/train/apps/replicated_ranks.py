"""Two ranks, made by fork, that hold a model each; each line that is printed is a fact that held."""

import copy
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # the first optimizer step imports it: once here instead of in every rank
import torch.distributed as dist
from torch import nn

from twinhull.errors import TwinhullError
from twinhull.train import engines
from twinhull.train.data.cursor import split
from twinhull.train.group import Group
from twinhull.train.job import Job
from twinhull.train.pace import Pace

STEPS, BATCH = 5, 7
BATCHES = [torch.randn(BATCH - (step == 3) * 5, 4, generator=torch.Generator().manual_seed(step))
           for step in range(STEPS)]  # fmt: skip


class Net(nn.Module):
    """Tied and frozen weights, a buffer, a loss of its own, and a part that is sometimes left out."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(4, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(2))
        self.blocks[1][0].weight = self.blocks[0][0].weight
        self.leave = nn.Linear(6, 1)
        self.enter.bias.requires_grad_(False)
        self.register_buffer("seen", torch.zeros(()))
        self.is_cut = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen += len(x)
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return x.sum(1, keepdim=True) if self.is_cut else self.leave(x)

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return (self(x) - x.sum(1, keepdim=True)).float().pow(2).mean()


Way = Callable[[Net, torch.Tensor], None]


def at_once(net: Net, x: torch.Tensor) -> None:
    net.loss(x).backward()


def in_two_passes(net: Net, x: torch.Tensor) -> None:
    loss = net.loss(x)
    (0.25 * loss).backward(retain_graph=True)
    (0.75 * loss).backward()


def by_its_parts(net: Net, x: torch.Tensor) -> None:
    y = net.leave(net.blocks[1](net.blocks[0](net.enter(x))))
    (y - x.sum(1, keepdim=True)).pow(2).mean().backward()


def plainly() -> dict[str, torch.Tensor]:
    """The weights after plain training on the global batches."""
    torch.manual_seed(1)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
    for x in BATCHES:
        at_once(net, x)
        nn.utils.clip_grad_norm_(net.parameters(), 2.0)
        optimizer.step()
        optimizer.zero_grad()
    return net.state_dict()


class Trial:
    """A model and its optimizer under an engine, driven as `Run` does."""

    def __init__(self, group: Group, **facts: Any) -> None:
        self.job = Job(name="fit", **facts)
        self.group, self.pace = group, Pace()
        self.engine = engines.choose(self.job, group, self.pace)
        torch.manual_seed(1 + group.rank)  # it begins with rank 0's weights
        self.net: Any = self.engine.model(Net())
        self.optimizer = self.engine.optimizer(torch.optim.AdamW(self.net.parameters(), lr=0.05))

    def parts(self, x: torch.Tensor) -> Iterator[torch.Tensor]:
        most = self.job.micro_batch or len(x)
        parts = split(len(x), self.group.rank, self.group.world_size, most)
        for number, (mine, share) in enumerate(parts):
            self.pace.enter(share, is_first=number == 0, is_last=number == len(parts) - 1)
            self.engine.begin()
            yield x[mine]

    def train(self, way: Way = at_once, *, clears_before: bool = False) -> dict[str, torch.Tensor]:
        for batch in BATCHES:
            for x in self.parts(batch):
                if clears_before:
                    self.optimizer.zero_grad()
                way(self.net, x)
                self.engine.clip_grad_norm(self.net, 2.0)
                self.optimizer.step()
                if not clears_before:
                    self.optimizer.zero_grad()
        return {name: value for name, value in self.net.state_dict().items() if name != "seen"}


def trains_as_one(group: Group) -> None:
    expected = plainly()
    del expected["seen"]
    for facts in ({}, {"micro_batch": 2}, {"micro_batch": 1}, {"recompute": True}):
        state = Trial(group, **facts).train()
        torch.testing.assert_close(state, expected, rtol=1e-5, atol=1e-6)
    state = Trial(group, micro_batch=2).train(clears_before=True)
    torch.testing.assert_close(state, expected, rtol=1e-5, atol=1e-6)
    for way in (in_two_passes, by_its_parts):
        torch.testing.assert_close(Trial(group).train(way), expected, rtol=1e-5, atol=1e-6)


def refuses_two_passes_a_part(group: Group) -> None:
    try:
        Trial(group, micro_batch=2).train(in_two_passes)
    except TwinhullError as error:
        assert "second backward pass" in str(error), error
    else:
        raise AssertionError("was not refused")


def names_what_got_no_gradient(group: Group) -> None:
    trial = Trial(group)
    trial.net.is_cut = True
    before = copy.deepcopy(trial.net.state_dict())
    try:
        trial.train()
    except TwinhullError as error:
        assert "leave.weight, leave.bias" in str(error), error
    else:
        raise AssertionError("was not refused")
    del before["seen"]
    torch.testing.assert_close({n: trial.net.state_dict()[n] for n in before}, before, rtol=0, atol=0)


def holds_buffers_alike(group: Group) -> None:
    trial = Trial(group)
    trial.train()
    assert int(trial.net.seen) == {0: 17, 1: 16}[group.rank], (
        trial.net.seen
    )  # 13 of rank 0, and its own 4 or 3
    for _ in trial.parts(BATCHES[0]):
        assert int(trial.net.seen) == 17


def asks_the_model_on_one_rank(group: Group) -> None:
    trial = Trial(group)
    for x in trial.parts(BATCHES[0]):
        if group.rank == 0:
            trial.net.loss(x).item()
            trial.net.eval()(x)
            trial.net.train()
        at_once(trial.net, x)
        trial.optimizer.step()


def holds_a_frozen_model_alike(group: Group) -> None:
    trial = Trial(group)
    torch.manual_seed(group.rank)
    frozen = trial.engine.model(Net().requires_grad_(False))
    together = frozen.leave.weight.clone()
    dist.all_reduce(together)
    torch.testing.assert_close(together, 2 * frozen.leave.weight)


def against_each_other(group: Group) -> dict[str, torch.Tensor]:
    """Two models, two optimizers, and a backward pass through both in the same step."""
    pace = Pace()
    engine = engines.choose(Job(name="fit"), group, pace)
    torch.manual_seed(1)
    maker, judge = engine.model(nn.Linear(4, 4)), engine.model(nn.Linear(4, 1))
    of_maker = engine.optimizer(torch.optim.Adam(maker.parameters(), 0.05))
    of_judge = engine.optimizer(torch.optim.Adam(judge.parameters(), 0.05))
    for batch in BATCHES:
        [(mine, share)] = split(len(batch), group.rank, group.world_size, len(batch))
        pace.enter(share, is_first=True, is_last=True)
        engine.begin()
        x = batch[mine]
        of_judge.zero_grad()
        (judge(maker(x).detach()).mean() - judge(x).pow(2).mean()).backward()
        of_judge.step()
        of_maker.zero_grad()
        judge(maker(x)).mean().backward()
        of_maker.step()
    return {**maker.state_dict(), **{f"judge.{name}": value for name, value in judge.state_dict().items()}}


def trains_models_against_each_other(group: Group) -> None:
    alone = against_each_other(Group(0, 1, torch.device("cpu")))
    torch.testing.assert_close(against_each_other(group), alone, rtol=1e-4, atol=1e-5)


def says_when_gradients_are_handed_over(group: Group) -> None:
    trial = Trial(group, micro_batch=2)
    calls: list[bool] = []
    trial.engine.on_local_gradients = lambda: calls.append(trial.pace.is_last)
    trial.train()
    assert calls == [True] * STEPS, calls


def trains_in_bf16(group: Group) -> None:
    trial = Trial(group, precision="bf16")
    assert trial.net(BATCHES[0]).dtype == torch.bfloat16
    assert trial.net.leave.weight.dtype == torch.float32
    expected = plainly()
    for name, value in trial.train().items():
        torch.testing.assert_close(value, expected[name], rtol=0.1, atol=0.1)


FACTS: list[Callable[[Group], None]] = [
    trains_as_one,
    refuses_two_passes_a_part,
    names_what_got_no_gradient,
    holds_buffers_alike,
    asks_the_model_on_one_rank,
    holds_a_frozen_model_alike,
    trains_models_against_each_other,
    says_when_gradients_are_handed_over,
    trains_in_bf16,
]


def rank(number: int, directory: Path) -> int:
    group = Group(number, 2, torch.device("cpu"))
    try:
        for fact in FACTS:
            dist.init_process_group(
                "gloo", init_method=f"file://{directory / fact.__name__}", rank=number, world_size=2
            )
            fact(group)
            dist.destroy_process_group()
            if number == 0:
                print(fact.__name__, flush=True)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def main(directory: Path) -> None:
    torch.set_num_threads(1)
    pids = []
    for number in range(2):
        pid = os.fork()
        if pid == 0:
            os._exit(rank(number, directory))
        pids.append(pid)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    sys.exit(int(any(codes)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
