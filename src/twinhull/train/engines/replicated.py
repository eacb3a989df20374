"""How do ranks that each hold the whole model train it? One of them alone, or several by DDP."""

from collections.abc import Callable
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
from twinhull.train.engines.guise import Method, replace, ways_in
from twinhull.train.engines.updates import Updates
from twinhull.train.group import Group
from twinhull.train.job import Job
from twinhull.train.pace import Pace


class Replicated:
    """One rank, or several that each hold the whole model.

    The gradient that the optimizer sees is the sum over ranks and micro-batches of share times gradient.
    Between ranks the shares come in when gradients are added up: in the last backward pass of a step;
    what was accumulated until then is kept in units of the share of the micro-batch under way.

    DDP adds up, in buckets, while the backward pass goes on. Its own call is not used: it is made ready for a
    backward pass here, so it matters neither which part of the model a loss came from nor how many there are.
    """

    def __init__(self, job: Job, group: Group, pace: Pace) -> None:
        self._job, self._group, self._pace = job, group, pace
        self._updates = Updates(pace)
        self._ddps: list[DistributedDataParallel] = []
        self._trained: list[nn.Parameter] = []
        self._alike: list[torch.Tensor] = []
        self._weighting: list[RemovableHandle] = []
        self._added_up: set[int] = set()
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
        if self._job.precision == "bf16":
            _compute_in_bf16(model, self._group.device.type)
        return model

    def optimizer(self, optimizer: Any) -> Any:  # Any: the user's own
        """The optimizer or schedule, which acts once a step."""
        return self._updates.wrap(optimizer)

    def begin(self) -> None:
        """Before each micro-batch: all ranks get rank 0's buffers, and what is accumulated its weight."""
        self._updates.begin()
        self._added_up.clear()
        if self._pace.is_first:
            align(self._alike)
            self._weigh_no_more()
        else:
            self._weigh()
        for ddp in self._ddps:
            ddp.reducer._reset_state()
            ddp.reducer._rebuild_buckets()  # once, in the order of the first backward pass
            if self._pace.is_last:
                ddp.reducer.prepare_for_backward([])

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
        """Give all ranks rank 0's model, and let DDP add up their gradients."""
        self._alike += kept_buffers(model)
        if not any(p.requires_grad for p in model.parameters()):
            align([*model.parameters(), *model.buffers()])
            return
        ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
        ddp.register_comm_hook(ddp.reducer, self._sum_by_share)
        self._ddps.append(ddp)

    def _sum_by_share(
        self, reducer: dist.Reducer, bucket: dist.GradBucket
    ) -> torch.futures.Future[torch.Tensor]:
        """Add up the gradients of all ranks, each weighted by its share of the samples.

        A plain mean over ranks would be wrong whenever the ranks hold unequal parts, as they do at an epoch's
        end.
        """
        if bucket.index() == 0:
            self._check_weight(reducer)
        if bucket.is_last():
            if self.on_local_gradients is not None:
                self.on_local_gradients()
            _at_end_of_backward(partial(reducer.prepare_for_backward, []))  # there may be one more
        weighted = bucket.buffer().mul_(self._pace.share)
        work: Any = dist.all_reduce(weighted, async_op=True)  # Any: it has no stub for get_future
        future: torch.futures.Future[list[torch.Tensor]] = work.get_future()
        return future.then(lambda done: done.value()[0])

    def _check_weight(self, reducer: dist.Reducer) -> None:
        """What was added up before is weighted once more: that is right if the shares of this pass make 1."""
        if id(reducer) in self._added_up and not self._pace.is_first:
            raise TwinhullError(
                "a second backward pass in one micro-batch: what was accumulated would lose its weight.",
                hint="Add the losses up and call backward() once, or take a step's samples at once.",
            )
        self._added_up.add(id(reducer))

    def _weigh(self) -> None:
        """What is accumulated is worth `previous` a sample, what comes will be worth `share`."""
        pace = self._pace
        is_alone_and_last = pace.is_last and not self._ddps
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
        for ddp in self._ddps:
            try:
                ddp.reducer._check_reducer_finalized()
            except RuntimeError as error:
                raise _without_gradient(ddp.module) from error


def _compute_in_bf16(model: nn.Module, device: str) -> None:
    """Let whatever is asked of the model be computed under autocast; its weights stay as they are."""

    def call(_: nn.Module, real: Method, *args: Any, **kwargs: Any) -> Any:  # Any: the user's own
        with torch.autocast(device, torch.bfloat16):
            return real(*args, **kwargs)

    replace(model, dict.fromkeys(ways_in(model), call))


def _at_end_of_backward(call: Callable[[], None]) -> None:
    """Call it when DDP, too, has finished this backward pass: its own last call is queued after the hook."""
    engine: Any = torch.autograd.Variable._execution_engine  # Any: it has no stub
    engine.queue_callback(lambda: engine.queue_callback(call))


def _without_gradient(model: nn.Module) -> TwinhullError:
    names = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return TwinhullError(
        f"{type(model).__name__} has parameters without a gradient in this step: {shown}.",
        hint="Freeze them (requires_grad_(False)) or let them take part in the loss; `fsdp` does without.",
    )
