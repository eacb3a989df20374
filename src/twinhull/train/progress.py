"""What a training run shows of itself while it runs: at most one line of numbers a second."""

import time
from typing import Any

from twinhull import logs

EVERY_S = 1.0


class Progress:
    """Means over the steps since the last sample. Loss is read from its tensor only when it is shown."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._reported: dict[str, Any] = {}  # Any: numbers or tensors of one number
        self._shown_at = time.monotonic()
        self._steps, self._step_s, self._data_s = 0, 0.0, 0.0

    def report(self, values: dict[str, Any]) -> None:  # Any: as above
        """Remember values by name for the next sample."""
        for name, value in values.items():
            self._reported[name] = value.detach() if hasattr(value, "detach") else value

    def stepped(self, step: int, steps_total: int, step_s: float, data_s: float) -> None:
        """One more step was completed: its whole time, and the part of it that data took."""
        self._steps += 1
        self._step_s += step_s
        self._data_s += data_s
        now = time.monotonic()
        if now - self._shown_at < EVERY_S:
            return
        numbers = {"step": float(step), "steps_total": float(steps_total)}
        numbers |= {"step_s": self._step_s / self._steps, "data_s": self._data_s / self._steps}
        numbers |= {name: float(value) for name, value in self._reported.items()}
        logs.sample({f"train.{self._name}.{name}": value for name, value in numbers.items()})
        self._shown_at, self._steps, self._step_s, self._data_s = now, 0, 0.0, 0.0
