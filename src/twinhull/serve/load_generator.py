"""What does a server answer to requests that come at their own pace, whatever it does?

Open loop: a request is due at an instant of its schedule and counts from there, even if the generator is late
or all connections are busy. So a server that stalls is charged for everyone who would have come meanwhile.
"""

import asyncio
import contextlib
import random
import time
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

import msgspec

from twinhull.errors import TwinhullError
from twinhull.serve.http_client import Client, Exchange
from twinhull.serve.load_report import LoadReport, Record, Tally, quantile

GRACE_S = 5.0  # beyond the deadline, so that a late answer is seen to be late rather than dropped
TIMEOUT_S = 30.0  # without a deadline
CONNECTIONS = 1000
_CONTROL_EVERY_S = 0.01
_LONGEST_NAP_S = 0.05
_MOST_AT_ONCE = 32
_LONGEST_REASON = 80
_REACH_S = 5.0


@dataclass(frozen=True, slots=True)
class Shot:
    """A request to make: where, with what JSON body, and, if its time is given, how long after the start."""

    path: str
    body: bytes
    at: float | None = None


def constant(rate: float) -> Iterator[float]:
    """Instants at equal distances, in seconds from the start."""
    n = 0
    while True:
        yield n / rate
        n += 1


def poisson(rate: float, seed: int) -> Iterator[float]:
    """Instants of a crowd that does not know of each other: exponential distances, repeatable by its seed."""
    chance = random.Random(seed)  # noqa: S311  # load, not secrets
    now = 0.0
    while True:
        now += chance.expovariate(rate)
        yield now


class _Answer(msgspec.Struct):
    """What the gateway says about an answer besides its value."""

    source: str | None = None
    age_s: float | None = None
    model_version: int | None = None
    error: str | None = None


