"""What of a run is to be saved, and what of it must be copied before the function goes on?"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from twinhull.train.checkpoints.skeleton import Tree, take_apart
from twinhull.train.checkpoints.staging import at_once

Thing = Any  # Any: has state_dict and load_state_dict, or keeps its own files


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What is saved. `copied` is this rank's already; `late` may be copied until the next update.

    `skeletons` are those of all things, None for one that keeps its own files, in a directory of `own`.
    """

    skeletons: list[Tree]
    copied: dict[str, torch.Tensor]
    late: dict[str, torch.Tensor]
    own: tuple[str, ...] = ()


def take(things: Sequence[Thing], rank: int, *, late: bool) -> Snapshot:
    """The state of the things as it is now.

    `late`: the update of wrapped optimizers is announced, so that their parameters and state can wait for it.
    These are sharded, or the same on all ranks, which share the work; of all else rank 0's is saved.
    """
    found: dict[str, torch.Tensor] = {}
    skeletons = [
        None if has_files(thing) else take_apart(thing.state_dict(), str(number), found)
        for number, thing in enumerate(things)
    ]
    changing = set(_addresses(things)) - {0}
    shared = {key for key, tensor in found.items() if _address(tensor) in changing}
    copied = {
        key: at_once(tensor)
        for key, tensor in found.items()
        if not (late and key in shared) and (rank == 0 or key in shared or isinstance(tensor, DTensor))
    }
    waiting = {key: found[key] for key in found if late and key in shared}
    own = tuple(own_name(number) for number, thing in enumerate(things) if has_files(thing))
    return Snapshot(skeletons, copied, waiting, own)


def has_files(thing: Thing) -> bool:
    """Whether a thing writes its own files (`save_files`, `load_files`), as DeepSpeed does."""
    return bool(getattr(thing, "own_files", False)) and callable(getattr(thing, "save_files", None))


def own_name(number: int) -> str:
    """The directory in a checkpoint where a thing keeps its own files."""
    return f"own-{number}"


def save_files(things: Sequence[Thing], beside: Path) -> None:
    """Let each thing that keeps its own files write them."""
    for number, thing in enumerate(things):
        if has_files(thing):
            directory = beside / own_name(number)
            directory.mkdir(parents=True, exist_ok=True)
            thing.save_files(directory)


def _addresses(things: Sequence[Thing]) -> Iterator[int]:
    """Where that lies which only an optimizer's step changes: its parameters and its state."""
    for thing in things:
        if isinstance(thing, torch.optim.Optimizer):
            kept: dict[str, torch.Tensor] = {}
            take_apart(list(thing.state.values()), "", kept)
            parameters = [p for group in thing.param_groups for p in group["params"]]
            yield from (_address(tensor) for tensor in (*parameters, *kept.values()))


def _address(tensor: torch.Tensor) -> int:
    """Where the tensor's memory on this rank begins; 0 if that says nothing."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return 0 if local.is_inference() else local.data_ptr()
