"""Is the loss still a number? Found out without making the device wait for the host at each step."""

import logging
import math
from typing import Any

log = logging.getLogger(__name__)

_NUMBER = (float, int)
_MOST = 256  # losses of a device that are kept before they are folded into one


class Finite:
    """Keeps in mind whether any loss of this rank was not finite.

    What is on the host is looked at at once. What is on a device stays there until `is_bad` is asked, which
    waits for the device. With `stop` false it is said once, and nothing is bad.
    """

    def __init__(self, *, stop: bool) -> None:
        self._stop, self._found, self._told = stop, False, False
        self._unread: list[Any] = []  # Any: tensors of one number, on a device

    def take(self, loss: Any) -> None:  # Any: a number, or a tensor of one on a device
        """One more loss."""
        if isinstance(loss, _NUMBER):
            self._found = self._found or not math.isfinite(loss)
        elif not self._told:
            self._unread.append(loss)
            if len(self._unread) == _MOST:
                self._unread = [self._together()]

    def is_bad(self) -> bool:
        """Whether training should stop."""
        if self._unread:
            self._found = not math.isfinite(float(self._together())) or self._found
            self._unread.clear()
        if self._found and not self._stop and not self._told:
            log.warning("the loss is not finite, and training goes on as asked")
            self._told = True
        return self._found and self._stop

    def _together(self) -> Any:  # Any: a tensor of one number
        """0 if all are finite, else no number: 0 times what is not finite is none, and a sum keeps that."""
        import torch

        return (torch.stack([loss.reshape(()).float() for loss in self._unread]) * 0.0).sum()
