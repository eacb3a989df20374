"""What a training run shows of itself while it runs: at most one line of numbers a second."""

import time
from collections.abc import Mapping
from typing import Any

from twinhull import logs
from twinhull.profile.clock import Part, Times

EVERY_S = 1.0
_SHOWN = (Part.DATA, Part.COMPUTE, Part.COMMUNICATION, Part.OPTIMIZER, Part.CHECKPOINT)


class Progress:
    """Means over the steps since the last line, and the newest value of what was reported."""

    def __init__(self, name: str, times: Times) -> None:
        self._name, self._times = name, times
        self._reported: dict[str, Any] = {}  # Any: numbers, or tensors of one on a device
        self._shown, self._shown_at = times.totals(), time.monotonic()

    def report(self, values: Mapping[str, Any]) -> None:  # Any: as above
        """Remember values by name for the next line."""
        self._reported.update(values)

    def stepped(self, step: int, left: int | None) -> None:
        """One more step was completed; so many are left, if that is known."""
        now = time.monotonic()
        if now - self._shown_at < EVERY_S:
            return
        numbers = {"step": float(step), "steps_total": float(step + left) if left is not None else 0.0}
        numbers |= self._means()
        numbers |= {name: float(value) for name, value in self._reported.items()}
        logs.sample({f"train.{self._name}.{name}": value for name, value in numbers.items()})
        self._shown_at = now

    def _means(self) -> dict[str, float]:
        """Of the steps in the clock's times since the last line; nothing if a GPU has not come so far."""
        totals = self._times.totals()
        lately = totals.since(self._shown)
        if not lately.steps:
            return {}
        self._shown = totals
        return {"step_s": lately.step_s, **{f"{part.name.lower()}_s": lately.mean_s(part) for part in _SHOWN}}
