"""How events travel up to training: appended once, kept while training is away, read once by offset.

A stream is bounded: what is not read in time is dropped oldest first, and the reader learns exactly how many.
Only entries older than SETTLE_S are read. A broker that is killed may forget its last two seconds, and the
writer then appends them again: so what a reader has seen can neither vanish nor come back under another id.
"""

import asyncio
import contextlib
import logging
import time
import uuid
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import msgspec
import redis
import redis.asyncio

from twinhull.broker import Keys
from twinhull.errors import BrokerError
from twinhull.handoff import stream
from twinhull.handoff.stream import SETTLE_S, START, Event, Offset

__all__ = ["BOUND", "SETTLE_S", "START", "Event", "Offset", "Reader", "Writer"]

BOUND = 1_000_000  # events kept on the broker; at 200 bytes each about 300 MB
REMEMBER_S = 600  # how long a caller's key protects against a second append; clients retry within minutes
REMEMBER_OURS_S = 60  # the same for a key made here, which nobody can use again
Bodies = Sequence[Any]  # Any: whatever JSON can say
log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Append:
    """One append that the broker may still forget."""

    key: str
    remember_s: int
    at: float
    bodies: list[bytes]
    first: str  # id of its first entry; empty before it was acknowledged
    acknowledged: float  # monotonic

    @property
    def size(self) -> int:
        return sum(map(len, self.bodies))


def append(
    client: redis.Redis, keys: Keys, name: str, bodies: Bodies, *, key: str | None = None, bound: int = BOUND
) -> int:
    """Append all bodies or none, once per key; how many were appended: 0 when this key was there before.

    Raises BrokerError when the broker does not acknowledge; a second try with the same key is then safe.
    """
    if not bodies:
        return 0
    todo = _prepared(bodies, key)
    try:
        reply: Any = client.execute_command("EVAL", *_append_arguments(keys, name, todo, bound))
        return int(reply[0])
    except stream.AWAY as error:
        raise stream.unreachable(error) from error


class Reader:
    """Reads a stream from an offset that the caller keeps; it has no state that matters.

    An entry is readable when it is SETTLE_S old by the broker's clock, or when this reader saw it that long
    ago: the second helps where the clock was set back between two starts of the broker.
    """

    def __init__(self, client: redis.Redis, keys: Keys, name: str, *, settle_s: float = SETTLE_S) -> None:
        self.client = client
        self.keys = keys
        self.name = name
        self.settle_s = settle_s
        self._seen: deque[tuple[float, str]] = deque()  # when (monotonic), newest id then
        self._settled = "0-0"

    def read(self, after: Offset = START, limit: int = 1000) -> tuple[list[Event], Offset]:
        """Up to `limit` events after the offset, and the offset behind them; does not wait.

        What was dropped unread is logged and added to the offset's `lost`. When the broker has lost the
        stream, that is logged and reading goes on with what it has now. Raises BrokerError when it is away.
        """
        look = self._look(after, limit)
        begin = stream.corrected(after, look)
        if begin != after:
            log.error(
                "the broker lost events",
                extra={
                    "stream": self.name,
                    "read": after.index,
                    "left": look.added,
                    "going_on_at": begin.index + 1,
                },
            )
            look = self._look(begin, limit)
        events, offset, broken = stream.advance(begin, look)
        if broken:
            log.error("events unreadable", extra={"stream": self.name, "count": broken})
        if offset.lost > begin.lost + broken:
            lost = offset.lost - begin.lost - broken
            log.warning("events dropped unread", extra={"stream": self.name, "count": lost})
        return events, offset

    def _look(self, after: Offset, limit: int) -> stream.Found:
        keys = (self.keys.events(self.name), self.keys.events_state(self.name))
        arguments = (after.id, limit, round(self.settle_s * 1000), self._settled)
        try:
            look = stream.found(self.client.execute_command("EVAL", stream.READ, 2, *keys, *arguments))
        except stream.AWAY as error:
            self._seen.clear()
            raise stream.unreachable(error) from error
        self._observe(look.newest)
        return look

    def _observe(self, newest: str) -> None:
        now = time.monotonic()
        if self._seen and stream.order(newest) < stream.order(self._seen[-1][1]):
            self._seen.clear()  # the broker has forgotten what was seen
        self._seen.append((now, newest))
        while self._seen and self._seen[0][0] <= now - self.settle_s:
            self._settled = self._seen.popleft()[1]


