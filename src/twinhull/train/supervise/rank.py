"""The main of one rank under torchrun: joins the group, calls the training function, says how it left."""

import argparse
import importlib
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from twinhull import logs
from twinhull.errors import TwinhullError, UserCodeError
from twinhull.train.job import Job
from twinhull.train.supervise import lease, stacks, torchrun
from twinhull.train.supervise.live import Beat, Failure, Phase

log = logging.getLogger(__name__)


def main() -> int:
    """Train as one rank. 0: done or stopped on request; 1: failed, and the launcher can read why."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--job", required=True)
    parser.add_argument("--live", type=Path, required=True)
    arguments = parser.parse_args()
    return _enter(arguments.job, arguments.live)


def forked(job: str, live: str) -> None:
    """The same in a process that the agent has forked: without the agent's session, signals and silence."""
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    logging.disable(logging.NOTSET)
    code = _enter(job, Path(live))
    _flush()
    if code:
        os._exit(code)  # a return would be a success to torchrun


def _enter(job_said: str, live: Path) -> int:
    torchrun.end_with(int(os.environ[torchrun.PARENT]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    job, rank = Job.from_json(job_said), int(os.environ["RANK"])
    logs.setup(f"rank:{job.name}-{rank}")
    lease.enforce(live.parent)
    stacks.arm(live, rank)
    return _train(job, Beat(live, rank))


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()


def _train(job: Job, beat: Beat) -> int:
    from twinhull.train.group import Group, is_peer_lost
    from twinhull.train.run import Run, Stopped

    run: Run | None = None
    try:
        function = training_function(job.run)
        group = Group.join(job)
        made = run = Run(job, group, beat)

        def stop(_number: int, _frame: FrameType | None) -> None:
            made.ask_to_stop()

        signal.signal(signal.SIGTERM, stop)
        function(run)
        run.finish()
        group.leave()
    except Stopped:
        beat.left(Phase.STOPPED)
        return 0
    except BaseException as error:  # the last line of a process: told to the launcher
        phase = Phase.REFUSED if isinstance(error, TwinhullError) else Phase.FAILED
        if is_peer_lost(error):
            phase = Phase.PEER_LOST
        if run is not None:
            run.close()
        beat.left(phase, _failure(error, beat.step))
        return 1
    beat.left(Phase.DONE)
    return 0


def training_function(entry: str) -> Callable[..., object]:
    """The function behind `module:function`. Raises UserCodeError."""
    module, _, name = entry.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except Exception as error:
        raise UserCodeError(f"{entry} cannot be loaded: {type(error).__name__}: {error}.") from error


def _failure(error: BaseException, step: int) -> Failure:
    """The error as the user should see it: without our own frame around their function."""
    if isinstance(error, TwinhullError):
        return Failure(
            step, str(error), "".join(traceback.format_exception(error)) if error.__cause__ else ""
        )
    inside = error.__traceback__.tb_next if error.__traceback__ else None
    lines = traceback.format_exception(type(error), error, inside)
    last = " ".join(line.strip() for line in traceback.format_exception_only(error))
    return Failure(step, last, "".join(lines))


if __name__ == "__main__":
    code = main()
    _flush()
    os._exit(code)  # what torch does at a usual exit sometimes aborts, and on the error path may never return
