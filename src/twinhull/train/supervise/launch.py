"""The supervisor of one train workload: generation after generation, cycle after cycle.

`python -m twinhull.train.supervise.launch --run DIR --train NAME` and
    `--ranks N`                            to train on this machine
    `--listen ADDR:PORT --nodes 1..4`      to train on those that join

Exit codes: 0 done (or asked to stop while it waited for the next cycle), 1 failed for good, 2 the user can
mend it, 75 stopped early and saved.
"""

import argparse
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Protocol

from twinhull import logs, processes
from twinhull.errors import TwinhullError
from twinhull.rundir import RunDirectory
from twinhull.system.quantities import Range
from twinhull.train.checkpoints.manifest import Place
from twinhull.train.checkpoints.store import Store
from twinhull.train.job import Job
from twinhull.train.supervise import grace, live
from twinhull.train.supervise.account import Account
from twinhull.train.supervise.crew import Size
from twinhull.train.supervise.generation import POLL_S, Cause, Generation, Outcome, Request
from twinhull.train.supervise.hosts import Host, LocalHost
from twinhull.train.supervise.lease import LEASE_S
from twinhull.train.supervise.restarts import Ended, History, until_next
from twinhull.train.supervise.wire import now
from twinhull.train.supervise.workload import Workload, described

DONE, FAILED, STOPPED = 0, 1, 75
log = logging.getLogger(__name__)


def main() -> int:
    """Run the workload to its end."""
    processes.die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parser = argparse.ArgumentParser()
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--train", required=True)
    parser.add_argument("--ranks", type=int, default=1, help="on this machine")
    parser.add_argument("--listen", help="ADDRESS:PORT at which machines join, instead of using this one")
    parser.add_argument(
        "--nodes", type=Range.parse, default=Range(1, 1), help="machines to train on, as 1..4"
    )
    parser.add_argument("--lease", type=float, default=LEASE_S, help="seconds that a machine trains unheard")
    parser.add_argument("--nice", type=int, default=10, help="how far training steps back behind serving")
    arguments = parser.parse_args()
    logs.setup(f"train:{arguments.train}")
    try:
        workload = described(RunDirectory(arguments.run), arguments.train)
        if arguments.listen is None:
            return Launcher(workload, Size(), Alone(workload, arguments.ranks, arguments.nice)).run()
        from twinhull.train.supervise.door import opened

        size = Size(arguments.nodes.low, arguments.nodes.high or arguments.nodes.low, workload.gang)
        return Launcher(
            workload, size, opened(workload, arguments.listen, arguments.lease, arguments.nice)
        ).run()
    except TwinhullError as error:
        log.error(str(error))  # noqa: TRY400  # a traceback would not help who can mend it
        return error.exit_code


class Crew(Protocol):
    """The hosts of a launcher. `is_going` says that the launcher's own machine is about to be taken."""

    @property
    def is_going(self) -> bool: ...  # noqa: D102  # said above
    def hosts(self) -> Sequence[Host]:
        """Those that are there to stay."""
        ...

    def close(self, code: int) -> None:
        """End them, or send them away; `code` is how the run has ended."""
        ...


class Alone:
    """A crew of this machine only."""

    def __init__(self, workload: Workload, num_ranks: int, nice: int) -> None:
        assert workload.job.directory is not None
        folder = live.directory(RunDirectory(workload.job.directory), workload.job.name)
        self._host = LocalHost(num_ranks, folder, nice=nice, notice=workload.notice)

    @property
    def is_going(self) -> bool:
        """Whether a notice says so."""
        return self._host.is_going

    def hosts(self) -> list[Host]:
        """This machine."""
        return [self._host]

    def close(self, code: int) -> None:
        """End its ranks."""
        self._host.end()


