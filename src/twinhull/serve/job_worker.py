"""How does the process that runs jobs start, drain and leave?"""

import logging
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import celery
from celery import Celery, signals
from celery.apps.worker import Worker
from celery.concurrency.prefork import TaskPool
from celery.exceptions import WorkerLostError
from celery.worker import state
from redis.exceptions import RedisError

from twinhull import processes
from twinhull.broker import Keys
from twinhull.handoff.registry import Registry
from twinhull.serve import celery_app, layout
from twinhull.serve.job import Runner
from twinhull.system.model import System, Task

log = logging.getLogger(__name__)

DRAIN_S = 2.0  # running jobs may end within this after SIGTERM; what is left goes back to the queue
LEAVE_S = 1.0
LOOK_EVERY_S = 0.5  # for a lost process; Celery's own pool looks every 5 s


def work(system: System, url: str, registry: Registry, pool: str) -> int:
    """Run the jobs of a pool until SIGTERM; the exit code."""
    app = celery_app.worker_app(system, url, pool)
    # A process that holds a GPU must never fork; on macOS none forks, and one started afresh knows no task.
    # There one process runs one job after the other.
    forks = not celery_app.has_gpus(system.pools[pool]) and sys.platform != "darwin"
    runner = register(app, system, url, registry, pool)
    runner.ends_itself = not forks
    worker = JobWorker(
        app=app,
        hostname=f"{pool}@{socket.gethostname()}",
        pool_cls="prefork" if forks else "solo",
        concurrency=celery_app.concurrency(system, pool) if forks else 1,
        queues=[Keys(system.name).jobs(pool)],
        loglevel="INFO",
        quiet=True,
        without_gossip=True,
        without_mingle=True,
        without_heartbeat=True,
    )
    worker.runner = runner
    if not forks:
        runner.load()
    worker.start()
    return int(worker.exitcode or 0)


def register(app: Celery, system: System, url: str, registry: Registry, pool: str) -> Runner:
    """Make one Celery task of each task of the pool."""
    tasks = tasks_of(system, pool)
    deliveries = layout.most_deliveries(system, pool)
    runner = Runner(system.name, url, registry, deliveries, tasks)
    for name, task in tasks.items():
        app.task(name=name, bind=True, **_options(task, deliveries))(_body(runner, name))
    signals.task_failure.connect(partial(_bury, app, runner), weak=False)
    signals.task_retry.connect(partial(_lost, app), weak=False)
    signals.task_revoked.connect(partial(_expired, app, runner), weak=False)
    signals.worker_process_init.connect(partial(_child, runner), weak=False)
    return runner


def tasks_of(system: System, pool: str) -> dict[str, Task]:
    """The tasks that run in a pool, by name."""
    parts = system.components.items()
    return {name: part for name, part in parts if isinstance(part, Task) and part.pool == pool and part.run}


def _options(task: Task, deliveries: int) -> dict[str, Any]:  # Any: Celery's options have no common type
    """Celery's options of a task. A lost process counts as a delivery, a raised error as a retry."""
    retries = task.retries.count if task.retries else 0
    limit = _finite(task.time_limit)
    return {
        "max_retries": max(retries, deliveries - 1),
        "default_retry_delay": celery_app.RETRY_LOST_AFTER_S,
        "soft_time_limit": limit,
        "time_limit": None if limit is None else limit * celery_app.HARD_LIMIT_AFTER,
        "expires": _finite(task.expires),
        "typing": False,
    }


def _finite(seconds: float | None) -> float | None:
    return None if seconds is None or math.isinf(seconds) else seconds


def _body(runner: Runner, name: str) -> Callable[..., None]:
    def run(call: celery.Task, packed: bytes | None = None) -> None:
        runner.run(call, name, packed)

    return run


def _bury(app: Celery, runner: Runner, sender: celery.Task, **what: Any) -> None:  # Any: Celery's signal
    """Celery's last word on a job: its retries are used up, or it took its process with it too often."""
    if sender.app is app and sender.name is not None:
        packed = next(iter(what.get("args") or ()), None)
        runner.bury(str(what["task_id"]), sender.name, packed, str(what["exception"]))


def _lost(app: Celery, sender: celery.Task, reason: object, **_: object) -> None:
    """Celery tries a job again whose process is gone; retries of ours are told by the job itself."""
    error = getattr(reason, "exc", None)
    if sender.app is app and isinstance(error, WorkerLostError):
        log.warning("job retried", extra={"task": sender.name, "reason": str(error)})


def _expired(app: Celery, runner: Runner, sender: celery.Task, expired: bool, **_: object) -> None:
    """Celery has dropped a job that waited too long."""
    if sender.app is app and expired and sender.name is not None:
        runner.expire(sender.name)


def _child(runner: Runner, **_: object) -> None:
    """A forked process before its first job."""
    processes.die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    runner.load()


class JobWorker(Worker):
    """Celery's worker under a supervisor that asks it once, by SIGTERM, to leave within seconds."""

    runner: Runner
    hub: Any  # Celery's event loop, not typed
    _looks = False

    def install_platform_tweaks(self, worker: Worker) -> None:
        """Answer SIGTERM alone: Celery's answer to others would be a longer wait, a restart, or lost work."""
        celery_app.speak_plainly()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, self._on_sigterm)

    def on_consumer_ready(self, consumer: Any) -> None:  # Any: Celery's consumer is not typed
        """Tell that the worker takes jobs now."""
        super().on_consumer_ready(consumer)
        if not self._looks and isinstance(self.pool, TaskPool):
            self._looks = True
            self.hub.call_repeatedly(LOOK_EVERY_S, self.pool.maintain_pool)
        log.info("jobs ready", extra={"pool": self.hostname.partition("@")[0], "processes": self.concurrency})

    def _on_sigterm(self, _signal: int, _frame: object) -> None:
        setattr(state, "should_stop", 0)  # noqa: B010  # Celery declares it as None
        if not any(thread.name == "drain" for thread in threading.enumerate()):
            threading.Thread(target=self._leave_in_time, name="drain", daemon=True).start()

    def _leave_in_time(self) -> None:
        """Give back what still runs after the drain time, and leave; who is done has left before."""
        until = time.monotonic() + DRAIN_S
        while state.reserved_requests and time.monotonic() < until:
            time.sleep(0.05)
        running = [request for request in tuple(state.reserved_requests) if not request.acknowledged]
        if not running:  # Celery's own way out is free; only its waits for a lost broker are cut short
            time.sleep(LEAVE_S)
        try:
            self._give_back(running)
        except RedisError as error:  # they come back with this worker
            log.warning("jobs not given back", extra={"jobs": len(running), "reason": str(error)})
        finally:
            logging.shutdown()
            os._exit(0)

    def _give_back(self, running: list[Any]) -> None:  # Any: Celery's requests are not typed
        for request in running:
            if request.worker_pid not in (None, os.getpid()):
                os.kill(request.worker_pid, signal.SIGKILL)
        with self.runner.hurried() as client:
            for request in running:
                self.runner.ledger(client).end(request.id, done=False, patience_s=0.0)
                message = request.message
                message.channel.qos.restore_by_tag(message.delivery_tag, client, leftmost=True)
        if running:
            log.warning("jobs given back", extra={"jobs": len(running)})
