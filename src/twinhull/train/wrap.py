"""How a user's model becomes one that all ranks train together, and comes out of it again unchanged."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from twinhull.train.group import Group
from twinhull.train.pace import Pace


class _Entry(nn.Module):
    """Lets any method of a model be called through DDP, which knows only `forward`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:  # Any: the user's own
        return getattr(self.model, method)(*args, **kwargs)


class Replicated(DistributedDataParallel):
    """A model that every rank holds whole; looks like the model itself.

    Calling it, or any of its methods while gradients are recorded, goes through DDP, so `model.loss(batch)`
    trains as well as `model(batch)`. Its state is the model's state, without a prefix.
    """

    def __init__(self, model: nn.Module, pace: Pace, group: Group) -> None:
        on_gpu = group.device.type == "cuda"
        super().__init__(_Entry(model), device_ids=[group.device] if on_gpu else None)
        self.register_comm_hook(pace, _sum_by_share)

    @property
    def inner(self) -> nn.Module:
        """The user's own model."""
        entry: _Entry = self.module
        return entry.model

    def forward(self, *args: Any, **kwargs: Any) -> Any:  # Any: the user's own
        """What the model gives."""
        return super().forward("forward", args, kwargs)

    def __getattr__(self, name: str) -> Any:  # Any: whatever the user's model has under that name
        try:
            return super().__getattr__(name)
        except AttributeError:
            modules: dict[str, Any] = self.__dict__.get("_modules", {})
            if "module" not in modules:
                raise
        found = getattr(modules["module"].model, name)
        is_method = callable(found) and getattr(found, "__self__", None) is modules["module"].model
        return self._through(name, found) if is_method else found

    def _through(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:  # Any: the user's own
            if not (torch.is_grad_enabled() and self.training):
                return method(*args, **kwargs)
            return DistributedDataParallel.forward(self, name, args, kwargs)

        return call

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:  # Any: as nn.Module has it
        """The user's model's own state."""
        return self.inner.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:  # Any: as nn.Module has it
        """Load the user's model's own state."""
        return self.inner.load_state_dict(*args, **kwargs)


def wrap_model(model: nn.Module, pace: Pace, group: Group) -> nn.Module:
    """The model on its device, replicated if there are several ranks and it has something to train."""
    model = model.to(group.device)
    if group.world_size == 1 or not any(p.requires_grad for p in model.parameters()):
        return model
    return Replicated(model, pace, group)


def unwrap(model: nn.Module) -> nn.Module:
    """The user's own model."""
    if isinstance(model, Replicated):
        return model.inner
    return model.module if isinstance(model, DistributedDataParallel) else model


def _sum_by_share(pace: Pace, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Add up the gradients of all ranks, each weighted by its share of the samples.

    A plain mean over ranks would be wrong whenever the ranks hold unequal parts, as they do at an epoch's
    end.
    """
    weighted = bucket.buffer().mul_(pace.share)
    work: Any = dist.all_reduce(weighted, async_op=True)
    future: torch.futures.Future[list[torch.Tensor]] = work.get_future()
    return future.then(lambda done: done.value()[0])


class Engine:
    """One rank, or several that each hold the whole model."""

    own_files = False

    def __init__(self, group: Group, pace: Pace) -> None:
        self._group, self._pace = group, pace
        self.on_local_gradients: Callable[[], None] | None = None

    def model(self, model: nn.Module) -> nn.Module:
        """The model, on its device and with all ranks."""
        return wrap_model(model, self._pace, self._group)

    def optimizer(self, optimizer: Any) -> Any:  # Any: the user's own
        """The optimizer as it is."""
        return optimizer

    def begin(self) -> None:
        """Before each micro-batch."""

    def full_state(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """The whole state on rank 0."""
        return unwrap(model).state_dict() if self._group.rank == 0 else {}

    def clip_grad_norm(self, model: nn.Module, max_norm: float) -> torch.Tensor:
        """The norm of the gradients, which are scaled down to `max_norm`."""
        return nn.utils.clip_grad_norm_(model.parameters(), max_norm)
