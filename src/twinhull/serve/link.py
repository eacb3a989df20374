"""How does the gateway talk to the broker without a request ever waiting for it?

Commands are put in an outbox and leave together, in the background; replies to batches come back through one
list of this gateway's own. While the broker is away nothing is taken in, and whoever had a command under way
is told so at once.
"""

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import redis.asyncio
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError, ResponseError

from twinhull import policy
from twinhull.broker import connect_async

log = logging.getLogger(__name__)

TIMEOUT_S = 0.5  # of one exchange: a frozen broker is noticed after that
BLOCK_S = 0.5  # of a wait for replies; short, so that stopping never needs a cancellation
BACK_OFF_S = 0.05
BACK_OFF_CAP_S = 0.5
MOST_AT_ONCE = 512  # commands in one exchange
MOST_WAITING = 20_000  # commands in the outbox; far above what the lanes let in
MOST_REPLIES = 64


class Lost:
    """Given in place of a reply when the broker went away, or refused the command, before it came."""


LOST: Final = Lost()

Word = bytes | str | int | float
Done = Callable[[object], None]


@dataclass(frozen=True, slots=True)
class _Command:
    words: tuple[Word, ...]
    done: Done | None


class Link:
    """One gateway's connection to the broker: up, or away; it comes back by itself.

    `run` works until `stop` is called. `hear` gets the replies that were waiting, several at a time.
    """

    def __init__(self, url: str, replies: str, hear: Callable[[list[bytes]], None]) -> None:
        self.is_up = False
        self.refused = 0  # commands that the broker answered with an error
        self._url = url
        self._replies = replies
        self._hear = hear
        self._outbox: deque[_Command] = deque()
        self._wake = asyncio.Event()
        self._first = asyncio.Event()
        self._pops_many = True
        self._complained_at = 0.0
        self._stopping = False

    @property
    def takes(self) -> bool:
        """Whether a command given now would be sent."""
        return self.is_up and len(self._outbox) < MOST_WAITING

    def send(self, *words: Word, done: Done | None = None) -> bool:
        """Send a command soon; `done` gets its reply, or LOST. False if the broker is away: nothing sent."""
        if not self.takes:
            return False
        self._outbox.append(_Command(words, done))
        self._wake.set()
        return True

    async def reached(self, patience_s: float) -> bool:
        """Whether the broker answers, waiting a little for it."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._first.wait(), patience_s)
        return self.is_up

    def stop(self) -> None:
        """Make `run` end within about BLOCK_S."""
        self._stopping = True
        self._wake.set()

    async def run(self) -> None:
        """Send and receive until stopped."""
        await asyncio.gather(self._write(), self._read())

    async def _write(self) -> None:
        client = connect_async(self._url, timeout_s=TIMEOUT_S)
        failures = 0
        try:
            while not self._stopping:
                try:
                    if not self.is_up:
                        await client.ping()
                        self._come_up()
                        failures = 0
                    await self._drain(client)
                except (RedisError, OSError) as error:
                    self._go_down(error)
                    failures += 1
                    pause = policy.restart_at(0.0, failures, BACK_OFF_S, BACK_OFF_CAP_S)
                    await asyncio.sleep(pause)
            if self.is_up and self._outbox:
                await self._drain(client)
        except (RedisError, OSError) as error:
            self._go_down(error)
        finally:
            await client.aclose()

    async def _drain(self, client: redis.asyncio.Redis) -> None:
        if not self._outbox:
            self._wake.clear()
            await self._wake.wait()
        commands = [self._outbox.popleft() for _ in range(min(len(self._outbox), MOST_AT_ONCE))]
        if not commands:
            return
        pipeline = client.pipeline(transaction=False)
        for command in commands:
            pipeline.execute_command(*command.words)
        try:
            results = await pipeline.execute(raise_on_error=False)
        except (RedisError, OSError):
            _give_up(commands)
            raise
        lost = next((r for r in results if isinstance(r, RedisConnectionError)), None)
        if lost is not None:  # a server that answers this is still reading its file
            _give_up(commands)
            raise lost
        for command, result in zip(commands, results, strict=True):
            self._finish(command, result)

    def _finish(self, command: _Command, result: object) -> None:
        if isinstance(result, Exception):
            self.refused += 1
            self._complain(str(command.words[0]), str(result))
            result = LOST
        if command.done is not None:
            command.done(result)

    def _complain(self, command: str, reason: str) -> None:
        now = time.monotonic()
        if now >= self._complained_at + 1.0:  # a broker that is full refuses everything
            self._complained_at = now
            log.warning("broker refused", extra={"command": command, "reason": reason})

    async def _read(self) -> None:
        client = connect_async(self._url, timeout_s=BLOCK_S + TIMEOUT_S)
        failures = 0
        try:
            while not self._stopping:
                try:
                    if found := await self._pop(client):
                        self._hear(found)
                    failures = 0
                except (RedisError, OSError):  # the writer tells of it
                    failures += 1
                    await asyncio.sleep(policy.restart_at(0.0, failures, BACK_OFF_S, BACK_OFF_CAP_S))
        finally:
            await client.aclose()

    async def _pop(self, client: redis.asyncio.Redis) -> list[bytes]:
        """Replies, as many as wait; none after BLOCK_S."""
        # Any: redis-py knows neither that we get bytes nor that a count gives a list.
        if self._pops_many:
            try:
                words = ("BLMPOP", BLOCK_S, 1, self._replies, "LEFT", "COUNT", MOST_REPLIES)
                many: Any = await client.execute_command(*words)
                return many[1] if many else []
            except ResponseError as error:  # a server before Redis 7
                if "unknown command" not in str(error).lower():
                    raise
                self._pops_many = False
        first: Any = await client.blpop([self._replies], timeout=BLOCK_S)
        if first is None:
            return []
        rest: Any = await client.lpop(self._replies, MOST_REPLIES)
        return [first[1], *(rest or [])]

    def _come_up(self) -> None:
        self.is_up = True
        self._first.set()
        log.info("broker reached")

    def _go_down(self, error: Exception) -> None:
        if self.is_up:
            log.warning("broker away", extra={"reason": f"{type(error).__name__}: {error}"})
        self.is_up = False
        left = list(self._outbox)
        self._outbox.clear()
        _give_up(left)


def _give_up(commands: list[_Command]) -> None:
    for command in commands:
        if command.done is not None:
            command.done(LOST)
