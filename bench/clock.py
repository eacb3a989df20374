"""What do the marks of a step cost on the CPU, beside bare readings of the clock that they take?"""

from collections.abc import Callable
from time import perf_counter

from report import Result, run

from twinhull.profile.clock import CHECKPOINT, DATA, OPTIMIZER, OTHER, StepClock

STEPS, ROUNDS = 20_000, 15


def marked() -> Callable[[], object]:
    """A step as training marks it: data, computing, a checkpoint's wait, the optimizer, the rest, its end."""
    clock = StepClock()
    clock.start()

    def step() -> None:
        clock.mark(DATA)
        clock.computed()
        clock.mark(CHECKPOINT)
        clock.mark(OPTIMIZER)
        clock.mark(OTHER)
        clock.stop()

    return step


def bare() -> Callable[[], object]:
    """Six readings."""

    def step() -> None:
        perf_counter()
        perf_counter()
        perf_counter()
        perf_counter()
        perf_counter()
        perf_counter()

    return step


def per_step_us(step: Callable[[], object]) -> float:
    """Microseconds a step, of the quietest round."""
    rounds: list[float] = []
    for _ in range(ROUNDS):
        began = perf_counter()
        for _ in range(STEPS):
            step()
        rounds.append((perf_counter() - began) / STEPS)
    return 1e6 * min(rounds)


def measure() -> list[Result]:
    """Both, in one run."""
    beside = per_step_us(bare())
    return [
        Result("marks of a step", per_step_us(marked()), "us", None, f"six bare readings {beside:.2f} us")
    ]


if __name__ == "__main__":
    run("The step clock", measure)
