"""How do ranks train a model that each holds only a part of? By PyTorch's FSDP2, block by block."""

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor

from twinhull.errors import TwinhullError
from twinhull.train.engines import blocks
from twinhull.train.engines.align import align, kept_buffers
from twinhull.train.engines.calls import is_plain
from twinhull.train.engines.guise import Method, ways_in
from twinhull.train.engines.updates import Updates
from twinhull.train.group import Group
from twinhull.train.job import Job
from twinhull.train.pace import Pace

log = logging.getLogger(__name__)


class Sharded:
    """Parameters, gradients and optimizer state are divided among `shard` ranks, or among all.

    Each block is a unit, and what lies outside of blocks is one more: a unit's parameters are whole on a rank
    only while it computes with them. Gradients are weighted by their share of the samples on their way to the
    other ranks, in each micro-batch. With `shard`, several groups of so many ranks hold a copy of the model
    each, and add up their gradients once a step.
    """

    def __init__(self, job: Job, group: Group, pace: Pace, *, shard: int | None = None) -> None:
        self._job, self._group, self._pace = job, group, pace
        self._mesh = _mesh(group, shard)
        self._updates = Updates(pace)
        self._comm: Any = _SumByShare(pace, self._handed_over)  # Any: its abstract class is private to FSDP
        self._kept_alike: list[torch.Tensor] = []
        self._roots: list[FSDPModule] = []
        self._sharded: set[int] = set()
        self.on_local_gradients: Callable[[], None] | None = None

    def model(self, model: nn.Module) -> nn.Module:
        """The model itself, of which this rank holds its part."""
        found = blocks.of(model)
        names = blocks.named(found)  # now: FSDP calls them otherwise
        _check(self._job, model, found)
        for tensor in (*model.parameters(), *model.buffers()):
            align([tensor])  # one by one, where they are: a second copy of the model might not fit
        if self._job.recompute:
            blocks.recompute(found)
        for unit in [*reversed(found), model]:  # the innermost first
            self._shard(unit)
        for name in dict.fromkeys(ways_in(model)):
            if name != "forward":
                _gather_for(model, name)
        assert isinstance(model, FSDPModule)
        self._roots.append(model)
        facts = {
            "blocks": names,
            "ranks": self._mesh.shape[-1],
            "copies": self._group.world_size // self._mesh.shape[-1],
        }
        if self._group.rank == 0:
            log.info("sharded", extra=facts)
        self._kept_alike += kept_buffers(model)
        self._sharded |= {id(parameter) for parameter in model.parameters()}
        return model

    def optimizer(self, optimizer: Any) -> Any:  # Any: the user's own
        """The optimizer or schedule, which acts once a step."""
        if isinstance(optimizer, torch.optim.Optimizer):
            _check_sharded(optimizer, self._sharded)
        return self._updates.wrap(optimizer)

    def begin(self) -> None:
        """Before each micro-batch."""
        self._updates.begin()
        if self._pace.is_first:
            align(self._kept_alike)
        for root in self._roots if self._mesh.ndim > 1 else ():
            root.set_requires_all_reduce(self._pace.is_last)

    def full_state(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """The whole state on rank 0, put together tensor by tensor."""
        state: dict[str, torch.Tensor] = {}
        for name, value in model.state_dict().items():
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            if self._group.rank == 0:
                state[name] = whole.detach().cpu()
        return state

    def clip_grad_norm(self, model: nn.Module, max_norm: float) -> torch.Tensor:
        """The whole gradient's norm, scaled down to `max_norm`; 0 before the last micro-batch."""
        if not self._pace.is_last:
            return torch.zeros((), device=self._group.device)
        norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def _shard(self, unit: nn.Module) -> None:
        sharded = fully_shard(
            unit, mesh=self._mesh, mp_policy=self._precision(), offload_policy=self._offload()
        )
        sharded.set_force_sum_reduction_for_comms(True)
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_custom_reduce_scatter(self._comm)

    def _precision(self) -> MixedPrecisionPolicy:
        if self._job.precision != "bf16":
            return MixedPrecisionPolicy()
        return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

    def _offload(self) -> OffloadPolicy:
        if not self._job.offload:
            return OffloadPolicy()
        return CPUOffloadPolicy(pin_memory=self._group.device.type == "cuda")

    def _handed_over(self) -> None:
        if self.on_local_gradients is not None:
            self.on_local_gradients()


class _SumByShare:
    """FSDP's reduce-scatter, as its `ReduceScatter` asks for it, which weights what this rank puts in.

    FSDP's own mean over ranks would be wrong whenever they hold unequal parts, as they do at an epoch's end.
    """

    def __init__(self, pace: Pace, handed_over: Callable[[], None]) -> None:
        self._pace, self._handed_over = pace, handed_over

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """New memory."""
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> Any:  # Any: a Work or None
        """Add up `input_tensor` of all ranks, weighted, and leave this rank's part in `output_tensor`."""
        self._handed_over()
        input_tensor.mul_(self._pace.share)
        return dist.reduce_scatter_single(output_tensor, input_tensor, op=op, group=group, async_op=async_op)


def _gather_for(model: nn.Module, name: str) -> None:
    """Let FSDP gather parameters for calls of this method too, if they compute."""
    plain: Method = getattr(model, name)
    register_fsdp_forward_method(model, name)
    gathering: Method = getattr(model, name)

    @functools.wraps(plain)
    def call(*args: Any, **kwargs: Any) -> Any:  # Any: the user's own
        return (plain if is_plain((args, kwargs)) else gathering)(*args, **kwargs)

    setattr(model, name, call)


def _mesh(group: Group, shard: int | None) -> DeviceMesh:
    kind, ranks = group.device.type, group.world_size
    if shard is None:
        return init_device_mesh(kind, (ranks,), mesh_dim_names=("shard",))
    return init_device_mesh(kind, (ranks // shard, shard), mesh_dim_names=("replicate", "shard"))


def _check(job: Job, model: nn.Module, found: Sequence[nn.Module]) -> None:
    """Raise TwinhullError for a parameter that cannot be sharded."""
    prefixes = [f"{name}." for name, module in model.named_modules() if any(module is one for one in found)]
    first: dict[int, tuple[str, str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.is_meta:
            raise TwinhullError(
                f"{job.name}: {name} has no values: it is on the meta device.",
                hint="Build the model on the CPU; it is sharded from there, block by block.",
            )
        unit = max((prefix for prefix in prefixes if name.startswith(prefix)), key=len, default="")
        other, other_unit = first.setdefault(id(parameter), (name, unit))
        if other_unit != unit:
            raise TwinhullError(
                f"{job.name}: {name} is the same parameter as {other}, which is in another block.",
                hint="Give the model a sharded_blocks() without one of them, or choose the engine `ddp`.",
            )


def _check_sharded(optimizer: torch.optim.Optimizer, sharded: set[int]) -> None:
    """Raise TwinhullError for an optimizer of parameters that belong to no wrapped model."""
    own = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    foreign = sum(number not in sharded for number in own)
    if foreign:
        raise TwinhullError(
            f"{type(optimizer).__name__}: {foreign} of its {len(own)} parameters are not those of a wrapped "
            "model, and the ranks would not train them together.",
            hint="Wrap the model first, then make the optimizer of its parameters.",
        )
