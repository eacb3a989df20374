"""How do single rows become batches for a task, and how does each row hear what became of it?

A lane holds the rows of one task: those that gather for the next batch and those under way. It decides with
`policy` whether to take a row in, when a batch leaves and whether the plane behind it is to be spared. What
carries a batch, the stream or Celery, it does not know.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

import msgspec

from twinhull import policy
from twinhull.serve.layout import Stop
from twinhull.serve.wire import Batch, SealedReply

log = logging.getLogger(__name__)

TRIP = 5  # batches in a row that nobody answered open the breaker
COOL_DOWN_S = 0.25  # between probes while it is open
LATE_S = 30.0  # so long after its deadline a reply is still of use to the cache
RATE_WEIGHT = 0.2

_SENT = msgspec.Raw()

Carry = Callable[[Batch, Stop], None]
Heard = Callable[[msgspec.Raw | None, str, int | None], None]  # a row's answer or a reason; model version


class Unheard(Exception):
    """Raised by a carrier that cannot take a batch now."""


@dataclass(slots=True)
class _Row:
    sealed: msgspec.Raw
    give_up: float
    heard: Heard


@dataclass(slots=True)
class _Flight:
    """A batch under way: waited for until `give_up`, then kept a while for the cache's sake."""

    rows: list[_Row]
    sent_at: float
    give_up: float
    waited_for: bool = True


@dataclass(slots=True)
class Tally:
    """What a lane has counted since it began."""

    batches: int = 0
    rows: int = 0
    timeouts: int = 0
    late: int = 0
    last_version: int | None = None


class Lane:
    """The rows of one task, on their way there and back.

    All instants are of the monotonic clock; the loop's own stands still within a turn.
    `carry` takes a batch; it may raise Unheard.
    The names of batches begin with `prefix`; no more than `most` are under way.
    """

    def __init__(
        self, stop: Stop, outputs: int, reply_to: str, prefix: bytes, carry: Carry, *, most: int
    ) -> None:
        self.stop = stop
        self.tally = Tally()
        self.breaker = policy.CLOSED
        self.outputs = outputs
        self._reply_to = reply_to
        self._most = most
        self._carry = carry
        self._loop = asyncio.get_running_loop()
        self._gathering: list[_Row] = []
        self._oldest_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._flights: dict[bytes, _Flight] = {}
        self._under_way = 0  # batches waited for
        self._rows_ahead = 0
        self._names = (prefix + n.to_bytes(6) for n in count())
        self._failures = 0
        self._opened_at = 0.0
        self._rate = 0.0
        self._heard_at = 0.0

    @property
    def in_flight(self) -> int:
        """Batches that somebody waits for."""
        return self._under_way

    def refuses(self, give_up: float) -> str:
        """Why a row would not be answered by `give_up`; empty if it may well be."""
        now = time.monotonic()
        if not policy.breaker_allows(self.breaker, self._opened_at, now, COOL_DOWN_S):
            return "the breaker is open"
        if not policy.admits(now, self._rows_ahead, self._rate, give_up):
            return "the queue is too long"
        if self._under_way >= self._most:
            return "the queue is full"
        return ""

    def ask(self, sealed: msgspec.Raw, give_up: float, heard: Heard) -> None:
        """Take a row in; `heard` is called at most once, perhaps after `give_up`: its answer, or a reason."""
        now = time.monotonic()
        self._opened_at = policy.breaker_asks(self.breaker, self._opened_at, now)
        if not self._gathering:
            self._oldest_at = now
        self._gathering.append(_Row(sealed, give_up, heard))
        self._rows_ahead += 1
        self._flush_or_wait()

    def hear(self, reply: SealedReply) -> bool:
        """Hand a reply to the rows that it answers; False if this lane does not know it (any more)."""
        flight = self._flights.pop(reply.id, None)
        if flight is None:
            return False
        if flight.waited_for:
            self._land(flight)
            self._outcome(succeeded=True)
        else:  # that the plane lives is no reason to send it more: it is too slow
            self.tally.late += 1
        if reply.model_version is not None:
            self.tally.last_version = reply.model_version
        for index, row in enumerate(flight.rows):
            reason = reply.errors.get(index, "" if index < len(reply.rows) else "no answer for this row")
            row.heard(None if reason else reply.rows[index], reason, reply.model_version)
        return True

    def heard_together(self, rows: int, since: float) -> None:
        """Learn the drain rate from rows that came back together, the first of them sent at `since`."""
        now = time.monotonic()
        busy_s = now - max(self._heard_at, since)
        self._rate = policy.learn_rate(self._rate, rows, busy_s, self._under_way > 0, RATE_WEIGHT)
        self._heard_at = now
        if self._gathering:
            self._flush_or_wait()

    def knows(self, name: bytes) -> tuple[int, float] | None:
        """How many rows a batch under way has and when it was sent, or None."""
        flight = self._flights.get(name)
        return None if flight is None else (len(flight.rows), flight.sent_at)

    def _flush_or_wait(self) -> None:
        now = time.monotonic()
        stop = self.stop
        due = policy.flush_at(
            len(self._gathering), stop.size, self._under_way, self._oldest_at, stop.window_s
        )
        if due <= now:
            self._flush(now)
        elif self._timer is None:
            self._timer = self._loop.call_later(due - now, self._window_over)

    def _window_over(self) -> None:
        self._timer = None
        if self._gathering:
            self._flush(time.monotonic())

    def _flush(self, now: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        rows = self._gathering
        self._gathering = []
        name = next(self._names)
        give_up = max(row.give_up for row in rows)
        flight = _Flight(rows, now, give_up)
        self._flights[name] = flight
        self._under_way += 1
        self.tally.batches += 1
        self.tally.rows += len(rows)
        deadline = time.time() + give_up - now
        batch = Batch(
            name, self.stop.task, self._reply_to, deadline, [row.sealed for row in rows], self.outputs
        )
        try:
            self._carry(batch, self.stop)
        except Unheard as error:
            self.lose(name, str(error))
            return
        for row in rows:
            row.sealed = _SENT  # only their listeners are needed from here on
        self._loop.call_later(give_up - now, self._time_out, name)

    def lose(self, name: bytes, reason: str) -> None:
        """Tell the rows of a batch that it never left."""
        flight = self._flights.pop(name, None)
        if flight is None:
            return
        if flight.waited_for:
            self._land(flight)
        for row in flight.rows:
            row.heard(None, reason, None)

    def _time_out(self, name: bytes) -> None:
        flight = self._flights.get(name)
        if flight is None:
            return
        self.tally.timeouts += 1
        self._land(flight)
        flight.waited_for = False
        self._outcome(succeeded=False)
        self._loop.call_later(LATE_S, self._forget, name)
        if self._gathering:
            self._flush_or_wait()

    def _forget(self, name: bytes) -> None:
        self._flights.pop(name, None)

    def _land(self, flight: _Flight) -> None:
        self._under_way -= 1
        self._rows_ahead -= len(flight.rows)

    def _outcome(self, *, succeeded: bool) -> None:
        before = self.breaker
        self.breaker, self._failures, self._opened_at = policy.breaker_hears(
            before, self._failures, self._opened_at, time.monotonic(), succeeded, TRIP
        )
        if before != self.breaker:
            event = "breaker closed" if self.breaker == policy.CLOSED else "breaker opened"
            log.warning(event, extra={"task": self.stop.task, "pool": self.stop.pool})
