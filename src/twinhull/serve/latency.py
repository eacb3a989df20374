"""How long did answers take? A histogram since the start, and the percentiles of the last second."""

from bisect import bisect_left

BOUNDS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
_MOST = 20_000  # readings kept for the percentiles of one second


class Latency:
    """Readings in seconds; `buckets` counts those up to each of BOUNDS_S, and at last those above."""

    def __init__(self) -> None:
        self.buckets = [0] * (len(BOUNDS_S) + 1)
        self.sum_s = 0.0
        self._recent: list[float] = []

    def add(self, took_s: float) -> None:
        """Count one reading."""
        self.buckets[bisect_left(BOUNDS_S, took_s)] += 1
        self.sum_s += took_s
        if len(self._recent) < _MOST:
            self._recent.append(took_s)

    def percentiles(self) -> tuple[float, float] | None:
        """The median and the 99th percentile of the readings since the last call; None if there were none."""
        recent = sorted(self._recent)
        self._recent.clear()
        if not recent:
            return None
        return recent[len(recent) // 2], recent[min(len(recent) - 1, len(recent) * 99 // 100)]
