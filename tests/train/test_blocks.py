"""Which parts of a model repeat, and that they compute again what they do not keep."""

import copy

import pytest
import torch
from torch import nn

from twinhull.errors import TwinhullError
from twinhull.train.engines import blocks


class Block(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(3, 3), nn.Linear(3, 3), nn.Dropout(0.5))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
        self.body = nn.ModuleDict({"layers": nn.ModuleList([Block(), Block(), nn.ReLU(), nn.LayerNorm(3)])})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.body["layers"]:
            x = layer(x)
        return x


def test_members_of_the_outermost_list_of_like_modules_are_blocks() -> None:
    net = Net()
    layers = net.body["layers"]
    assert blocks.of(net) == [layers[0], layers[1], layers[3]]
    assert blocks.named(blocks.of(net)) == "2 x Block, 1 x LayerNorm"


def test_a_model_that_is_itself_a_list_has_blocks() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    assert blocks.of(net) == [net[0], net[2]]


def test_a_model_without_repetition_has_none() -> None:
    assert blocks.of(nn.Linear(2, 2)) == []
    assert blocks.named([]) == "none"


def test_a_model_may_state_its_blocks() -> None:
    class Stated(Net):
        def sharded_blocks(self) -> list[nn.Module]:
            return [self.enter]

    net = Stated()
    assert blocks.of(net) == [net.enter]


def test_a_model_may_state_the_classes_of_its_blocks_as_hugging_face_does() -> None:
    class Stated(Net):
        _no_split_modules = ("LayerNorm",)

    net = Stated()
    assert blocks.of(net) == [net.body["layers"][3]]


def test_recomputing_changes_no_number_and_no_name() -> None:
    torch.manual_seed(1)
    plain = Net()
    again = copy.deepcopy(plain)
    blocks.recompute(blocks.of(again))
    kept: list[int] = []
    for net in (plain, again):
        torch.manual_seed(2)  # the same dropout, in the second pass through a block too
        sizes: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, s=sizes: s.append(1) or t, lambda t: t):
            loss = net(torch.ones(2, 3)).sum()
        kept.append(len(sizes))
        loss.backward()
    assert kept[1] < kept[0]
    assert list(again.state_dict()) == list(plain.state_dict())
    for one, other in zip(plain.parameters(), again.parameters(), strict=True):
        assert one.grad is None or torch.equal(one.grad, other.grad)


def test_a_model_without_blocks_cannot_recompute_and_is_told_the_way_out() -> None:
    with pytest.raises(TwinhullError, match=r"no blocks .* sharded_blocks\(\)"):
        blocks.recompute(blocks.of(nn.Linear(2, 2)))
