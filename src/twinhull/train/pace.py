"""Which part of a step a rank is in: what it holds of the global batch, and whether the step ends with it."""

from collections.abc import Callable


class Pace:
    """The micro-batch that a rank trains now; `Run` sets it, engines and wrapped optimizers read it.

    `share` is what the micro-batch is of the global batch; over all ranks and micro-batches of a step the
    shares add up to 1. `previous` is the share of the micro-batch before it in the same step. Parameters
    change in the last micro-batch only, between the calls of `before_update` and `after_update`.
    """

    def __init__(self) -> None:
        self.share, self.previous = 1.0, 0.0
        self.is_first = self.is_last = True
        self.before_update: list[Callable[[], None]] = []
        self.after_update: list[Callable[[], None]] = []

    def enter(self, share: float, *, is_first: bool, is_last: bool) -> None:
        """Begin a micro-batch."""
        self.previous = 0.0 if is_first else self.share
        self.share, self.is_first, self.is_last = share, is_first, is_last