class Writer:
    """Appends to a stream, and appends again what a killed broker may have forgotten.

    An append is unsettled until the same run of the broker was seen alive SETTLE_S after acknowledging it.
    Unsettled appends are kept in memory; a new run of the broker gets them again under their old keys. The
    memory is bounded: beyond it the oldest lose this protection and are counted in `dropped`.
    Use as `async with`.
    """

    def __init__(
        self,
        client: redis.asyncio.Redis,
        keys: Keys,
        name: str,
        *,
        bound: int = BOUND,
        memory_bytes: int = 64 * 2**20,
        settle_s: float = SETTLE_S,
    ) -> None:
        self.client = client
        self.keys = keys
        self.name = name
        self.bound = bound
        self.memory_bytes = memory_bytes
        self.settle_s = settle_s
        self.dropped = 0  # events acknowledged that lost their protection
        self.repeated = 0  # events that a broker had forgotten and got again
        self._unsettled: deque[_Append] = deque()
        self._bytes = 0
        self._run = ""
        self._task: asyncio.Task[None] | None = None
        self._stop = asyncio.Event()

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stop.set()
        if self._task is not None:
            await self._task

    @property
    def unsettled(self) -> int:
        """Events that the broker has acknowledged and may still forget."""
        return sum(len(todo.bodies) for todo in self._unsettled)

    async def append(self, bodies: Bodies, *, key: str | None = None) -> int:
        """Append all bodies or none, once per key, and return when the broker has them; how many were new.

        Raises BrokerError when it does not acknowledge; a second try with the same key is then safe.
        """
        if not bodies:
            return 0
        if not self._run:
            await self.settle()
        todo = _prepared(bodies, key)
        new = await self._send(todo)
        self._keep(todo)
        return new

    async def settle(self) -> None:
        """Forget what is safe; append again what a new run of the broker may miss. Raises BrokerError."""
        asked = time.monotonic()
        try:
            about = await self.client.info("server")
        except stream.AWAY as error:
            raise stream.unreachable(error) from error
        if self._run and about["run_id"] != self._run:
            await self._repeat()
        self._run = about["run_id"]
        while self._unsettled and self._unsettled[0].acknowledged <= asked - self.settle_s:
            self._bytes -= self._unsettled.popleft().size

    async def _repeat(self) -> None:
        before = self.repeated
        for todo in list(self._unsettled):
            self.repeated += await self._send(todo)
        again = self.repeated - before
        log.info("broker is back", extra={"stream": self.name, "events_appended_again": again})

    async def _send(self, todo: _Append) -> int:
        try:
            reply: Any = await self.client.execute_command(
                "EVAL", *_append_arguments(self.keys, self.name, todo, self.bound)
            )
        except stream.AWAY as error:
            raise stream.unreachable(error) from error
        todo.first = reply[1].decode()
        todo.acknowledged = time.monotonic()
        return int(reply[0])

    def _keep(self, todo: _Append) -> None:
        self._unsettled.append(todo)
        self._bytes += todo.size
        while self._bytes > self.memory_bytes:
            oldest = self._unsettled.popleft()
            self._bytes -= oldest.size
            self.dropped += len(oldest.bodies)

    async def _watch(self) -> None:
        while True:
            stopping = self._stop.is_set()
            with contextlib.suppress(BrokerError):  # appends report it; here only its return matters
                await self.settle()
            if stopping:
                return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), self.settle_s / 5)


def _prepared(bodies: Bodies, key: str | None) -> _Append:
    packed = [msgspec.msgpack.encode(body) for body in bodies]
    remember_s = REMEMBER_OURS_S if key is None else REMEMBER_S
    return _Append(uuid.uuid4().hex if key is None else key, remember_s, time.time(), packed, "", 0.0)


# Any: text, bytes and numbers
def _append_arguments(keys: Keys, name: str, todo: _Append, bound: int) -> list[Any]:
    names = (keys.events(name), keys.events_state(name), keys.events_once(name, todo.key))
    head = (bound, todo.remember_s, todo.first, todo.key, repr(todo.at))
    return [stream.APPEND, 3, *names, *head, *todo.bodies]
