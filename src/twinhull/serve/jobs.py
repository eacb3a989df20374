"""How does work get into the job lane, and who takes it out? Senders here, the lane's processes by `main`.

`python -m twinhull.serve.jobs --run DIR --pool POOL` runs the jobs of a pool, `--beat` sends what is due.
"""

import argparse
import contextlib
import logging
import os
import queue
import signal
import sys
import threading
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import NoReturn

import redis
from celery.beat import Service
from kombu.exceptions import OperationalError

from twinhull import broker, logs, processes
from twinhull.errors import BrokerError, TwinhullError
from twinhull.handoff.registry import Registry
from twinhull.rundir import RunDirectory
from twinhull.serve import celery_app, job_worker, schedule, wire
from twinhull.system.load import load
from twinhull.system.model import System, Task

log = logging.getLogger(__name__)

WAITING = 1000  # batches that may wait for a broker that is slow; more are dropped and counted
_LEAVE_S = 1.0


@dataclass(frozen=True, slots=True)
class Sent:
    """What became of the batches handed to a sender."""

    sent: int
    failed: int  # the broker did not take it
    expired: int  # its deadline passed while it waited
    dropped: int  # too many waited


class Sender:
    """Hands batches to the job lane from an event loop, which it never makes wait and never raises into.

    A batch that cannot be sent is counted and forgotten: its gateway falls back at the deadline.
    """

    def __init__(self, broker_url: str, system: System) -> None:
        self._app = celery_app.sender_app(system, broker_url)
        self._queues = _queues(system)
        self._waiting: queue.Queue[wire.Batch | None] = queue.Queue(WAITING)
        self._sent = self._failed = self._expired = self._dropped = 0
        self._reached = True
        self._thread = threading.Thread(target=self._send_all, name="jobs-sender", daemon=True)
        self._thread.start()

    def send(self, batch: wire.Batch) -> None:
        """Hand a batch over; returns at once."""
        try:
            self._waiting.put_nowait(batch)
        except queue.Full:
            self._dropped += 1

    @property
    def counts(self) -> Sent:
        """What became of the batches so far."""
        return Sent(self._sent, self._failed, self._expired, self._dropped)

    def close(self) -> None:
        """Send what waits, for a second at most, and end the thread."""
        with contextlib.suppress(queue.Full):
            self._waiting.put_nowait(None)
        self._thread.join(_LEAVE_S)

    def _send_all(self) -> None:
        while (batch := self._waiting.get()) is not None:
            if batch.deadline <= time.time():
                self._expired += 1
                continue
            try:
                self._send(batch)
            except (OperationalError, redis.RedisError, OSError) as error:
                self._failed += 1
                self._tell(reached=False, reason=str(error))
            except Exception:  # the thread's last line: a batch that cannot be sent must not end all sending
                self._failed += 1
                log.exception("job not sent", extra={"task": batch.task})
            else:
                self._sent += 1
                self._tell(reached=True)

    def _send(self, batch: wire.Batch) -> None:
        self._app.send_task(
            batch.task,
            args=(wire.encode(batch),),
            argsrepr="(batch)",  # else Celery prints the rows into the message's headers
            queue=self._queues[batch.task],
            expires=datetime.fromtimestamp(batch.deadline, UTC),
            retry=False,
            ignore_result=True,
        )

    def _tell(self, *, reached: bool, reason: str = "") -> None:
        if reached != self._reached:
            self._reached = reached
            if reached:
                log.info("job lane reached again")
            else:
                log.warning("job lane not reached", extra={"reason": reason})


def run_now(broker_url: str, system: System, task: str) -> str:
    """Send a task as a job without arguments, by hand; the job's id.

    Raises TwinhullError if there is no such task, BrokerError if the broker does not take it.
    """
    queues = _queues(system)
    if task not in queues:
        raise TwinhullError(f"there is no task {task!r}.", hint=f"Its tasks: {', '.join(sorted(queues))}.")
    app = celery_app.sender_app(system, broker_url)
    try:
        return str(app.send_task(task, queue=queues[task], retry=False, ignore_result=True).id)
    except (OperationalError, redis.RedisError, OSError) as error:
        raise BrokerError(
            f"the broker at {broker.masked(broker_url)} did not take the job: {error}."
        ) from error
    finally:
        app.close()


def _queues(system: System) -> dict[str, str]:
    keys = broker.Keys(system.name)
    tasks = {name: part for name, part in system.components.items() if isinstance(part, Task)}
    return {name: keys.jobs(task.pool) for name, task in tasks.items() if task.pool}


def _beat(directory: RunDirectory, system: System, url: str) -> None:
    """Send what is due until SIGTERM."""
    app = celery_app.scheduler_app(system, url)
    app.conf.beat_schedule = schedule.entries(system)
    signal.signal(signal.SIGTERM, _leave)
    service = Service(app, scheduler_cls=schedule.FileScheduler, schedule_filename=str(directory.schedule))
    service.start()


def _leave(_signal: int, _frame: object) -> NoReturn:
    raise SystemExit(0)


def main(arguments: list[str] | None = None) -> int:
    """Run one process of the job lane, as the supervisor starts it."""
    processes.die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parser = argparse.ArgumentParser(prog="python -m twinhull.serve.jobs", description=__doc__)
    parser.add_argument("--run", type=Path, required=True)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--pool")
    which.add_argument("--beat", action="store_true")
    given = parser.parse_args(arguments)
    logs.setup("beat" if given.beat else f"jobs:{given.pool}")
    try:
        directory = RunDirectory(given.run)
        system, url = load(directory.system).system, os.environ[broker.VARIABLE]
        if given.beat:
            _beat(directory, system, url)
            return 0
        return job_worker.work(system, url, Registry(directory.registry), given.pool)
    except TwinhullError as error:
        log.error(str(error))  # noqa: TRY400  # one clear line
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
