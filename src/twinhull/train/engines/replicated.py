"""How do ranks that each hold the whole model train it? One of them alone, or several by DDP."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from twinhull.errors import TwinhullError
from twinhull.train.engines import blocks
from twinhull.train.engines.align import align, kept_buffers
from twinhull.train.engines.guise import Method, route
from twinhull.train.engines.updates import Updates
from twinhull.train.group import Group
from twinhull.train.job import Job
from twinhull.train.pace import Pace


class _Entry(nn.Module):
    """Lets any method of a model be called through DDP, which knows only `forward`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, method: Method, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:  # Any: the user's
        return method(*args, **kwargs)


class Replicated:
    """One rank, or several that each hold the whole model.

    The gradient that the optimizer sees is the sum over ranks and micro-batches of share times gradient.
    Between ranks the shares come in while gradients are added up, after the last micro-batch; what was
    accumulated until then is kept in units of the share of the micro-batch under way.
    """

    def __init__(self, job: Job, group: Group, pace: Pace) -> None:
        self._job, self._group, self._pace = job, group, pace
        self._updates = Updates(pace)
        self._replicas: list[DistributedDataParallel] = []
        self._trained: list[nn.Parameter] = []
        self._alike: list[torch.Tensor] = []
        self._weighting: list[RemovableHandle] = []
        self.on_local_gradients: Callable[[], None] | None = None
        pace.before_update.append(self._check_all_reduced)

    def model(self, model: nn.Module) -> nn.Module:
        """The model itself, on its device; what is asked of it goes through DDP."""
        model = model.to(self._group.device)
        if self._job.recompute:
            blocks.recompute(blocks.of(model))
        self._trained += [p for p in model.parameters() if p.requires_grad]
        if self._group.world_size > 1:
            self._replicate(model)
        elif self._job.precision == "bf16":
            route(model, self._directly)
        return model

    def optimizer(self, optimizer: Any) -> Any:  # Any: the user's own
        """The optimizer or schedule, which acts once a step."""
        return self._updates.wrap(optimizer)

    def begin(self) -> None:
        """Before each micro-batch: all ranks get rank 0's buffers, and what is accumulated its weight."""
        self._updates.begin()
        if self._pace.is_first:
            align(self._alike)
            self._weigh_no_more()
        else:
            self._weigh()
        for replica in self._replicas:
            replica.require_backward_grad_sync = self._pace.is_last

    def full_state(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """The whole state on rank 0."""
        if self._group.rank != 0:
            return {}
        return {name: value.detach().cpu() for name, value in model.state_dict().items()}

    def clip_grad_norm(self, model: nn.Module, max_norm: float) -> torch.Tensor:
        """The norm of the gradient, which is scaled down to `max_norm`."""
        if not self._pace.is_last:
            return torch.zeros((), device=self._group.device)
        return nn.utils.clip_grad_norm_(model.parameters(), max_norm)

    def _replicate(self, model: nn.Module) -> None:
        self._alike += kept_buffers(model)
        if not any(p.requires_grad for p in model.parameters()):
            align([*model.parameters(), *model.buffers()])
            route(model, self._directly)
            return
        # Buffers are aligned in `begin`, which all ranks call; the model may be asked by some of them alone.
        replica = DistributedDataParallel(
            _Entry(model), forward_sync_buffers=False, gradient_as_bucket_view=True
        )
        replica.register_comm_hook(None, self._sum_by_share)
        self._replicas.append(replica)

        def through(
            method: Method, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> Any:  # Any: the user's own
            with self._precision():
                return replica(method, args, kwargs) if torch.is_grad_enabled() else method(*args, **kwargs)

        route(model, through)

    def _directly(
        self, method: Method, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:  # Any: the user's
        with self._precision():
            return method(*args, **kwargs)

    def _precision(self) -> AbstractContextManager[object]:
        if self._job.precision == "bf16":
            return torch.autocast(self._group.device.type, torch.bfloat16)
        return nullcontext()

    def _sum_by_share(self, _: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Add up the gradients of all ranks, each weighted by its share of the samples.

        A plain mean over ranks would be wrong whenever the ranks hold unequal parts, as they do at an epoch's
        end.
        """
        if bucket.index() == 0 and self.on_local_gradients is not None:
            self.on_local_gradients()
        weighted = bucket.buffer().mul_(self._pace.share)
        work: Any = dist.all_reduce(weighted, async_op=True)  # Any: it has no stub for get_future
        future: torch.futures.Future[list[torch.Tensor]] = work.get_future()
        return future.then(lambda done: done.value()[0])

    def _weigh(self) -> None:
        """What is accumulated is worth `previous` a sample, what comes will be worth `share`."""
        pace = self._pace
        is_alone_and_last = pace.is_last and not self._replicas
        unit = 1.0 if is_alone_and_last else pace.share
        if pace.previous == 0:
            for parameter in self._trained:
                parameter.grad = None
        elif pace.previous != unit:
            accumulated = [p.grad for p in self._trained if p.grad is not None]
            torch._foreach_mul_(accumulated, pace.previous / unit)
        if is_alone_and_last:  # no communication that could do it
            share = pace.share
            self._weighting = [p.register_hook(partial(torch.mul, other=share)) for p in self._trained]

    def _weigh_no_more(self) -> None:
        for handle in self._weighting:
            handle.remove()
        self._weighting = []

    def _check_all_reduced(self) -> None:
        """Before gradients are used: each must have come in, or ranks would drift apart."""
        for replica in self._replicas:
            try:
                replica.reducer._rebuild_buckets()  # what the next forward pass would do, and it checks that
            except RuntimeError as error:
                raise _without_gradient(replica) from error


def _without_gradient(replica: DistributedDataParallel) -> TwinhullError:
    entry: _Entry = replica.module
    names = [name for name, p in entry.model.named_parameters() if p.requires_grad and p.grad is None]
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return TwinhullError(
        f"{type(entry.model).__name__} has parameters without a gradient in this step: {shown}.",
        hint="Freeze them (requires_grad_(False)) or let them take part in the loss; `fsdp` does without.",
    )
