"""Ranks that each hold the whole model, and one alone."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from twinhull.errors import TwinhullError
from twinhull.train import engines
from twinhull.train.group import Group
from twinhull.train.job import Job
from twinhull.train.pace import Pace

APPS = Path(__file__).parent / "apps"
ALONE = Group(0, 1, torch.device("cpu"))


@pytest.mark.live
@pytest.mark.timeout(90)
def test_two_ranks_train_as_one_would(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(APPS / "replicated_ranks.py"), str(tmp_path)],
        capture_output=True, text=True, timeout=80, check=False,
    )  # fmt: skip
    assert done.stdout.split() == [
        "trains_as_one",
        "refuses_two_passes_a_part",
        "names_what_got_no_gradient",
        "holds_buffers_alike",
        "asks_the_model_on_one_rank",
        "holds_a_frozen_model_alike",
        "trains_models_against_each_other",
        "says_when_gradients_are_handed_over",
        "trains_in_bf16",
    ], done.stderr
    assert (done.returncode, done.stderr) == (0, "")


class Net(nn.Linear):
    """A layer, and one that only some micro-batches use."""

    def __init__(self) -> None:
        super().__init__(3, 1, bias=False)
        self.rare = nn.Parameter(torch.ones(1))

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        loss = self(x).mean()
        return loss + self.rare.sum() if x[0, 0] > 0 else loss


def test_one_rank_weighs_micro_batches_by_their_samples() -> None:
    pace = Pace()
    engine = engines.choose(Job(name="fit"), ALONE, pace)
    net = engine.model(Net())
    x = torch.randn(7, 3, generator=torch.Generator().manual_seed(1))
    x[:2, 0], x[2:, 0] = x[:2, 0].abs(), -x[2:, 0].abs()  # `rare` gets a gradient in the first part alone
    cuts = [(0, 2), (2, 3), (3, 7)]
    for begin, end in cuts:
        pace.enter((end - begin) / 7, is_first=begin == 0, is_last=end == 7)
        engine.begin()
        for part in (0.25, 0.75):  # two backward passes
            (part * net.loss(x[begin:end])).backward()
    torch.testing.assert_close(net.weight.grad, x.mean(0, keepdim=True))
    torch.testing.assert_close(net.rare.grad, torch.tensor([2 / 7]))


def test_a_step_of_one_micro_batch_leaves_gradients_alone_again() -> None:
    pace = Pace()
    engine = engines.choose(Job(name="fit"), ALONE, pace)
    net = engine.model(nn.Linear(1, 1))
    for share, first, last in [(0.5, True, False), (0.5, False, True), (1.0, True, True)]:
        pace.enter(share, is_first=first, is_last=last)
        engine.begin()
        if first:
            net.zero_grad()
        net(torch.ones(1, 1)).sum().backward()
    assert net.bias.grad.item() == 1.0


def test_one_rank_leaves_the_model_as_it_is() -> None:
    net = Net()
    assert engines.choose(Job(name="fit"), ALONE, Pace()).model(net) is net
    assert type(net) is Net


def test_bf16_keeps_the_weights_and_what_is_on_the_instance() -> None:
    engine = engines.choose(Job(name="fit", precision="bf16"), ALONE, Pace())
    net = Net()
    plain = net.forward
    net.forward = lambda x: plain(x) + 1  # as torch.compile and others do
    net = engine.model(net)
    assert type(net).__name__ == "Net"
    assert isinstance(net, Net)
    assert net.weight.dtype == torch.float32
    assert net(torch.zeros(1, 3)).item() == 1.0
    net = engine.model(Net())
    assert net(torch.zeros(1, 3)).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("facts", "ranks", "says"),
    [
        ({"engine": "single"}, 2, "trains on one rank, and there are 2"),
        ({"engine": "ddp", "offload": True}, 2, "cannot offload"),
        ({"offload": True}, 1, "cannot offload"),
        ({"engine": "hsdp", "shard": 3}, 4, "4 ranks cannot be divided into copies of 3"),
        ({"engine": "hsdp", "shard": 0}, 4, "cannot be divided"),
    ],
)
def test_an_engine_that_cannot_be_is_refused(facts: dict[str, object], ranks: int, says: str) -> None:
    group = Group(0, ranks, torch.device("cpu"))
    with pytest.raises(TwinhullError, match=says) as refused:
        engines.choose(Job(name="fit", **facts), group, Pace())
    assert refused.value.hint


@pytest.mark.parametrize("engine", ["", "single", "ddp", "fsdp", "hsdp"])
def test_one_rank_trains_with_any_engine(engine: str) -> None:
    net = engines.choose(Job(name="fit", engine=engine), ALONE, Pace()).model(nn.Linear(2, 2))
    assert type(net) is nn.Linear
