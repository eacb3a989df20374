"""How is Celery set up, so that a job survives its worker, its broker and a poison message?"""

import logging
import os
import socket
import warnings
from collections.abc import Sequence
from typing import Any

import kombu
import msgspec
from billiard.util import get_logger
from celery import Celery, bootsteps, signals
from kombu.serialization import register
from kombu.transport.redis import Channel
from redis.exceptions import ConnectionError as BrokerLost

from twinhull.broker import Keys, celery_url
from twinhull.system.model import Pool, Process, System, Task

log = logging.getLogger(__name__)

ASSUMED_LONGEST_S = 3600.0  # of a task whose file gives no time limit
LONGEST_S = 24 * 3600.0  # even of a task without any limit
RETRY_LOST_AFTER_S = 1.0  # a lost process is usually a passing thing; Celery's own default is 180 s
HARD_LIMIT_AFTER = 1.25  # of the soft limit: a function that swallows the soft one is killed then


def broker_options(system: System, pool: str | None = None) -> dict[str, Any]:
    """Kombu's transport options for a worker of `pool`, or for one that only sends.

    Unacknowledged messages are kept under a key of this pool on this host, so that a worker that comes back
    after a kill takes its own work up at once (`Reclaim`) instead of waiting for the visibility timeout.
    """
    held = Keys(system.name).jobs_held(pool or "", socket.gethostname())
    return {
        "visibility_timeout": 2 * longest_task_s(system),
        "unacked_restore_interval": 1,
        "unacked_restore_throttle": 1,
        "unacked_key": held,
        "unacked_index_key": f"{held}:index",
        "unacked_mutex_key": f"{held}:mutex",
        "socket_timeout": 5,
        "socket_connect_timeout": 2,
    }


WORKER_SETTINGS: dict[str, Any] = {  # Any: Celery's settings have no common type
    "task_serializer": "msgpack",
    "result_serializer": "msgpack",
    "accept_content": ["msgpack"],
    "task_acks_late": True,
    "task_reject_on_worker_lost": True,
    "task_retry_on_worker_lost": True,
    "task_ignore_result": True,
    "worker_prefetch_multiplier": 1,
    "worker_disable_prefetch": True,
    "worker_enable_remote_control": False,  # nobody asks; one connection less to lose
    "worker_hijack_root_logger": False,
    "worker_redirect_stdouts": False,
    "worker_proc_alive_timeout": 120.0,  # a child imports the user's code before it counts as up
    "broker_connection_retry_on_startup": True,
    "broker_connection_max_retries": None,
    "enable_utc": True,
}

SENDER_SETTINGS: dict[str, Any] = {
    "task_serializer": "msgpack",
    "accept_content": ["msgpack"],
    "task_ignore_result": True,
    "task_publish_retry": False,
    "broker_connection_retry": False,
    "broker_connection_timeout": 0.5,
    "broker_transport_options": {"max_retries": 0, "socket_timeout": 0.5, "socket_connect_timeout": 0.2},
}


def worker_app(system: System, url: str, pool: str) -> Celery:
    """The Celery application of a worker of `pool`, without its tasks."""
    app = _app(system, url, WORKER_SETTINGS)
    app.conf.task_default_queue = Keys(system.name).jobs(pool)
    app.conf.broker_transport_options = broker_options(system, pool)
    assert app.steps is not None
    app.steps["consumer"].add(Reclaim)
    return app


def scheduler_app(system: System, url: str) -> Celery:
    """The Celery application of the process that sends what is due: as patient as a worker."""
    app = _app(system, url, WORKER_SETTINGS)
    app.conf.broker_transport_options = broker_options(system)
    return app


def sender_app(system: System, url: str) -> Celery:
    """The Celery application of a process that only sends, and fails at once where it cannot."""
    return _app(system, url, SENDER_SETTINGS)


