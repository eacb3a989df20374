"""How much of the time was training? The time of steps that count over all time, and where the rest went."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace


@dataclass(frozen=True, slots=True)
class Spent:
    """What one generation has taken so far, or altogether. Seconds.

    `started_s` passed before its ranks took up the work. Then they completed `steps` in `worked_s`, the last
    `new_steps` of them for the first time, and waited `stalled_s` for checkpoints besides.
    """

    wall_s: float
    started_s: float
    steps: int
    new_steps: int
    worked_s: float
    stalled_s: float


@dataclass(frozen=True, slots=True)
class Ledger:
    """What the generations of a run have cost. Seconds.

    The law: useful, repeated, stalled, starting, restarting, waiting and outside add up to the wall.
    """

    wall_s: float = 0.0
    useful_s: float = 0.0
    repeated_s: float = 0.0
    stalled_s: float = 0.0
    starting_s: float = 0.0
    restarting_s: float = 0.0
    waiting_s: float = 0.0
    steps: int = 0
    repeated_steps: int = 0
    restarts: Mapping[str, int] = field(default_factory=dict)

    def after(self, spent: Spent, *, restarted_for: str = "") -> "Ledger":
        """The ledger with one more generation, whether it has ended or not.

        `restarted_for` is the cause that has ended the one before; "" if nothing had to be started again.
        """
        started_s = _within(spent.started_s, spent.wall_s)
        worked_s = _within(spent.worked_s, spent.wall_s - started_s)
        stalled_s = _within(spent.stalled_s, spent.wall_s - started_s - worked_s)
        useful_s = worked_s * (_within(spent.new_steps, spent.steps) / spent.steps) if spent.steps else 0.0
        restarts = dict(self.restarts)
        if restarted_for:
            restarts[restarted_for] = restarts.get(restarted_for, 0) + 1
        return replace(
            self,
            wall_s=self.wall_s + spent.wall_s,
            useful_s=self.useful_s + useful_s,
            repeated_s=self.repeated_s + (worked_s - useful_s),
            stalled_s=self.stalled_s + stalled_s,
            starting_s=self.starting_s + (0.0 if restarted_for else started_s),
            restarting_s=self.restarting_s + (started_s if restarted_for else 0.0),
            steps=self.steps + spent.steps,
            repeated_steps=self.repeated_steps + spent.steps - int(_within(spent.new_steps, spent.steps)),
            restarts=restarts,
        )

    def waited(self, seconds: float) -> "Ledger":
        """The ledger after a wait for hosts, or before another try."""
        return replace(self, wall_s=self.wall_s + seconds, waiting_s=self.waiting_s + seconds)

    @property
    def outside_s(self) -> float:
        """What passed outside of steps: the user's code between loops, steps cut off, hangs."""
        known = (self.useful_s, self.repeated_s, self.stalled_s, self.starting_s, self.restarting_s)
        return max(0.0, self.wall_s - sum(known) - self.waiting_s)

    @property
    def goodput(self) -> float:
        """The share of the wall that went into steps which count; 0 before there was any."""
        return self.useful_s / self.wall_s if self.wall_s > 0 else 0.0

    def as_facts(self) -> dict[str, object]:
        """All of it, rounded, for a line of the log."""
        seconds = {
            "wall_s": self.wall_s,
            "useful_s": self.useful_s,
            "repeated_s": self.repeated_s,
            "stalled_s": self.stalled_s,
            "starting_s": self.starting_s,
            "restarting_s": self.restarting_s,
            "waiting_s": self.waiting_s,
            "outside_s": self.outside_s,
        }
        return {
            "goodput": round(self.goodput, 4),
            **{name: round(value, 3) for name, value in seconds.items()},
            "steps": self.steps,
            "repeated_steps": self.repeated_steps,
            "restarts": dict(self.restarts),
        }


def _within(value: float, most: float) -> float:
    """Clocks of ranks and launcher differ a little: no part may exceed its whole."""
    return max(0.0, min(value, most))
