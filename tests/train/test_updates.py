"""Optimizers and schedules that act once a step, whatever the number of micro-batches."""

import copy
import io
import pickle
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from twinhull.train.engines.updates import Updates
from twinhull.train.pace import Pace


@pytest.fixture
def pace() -> Pace:
    return Pace()


@pytest.fixture
def updates(pace: Pace) -> Updates:
    return Updates(pace)


@pytest.fixture
def weight() -> nn.Parameter:
    return nn.Parameter(torch.ones(1))


def micro_batches(pace: Pace, updates: Updates, number: int = 3) -> Iterator[int]:
    for micro in range(number):
        pace.enter(1 / number, is_first=micro == 0, is_last=micro == number - 1)
        updates.begin()
        yield micro


@pytest.mark.parametrize("clears", ["before", "after"])
def test_gradients_add_up_wherever_zero_grad_stands(
    pace: Pace, updates: Updates, weight: nn.Parameter, clears: str
) -> None:
    optimizer = updates.wrap(torch.optim.SGD([weight], lr=1.0))
    seen = []
    for _ in range(2):
        for micro in micro_batches(pace, updates):
            if clears == "before":
                optimizer.zero_grad()
            (weight * 10**micro).sum().backward()
            optimizer.step()
            seen.append(weight.item())
            if clears == "after":
                optimizer.zero_grad()
    assert seen == [1.0, 1.0, 1.0 - 111, 1.0 - 111, 1.0 - 111, 1.0 - 222]


def test_what_waits_for_an_update_is_called_around_it(
    pace: Pace, updates: Updates, weight: nn.Parameter
) -> None:
    optimizer = updates.wrap(torch.optim.SGD([weight], lr=1.0))
    seen: list[float] = []
    pace.before_update.append(lambda: seen.append(weight.item()))
    pace.after_update.append(lambda: seen.append(weight.item()))
    for _ in micro_batches(pace, updates):
        weight.grad = torch.ones(1)
        optimizer.step()
    assert seen == [1.0, 0.0]


def test_a_closure_is_called_for_each_micro_batch(pace: Pace, updates: Updates, weight: nn.Parameter) -> None:
    optimizer = updates.wrap(torch.optim.SGD([weight], lr=1.0))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (weight * 2).sum()
        loss.backward()
        return loss

    losses = [optimizer.step(closure).item() for _ in micro_batches(pace, updates)]
    assert losses == [2.0, 2.0, 2.0]
    assert weight.item() == 1.0 - 6


@pytest.mark.parametrize("is_schedule_first", [False, True])
def test_a_schedule_counts_steps_without_a_warning(
    pace: Pace, updates: Updates, weight: nn.Parameter, is_schedule_first: bool
) -> None:
    optimizer = torch.optim.SGD([weight], lr=1.0)
    if not is_schedule_first:
        optimizer = updates.wrap(optimizer)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    if is_schedule_first:
        optimizer = updates.wrap(optimizer)
    schedule = updates.wrap(schedule)
    weight.grad = torch.ones(1)
    for _ in range(2):
        for _ in micro_batches(pace, updates):
            optimizer.step()
            schedule.step()
    assert schedule.get_last_lr() == [0.25]
    assert weight.item() == 1.0 - 1 - 0.5


def test_hooks_on_an_optimizer_are_called_once_an_update(
    pace: Pace, updates: Updates, weight: nn.Parameter
) -> None:
    optimizer = updates.wrap(torch.optim.SGD([weight], lr=1.0))
    optimizer.load_state_dict(optimizer.state_dict())  # makes PyTorch look at `step` again
    calls: list[int] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append(1))
    for _ in micro_batches(pace, updates):
        optimizer.step()
    assert calls == [1]


def test_an_optimizer_stays_what_it_was(updates: Updates, weight: nn.Parameter) -> None:
    plain = torch.optim.AdamW([weight])
    wrapped = updates.wrap(plain)
    assert wrapped is plain
    assert isinstance(wrapped, torch.optim.AdamW)
    assert type(wrapped).__name__ == "AdamW"
    assert repr(wrapped).startswith("AdamW (")


def test_a_copy_of_an_optimizer_is_a_plain_one(updates: Updates, weight: nn.Parameter) -> None:
    wrapped = updates.wrap(torch.optim.AdamW([weight], lr=0.5))
    file = io.BytesIO()
    torch.save(wrapped, file)
    file.seek(0)
    for made in (
        copy.deepcopy(wrapped),
        pickle.loads(pickle.dumps(wrapped)),
        torch.load(file, weights_only=False),
    ):
        assert type(made) is torch.optim.AdamW
        assert made.param_groups[0]["lr"] == 0.5


def test_anything_else_is_given_back_as_it_is(updates: Updates) -> None:
    thing = {"a": 1}
    assert updates.wrap(thing) is thing
    assert type(thing) is dict