class Generator:
    """Sends streams of requests to one server and counts what comes back, by phase.

    async with Generator("http://127.0.0.1:8000", deadline_s=0.2) as load:
        load.start("recommend", shots, poisson(200, seed=1), for_s=60)
        load.mark("kill-worker")
        report = await load.finish()
    """

    def __init__(
        self,
        url: str,
        *,
        deadline_s: float | None = None,
        timeout_s: float | None = None,
        connections: int = CONNECTIONS,
        keep_records: bool = False,
    ) -> None:
        self.url = url
        self._host, self._port, self._name, self.path = _parts(url)
        self._deadline_s = deadline_s
        usual = TIMEOUT_S if deadline_s is None else deadline_s + GRACE_S
        self._timeout_s = usual if timeout_s is None else timeout_s
        self._connections = connections
        self._keep = keep_records
        self.records: list[Record] = []
        self._total = Tally("total")
        self._unnamed = Tally("all")
        self._phases = [self._unnamed]
        self._streams: dict[str, Tally] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._lags_s = array("d")

    async def reach(self) -> None:
        """Try a connection. Raises TwinhullError if nobody listens there."""
        try:
            _, writer = await asyncio.wait_for(asyncio.open_connection(self._host, self._port), _REACH_S)
        except OSError as error:  # a TimeoutError too
            why = error.strerror or "no answer"
            raise TwinhullError(
                f"nobody listens at {self._host}:{self._port}: {why}.",
                hint="Start it first: twinhull up FILE",
            ) from error
        writer.close()

    async def __aenter__(self) -> Self:
        self._client = Client(
            self._host, self._port, timeout_s=self._timeout_s, connections=self._connections
        )
        self._began = time.monotonic()
        self._unix = time.time() - self._began
        self._control = asyncio.create_task(self._watch_own_lag())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in (*self._tasks, self._control):
            task.cancel()
        await asyncio.gather(*self._tasks, self._control, return_exceptions=True)
        self._client.close()

    def start(
        self, stream: str, shots: Iterable[Shot], schedule: Iterator[float], *, for_s: float | None = None
    ) -> None:
        """Begin a stream of requests beside those that run; it ends with its shots or its time."""
        tally = self._streams.setdefault(stream, Tally(stream))
        self._tasks.append(asyncio.create_task(self._ask_all(tally, shots, schedule, for_s)))

    def mark(self, phase: str) -> None:
        """From now on requests count for this phase."""
        if self._phases == [self._unnamed] and not self._unnamed.asked:
            self._phases.clear()
        self._phases.append(Tally(phase))

    @property
    def now(self) -> Tally:
        """The live counts over all phases."""
        return self._total

    @property
    def phase(self) -> Tally:
        """The live counts of the present phase."""
        return self._phases[-1]

    async def finish(self, *, at_once: bool = False) -> LoadReport:
        """Wait for the streams to end and for their answers, and report; `at_once` ends them now."""
        if at_once:
            for task in self._tasks:
                task.cancel()
            return self.report(interrupted=True)
        await asyncio.gather(*self._tasks)
        asked_s = time.monotonic() - self._began
        await self._client.drained.wait()
        return self.report(asked_s)

    async def settle(self) -> None:
        """Wait until the streams that run now have ended and all is answered."""
        await asyncio.gather(*self._tasks)
        await self._client.drained.wait()

    async def end(self) -> LoadReport:
        """Ask nothing more, wait for the answers that are under way, and report."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        asked_s = time.monotonic() - self._began
        await self._client.drained.wait()
        return self.report(asked_s)

    def report(self, took_s: float | None = None, *, interrupted: bool = False) -> LoadReport:
        """What became of the requests so far."""
        lags = sorted(self._lags_s)
        return LoadReport(
            url=self.url,
            deadline_s=self._deadline_s,
            took_s=time.monotonic() - self._began if took_s is None else took_s,
            total=self._total.totals(),
            phases=tuple(phase.totals() for phase in self._phases),
            streams=tuple(stream.totals() for stream in self._streams.values()),
            own_lag_p99_s=quantile(lags, 0.99) or 0.0,
            own_lag_max_s=lags[-1] if lags else 0.0,
            interrupted=interrupted,
        )

    async def _ask_all(
        self, stream: Tally, shots: Iterable[Shot], schedule: Iterator[float], for_s: float | None
    ) -> None:
        start = time.monotonic()
        unrested = 0
        for shot, at in zip(shots, schedule, strict=False):
            if for_s is not None and at >= for_s:
                break
            due = start + at
            unrested += 1
            while (wait_s := due - time.monotonic()) > 0:
                await asyncio.sleep(min(wait_s, _LONGEST_NAP_S))
                unrested = 0
            if unrested >= _MOST_AT_ONCE:  # behind: answers must still be read
                await asyncio.sleep(0)
                unrested = 0
            self._ask(stream, shot, due)
        if for_s is not None:
            await asyncio.sleep(max(0.0, start + for_s - time.monotonic()))

    def _ask(self, stream: Tally, shot: Shot, due: float) -> None:
        phase = self._phases[-1]
        for tally in (stream, phase, self._total):
            tally.asked += 1
        head = f"POST {shot.path} HTTP/1.1\r\nHost: {self._name}\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(shot.body)}\r\n\r\n"
        done = partial(self._finished, stream, phase, due)
        self._client.send(Exchange(head.encode() + shot.body, done))

    def _finished(self, stream: Tally, phase: Tally, due: float, exchange: Exchange) -> None:
        answer, reason = _read(exchange)
        for tally in (stream, phase, self._total):
            if reason is None:
                tally.answer(
                    exchange.finished_at - due, answer.source, answer.model_version, self._deadline_s
                )
            else:
                tally.fail(reason)
        if self._keep:
            self.records.append(
                Record(
                    stream=stream.name,
                    phase=phase.name,
                    asked_at=self._unix + due,
                    sent_at=self._unix + exchange.sent_at if exchange.sent_at else None,
                    answered_at=None if exchange.status is None else self._unix + exchange.finished_at,
                    status=exchange.status,
                    source=answer.source,
                    version=answer.model_version,
                    age_s=answer.age_s,
                    reason=reason,
                )
            )

    async def _watch_own_lag(self) -> None:
        """A timer beside the load: as late as it rings, so late may this process have sent or read."""
        while True:
            due = time.monotonic() + _CONTROL_EVERY_S
            await asyncio.sleep(_CONTROL_EVERY_S)
            self._lags_s.append(max(0.0, time.monotonic() - due))


def _read(exchange: Exchange) -> tuple[_Answer, str | None]:
    """What an answer says about itself, and why it counts as failed, if it does."""
    if exchange.status is None:
        return _Answer(), exchange.reason or "no answer"
    with contextlib.suppress(msgspec.MsgspecError):
        answer = _answer_decoder.decode(exchange.body)
        if exchange.status < 400:
            return answer, None
        return answer, f"HTTP {exchange.status}: {(answer.error or '')[:_LONGEST_REASON]}".rstrip(": ")
    return _Answer(), None if exchange.status < 400 else f"HTTP {exchange.status}"


def _parts(url: str) -> tuple[str, int, str, str]:
    """Host, port, HTTP's name of both, and path of a URL. Raises TwinhullError if it is none for load."""
    example = "Write for example http://127.0.0.1:8000/recommend"
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise TwinhullError(f"{url!r} is not a URL: {error}.", hint=example) from error
    if parts.scheme != "http" or not parts.hostname:
        raise TwinhullError(f"{url!r} is not an http:// URL.", hint=example)
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    if not (path.isascii() and path.isprintable()) or " " in path:
        raise TwinhullError(f"{url!r} has characters that a URL must write as %XX.")
    return parts.hostname, port or 80, parts.netloc.rpartition("@")[2], path


_answer_decoder = msgspec.json.Decoder(_Answer)
