"""With how many of the hosts that are there is trained now? Pure decisions on counts and times."""

from dataclasses import dataclass

GATHER_S = 30.0  # for the first start: one that begins with all need not be interrupted to grow
GROW_STEPS = 5  # of the present generation before it is interrupted, or a host that flaps would stop all


@dataclass(frozen=True, slots=True)
class Size:
    """How many hosts a run may train on. A `gang` starts only when all are there, and goes on with fewer."""

    low: int = 1
    high: int = 1
    gang: bool = False

    def start_with(self, num_ready: int, waited_s: float, *, is_first: bool) -> int:
        """How many hosts to start with now; 0: wait for more."""
        if num_ready >= self.high:
            return self.high
        if is_first and (self.gang or waited_s < GATHER_S):
            return 0
        return num_ready if num_ready >= self.low else 0

    def grows(self, num_training: int, num_ready: int, steps: int) -> bool:
        """Whether a generation that has completed `steps` is to end for one with more hosts."""
        return num_training < min(num_ready, self.high) and steps >= GROW_STEPS
