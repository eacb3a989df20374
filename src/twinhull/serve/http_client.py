"""How does a request travel over connections that are kept open, as cheaply as one core allows?"""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable
from typing import Final, cast

import httptools

_LOOK_EVERY_S: Final = 0.05  # how exact the time-out is


class Exchange:
    """One request and what became of it.

    States: given to the client, sent (`sent_at`), finished (`finished_at`, and `status` or `reason`).
    """

    __slots__ = (
        "body",
        "finished_at",
        "given_at",
        "on_finish",
        "reason",
        "request",
        "retried",
        "sent_at",
        "status",
    )

    def __init__(self, request: bytes, on_finish: Callable[["Exchange"], None]) -> None:
        self.request = request
        self.on_finish = on_finish
        self.given_at = 0.0
        self.sent_at = 0.0
        self.finished_at = 0.0
        self.status: int | None = None
        self.body = b""
        self.reason: str | None = None
        self.retried = False


class Client:
    """Sends requests to one host, each on a connection of its own while it is under way.

    Connections are opened as they are needed, up to `connections`; beyond that requests wait. All times are
    of `time.monotonic`. A request that was sent on a connection kept from before, and that closed without a
    byte of an answer, is sent once more: the server had closed it while idle. Nothing else is repeated.
    """

    def __init__(self, host: str, port: int, *, timeout_s: float, connections: int) -> None:
        self._host, self._port = host, port
        self._timeout_s = timeout_s
        self._most = connections
        self._idle: list[_Connection] = []
        self._open: set[_Connection] = set()
        self._connecting: set[asyncio.Task[None]] = set()
        self._waiting: deque[Exchange] = deque()
        self._given: deque[Exchange] = deque()
        self._carrier: dict[Exchange, _Connection] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._unfinished = 0
        self.drained = asyncio.Event()  # set while nothing is under way
        self.drained.set()

    def send(self, exchange: Exchange) -> None:
        """Send a request; `on_finish` is called when it is over, also when it failed."""
        exchange.given_at = time.monotonic()
        self._given.append(exchange)
        self._unfinished += 1
        self.drained.clear()
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_LOOK_EVERY_S, self._look)
        self._dispatch(exchange)

    def close(self) -> None:
        """Drop all connections; what is under way stays unfinished."""
        if self._timer is not None:
            self._timer.cancel()
        for task in self._connecting:
            task.cancel()
        for connection in list(self._open):
            connection.exchange = None
            connection.transport.abort()

    def _dispatch(self, exchange: Exchange) -> None:
        while self._idle:
            connection = self._idle.pop()
            if connection in self._open:
                self._carry(connection, exchange)
                return
        self._waiting.append(exchange)
        if len(self._open) + len(self._connecting) < self._most:
            task = asyncio.get_running_loop().create_task(self._connect())
            self._connecting.add(task)
            task.add_done_callback(self._connecting.discard)

    def _carry(self, connection: "_Connection", exchange: Exchange) -> None:
        self._carrier[exchange] = connection
        connection.carry(exchange)

    async def _connect(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            await loop.create_connection(lambda: _Connection(self), self._host, self._port)
        except OSError as error:
            if (exchange := self._next_waiting()) is not None:
                self.finish(exchange, reason=f"not connected: {error.strerror or error}")

    def _next_waiting(self) -> Exchange | None:
        while self._waiting:
            exchange = self._waiting.popleft()
            if not exchange.finished_at:
                return exchange
        return None

    def ready(self, connection: "_Connection") -> None:
        """A connection is open and free."""
        self._open.add(connection)
        exchange = self._next_waiting()
        if exchange is None:
            self._idle.append(connection)
        else:
            self._carry(connection, exchange)

    def lost(
        self, connection: "_Connection", exchange: Exchange | None, *, untouched: bool, why: str
    ) -> None:
        """A connection is closed; `untouched`: it was an old one, and no byte of an answer had come."""
        self._open.discard(connection)
        if exchange is None or exchange.finished_at:
            return
        if untouched and not exchange.retried:
            exchange.retried = True
            self._dispatch(exchange)
        else:
            self.finish(exchange, reason=why)

    def finish(
        self, exchange: Exchange, *, status: int | None = None, body: bytes = b"", reason: str | None = None
    ) -> None:
        """Close an exchange, once."""
        if exchange.finished_at:
            return
        exchange.finished_at = time.monotonic()
        exchange.status, exchange.body, exchange.reason = status, body, reason
        self._carrier.pop(exchange, None)
        exchange.on_finish(exchange)
        self._unfinished -= 1
        if not self._unfinished:
            self.drained.set()

    def _look(self) -> None:
        """Give up what has waited too long; the oldest stand first."""
        now = time.monotonic()
        while self._given and (self._given[0].finished_at or now - self._given[0].given_at > self._timeout_s):
            exchange = self._given.popleft()
            if not exchange.finished_at:
                connection = self._carrier.get(exchange)
                self.finish(exchange, reason=f"no answer within {self._timeout_s:g} s")
                if connection is not None:
                    connection.transport.abort()
        self._timer = asyncio.get_running_loop().call_later(_LOOK_EVERY_S, self._look)


class _Connection(asyncio.Protocol):
    """One connection; carries at most one exchange at a time."""

    transport: asyncio.Transport

    def __init__(self, client: Client) -> None:
        self._client = client
        self._parser = httptools.HttpResponseParser(self)
        self._parts: list[bytes] = []
        self._used = False  # carried an exchange before the present one
        self._heard = False  # a byte of the present answer has come
        self.exchange: Exchange | None = None

    def carry(self, exchange: Exchange) -> None:
        self.exchange = exchange
        self._heard = False
        exchange.sent_at = time.monotonic()
        self.transport.write(exchange.request)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's are not asyncio's by class
        self._client.ready(self)

    def data_received(self, data: bytes) -> None:
        self._heard = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end(f"not an HTTP answer: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        exchange, self.exchange = self.exchange, None
        why = "connection reset" if exc is not None else "connection closed before the answer was whole"
        self._client.lost(self, exchange, untouched=self._used and not self._heard, why=why)

    def on_body(self, body: bytes) -> None:
        self._parts.append(body)

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        body = b"".join(self._parts)
        self._parts.clear()
        exchange = self.exchange
        if 100 <= status < 200 or exchange is None:
            return
        self.exchange, self._used = None, True
        self._client.finish(exchange, status=status, body=body)
        if self._parser.should_keep_alive():
            self._client.ready(self)
        else:
            self.transport.close()

    def _end(self, why: str) -> None:
        exchange, self.exchange = self.exchange, None
        if exchange is not None:
            self._client.finish(exchange, reason=why)
        with contextlib.suppress(OSError):
            self.transport.abort()
