"""Does a group of ranks hang, and does one of them hold up the others? Records and times in, findings out.

A group hangs when none of its ranks completes anything for longer than what it does may take. Collectives
make all steps equally long: who holds up the others shows only in what a rank does before them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Literal

from twinhull.train.supervise.live import Doing, Phase, Record

START_S = 120.0  # imports on a busy machine are slow, and no hang
STEPS, STEP_S = 20, 5.0  # times the usual step: nothing is slow by chance by that much; less is a pause
SAVES, SAVE_S = 10, 60.0  # times the longest save seen: disks and stores have bad moments
AFTER_HANG = 4
LONGEST_LOOK_S = 1.0  # a launcher that was stopped itself has not seen its ranks hang meanwhile

BEHIND, BEHIND_S = 1.5, 0.002  # times the others' time, and more than noise
LOOKS, LOOKS_S = 5, 5.0  # what was seen once may be chance
AGAIN_S = 60.0

_WORDS = {
    Doing.BETWEEN: "outside of its loops",
    Doing.FIRST: "in the first step of a loop",
    Doing.STEPPING: "in a step",
    Doing.SAVING: "waiting for a checkpoint",
}
Records = Mapping[int, Record]


@dataclass(frozen=True, slots=True)
class Hang:
    """A group that has completed nothing for `silent_s`.

    `ranks` are those that are behind: where some wait for others, the others. `doing` says what they do, in
    words, `step` how many steps they have completed.
    """

    ranks: tuple[int, ...]
    doing: str
    step: int
    silent_s: float
    deadline_s: float


@dataclass(frozen=True, slots=True)
class Straggler:
    """A rank that the others wait for in each step: it needs `own_s` where they need `usual_s`."""

    rank: int
    phase: Literal["data", "compute"]
    own_s: float
    usual_s: float

    @property
    def factor(self) -> float:
        """How many times the others' time it needs."""
        return self.own_s / self.usual_s


class Watch:
    """Looks at one generation, again and again.

    The law: a group in which any rank completes something within each deadline never hangs, and one in which
    none does has hung at the first look after the deadline.

    `hangs` is how many generations in a row have hung at the same step: each makes the deadline of a step
    longer, so that one which is long by nature can end some day.
    """

    def __init__(self, hang_timeout_s: float, num_ranks: int, hangs: int = 0) -> None:
        self._most_s, self._num_ranks, self._patience = hang_timeout_s, num_ranks, AFTER_HANG**hangs
        self._looked_at: float | None = None
        self._silent_s, self._spared = 0.0, False
        self._signs: dict[int, tuple[int, int, int]] = {}
        self._saving_s = self._longest_save_s = 0.0
        self._seen: tuple[int, str] | None = None
        self._since, self._looks, self._steps = 0.0, 0, -1
        self._told: tuple[int, str] | None = None
        self._told_at = 0.0

    def look(self, now: float, records: Records) -> Hang | None:
        """The hang to be seen at `now`, a time of a clock that nobody sets; None if there is none."""
        passed_s = min(now - self._looked_at, LONGEST_LOOK_S) if self._looked_at is not None else 0.0
        self._looked_at = now
        self._silent_s += passed_s
        signs = {rank: (record.beats, record.waits, int(record.phase)) for rank, record in records.items()}
        if signs != self._signs:
            self._signs, self._silent_s, self._spared = signs, 0.0, False
        self._time_save(passed_s, records)
        behind, deadline_s = _behind(records), self.deadline_s(records)
        if self._silent_s <= deadline_s:
            return None
        step = max((record.step for record in behind.values()), default=0)
        doing = _said(behind) or ("leaving" if len(records) == self._num_ranks else "starting")
        return Hang(tuple(behind), doing, step, self._silent_s, deadline_s)

    def spare(self) -> None:
        """Those that are silent were seen at work: they may take the hang timeout to complete something."""
        self._spared = True

    def deadline_s(self, records: Records) -> float:
        """For how long these ranks may complete nothing."""
        if len(records) < self._num_ranks:
            return max(self._most_s, START_S)
        usual_s = median([r.step_s for r in records.values() if r.step_s > 0] or [0.0])
        behind = _behind(records).values()
        return max((self._deadline_s(record, usual_s) for record in behind), default=self._most_s)

    def straggler(self, now: float, records: Records) -> Straggler | None:
        """The rank that has held up the others for a while; told again if that changes, or a minute later."""
        steps = sum(record.step for record in records.values())
        if steps == self._steps:
            return None  # nothing new
        self._steps = steps
        found = slowest(records)
        seen = (found.rank, found.phase) if found is not None else None
        if seen != self._seen:
            self._seen, self._since, self._looks = seen, now, 0
        self._looks += 1
        if found is None or self._looks < LOOKS or now - self._since < LOOKS_S:
            return None
        if seen == self._told and now - self._told_at < AGAIN_S:
            return None
        self._told, self._told_at = seen, now
        return found

    def _time_save(self, passed_s: float, records: Records) -> None:
        """Note how long saves take; one that hangs does not count as long."""
        is_saving = any(record.doing is Doing.SAVING for record in records.values())
        self._saving_s = self._saving_s + passed_s if is_saving else 0.0
        if not self._silent_s:
            self._longest_save_s = max(self._longest_save_s, self._saving_s)

    def _deadline_s(self, record: Record, usual_s: float) -> float:
        if record.phase is Phase.STARTING:
            return max(self._most_s, START_S)
        if record.doing is Doing.SAVING:
            return min(max(SAVE_S, SAVES * self._longest_save_s), max(self._most_s, SAVE_S))
        if record.doing is Doing.STEPPING and not self._spared:
            return min(self._patience * max(STEP_S, STEPS * usual_s), self._most_s)
        return self._most_s


def slowest(records: Records) -> Straggler | None:
    """The slowest rank, if it is much slower than the others are."""
    timed = {rank: r for rank, r in records.items() if r.own_s > 0 and r.phase is Phase.RUNNING}
    if len(timed) < 2:
        return None
    rank = max(timed, key=lambda one: timed[one].own_s)
    slow = timed.pop(rank)
    usual_s = median(record.own_s for record in timed.values())
    more_s = slow.own_s - usual_s
    if slow.own_s <= BEHIND * usual_s or more_s < BEHIND_S:
        return None
    more_data_s = slow.data_s - median(record.data_s for record in timed.values())
    return Straggler(rank, "data" if more_data_s > more_s / 2 else "compute", slow.own_s, usual_s)


def _behind(records: Records) -> Records:
    """Of the ranks that have not left those that have done least.

    They completed fewer steps than others, or have not yet given them what they need of this one.
    """
    here = {rank: record for rank, record in sorted(records.items()) if record.phase <= Phase.RUNNING}
    least = min(((record.step, record.waits) for record in here.values()), default=None)
    return {rank: r for rank, r in here.items() if (r.step, r.waits) == least}


def _said(behind: Records) -> str:
    words = ["starting" if r.phase is Phase.STARTING else _WORDS[r.doing] for r in behind.values()]
    return " and ".join(dict.fromkeys(words))