class Launcher:
    """Runs the cycles of one workload. States: in a cycle, between cycles, over."""

    def __init__(self, workload: Workload, size: Size, crew: Crew) -> None:
        job = workload.job
        store = Store.of(job)
        assert store is not None
        assert job.directory is not None
        self._workload, self._job, self._size, self._crew, self._store = workload, job, size, crew, store
        self._grace, self._account = grace.Watch(job.warning_s), Account(job.name)
        self._stop_at = (
            now() + workload.walltime_s - (job.warning_s or grace.WALLTIME_S) if workload.walltime_s else None
        )
        self._stopping = False
        self._generations, self._full_size = 0, 0
        self._shown: set[str] = set()
        seen = live.read(live.directory(RunDirectory(job.directory), job.name))
        self._furthest = max((record.step for record in seen.values()), default=0)

    def run(self) -> int:
        """Cycles until there is none left, or until asked to stop. Raises RunInUse."""
        signal.signal(signal.SIGTERM, self._stop)
        signal.signal(signal.SIGUSR1, self._stop)
        code = FAILED
        try:
            with self._store.held():
                code = self._cycles()
        finally:
            self._crew.close(code)
        return code

    def _cycles(self) -> int:
        while True:
            place = self._store.last_place()
            if place is not None and place.done and not self._wait_for_next(place):
                return DONE
            started = place.cycle_started if place is not None and not place.done else time.time()
            code = self._cycle(replace(self._job, cycle_started=started))
            if code != DONE:
                return code

    def _wait_for_next(self, done: Place) -> bool:
        """Wait until the next cycle is due; False if there is none, or when asked to stop."""
        if self._workload.every_s is None:
            return False
        return self._rest(until_next(done.cycle_started, self._workload.every_s, time.time()))

    def _cycle(self, job: Job) -> int:
        """Generations until the training function has returned on all ranks."""
        history = History()
        while (hosts := self._gather()) is not None:
            before = self._store.last_place()
            outcome = self._generation(replace(job, furthest_step=self._furthest), hosts, history.hangs)
            self._furthest = max(self._furthest, outcome.step)
            now_at = self._store.last_place()
            if outcome.cause not in ("done", "stop", "refused"):
                history = history.after(_ended(outcome.cause, outcome, saved=now_at != before))
            self._explain(outcome, hosts, now_at, history)
            if outcome.cause == "done" or (now_at is not None and now_at.done and now_at != before):
                return DONE  # also when a rank was lost after the end was saved
            if outcome.cause == "stop":
                break
            if outcome.cause == "refused":
                return FAILED
            if history.is_hopeless:
                log.error("training ended: the same crash three times", extra=_words(outcome))
                return FAILED
            if history.wait_s > 0:
                log.info("waiting before the next generation", extra={"wait_s": history.wait_s})
                self._rest(history.wait_s)
                self._account.waited(history.wait_s)
        log.info("stopped early", extra={"step": self._furthest})
        return STOPPED

    def _gather(self) -> list[Host] | None:
        """The hosts to train with now, once they are enough; None when asked to stop meanwhile."""
        began, told = now(), False
        while not self._must_stop():
            hosts = self._crew.hosts()
            if number := self._size.start_with(len(hosts), now() - began, is_first=not self._generations):
                self._account.waited(now() - began)
                return list(hosts[:number])
            if not told and self._generations:
                told = True
                log.warning("waiting for hosts", extra={"there": len(hosts), "needed": self._size.low})
            time.sleep(POLL_S)
        return None

    def _generation(self, job: Job, hosts: list[Host], hangs: int) -> Outcome:
        self._generations += 1
        number = self._store.claimed() + 1
        self._store.claim(number)
        self._full_size = max(self._full_size, self._size.high * max(host.num_ranks for host in hosts))
        num_ranks = sum(host.num_ranks for host in hosts)
        log.info("generation started", extra={"generation": number, "ranks": num_ranks, **_names(hosts)})
        job = replace(job, generation=number, full_size=self._full_size)
        generation, furthest = Generation(job, hosts, grace.grace_s(job.warning_s), hangs), self._furthest

        def request(steps: int) -> Request | None:
            self._account.look(generation, furthest)
            return self._request(hosts, steps)

        outcome = generation.watch(request)
        self._account.close(generation, furthest, outcome.cause)
        return outcome

    def _request(self, hosts: list[Host], steps: int) -> Request | None:
        """Why the ranks of a generation should save and leave now, if they should."""
        if self._must_stop():
            return "stop"
        self._grace.look(self._store)
        ready = self._crew.hosts()
        if any(host.is_going for host in hosts):
            return "preempted"
        return "growth" if self._size.grows(len(hosts), len(ready), steps) else None

    def _explain(self, outcome: Outcome, hosts: list[Host], saved: Place | None, history: History) -> None:
        facts = {
            "cause": outcome.cause,
            "step": outcome.step,
            "steps": outcome.steps,
            "steps_to_repeat": max(0, outcome.step - (saved.step if saved is not None else 0)),
            "stepped_s": round(outcome.stepped_s, 3),
            **({"ends": dict(history.by_cause)} if history.by_cause else {}),
            **_names(hosts),
        }
        is_loss = outcome.cause in ("host", "rank", "hang", "crash")
        log.log(logging.WARNING if is_loss else logging.INFO, "generation ended", extra=facts)
        if outcome.failure is None:
            return
        words: dict[str, object] = _words(outcome)
        if outcome.failure.traceback and outcome.failure.error not in self._shown:
            words["exception"] = outcome.failure.traceback
        self._shown.add(outcome.failure.error)
        log.error("training crashed", extra=words)

    def _rest(self, seconds: float) -> bool:
        due = now() + seconds
        while now() < due and not self._must_stop():
            self._crew.hosts()
            time.sleep(min(POLL_S, max(0.0, due - now())))
        return not self._stopping

    def _must_stop(self) -> bool:
        if not self._stopping and self._crew.is_going:
            log.warning("notice: this machine is about to go")
            self._stopping = True
        if not self._stopping and self._stop_at is not None and now() >= self._stop_at:
            log.warning("walltime is nearly over", extra={"walltime_s": self._workload.walltime_s})
            self._stopping = True
        return self._stopping

    def _stop(self, _number: int, _frame: FrameType | None) -> None:
        self._stopping = True


def _ended(cause: Cause, outcome: Outcome, *, saved: bool) -> Ended:
    assert cause not in ("done", "stop", "refused")
    return Ended(cause, outcome.step, outcome.steps, outcome.stepped_s, saved)


def _names(hosts: list[Host]) -> dict[str, object]:
    return {"hosts": [host.name for host in hosts]} if len(hosts) > 1 or hosts[0].name != "here" else {}


def _words(outcome: Outcome) -> dict[str, object]:
    assert outcome.failure is not None
    return {"step": outcome.step, "error": outcome.failure.error}


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)
