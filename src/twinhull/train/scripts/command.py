"""The supervisor of a script that was not written for Twinhull: generations, cycles, trust, publishing.

`python -m twinhull.train.scripts.command --run DIR --train NAME --ranks N`

Exit codes as of `supervise.launch`: 0 done (or asked to stop while it waited for the next cycle), 1 failed
for good, 2 the user can mend it, 75 stopped early.
"""

import argparse
import logging
import os
import shlex
import shutil
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import FrameType

from twinhull import logs, processes
from twinhull.errors import TwinhullError
from twinhull.handoff.registry import Registry
from twinhull.rundir import RunDirectory
from twinhull.system import script as spelling
from twinhull.train.checkpoints import fence
from twinhull.train.scripts import foreign
from twinhull.train.scripts.assignment import Command, Cycle, described
from twinhull.train.scripts.entries import step_of
from twinhull.train.scripts.script import MARK, POLL_S, Outcome, Script, end_family
from twinhull.train.scripts.seals import Checkpoints
from twinhull.train.supervise import grace
from twinhull.train.supervise.notice import Notice
from twinhull.train.supervise.restarts import Ended, History, until_next

DONE, FAILED, STOPPED = 0, 1, 75
LOST = (  # against a function that is given a Run; said once, at the start
    "samples may be repeated or skipped after a restart, unless the script takes up its data where it was",
    "the global batch changes with the number of ranks",
    "ranks that are asked to stop do not agree on a step, and save only if the script does",
    "randomness is not the same after a restart, unless the script saves it",
    "steps are not counted: no goodput, no stragglers, a hang shows by silence only",
    "a checkpoint is as whole as the script writes it",
)
log = logging.getLogger(__name__)


def main() -> int:
    """Run the command to its end."""
    processes.die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parser = argparse.ArgumentParser()
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--train", required=True)
    parser.add_argument("--ranks", type=int, default=1, help="what {ranks} stands for")
    parser.add_argument("--nice", type=int, default=10, help="how far training steps back behind serving")
    arguments = parser.parse_args()
    logs.setup(f"train:{arguments.train}")
    os.nice(arguments.nice)
    try:
        return Launcher(
            described(RunDirectory(arguments.run.resolve()), arguments.train), arguments.ranks
        ).run()
    except TwinhullError as error:
        log.error(str(error))  # noqa: TRY400  # a traceback would not help who can mend it
        return error.exit_code


