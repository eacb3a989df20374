"""How does a thing get its state back? Tensors are read straight to where they belong, each rank its part."""

from pathlib import Path

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from twinhull.train.checkpoints import shards
from twinhull.train.checkpoints.manifest import STATE
from twinhull.train.checkpoints.skeleton import Piece, Tree, pieces, put_together


def read_skeletons(directory: Path) -> list[Tree]:
    """The skeletons of all wrapped things; in format 1 whole states. Only after its hash has held."""
    with torch.serialization.safe_globals([Piece]):
        return torch.load(directory / STATE, map_location="cpu", weights_only=True)


def restore(thing: Tree, skeleton: Tree, directory: Path) -> None:
    """Give a thing the state that the skeleton and the shards hold."""
    targets: dict[str, torch.Tensor] = {}
    for piece, own in pieces(skeleton, _beside(thing)):
        targets.setdefault(piece.key, _target(piece, own, in_place=isinstance(thing, nn.Module)))
    if targets:
        shards.read(directory, targets)
    thing.load_state_dict(put_together(skeleton, targets))


def _beside(thing: Tree) -> Tree:
    """A structure like the thing's state, which shows where its tensors live."""
    if isinstance(thing, nn.Module):
        return thing.state_dict()
    if isinstance(thing, torch.optim.Optimizer):
        parameters = [p for group in thing.param_groups for p in group["params"]]
        return {"state": dict(enumerate(parameters))}  # what it keeps for a parameter lies like that one
    return None


def _target(piece: Piece, own: Tree, *, in_place: bool) -> torch.Tensor:
    if isinstance(own, torch.Tensor) and tuple(own.shape) == piece.shape:
        if in_place and own.dtype == piece.dtype:
            return own.detach()
        if isinstance(own, DTensor):
            return torch.empty_like(own, dtype=piece.dtype, requires_grad=False)
    return torch.empty(piece.shape, dtype=piece.dtype)
