"""What does one job do, however often it is delivered? It has one effect, or ends among the dead letters."""

import logging
import math
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import celery
import redis
from celery.exceptions import Reject

from twinhull import broker, policy
from twinhull.errors import UserCodeError
from twinhull.handoff.registry import Registry
from twinhull.serve import entry, wire
from twinhull.serve.function import NO_MODEL, Function
from twinhull.serve.ledger import Ledger
from twinhull.serve.models import Loaded, Slot
from twinhull.system.model import Task

log = logging.getLogger(__name__)

DEAD_LETTERS_KEPT = 10_000
REPLY_KEPT_S = 60  # a gateway that has gone leaves its list behind no longer than this
TELL_EVERY_S = 1.0
HURRY_S = 0.3
KNOWN_S = 24 * 3600  # of a job that nobody waits for
KNOWN_AFTER_S = 60  # the deadline, of a job that somebody waited for


def _end_process(name: str, limit: float) -> None:
    log.error("job beyond its time limit", extra={"task": name, "limit_s": limit})
    logging.shutdown()
    os._exit(1)


def _kept_s(batch: wire.Batch | None) -> int:
    return KNOWN_S if batch is None else int(max(0.0, batch.deadline - time.time())) + KNOWN_AFTER_S


class JobFailed(Exception):
    """Raised for a batch of which no row was answered, with the reason of the first."""