class Launcher:
    """Runs the cycles of one command. States: in a cycle, between cycles, over."""

    def __init__(self, command: Command, num_ranks: int) -> None:
        self._command, self._num_ranks = command, num_ranks
        self._root = command.run.checkpoints / command.name
        self._file = self._root / "command.json"
        self._env = {**os.environ, "PATH": _path()}
        self._publish = self._directory_to_publish()
        self._notice: Notice | None = None
        self._began, self._stopping = time.monotonic(), False
        self._last_end = self._began + command.walltime_s if command.walltime_s else None

    def run(self) -> int:
        """Cycles until there is none left, or until asked to stop. Raises TwinhullError."""
        signal.signal(signal.SIGTERM, self._stop)
        signal.signal(signal.SIGUSR1, self._stop)
        _check_program(self._words("", self._root), self._env["PATH"])
        self._notice = Notice(self._command.notice, os.environ)
        try:
            with fence.held(self._root):
                if left := end_family(str(self._root)):
                    log.warning("ended what a former launcher left", extra={"processes": left})
                return self._cycles()
        finally:
            self._notice.end()

    def _cycles(self) -> int:
        told = False
        while True:
            cycle = Cycle.read(self._file)
            if cycle.done:
                if self._command.every_s is None:
                    return DONE
                if not self._rest(until_next(cycle.started, self._command.every_s, time.time())):
                    return DONE
                cycle = Cycle(cycle.number + 1, time.time(), generation=cycle.generation)
            cycle.write(self._file)
            if not told:
                told = _tell_what_is_lost()
            code = self._cycle(cycle.number)
            if code != DONE:
                return code

    def _cycle(self, cycle: int) -> int:
        """Generations until the command has left with 0."""
        checkpoints, history = Checkpoints(self._root / f"cycle-{cycle}"), History()
        self._forget_before(cycle)
        checkpoints.settle(well=False)
        try:
            while not self._must_stop():
                before = foreign.Before.look(self._publish) if self._publish else None
                sealed = checkpoints.count
                outcome, step = self._generation(checkpoints)
                saved = checkpoints.count > sealed
                if outcome.how not in ("done", "stop"):
                    history = history.after(Ended(outcome.how, step, int(saved), outcome.lived_s, saved))
                self._explain(outcome, step, history)
                if outcome.how == "stop":
                    break
                if outcome.how == "done":
                    self._finish(cycle, before)
                    return DONE
                if history.is_hopeless:
                    log.error("training ended: the same crash three times", extra={"error": outcome.error})
                    return FAILED
                if history.wait_s > 0:
                    log.info("waiting before the next generation", extra={"wait_s": history.wait_s})
                    self._rest(history.wait_s)
        finally:
            checkpoints.close()
        log.info("stopped early")
        return STOPPED

    def _generation(self, checkpoints: Checkpoints) -> tuple[Outcome, int]:
        """How it ended, and at which step it began: that of the checkpoint it was given."""
        cycle = Cycle.read(self._file)
        cycle = replace(cycle, generation=cycle.generation + 1)
        cycle.write(self._file)
        newest = checkpoints.newest()
        step = (newest and step_of(newest.name)) or 0
        ranks = {"ranks": self._num_ranks} if spelling.holds(self._command.text, "ranks") else {}
        log.info("generation started", extra={"generation": cycle.generation, **ranks})
        if newest is not None:
            log.info("resumed", extra={"step": step, "checkpoint": newest.name})
        given = str(newest or "")
        env = {**self._env, MARK: str(self._root), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
               "TWINHULL_CHECKPOINT": given, "TWINHULL_CHECKPOINTS": str(checkpoints.root),
               "TWINHULL_HEARTBEAT": str(self._root / "heartbeat")}  # fmt: skip
        script = Script(self._words(given, checkpoints.root), env, checkpoints)
        command = self._command
        outcome = script.watch(self._must_stop, grace.grace_s(command.warning_s), command.hang_s)
        checkpoints.settle(well=outcome.code == 0)
        return outcome, step

    def _finish(self, cycle: int, before: foreign.Before | None) -> None:
        """Publish what the command has left, and note that the cycle is done. Raises TwinhullError."""
        if before is not None:
            tensors = foreign.model_in(before)
            foreign.publish(
                Registry(self._command.run.registry), self._command.name, tensors, cycle=cycle,
                keep=self._command.keep_versions, system=self._command.system,
            )  # fmt: skip
        replace(Cycle.read(self._file), done=True).write(self._file)
        log.info("cycle finished", extra={"cycle": cycle})

    def _explain(self, outcome: Outcome, step: int, history: History) -> None:
        facts = {"cause": outcome.how, "exit": outcome.code, "from_step": step,
                 "lived_s": round(outcome.lived_s, 1),
                 **({"ends": dict(history.by_cause)} if history.by_cause else {})}  # fmt: skip
        is_loss = outcome.how in ("rank", "hang", "crash")
        log.log(logging.WARNING if is_loss else logging.INFO, "generation ended", extra=facts)
        if outcome.how == "crash":
            log.error("training crashed", extra={"from_step": step, "error": outcome.error})

    def _words(self, checkpoint: str, checkpoints: Path) -> list[str]:
        values = {"checkpoint": checkpoint, "checkpoints": str(checkpoints), "ranks": str(self._num_ranks),
                  "run": str(self._command.run.root), "publish": str(self._publish or "")}  # fmt: skip
        return spelling.words(self._command.text, values)

    def _directory_to_publish(self) -> Path | None:
        """As the file says, below the directory of the user's code; else in the run directory if wanted."""
        said = self._command.publish
        if said is not None:
            return Path.cwd() / spelling.filled(said, {"run": str(self._command.run.root),
                                                       "checkpoints": str(self._root)})  # fmt: skip
        return self._root / "publish" if spelling.holds(self._command.text, spelling.PUBLISH) else None

    def _forget_before(self, cycle: int) -> None:
        """Remove the checkpoints of all cycles but the last one, which may be wanted still."""
        for path in self._root.glob("cycle-*"):
            number = path.name.removeprefix("cycle-")
            if number.isdecimal() and int(number) < cycle - 1:
                shutil.rmtree(path, ignore_errors=True)

    def _rest(self, seconds: float) -> bool:
        due = time.monotonic() + seconds
        while time.monotonic() < due and not self._must_stop():
            time.sleep(min(POLL_S, max(0.0, due - time.monotonic())))
        return not self._stopping

    def _must_stop(self) -> bool:
        if not self._stopping and self._notice is not None and self._notice.is_given:
            log.warning("notice: this machine is about to go")
            self._stopping = True
        early_s = self._command.warning_s or grace.WALLTIME_S
        if not self._stopping and self._last_end is not None and time.monotonic() >= self._last_end - early_s:
            log.warning("walltime is nearly over", extra={"walltime_s": self._command.walltime_s})
            self._stopping = True
        return self._stopping

    def _stop(self, _number: int, _frame: FrameType | None) -> None:
        self._stopping = True


def _tell_what_is_lost() -> bool:
    for what in LOST:
        log.info("a command, not a function", extra={"lost": what})
    return True


def _path() -> str:
    """Where programs are found: first beside this Python, so that torchrun is that of its environment."""
    own = str(Path(sys.executable).parent)
    return os.pathsep.join([own, os.environ.get("PATH", os.defpath)])


def _check_program(words: list[str], path: str) -> None:
    if shutil.which(words[0], path=path) is None:
        raise TwinhullError(
            f"the program {shlex.quote(words[0])} of the command is not found, or cannot be executed.",
            hint="Write its path from the directory of the system file, or begin with python or torchrun.",
        )


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)
