"""How do answers and posted outcomes become events for training, without an answer ever waiting for that?"""

import asyncio
import contextlib
import logging
import os
import time
from collections import deque
from contextlib import AsyncExitStack
from itertools import count
from typing import Any

import msgspec
from redis.exceptions import RedisError

from twinhull.broker import Keys, connect_async
from twinhull.errors import BrokerError, TwinhullError
from twinhull.handoff.events import Writer
from twinhull.handoff.progress import Waiting, waiting_async

log = logging.getLogger(__name__)

MOST_WAITING = 20_000  # events in memory while the broker is away: some seconds of traffic
MOST_BYTES = 64_000_000  # of them
MOST_APPENDS = 32  # at the same time, each on a connection of its own
MOST_AT_ONCE = 500  # events in one append
MOST_STREAMS = 64  # names that clients may make up
FLUSH_EVERY_S = 0.1
TIMEOUT_S = 1.0
LEAVE_S = 1.0  # for the last events when the gateway is told to leave


class TooManyStreams(TwinhullError):
    """Raised for one more stream of events than a gateway writes to."""


class Recorder:
    """Writes events to their streams. Use as `async with`.

    `note` never waits: events gather and leave several at a time; while the broker is away the newest are
    dropped and counted once the memory is full. `post` returns when the broker has them.
    """

    def __init__(self, url: str, keys: Keys) -> None:
        self.appended: dict[str, int] = {}
        self.dropped: dict[str, int] = {}
        self.unread: dict[str, Waiting] = {}  # what waits for training, at the last look
        self._client = connect_async(url, timeout_s=TIMEOUT_S)
        self._keys = keys
        self._writers: dict[str, Writer] = {}
        self._stack = AsyncExitStack()
        self._waiting: dict[str, deque[msgspec.Raw]] = {}
        self._num_waiting = 0
        self._num_bytes = 0
        self._under_way: dict[str, tuple[str, list[msgspec.Raw]]] = {}
        self._names = (f"{os.urandom(8).hex()}-{n}" for n in count())
        self._turns = asyncio.Semaphore(MOST_APPENDS)
        self._stopping = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "Recorder":
        self._task = asyncio.create_task(self._flush_for_ever())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stopping.set()
        if self._task is not None:
            await self._task
        # Bounded, and without cancelling: a broker that is frozen must not keep the gateway from leaving.
        await asyncio.wait({asyncio.ensure_future(self._last())}, timeout=LEAVE_S)

    async def _last(self) -> None:
        with contextlib.suppress(BrokerError):
            await self._flush()
        await self._stack.aclose()
        await self._client.aclose()

    @property
    def waiting(self) -> int:
        """Events that are not on the broker yet."""
        return self._num_waiting

    def note(self, stream: str, event: dict[str, Any]) -> None:  # Any: whatever JSON can say
        """Append an event soon, if the broker comes back before too many wait."""
        try:
            packed = msgspec.Raw(msgspec.msgpack.encode(event))
        except OverflowError:  # a number of more than 64 bits from a default function
            packed = None
        if packed is None or self._num_waiting >= MOST_WAITING or self._num_bytes >= MOST_BYTES:
            self.dropped[stream] = self.dropped.get(stream, 0) + 1
            return
        self._waiting.setdefault(stream, deque()).append(packed)
        self._num_waiting += 1
        self._num_bytes += len(bytes(packed))

    async def look(self) -> None:
        """See how much waits for training; of a broker that is away the last sight stays."""
        for stream in list(self._writers):
            with contextlib.suppress(BrokerError):
                self.unread[stream] = await waiting_async(self._client, self._keys, stream)

    async def post(self, stream: str, bodies: list[msgspec.Raw], key: str | None) -> int:
        """Append events now, once per key; how many were new.

        Raises BrokerError when the broker does not take them, TooManyStreams for a name too many.
        """
        async with self._turns:
            new = await (await self._writer(stream)).append(bodies, key=key)
        self.appended[stream] = self.appended.get(stream, 0) + new
        return new

    async def _writer(self, stream: str) -> Writer:
        found = self._writers.get(stream)
        if found is None:
            if len(self._writers) >= MOST_STREAMS:
                raise TooManyStreams(f"there are {MOST_STREAMS} streams of events already.")
            found = self._writers[stream] = Writer(self._client, self._keys, stream)
            await self._stack.enter_async_context(found)
        return found

    async def _flush_for_ever(self) -> None:
        reached = True
        while not self._stopping.is_set():
            try:
                await self._flush()
                reached = True
            except (BrokerError, RedisError, OSError) as error:
                if reached:
                    log.warning("events wait for the broker", extra={"reason": str(error)})
                reached = False
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), FLUSH_EVERY_S if reached else 5 * FLUSH_EVERY_S)

    async def _flush(self) -> None:
        for stream in list(self._waiting):
            while self._under_way.get(stream) or self._waiting[stream]:
                key, bodies = self._under_way.get(stream) or self._next(stream)
                await self.post(stream, bodies, key)  # the same key again after a failure: never twice
                del self._under_way[stream]
                self._num_waiting -= len(bodies)
                self._num_bytes -= sum(len(bytes(body)) for body in bodies)

    def _next(self, stream: str) -> tuple[str, list[msgspec.Raw]]:
        waiting = self._waiting[stream]
        bodies = [waiting.popleft() for _ in range(min(len(waiting), MOST_AT_ONCE))]
        self._under_way[stream] = (next(self._names), bodies)
        return self._under_way[stream]


def answered(body: msgspec.Raw, value: bytes, source: str, version: int | None) -> dict[str, Any]:
    """The event of an answered request."""
    return {
        "body": body,
        "value": msgspec.json.decode(value),
        "source": source,
        "version": version,
        "at": time.time(),
    }
