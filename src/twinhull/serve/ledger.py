"""Who runs a job now, or is it done? Kept on the broker, so that a second delivery has no second effect."""

import logging
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import psutil
import redis

from twinhull.broker import Keys

log = logging.getLogger(__name__)

T = TypeVar("T")
Begun = Literal["begun", "done before", "lost too often"]

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
    keys: Keys
    deliveries: int  # of a job that takes its process with it

    def begin(self, job: str, *, redelivered: bool, kept_s: int) -> Begun:
        """Take a job up, unless it was done before or has taken its worker with it too often.

        What is known of it is kept for `kept_s`; one that comes back later is done again.
        """
        return _patiently(lambda: self._begin(self.keys.job(job), redelivered, kept_s))

    def end(self, job: str, *, done: bool, kept_s: int = 0, patience_s: float = PATIENCE_S) -> None:
        """Close a job: done for good, or free to run again."""
        key = self.keys.job(job)
        try:
            _patiently(lambda: self._end(key, done, kept_s), patience_s)
        except redis.RedisError as error:
            log.warning("job not recorded", extra={"job": job, "reason": str(error)})

    def _begin(self, key: str, redelivered: bool, kept_s: int) -> Begun:
        if redelivered:
            state = self._settled(key)
            if state == "done":
                return "done before"
            if state and self._count_loss(key, kept_s) >= self.deliveries:
                return "lost too often"
        self.client.set(key, _whoami(), ex=kept_s)
        return "begun"

    def _end(self, key: str, done: bool, kept_s: int) -> None:
        if done:
            self.client.set(key, "done", ex=kept_s)
            self.client.delete(f"{key}:lost")
        else:
            self.client.delete(key, f"{key}:lost")

    def _count_loss(self, key: str, kept_s: int) -> int:
        """Count a run that was begun and never ended."""
        lost: Any = self.client.incr(f"{key}:lost")  # Any: redis-py's reply
        self.client.expire(f"{key}:lost", kept_s)
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
