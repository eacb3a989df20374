"""When do parameters change? Once a step: optimizers and schedules wait for its last micro-batch."""

from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from twinhull.train.engines.guise import Method, replace
from twinhull.train.pace import Pace


class Updates:
    """Lets the user's loop treat each micro-batch as if it were a step.

    Before the last one `step` does nothing. `zero_grad` clears what is left of the step before (at the first
    micro-batch, before `step`) and what has been used (at the last, after `step`), and nothing in between: so
    it may stand before the backward pass or after the update. A closure is called for each micro-batch.
    """

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._stepped: set[int] = set()

    def begin(self) -> None:
        """A micro-batch begins."""
        self._stepped.clear()

    def wrap(self, thing: Any) -> Any:  # Any: the user's own
        """An optimizer or a schedule that waits for the last micro-batch; all else as it is."""
        if isinstance(thing, torch.optim.Optimizer):
            replace(thing, {"step": self._step, "zero_grad": self._zero_grad})
        elif isinstance(thing, LRScheduler):
            replace(thing, {"step": self._schedule})
        return thing

    def _step(self, optimizer: torch.optim.Optimizer, real: Method, *args: Any, **kwargs: Any) -> Any:
        pace, given = self._pace, None
        if pace.is_last:
            for call in pace.before_update:
                call()
            given = real(*args, **kwargs)
            for call in pace.after_update:
                call()
        elif (closure := args[0] if args else kwargs.get("closure")) is not None:
            with torch.enable_grad():
                given = closure()
        self._stepped.add(id(optimizer))
        return given

    def _zero_grad(self, optimizer: torch.optim.Optimizer, real: Method, *args: Any, **kwargs: Any) -> None:
        has_stepped = id(optimizer) in self._stepped
        if self._pace.is_last if has_stepped else self._pace.is_first:
            real(*args, **kwargs)

    def _schedule(self, _: LRScheduler, real: Method, *args: Any, **kwargs: Any) -> None:
        if self._pace.is_last:
            real(*args, **kwargs)
