"""One generation: a set of ranks with a fresh store, on one host or several, watched until all have left.

torchrun starts ranks and does no more: the first rank that leaves with an error, or the first host that is
lost, ends the generation; what still runs is asked to leave and killed soon after, and a group that completes
nothing for too long is killed.
"""

import logging
import signal
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from statistics import median
from typing import Literal

from twinhull.train.job import Job
from twinhull.train.supervise import stacks
from twinhull.train.supervise.goodput import Spent
from twinhull.train.supervise.hosts import Host, Left, Order, Sight
from twinhull.train.supervise.live import Failure, Phase, Record
from twinhull.train.supervise.watch import Hang, Watch

LAGGARD_S = 1.0  # between SIGTERM and SIGKILL for the ranks that outlive a lost one
GROWTH_S = 60.0  # to save and leave when nothing presses
SECOND_LOOK_S = 0.3  # between two looks at where a silent rank is
POLL_S = 0.05
_IN_TIME = {Phase.DONE, Phase.STOPPED}
_OUTSIDE = {-signal.SIGKILL, -signal.SIGINT, -signal.SIGHUP, -signal.SIGQUIT}
log = logging.getLogger(__name__)

Request = Literal["stop", "preempted", "growth"]
Cause = Literal["done", "stop", "preempted", "growth", "host", "rank", "hang", "crash", "refused"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """Why a generation ended. `steps` of it were completed in `stepped_s`, up to `step`."""

    cause: Cause
    step: int
    steps: int
    stepped_s: float
    failure: Failure | None


class Generation:
    """States: started, stepping (a step is complete), leaving (somebody left or was asked to), ended."""

    def __init__(self, job: Job, hosts: list[Host], grace_s: float, hangs: int = 0) -> None:
        self._job, self._hosts, self._grace_s = job, hosts, grace_s
        self._num_ranks = sum(host.num_ranks for host in hosts)
        self._watch = Watch(job.hang_timeout_s, self._num_ranks, hangs)
        self._started_at, self._running_at, self._first_step_at = time.monotonic(), 0.0, 0.0
        self._sights = [Sight() for _ in hosts]
        self._leave_by: float | None = None
        self._requested: Request | None = None
        self._hung = False
        self._killed: set[int] = set()
        endpoint = hosts[0].endpoint()
        for node, host in enumerate(hosts):
            host.start(Order(job.to_json(), node, len(hosts), endpoint, job.generation))

    def watch(self, request: Callable[[int], Request | None]) -> Outcome:
        """Wait until all its ranks have left or are lost.

        `request` is asked whether all shall save and leave now, given the steps completed so far.
        """
        while not self._is_over():
            self._look()
            if self._leave_by is None:
                self._consider(request(self._step - self._began))
            elif time.monotonic() >= self._leave_by:
                self._kill()
            time.sleep(POLL_S)
        self._look()
        self._kill()
        return self._outcome()

    def spent(self, furthest: int) -> Spent:
        """What it has taken so far; `furthest` is the step that was reached before it."""
        now, records = time.monotonic(), list(self._records.values())
        return Spent(
            wall_s=now - self._started_at,
            started_s=(self._running_at or now) - self._started_at,
            steps=max(0, self._step - self._began),
            new_steps=max(0, self._step - max(self._began, furthest)),
            worked_s=median(record.worked_s for record in records) if records else 0.0,
            stalled_s=median(record.stalled_s for record in records) if records else 0.0,
        )

    def _is_over(self) -> bool:
        return all(
            sight.left is not None or host.lost for host, sight in zip(self._hosts, self._sights, strict=True)
        )

    def _look(self) -> None:
        self._sights = [host.look() for host in self._hosts]
        phases = [record.phase for record in self._records.values()]
        if not self._running_at and len(phases) == self._num_ranks and Phase.STARTING not in phases:
            self._running_at = time.monotonic()
        if not self._first_step_at and any(r.step > r.started_at_step for r in self._records.values()):
            self._first_step_at = time.monotonic()

    @property
    def _records(self) -> dict[int, Record]:
        return {rank: record for sight in self._sights for rank, record in sight.records.items()}

    def _consider(self, requested: Request | None) -> None:
        """Whether it is time for all ranks to leave."""
        now, records = time.monotonic(), self._records
        if requested is not None:
            self._requested = requested
            grace_s = GROWTH_S if requested == "growth" else self._grace_s
            self._leave(grace_s if len(records) == self._num_ranks else 0.0)  # nothing to save yet
        elif self._is_broken():
            self._leave(LAGGARD_S)
        elif (hang := self._watch.look(now, records)) is not None:
            self._examine(hang)
        elif (slow := self._watch.straggler(now, records)) is not None:
            facts = {"rank": slow.rank, "phase": slow.phase, **self._where([slow.rank])}
            times = {"own_s": round(slow.own_s, 4), "usual_s": round(slow.usual_s, 4)}
            log.warning("straggler", extra={**facts, **times})

    def _examine(self, hang: Hang) -> None:
        """End the generation, unless the ranks that it waits for are seen at work: those get more time."""
        before = self._stacks(hang.ranks)
        time.sleep(SECOND_LOOK_S)
        after = self._stacks(hang.ranks)
        works = any(stacks.moved(text, after.get(rank, "")) for rank, text in before.items())
        if works and hang.deadline_s < self._job.hang_timeout_s:
            self._watch.spare()
            return
        facts: dict[str, object] = {"step": hang.step, "ranks": list(hang.ranks), "doing": hang.doing}
        facts |= {"without_a_step_s": round(hang.silent_s, 1), "deadline_s": round(hang.deadline_s, 1)}
        if after:
            facts["exception"] = "\n".join(f"rank {rank}: {text}" for rank, text in after.items())
        log.error("hang", extra={**facts, **self._where(hang.ranks)})
        self._hung = True
        self._leave(0.0)

    def _stacks(self, ranks: tuple[int, ...]) -> dict[int, str]:
        found: dict[int, str] = {}
        for host, sight in zip(self._hosts, self._sights, strict=True):
            if here := [rank for rank in ranks if rank in sight.records]:
                found |= host.stacks(here)
        return found

    def _where(self, ranks: Collection[int]) -> dict[str, object]:
        """The hosts of these ranks, if there are several to choose from."""
        if len(self._hosts) == 1:
            return {}
        pairs = zip(self._hosts, self._sights, strict=True)
        return {"hosts": [host.name for host, sight in pairs if not sight.records.keys().isdisjoint(ranks)]}

    def _is_broken(self) -> bool:
        """Whether a rank, a host or an agent is gone before its time."""
        return any(
            host.lost
            or any(sight.records[rank].phase not in _IN_TIME for rank in sight.gone)
            or (sight.left is not None and len(sight.records) < host.num_ranks)
            for host, sight in zip(self._hosts, self._sights, strict=True)
        )

    def _leave(self, grace_s: float) -> None:
        self._leave_by = time.monotonic() + grace_s
        for host in self._hosts:
            host.ask()

    def _kill(self) -> None:
        """End the ranks that still run, with all they have started."""
        for host, sight in zip(self._hosts, self._sights, strict=True):
            self._killed |= sight.records.keys() - sight.gone
            host.kill()

    @property
    def _step(self) -> int:
        return max((record.step for record in self._records.values()), default=0)

    @property
    def _began(self) -> int:
        return min((record.started_at_step for record in self._records.values()), default=0)

    def _outcome(self) -> Outcome:
        stepped_s = time.monotonic() - self._first_step_at if self._first_step_at else 0.0
        cause, failure = self._cause()
        step = failure.step if failure is not None else self._step
        return Outcome(cause, step, max(0, self._step - self._began), stepped_s, failure)

    def _cause(self) -> tuple[Cause, Failure | None]:
        phases = {rank: record.phase for rank, record in self._records.items()}
        failures = {rank: f for sight in self._sights for rank, f in sight.failures.items()}
        in_time = len(phases) == self._num_ranks and set(phases.values()) <= _IN_TIME
        failed = [rank for rank, phase in phases.items() if phase is Phase.FAILED]
        cause: Cause | None = None
        if in_time and Phase.STOPPED not in phases.values():
            cause = "done"
        elif refused := [rank for rank, phase in phases.items() if phase is Phase.REFUSED]:
            cause, failed = "refused", refused
        elif self._requested == "stop" or (self._requested and in_time):
            cause = self._requested
            failed.clear()
        elif failed:
            cause = "crash"
        elif any(host.lost for host in self._hosts):
            cause = "host"
        elif self._hung:
            cause = "hang"
        if cause is None:
            return self._whose_fault(phases, failures)
        return cause, failures.get(failed[0]) if failed else None

    def _whose_fault(
        self, phases: dict[int, Phase], failures: dict[int, Failure]
    ) -> tuple[Cause, Failure | None]:
        """Of ranks that left without a word: somebody's from outside, or the code's."""
        lefts = [sight.left for sight in self._sights if sight.left is not None]
        for left in lefts:
            if left.agent is not None and left.agent >= 0:
                return "crash", Failure(self._step, f"torchrun left with exit {left.agent}", "")
        peers = {rank for rank, phase in phases.items() if phase is Phase.PEER_LOST}
        first = {rank: code for rank, code in self._own_exits(lefts).items() if rank not in peers}
        for rank, code in first.items():
            log.warning("rank left", extra={"rank": rank, "exit": code, "step": self._step})
        killed = -signal.SIGKILL in [*first.values(), *(left.agent for left in lefts)]
        if killed and any(left.no_memory for left in lefts):
            return "crash", Failure(self._step, "killed by the kernel: out of memory", "")
        if any(code in _OUTSIDE for code in first.values()):
            return "rank", None
        if first:
            rank, code = next(iter(first.items()))
            early = "before the training function had returned" if code == 0 else "and said nothing"
            step = self._records[rank].step  # its own: how far the others came meanwhile is chance
            return "crash", Failure(step, f"rank {rank} left with exit {code} {early}", "")
        if peers and len(peers) == self._num_ranks:
            return "crash", failures.get(min(peers))
        return "rank", None  # somebody left without being seen: killed, as far as anybody knows

    def _own_exits(self, lefts: list[Left]) -> dict[int, int]:
        """Exits that are neither our doing nor torchrun's, which sends SIGTERM when one has left."""
        exits = {rank: code for left in lefts for rank, code in left.exits.items()}
        in_time = {rank for rank, record in self._records.items() if record.phase in _IN_TIME}
        return {r: c for r, c in exits.items() if r not in self._killed | in_time and c != -signal.SIGTERM}
