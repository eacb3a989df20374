"""How do ranks train a model by DeepSpeed's ZeRO? It joins model and optimizer, and keeps its own files.

DeepSpeed is imported only when its engine is chosen: it takes seconds.
"""

import copy
import functools
import logging
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from twinhull.errors import CheckpointError, TwinhullError
from twinhull.train.engines import blocks
from twinhull.train.engines.align import align, kept_buffers
from twinhull.train.engines.calls import is_plain
from twinhull.train.engines.guise import Method, give, ways_in
from twinhull.train.engines.updates import Updates
from twinhull.train.group import Group
from twinhull.train.job import Job
from twinhull.train.pace import Pace

log = logging.getLogger(__name__)
_TAG = "state"


class Zero:
    """Stage 1 divides the optimizer's state among all ranks, 2 the gradients too, 3 the parameters too.

    One model and one optimizer. DeepSpeed begins when the optimizer is wrapped; before that the model answers
    by itself. It averages gradients over ranks, so each is multiplied by `share` times the number of ranks as
    it comes.
    """

    def __init__(self, job: Job, group: Group, pace: Pace, *, stage: int) -> None:
        self._job, self._group, self._pace, self._stage = job, group, pace, stage
        self._updates = Updates(pace)
        self._model: nn.Module | None = None
        self._own: torch.optim.Optimizer | None = None
        self._twin: torch.optim.Optimizer | None = None
        self._deepspeed: Any = None  # Any: DeepSpeed has no types
        self._kept_alike: list[torch.Tensor] = []
        self.on_local_gradients: Callable[[], None] | None = None

    def model(self, model: nn.Module) -> nn.Module:
        """The model itself, all its ways in led through DeepSpeed."""
        if self._model is not None:
            raise TwinhullError(
                f"{self._job.name}: zero-{self._stage} takes one model, and a second one was wrapped.",
                hint="Put both into one module, or choose the engine `fsdp`.",
            )
        model.to(self._group.device)
        if self._group.world_size > 1:
            align([*model.parameters(), *model.buffers()])
        if self._job.recompute:
            blocks.recompute(blocks.of(model))
        self._kept_alike = kept_buffers(model) if self._group.world_size > 1 else []
        self._model = model
        self._route(model)
        return model

    def optimizer(self, optimizer: Any) -> Any:  # Any: the user's own
        """The optimizer or schedule, which acts once a step; the first optimizer is joined with the model."""
        if isinstance(optimizer, torch.optim.Optimizer):
            self._join(optimizer)
        return self._updates.wrap(optimizer)

    def begin(self) -> None:
        """Before each micro-batch."""
        self._updates.begin()
        if self._pace.is_first:
            align(self._kept_alike)
        if self._deepspeed is not None:
            self._deepspeed.set_gradient_accumulation_boundary(self._pace.is_last)

    @torch.no_grad()
    def full_state(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """The whole state on rank 0, put together tensor by tensor."""
        state: dict[str, torch.Tensor] = {}
        for name, value in model.state_dict(keep_vars=True).items():
            with self._whole(value):
                if self._group.rank == 0:
                    state[name] = value.detach().to("cpu", copy=True)
        return state

    def clip_grad_norm(self, model: nn.Module, max_norm: float) -> torch.Tensor:
        """The whole gradient's norm; DeepSpeed scales down to `max_norm` in its step."""
        if not self._pace.is_last:
            return torch.zeros((), device=self._group.device)
        inner = self._deepspeed.optimizer
        inner.clip_grad = max_norm
        if self._stage < 3:
            return inner.scaled_global_norm()
        from deepspeed.runtime.utils import combine_grad_norm_groups

        return combine_grad_norm_groups(inner._get_norm_groups())

    def _whole(self, value: torch.Tensor) -> Any:  # Any: DeepSpeed has no types
        import deepspeed

        is_divided = hasattr(value, "ds_id")
        return deepspeed.zero.GatheredParameters([value] if is_divided else [], enabled=is_divided)

    def _join(self, optimizer: torch.optim.Optimizer) -> None:
        """Let DeepSpeed begin with a twin of the optimizer: it shares its groups, so schedules still act."""
        if self._model is None or self._deepspeed is not None:
            what = "a second optimizer was wrapped" if self._model else "the optimizer was wrapped before it"
            raise TwinhullError(
                f"{self._job.name}: zero-{self._stage} takes one model, then one optimizer; {what}.",
                hint="Wrap the model, then its optimizer, or choose the engine `fsdp`.",
            )
        trained = [p for p in self._model.parameters() if p.requires_grad]
        self._own, self._twin = optimizer, copy.copy(optimizer)
        self._deepspeed = _initialize(_Entry(self._model), self._twin, self._config())
        for parameter in trained:
            parameter.register_hook(self._weigh)
        vars(optimizer).pop("step", None)  # of a schedule made before
        give(optimizer, {"step": self._step_of(optimizer), "zero_grad": _leave_to_deepspeed})
        _keep_own_files(optimizer, self._save, self._load)
        if self._group.rank == 0:
            log.info("sharded", extra={"stage": self._stage, "ranks": self._group.world_size})

    def _config(self) -> dict[str, Any]:  # Any: plain JSON
        zero: dict[str, Any] = {"stage": self._stage}  # Any: plain JSON
        if self._job.offload:
            zero["offload_optimizer"] = {"device": "cpu"}
            if self._stage == 3:
                zero["offload_param"] = {"device": "cpu"}
        return {
            "train_micro_batch_size_per_gpu": 1,  # it only counts with it
            "gradient_accumulation_steps": 1,  # `begin` says when a step ends
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "gradient_clipping": 0.0,  # left out, ZeRO clips to a norm of 1
            "zero_optimization": zero,
            "torch_autocast": {"enabled": self._job.precision == "bf16", "dtype": "bfloat16"},
            "steps_per_print": None,
        }

    def _weigh(self, gradient: torch.Tensor) -> torch.Tensor | None:
        if self.on_local_gradients is not None:
            self.on_local_gradients()
        weight = self._pace.share * self._group.world_size
        return None if weight == 1 else gradient * weight

    def _step_of(self, optimizer: torch.optim.Optimizer) -> Method:
        kind = type(optimizer)

        @functools.wraps(kind.step)
        def step(self_: Any, closure: object = None) -> None:  # Any: the optimizer
            if closure is not None:
                raise TwinhullError(
                    f"{self._job.name}: {kind.__name__}.step has a closure, which DeepSpeed does not call.",
                    hint="Call loss.backward() before step(), or choose another engine.",
                )
            self_._opt_called = True
            self._deepspeed.step()
            self._deepspeed.optimizer.clip_grad = 0.0

        step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        return step

    def _route(self, model: nn.Module) -> None:
        """Send calls from outside through DeepSpeed; those from inside meet its hooks on modules."""
        is_inside = False

        def routed(method: Method) -> Method:
            @functools.wraps(method)
            def call(self_: nn.Module, *args: Any, **kwargs: Any) -> Any:  # Any: the user's own
                nonlocal is_inside
                if is_inside or self._deepspeed is None or is_plain((args, kwargs)):
                    return method(self_, *args, **kwargs)
                is_inside = True
                try:
                    return self._deepspeed(method, args, kwargs)
                finally:
                    is_inside = False

            return call

        kind = type(model)
        names = ["__call__", *dict.fromkeys(name for name in ways_in(model) if name != "forward")]
        give(model, {name: routed(getattr(kind, name)) for name in names})
        _keep_own_files(model, _nothing, _nothing)  # the optimizer's files hold it

    def _save(self, directory: Path) -> None:
        self._deepspeed.save_checkpoint(str(directory), tag=_TAG, save_latest=False)

    def _load(self, directory: Path) -> None:
        found, _ = self._deepspeed.load_checkpoint(str(directory), tag=_TAG)
        if found is None:
            raise CheckpointError(f"DeepSpeed finds nothing of its own in {directory}.")
        assert self._own is not None and self._twin is not None
        self._own.param_groups = self._twin.param_groups  # the twin has new ones now


class _Entry(nn.Module):
    """Lets any method of a model be called through DeepSpeed, which knows only `forward`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, method: Method, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # Any: user's
        return method(self.model, *args, **kwargs)


def _initialize(entry: nn.Module, optimizer: torch.optim.Optimizer, config: dict[str, Any]) -> Any:
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    if not dist.is_initialized():  # one rank
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    import deepspeed

    # DeepSpeed 0.19 calls collectives by names that PyTorch 2.13 will drop, and each call would say so.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    # A collective of its own for the CPU, which it would compile here and now, and say so on stdout.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("nccl" if torch.cuda.is_available() else "gloo", verbose=False)
    engine, *_ = deepspeed.initialize(model=entry, optimizer=optimizer, config=config)
    return engine


def _keep_own_files(thing: Any, save: Callable[[Path], None], load: Callable[[Path], None]) -> None:
    """Let a thing of any class keep its state in files of its own, as the Keeper asks for it."""
    thing.own_files, thing.save_files, thing.load_files = True, save, load


def _nothing(directory: Path) -> None:
    """Neither save nor load."""


def _leave_to_deepspeed(optimizer: torch.optim.Optimizer, set_to_none: bool = True) -> None:
    """DeepSpeed clears gradients itself, in its step."""
