"""The supervisor of one train workload: generation after generation, cycle after cycle.

`python -m twinhull.train.launch --run DIR --train NAME --ranks N`

Exit codes: 0 done (or asked to stop while it waited for the next cycle), 1 failed for good, 2 the user can
mend it, 75 stopped early and saved.
"""

import argparse
import importlib.util
import logging
import os
import shutil
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import FrameType

from twinhull import logs, processes
from twinhull.errors import TwinhullError
from twinhull.rundir import RunDirectory
from twinhull.train import live
from twinhull.train.checkpoint import Place, Store
from twinhull.train.generation import POLL_S, Agent, Generation, Outcome
from twinhull.train.job import Job
from twinhull.train.restarts import Ended, History

DONE, FAILED, USAGE, STOPPED = 0, 1, 2, 75
log = logging.getLogger(__name__)


def main() -> int:
    """Run the workload to its end."""
    processes.die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parser = argparse.ArgumentParser()
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--train", required=True)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--nice", type=int, default=10, help="how far training steps back behind serving")
    arguments = parser.parse_args()
    logs.setup(f"train:{arguments.train}")
    try:
        job, every_s = described(RunDirectory(arguments.run), arguments.train)
        return Launcher(job, every_s, arguments.ranks, arguments.nice).run()
    except TwinhullError as error:
        log.error(str(error))  # noqa: TRY400  # a traceback would not help who can mend it
        return error.exit_code


def described(run: RunDirectory, name: str) -> tuple[Job, float | None]:
    """What the effective system says of a train workload, and how often it runs. Raises TwinhullError."""
    from twinhull.system.load import load
    from twinhull.system.model import State, Train

    if importlib.util.find_spec("torch") is None:
        raise TwinhullError("training needs PyTorch:", hint="pip install 'twinhull[train]'")
    system = load(run.system).system
    train = system.components.get(name)
    if not isinstance(train, Train) or train.run is None:
        raise TwinhullError(f"the system has no train workload {name} with a function to run.")
    saving = train.checkpoint
    every = saving.every if saving else None
    registry = next(
        (c for c in system.components.values() if isinstance(c, State) and c.kind == "registry"), None
    )
    job = Job(name=name, system=system.name, run=train.run, directory=run.root.resolve(),
              save_every_s=every.seconds if every else 600.0, save_every_steps=every.steps if every else None,
              keep=(saving.keep if saving else None) or 3,
              keep_versions=registry.keep if registry else None,
              hang_timeout_s=train.hang_timeout or 300.0)  # fmt: skip
    return job, train.every


class Launcher:
    """Runs the cycles of one workload. States: in a cycle, between cycles, over."""

    def __init__(self, job: Job, every_s: float | None, num_ranks: int, nice: int) -> None:
        assert job.directory is not None
        self._job, self._every_s, self._num_ranks, self._nice = job, every_s, num_ranks, nice
        self._run = RunDirectory(job.directory)
        self._store = Store(self._run.checkpoints / job.name, job.keep)
        self._folder = live.directory(self._run, job.name)
        self._stopping = False
        self._agent: Agent | None = None
        self._generations = 0
        self._shown: set[str] = set()
        self._furthest = max((record.step for record in live.read(self._folder).values()), default=0)

    def run(self) -> int:
        """Cycles until there is none left, or until asked to stop."""
        signal.signal(signal.SIGTERM, self._stop)
        try:
            while True:
                place = self._store.last_place()
                if place is not None and place.done and not self._wait_for_next(place):
                    return DONE
                started = place.cycle_started if place is not None and not place.done else time.time()
                code = self._cycle(replace(self._job, cycle_started=started))
                if code != DONE:
                    return code
        finally:
            if self._agent is not None:
                self._agent.end()
            shutil.rmtree(self._folder, ignore_errors=True)

    def _wait_for_next(self, done: Place) -> bool:
        """Wait until the next cycle is due; False if there is none, or when asked to stop."""
        if self._every_s is None:
            return False
        return self._rest_until(done.cycle_started + self._every_s)

    def _cycle(self, job: Job) -> int:
        """Generations until the training function has returned on all ranks."""
        history = History()
        while not self._stopping:
            before = self._store.last_place()
            outcome = self._generation(replace(job, furthest_step=self._furthest))
            self._furthest = max(self._furthest, outcome.step)
            now = self._store.last_place()
            if outcome.how == "done" or (now is not None and now.done and now != before):
                return DONE  # also when a rank was lost after the end was saved
            if outcome.how == "stopped":
                break
            history = history.after(_ended(outcome, saved=now != before))
            self._explain(outcome)
            if outcome.how == "refused":
                return FAILED
            if history.is_hopeless:
                log.error("training ended: the same crash three times", extra=_words(outcome))
                return FAILED
            if history.wait_s > 0:
                log.info("waiting before the next generation", extra={"wait_s": history.wait_s})
                self._rest_until(time.time() + history.wait_s)
        log.info("stopped early", extra={"step": self._furthest})
        return STOPPED

    def _generation(self, job: Job) -> Outcome:
        self._generations += 1
        if self._agent is None or not self._agent.lives:
            self._agent = Agent(self._nice)
        log.info("generation started", extra={"generation": self._generations, "ranks": self._num_ranks})
        return Generation(job, self._agent, self._folder, self._num_ranks).watch(lambda: self._stopping)

    def _explain(self, outcome: Outcome) -> None:
        failure = outcome.failure
        if failure is None:
            log.warning("generation lost", extra={"step": outcome.step, "steps": outcome.steps})
            return
        facts: dict[str, object] = _words(outcome)
        if failure.traceback and failure.error not in self._shown:
            facts["exception"] = failure.traceback
        self._shown.add(failure.error)
        log.error("training crashed", extra=facts)

    def _rest_until(self, due: float) -> bool:
        while time.time() < due and not self._stopping:
            time.sleep(min(POLL_S, max(0.0, due - time.time())))
        return not self._stopping

    def _stop(self, _number: int, _frame: FrameType | None) -> None:
        self._stopping = True


def _ended(outcome: Outcome, *, saved: bool) -> Ended:
    cause = "loss" if outcome.how == "loss" else "crash"
    return Ended(cause, outcome.step, outcome.steps, outcome.stepped_s, saved)


def _words(outcome: Outcome) -> dict[str, object]:
    assert outcome.failure is not None
    return {"step": outcome.step, "error": outcome.failure.error}


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)
