"""What does one job do, however often it is delivered? It has one effect, or ends among the dead letters."""

import logging
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, TypeVar

import celery
import psutil
import redis
from celery.exceptions import Reject

from twinhull import broker, policy
from twinhull.errors import UserCodeError
from twinhull.serve import entry, wire
from twinhull.serve.function import Function
from twinhull.system.model import Task

log = logging.getLogger(__name__)

T = TypeVar("T")
Begun = Literal["begun", "done before", "lost too often"]

DEAD_LETTERS_KEPT = 10_000
REPLY_KEPT_S = 60  # a gateway that has gone leaves its list behind no longer than this
DONE_KEPT_S = 24 * 3600.0  # a job that comes back later than this is done again
PATIENCE_S = 20.0  # with a broker that is away, before and after a job
_ASK_EVERY_S = 0.2


@dataclass(frozen=True)
class Ledger:
    """Who runs which job, kept on the broker, so that a second delivery has no second effect.

    States of a job: unknown, running (the process that runs it), done. The law: a job that is done, or that a
    living process of this host runs, is not begun again. A run on another host is taken for lost: only the
    visibility timeout, longer than any task, can have brought its job here.
    """

    client: redis.Redis
    keys: broker.Keys
    deliveries: int  # of a job that takes its process with it

    def begin(self, job: str, *, redelivered: bool) -> Begun:
        """Take a job up, unless it was done before or has taken its worker with it too often."""
        return _patiently(lambda: self._begin(self.keys.job(job), redelivered))

    def end(self, job: str, *, done: bool, patience_s: float = PATIENCE_S) -> None:
        """Close a job: done for good, or free to run again."""
        key = self.keys.job(job)
        try:
            _patiently(lambda: self._end(key, done), patience_s)
        except redis.RedisError as error:
            log.warning("job not recorded", extra={"job": job, "reason": str(error)})

    def _begin(self, key: str, redelivered: bool) -> Begun:
        if redelivered:
            state = self._settled(key)
            if state == "done":
                return "done before"
            if state and self._count_loss(key) >= self.deliveries:
                return "lost too often"
        self.client.set(key, _whoami(), ex=int(DONE_KEPT_S))
        return "begun"

    def _end(self, key: str, done: bool) -> None:
        if done:
            self.client.set(key, "done", ex=int(DONE_KEPT_S))
            self.client.delete(f"{key}:lost")
        else:
            self.client.delete(key, f"{key}:lost")

    def _count_loss(self, key: str) -> int:
        """Count a run that was begun and never ended."""
        lost: Any = self.client.incr(f"{key}:lost")  # Any: redis-py's reply
        self.client.expire(f"{key}:lost", int(DONE_KEPT_S))
        return int(lost)

    def _settled(self, key: str) -> str:
        """The state of a job once no other living process of this host runs it."""
        while True:
            raw: Any = self.client.get(key)  # Any: redis-py's reply
            state = bytes(raw or b"").decode()
            if state in ("", "done") or not _lives(state):
                return state
            time.sleep(_ASK_EVERY_S)


def _patiently(act: Callable[[], T], patience_s: float = PATIENCE_S) -> T:
    """The result of an act on the broker, tried again while the broker is away."""
    until = time.monotonic() + patience_s
    while True:
        try:
            return act()
        except redis.RedisError:
            if time.monotonic() > until:
                raise
            time.sleep(_ASK_EVERY_S)


def _whoami() -> str:
    return f"{socket.gethostname()} {os.getpid()} {psutil.Process().create_time():.2f}"


def _lives(who: str) -> bool:
    """Whether that process lives on this host. This one does not count: it is through with what it began."""
    host, pid, born = who.rsplit(" ", 2)
    if host != socket.gethostname() or int(pid) == os.getpid():
        return False
    try:
        return f"{psutil.Process(int(pid)).create_time():.2f}" == born
    except psutil.Error:
        return False


class JobFailed(Exception):
    """Raised for a batch of which no row was answered, with the reason of the first."""


class Runner:
    """Runs the jobs of one pool in this process: function, reply, retries, dead letter."""

    def __init__(self, system: str, url: str, deliveries: int, tasks: dict[str, Task]) -> None:
        self._url = url
        self._keys = broker.Keys(system)
        self._deliveries = deliveries
        self._tasks = tasks
        self._functions: dict[str, Function] = {}

    @cached_property
    def _client(self) -> redis.Redis:
        return broker.connect(self._url, timeout_s=5.0)

    @cached_property
    def _ledger(self) -> Ledger:
        return Ledger(self._client, self._keys, self._deliveries)

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
            log.info("job expired", extra={"task": name, "rows": len(batch.rows)})
            return
        redelivered = bool((call.request.delivery_info or {}).get("redelivered"))
        try:
            state = self._ledger.begin(job, redelivered=redelivered)
        except (
            redis.RedisError
        ) as error:  # not the job's failure: it is delivered again with the broker's return
            raise Reject(str(error), requeue=True) from error
        if state == "lost too often":
            self.bury(job, name, packed, f"its worker was lost {self._deliveries} times")
        elif state == "done before":
            log.info("job done before", extra={"task": name, "job": job})
        else:
            self._attempt(call, job, name, batch)

    def _attempt(self, call: celery.Task, job: str, name: str, batch: wire.Batch | None) -> None:
        started = time.monotonic()
        try:
            if batch is None:
                self._call(name)
            else:
                self._answer(name, batch)
        except (
            Exception,
            SystemExit,
        ) as error:  # the border to the user's code: logged, retried or raised again
            self._ledger.end(job, done=False)
            self._fail(call, name, batch, error)
        else:
            self._ledger.end(job, done=True)
            log.info("job done", extra={"task": name, "took_s": round(time.monotonic() - started, 4)})

    def _call(self, name: str) -> None:
        if self._function(name).model_class is not None:
            raise JobFailed(f"{self._tasks[name].run} wants a model, which only a request's job could get")
        entry.load(self._tasks[name].run or "")()

    def _answer(self, name: str, batch: wire.Batch) -> None:
        started = time.monotonic()
        outcome = self._function(name).answer(batch.rows, batch.outputs, None)
        if batch.rows and len(outcome.errors) == len(batch.rows):
            raise JobFailed(next(iter(outcome.errors.values())))
        self._reply(
            batch, wire.Reply(batch.id, outcome.rows, outcome.errors, None, time.monotonic() - started)
        )

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

    def free(self, job: str) -> None:
        """Note that a job given back to its queue is no longer run, and that this was not its fault."""
        self._ledger.end(job, done=False, patience_s=0.0)

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