def _app(system: System, url: str, settings: dict[str, Any]) -> Celery:
    speak_msgpack()
    outlive_broker()
    speak_plainly()
    app = Celery(system.name, broker=celery_url(url), set_as_current=False, fixups=[])
    app.conf.update(settings)
    return app


def longest_task_s(system: System) -> float:
    """Seconds that the longest task of the system may take, retries' waits included."""
    tasks = [part for part in system.components.values() if isinstance(part, Task)]
    limits = [min(task.time_limit or ASSUMED_LONGEST_S, LONGEST_S) * HARD_LIMIT_AFTER for task in tasks]
    waits = [task.retries.after or 0.0 for task in tasks if task.retries]
    return max([*limits, *waits], default=ASSUMED_LONGEST_S)


def concurrency(system: System, pool: str) -> int:
    """Processes that a worker of the pool starts: what the file says, at most one a core."""
    worker = system.components.get(f"{pool}-worker")
    wanted = worker.concurrency if isinstance(worker, Process) and worker.concurrency else cores()
    return max(1, min(wanted, cores()))


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def has_gpus(pool: Pool) -> bool:
    """Whether the pool's tasks may hold a GPU, so that its worker must never fork."""
    return pool.gpus is not None and pool.gpus.count != 0


def speak_msgpack() -> None:
    """Register msgspec's codec as Celery's msgpack: kombu and others pin that package differently."""
    register(
        "msgpack",
        msgspec.msgpack.encode,
        msgspec.msgpack.decode,
        content_type="application/x-msgpack",
        content_encoding="binary",
    )


def outlive_broker() -> None:
    """Let a worker outlive its broker connection.

    kombu 5.7 asks a connection that it has just given up for its host; the AttributeError that follows is not
    one that Celery takes for a lost connection, and the worker leaves. The right error makes it reconnect.
    """
    if kombu.VERSION[:2] != (5, 7) or getattr(Channel, "_outlives_broker", False):
        return
    parameters = Channel._connparams

    def connection_parameters(self: Channel, asynchronous: bool = False) -> dict[str, Any]:
        if self.connection.client is None:
            raise BrokerLost("the broker connection is closed")
        return parameters(self, asynchronous=asynchronous)

    setattr(Channel, "_connparams", connection_parameters)  # noqa: B010  # a type checker calls this a mistake
    setattr(Channel, "_outlives_broker", True)  # noqa: B010


class Reclaim(bootsteps.StartStopStep):
    """Puts back in the queue what this worker, or the one it replaces, held on its last connection."""

    requires = ("celery.worker.consumer.tasks:Tasks",)

    def start(self, parent: Any) -> None:  # Any: Celery's consumer is not typed
        """Restore every message held under this worker's key: nothing was fetched on this connection yet."""
        channel = parent.task_consumer.channel
        with channel.conn_or_acquire() as client:
            held: Sequence[bytes] = client.hkeys(channel.unacked_key)
            for tag in held:
                channel.qos.restore_by_tag(tag, client)
        if held:
            log.warning("jobs taken back", extra={"jobs": len(held)})


@signals.setup_logging.connect
def _leave_logging_alone(**_: object) -> None:
    """With a receiver Celery configures no logging: ours is set up already."""


def speak_plainly() -> None:
    """Let Celery say what only it knows, and leave the story of each job to us.

    Call it again once a worker is set up: Celery then shows every warning of its own.
    """
    get_logger().propagate = True  # billiard would print past our handler
    get_logger().setLevel(logging.WARNING)
    for name in ("celery.worker.strategy", "celery.worker.request", "celery.app.trace"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    for name in ("celery.apps.worker", "celery.beat", "celery.worker.consumer.consumer", "kombu"):
        logging.getLogger(name).setLevel(logging.WARNING)
    for known in (
        "You're running the worker with superuser privileges",  # containers are root
        r"\s*In Celery 5\.1 we introduced",  # a job may end while the broker is away
    ):
        warnings.filterwarnings("ignore", message=known)
