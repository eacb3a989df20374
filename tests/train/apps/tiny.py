"""Training functions for the tests: small, quick, and each with the one trait that its test needs."""

import os
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn

from twinhull.train.run import Run

EVENTS = 500
NOTED, NOTED_EPOCHS = 203, 8


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 8)
        self.outer = nn.Linear(8, 1)
        self.drop = nn.Dropout(0.2)

    def loss(self, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        x, y = batch
        return ((self.outer(self.drop(self.inner(x).relu())).squeeze(-1) - y) ** 2).mean()


class Data:
    def __init__(self, size: int = 203) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.tensor([number % 7, number % 5, number % 3, 1.0]) / 7
        return x, x.sum()


def fit(run: Run) -> None:
    model = run.wrap(Net())
    optimizer = run.wrap(torch.optim.AdamW(model.parameters(), lr=3e-3))
    pause_s = float(os.environ.get("PAUSE_S", "0"))
    for batch in run.steps(run.loader(Data(), batch_size=16), epochs=int(os.environ.get("EPOCHS", "2"))):
        loss = model.loss(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.report(loss=loss)
        time.sleep(pause_s)
    run.publish(model, metrics={"steps": run.step})


def fit_and_linger(run: Run) -> None:
    """Publishes and then, in its first life, waits to be killed."""
    fit(run)
    mark = Path(os.environ["MARK"])
    if not mark.exists():
        if run.rank == 0:
            mark.write_text("")
        time.sleep(600)


def raises_at_step_3(run: Run) -> None:
    model = run.wrap(Net())
    for batch in run.steps(run.loader(Data(), batch_size=16)):
        model.loss(batch).backward()
        if run.step == 3 and run.rank == 1:
            raise ValueError("boom at three")


def dies_at_step_3(run: Run) -> None:
    model = run.wrap(Net())
    for batch in run.steps(run.loader(Data(), batch_size=16)):
        model.loss(batch).backward()
        if run.step == 3 and run.rank == 1:
            os._exit(9)


def leaves_at_step_3(run: Run) -> None:
    model = run.wrap(Net())
    for batch in run.steps(run.loader(Data(), batch_size=16)):
        model.loss(batch).backward()
        if run.step == 3 and run.rank == 1:
            os._exit(0)


def grows_at_step_3(run: Run) -> None:
    """Takes memory without end."""
    model, kept = run.wrap(Net()), []
    for batch in run.steps(run.loader(Data(), batch_size=16)):
        model.loss(batch).backward()
        while run.step == 3:
            kept.append(b"." * (16 << 20))


def is_taken() -> bool:
    return Path(os.environ["TAKEN"]).exists()


def hangs_once(run: Run) -> None:
    """Stops at step 5 of its first life."""
    mark = Path(os.environ["MARK"])
    model = run.wrap(Net())
    for batch in run.steps(run.loader(Data(), batch_size=16)):
        model.loss(batch).backward()
        if run.step == 5 and not mark.exists():
            mark.write_text("")
            time.sleep(3600)


def evaluates_for_ever(run: Run) -> None:
    model = run.wrap(Net())
    for batch in run.steps(run.loader(Data(32), batch_size=16)):
        model.loss(batch).backward()
    Path(os.environ["MARK"]).write_text("")
    while True:
        time.sleep(0.05)


def wraps_an_array(run: Run) -> None:
    class Mine:
        def state_dict(self) -> dict[str, object]:
            return {"mean": np.zeros(3)}

        def load_state_dict(self, state: dict[str, object]) -> None:
            pass

    run.wrap(Mine())


def two_loops(run: Run) -> None:
    """Notes every sample of two loops; rank 0 writes what both have seen when it is over."""
    model = run.wrap(Net())
    for name, epochs in (("first", 1), ("second", 2)):
        loader = run.loader(list(range(40)), batch_size=8, collate=list)
        for numbers in run.steps(loader, epochs=epochs):
            model.loss((torch.ones(len(numbers), 4), torch.ones(len(numbers)))).backward()
            with Path(os.environ["SEEN"]).open("a") as file:
                file.write(f"{name} {run.step} {run.rank} {' '.join(map(str, numbers))}\n")
            time.sleep(float(os.environ.get("PAUSE_S", "0")))


def notes(run: Run) -> None:
    """Notes every sample with the generation that trained it, when its step is complete; then publishes.

    Without dropout, so that any number of ranks comes to the same weights. Slow until the file GO is there.
    """
    net = Net()
    net.drop.p = 0.0
    model = run.wrap(net)
    optimizer = run.wrap(torch.optim.SGD(model.parameters(), lr=1e-2))
    loader = run.loader(list(range(NOTED)), batch_size=16, collate=list)
    with Path(os.environ["SEEN"]).open("a") as file:
        for numbers in run.steps(loader, epochs=NOTED_EPOCHS):
            x = torch.tensor([[n % 7, n % 5, n % 3, 1.0] for n in numbers]) / 7
            model.loss((x, x.sum(1))).backward()
            optimizer.step()
            optimizer.zero_grad()
            file.write(f"{run._job.generation} {run.step} {run.rank} {' '.join(map(str, numbers))}\n")
            file.flush()
            time.sleep(0.0 if Path(os.environ["GO"]).exists() else 0.15)
    run.publish(model)


def count_events(run: Run) -> None:
    """Keeps how often each event was trained, in a model of which each event moves its own weight by one."""
    model = run.wrap(Tally())
    for batch in run.steps(run.loader(run.events("tick"), batch_size=10, collate=list)):
        model(batch).backward()
        model.add()
        time.sleep(float(os.environ.get("PAUSE_S", "0")))
    run.publish(model, metrics={"steps": run.step})


class Tally(nn.Module):
    """Its loss is a mean over the batch of what each event weighs; `add` turns gradients into counts."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(EVENTS))

    def forward(self, events: list[dict[str, int]]) -> torch.Tensor:
        return self.weight[[event["n"] for event in events]].mean()

    @torch.no_grad()
    def add(self) -> None:
        assert self.weight.grad is not None
        self.weight += self.weight.grad.sign()
        self.weight.grad = None
