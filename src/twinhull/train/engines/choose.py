"""Which engine trains: the one the job names, or what suits the number of ranks."""

import importlib.util
import logging
import os
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn

from twinhull.errors import TwinhullError
from twinhull.train.engines.replicated import Replicated
from twinhull.train.group import Group
from twinhull.train.job import Job
from twinhull.train.pace import Pace

log = logging.getLogger(__name__)


class Engine(Protocol):
    """How the ranks of a run train one model. All methods are called on all ranks.

    `on_local_gradients`, if set, is called when this rank hands gradients to communication.
    """

    on_local_gradients: Callable[[], None] | None

    def model(self, model: nn.Module) -> nn.Module:
        """The model, on its device and trained by all ranks."""
        ...

    def optimizer(self, optimizer: Any) -> Any:  # Any: the user's own, perhaps a schedule
        """The optimizer or schedule, which acts in the last micro-batch of a step; all else as it is."""
        ...

    def begin(self) -> None:
        """A micro-batch begins; `pace` knows it already."""
        ...

    def full_state(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """The model's whole state on the CPU of rank 0, nothing elsewhere."""
        ...

    def clip_grad_norm(self, model: nn.Module, max_norm: float) -> torch.Tensor:
        """The norm of the whole gradient, scaled down to `max_norm`; 0 before the last micro-batch."""
        ...


def choose(job: Job, group: Group, pace: Pace) -> Engine:
    """The engine of the job. Raises TwinhullError for what cannot be."""
    name = _possible(job, group)
    if name in {"fsdp", "hsdp"}:
        from twinhull.train.engines.sharded import Sharded

        return Sharded(job, group, pace, shard=_shard(job, group) if name == "hsdp" else None)
    if name.startswith("zero"):
        from twinhull.train.engines.zero import Zero

        return Zero(job, group, pace, stage=int(name[-1]))
    return Replicated(job, group, pace)


def _possible(job: Job, group: Group) -> str:
    """The engine's name; "single" where there is nothing to divide."""
    several = group.world_size > 1
    name = job.engine or ("ddp" if several else "single")
    if name == "single" and several:
        raise TwinhullError(
            f"{job.name}: the engine `single` trains on one rank, and there are {group.world_size}.",
            hint="Leave `engine` out, or start one rank.",
        )
    if job.offload and name in {"single", "ddp"}:
        raise TwinhullError(
            f"{job.name}: the engine `{name}` cannot offload: each rank keeps the whole model on its device.",
            hint="Choose `fsdp`, `hsdp` or `zero-3`, or leave `offload` out.",
        )
    if name.startswith("zero") and importlib.util.find_spec("deepspeed") is None:
        raise TwinhullError(
            f"{job.name}: the engine `{name}` is DeepSpeed's, which is not installed.",
            hint="pip install 'twinhull[deepspeed]', or choose `fsdp`.",
        )
    if name in {"fsdp", "hsdp"} and not several:
        log.info("nothing to shard on one rank", extra={"engine": name, "instead": "single"})
        return "single"
    if name == "hsdp" and _shard(job, group) in {1, group.world_size}:
        instead = "ddp" if _shard(job, group) == 1 else "fsdp"
        log.info("nothing to replicate or to shard", extra={"engine": name, "instead": instead})
        return instead
    return name


def _shard(job: Job, group: Group) -> int:
    """How many ranks share one copy of the model."""
    here = int(os.environ.get("LOCAL_WORLD_SIZE", str(group.world_size)))
    size = here if job.shard is None else job.shard
    if size < 1 or group.world_size % size:
        raise TwinhullError(
            f"{job.name}: {group.world_size} ranks cannot be divided into copies of {size}.",
            hint="Choose a `shard` that divides the number of ranks, or the engine `fsdp`.",
        )
    return size