class Runner:
    """Runs the jobs of one pool in this process: function, reply, retries, dead letter."""

    def __init__(
        self, system: str, url: str, registry: Registry, deliveries: int, tasks: dict[str, Task]
    ) -> None:
        self._url = url
        self._keys = broker.Keys(system)
        self._registry = registry
        self._deliveries = deliveries
        self._tasks = tasks
        self.ends_itself = False
        self._expired, self._told_at = 0, 0.0
        self._functions: dict[str, Function] = {}
        self._slots: dict[tuple[str, type], Slot] = {}

    @cached_property
    def _client(self) -> redis.Redis:
        return broker.connect(self._url, timeout_s=5.0)

    def ledger(self, client: redis.Redis) -> Ledger:
        """Who runs which job of this pool."""
        return Ledger(client, self._keys, self._deliveries)

    def hurried(self) -> redis.Redis:
        """A client for a process that must leave."""
        return broker.connect(self._url, timeout_s=HURRY_S)

    def load(self) -> None:
        """Import the functions before the first job needs them; jobs of one that fails will fail later."""
        for name in self._tasks:
            try:
                self._function(name)
            except UserCodeError as error:
                log.error("function not loaded", extra={"task": name, "reason": str(error)})  # noqa: TRY400

    def run(self, call: celery.Task, name: str, packed: bytes | None) -> None:
        """Do one job: the rows of a batch for a gateway, or a call without arguments.

        Raises Retry when it is to be tried again, and the function's own error when it has failed for good.
        """
        job = str(call.request.id)
        batch = wire.decode_batch(packed) if packed is not None else None
        if batch is not None and policy.is_expired(time.time(), batch.deadline):
            self.expire(name)
            return
        redelivered = bool((call.request.delivery_info or {}).get("redelivered"))
        try:
            state = self.ledger(self._client).begin(job, redelivered=redelivered, kept_s=_kept_s(batch))
        except redis.RedisError as error:  # not the job's failure: it comes again when the broker does
            raise Reject(str(error), requeue=True) from error
        if state == "lost too often":
            self.bury(job, name, packed, f"its worker was lost {self._deliveries} x")
        elif state == "done before":
            log.info("job done before", extra={"task": name, "job": job})
        else:
            self._attempt(call, job, name, batch)

    def _attempt(self, call: celery.Task, job: str, name: str, batch: wire.Batch | None) -> None:
        started = time.monotonic()
        try:
            with self._time_limit(name):
                if batch is None:
                    self._call(name)
                else:
                    self._answer(name, batch)
        except (Exception, SystemExit) as error:  # of the user's code: logged, retried or raised again
            self.ledger(self._client).end(job, done=False)
            self._fail(call, name, batch, error)
        else:
            self.ledger(self._client).end(job, done=True, kept_s=_kept_s(batch))
            level = logging.INFO if batch is None else logging.DEBUG  # batches come by the dozen a second
            log.log(level, "job done", extra={"task": name, "took_s": round(time.monotonic() - started, 4)})

    @contextmanager
    def _time_limit(self, name: str) -> Iterator[None]:
        """End the process with a job that takes too long, where Celery has no other process to do it."""
        limit = self._tasks[name].time_limit
        if not self.ends_itself or limit is None or math.isinf(limit):
            yield
            return
        timer = threading.Timer(limit, _end_process, (name, limit))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _call(self, name: str) -> None:
        function = entry.load(self._tasks[name].run or "")
        loaded = self._model(name)
        if loaded is not None:
            function(model=loaded.model)
        elif self._function(name).model_class is not None:
            raise JobFailed(NO_MODEL)
        else:
            function()

    def _answer(self, name: str, batch: wire.Batch) -> None:
        started = time.monotonic()
        loaded = self._model(name)
        outcome = self._function(name).answer(batch.rows, batch.outputs, loaded and loaded.model)
        if batch.rows and len(outcome.errors) == len(batch.rows):
            raise JobFailed(next(iter(outcome.errors.values())))
        version, took_s = None if loaded is None else loaded.number, time.monotonic() - started
        self._reply(batch, wire.Reply(batch.id, outcome.rows, outcome.errors, version, took_s))

    def _fail(self, call: celery.Task, name: str, batch: wire.Batch | None, error: BaseException) -> None:
        retries = self._tasks[name].retries
        count, after = (retries.count, retries.after or 0.0) if retries else (0, 0.0)
        reason = str(error) if isinstance(error, JobFailed) else f"{type(error).__name__}: {error}"
        in_time = batch is None or not policy.is_expired(time.time() + after, batch.deadline)
        if call.request.retries < count and in_time:
            log.warning(
                "job retried", extra={"task": name, "reason": reason, "after_s": after}, exc_info=error
            )
            call.retry(exc=JobFailed(reason), countdown=after, max_retries=count)
        log.error("job failed", extra={"task": name, "reason": reason}, exc_info=error)
        if batch is not None:  # the gateway falls back now instead of at the deadline
            errors = dict.fromkeys(range(len(batch.rows)), reason)
            self._reply(batch, wire.Reply(batch.id, [None] * len(batch.rows), errors))
        raise JobFailed(reason) from error

    def _reply(self, batch: wire.Batch, reply: wire.Reply) -> None:
        """Push a reply; one that cannot be sent is given up: its gateway falls back at the deadline."""
        try:
            with self._client.pipeline(transaction=False) as pipe:
                pipe.rpush(batch.reply_to, wire.encode(reply))
                pipe.expire(batch.reply_to, REPLY_KEPT_S)
                pipe.execute()
        except redis.RedisError as error:
            log.warning("reply lost", extra={"task": batch.task, "reason": str(error)})

    def _function(self, name: str) -> Function:
        if name not in self._functions:
            task = self._tasks[name]
            self._functions[name] = Function(task.run or "", batch=task.batch is not None)
        return self._functions[name]

    def _model(self, name: str) -> Loaded | None:
        """The newest version that the task's function wants; None if it wants or there is none."""
        kind, model = self._function(name).model_class, self._tasks[name].model
        if kind is None:
            return None
        if model is None:
            raise JobFailed(f"{self._tasks[name].run} wants a model, but task {name} names none")
        if (model, kind) not in self._slots:
            # No thread: a job takes long enough to look at the registry before each.
            self._slots[model, kind] = Slot(self._registry, model, kind, warm_ups=(), hint=lambda: None)
        slot = self._slots[model, kind]
        slot.look()
        return slot.current

    def expire(self, name: str) -> None:
        """Count a job that nobody waits for any longer, and tell at most once a second."""
        self._expired += 1
        if time.monotonic() - self._told_at >= TELL_EVERY_S:
            log.info("jobs expired", extra={"task": name, "jobs": self._expired})
            self._told_at, self._expired = time.monotonic(), 0

    def bury(self, job: str, name: str, packed: bytes | None, reason: str) -> None:
        """Add a job that is given up to the dead letters, with the reason."""
        log.error("job given up", extra={"task": name, "job": job, "reason": reason})
        letter: dict[Any, Any] = {  # Any: redis-py's invariant field types
            "lane": "job",
            "task": name,
            "id": job,
            "reason": reason,
            "at": repr(time.time()),
            "body": packed or b"",
        }
        try:
            self._client.xadd(self._keys.dead_letters, letter, maxlen=DEAD_LETTERS_KEPT, approximate=True)
        except redis.RedisError as error:
            log.error("dead letter lost", extra={"job": job, "reason": str(error)})  # noqa: TRY400
