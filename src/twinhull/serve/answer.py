"""How does every accepted request get an answer by its deadline? Fresh, else cached, else default."""

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec

from twinhull import policy
from twinhull.broker import Keys
from twinhull.serve import cache, wire
from twinhull.serve.bodies import Body
from twinhull.serve.latency import Latency
from twinhull.serve.layout import CACHE, CacheTimes, Promise
from twinhull.serve.link import Done
from twinhull.serve.plane import AWAY, Plane

log = logging.getLogger(__name__)

RESERVE_S = 0.020  # kept back from the deadline for the ladder and the way to the client
RESERVE_SHARE = 0.1  # but never more than this share of a short deadline
LAST_MOMENT_S = 0.002  # kept back even from a default function

Default = Callable[..., Any]  # Any: the user's own signature


@dataclass(frozen=True, slots=True)
class Answer:
    """What a request was answered with: JSON of the value and where it is from; FAILED with a reason."""

    value: bytes
    source: int
    age_s: float
    version: int | None
    took_s: float
    reason: str = ""


@dataclass(slots=True)
class Counts:
    """Answers of one endpoint since the gateway began, by source (FRESH, CACHED, DEFAULT, FAILED)."""

    asked: int = 0
    by_source: list[int] = field(default_factory=lambda: [0, 0, 0, 0])
    late: int = 0  # answered after the deadline
    late_replies: int = 0  # fresh values that came too late and went into the cache
    shed: int = 0  # not sent because the answer would have come too late
    errors: int = 0  # rows that the user's code failed on
    latency: Latency = field(default_factory=Latency)


class Desk:
    """One endpoint: takes requests, sends them along the path, answers each by its deadline."""

    def __init__(
        self,
        promise: Promise,
        plane: Plane,
        keys: Keys,
        *,
        memory: cache.Memory,
        times: CacheTimes,
        defaults: dict[str, Default],
        threads: Executor,
    ) -> None:
        self.promise = promise
        self.counts = Counts()
        self.plane = plane
        self._keys = keys
        self._memory = memory
        self._times = times
        self._defaults = defaults
        self._threads = threads
        self._loop = asyncio.get_running_loop()
        self._prefix = promise.name.encode() + b":"
        self._caches = CACHE in promise.fallback

    async def ask(self, body: Body) -> Answer:
        """Answer a request, by its deadline whatever becomes of the plane."""
        asked_at = time.monotonic()
        self.counts.asked += 1
        deadline = asked_at + self.promise.deadline_s
        give_up = policy.give_up_at(asked_at, self.promise.deadline_s, RESERVE_S, RESERVE_SHARE)
        question = _Question(self, body, give_up)
        looked_up = self._look_up(body.key)
        question.enter(0, [body.sealed])
        if not question.decided.done():
            timer = self._loop.call_later(give_up - asked_at, question.give_up)
            await question.decided
            timer.cancel()
        fresh = question.decided.result()
        if fresh is None:
            answer = await self._fall_back(body, deadline, give_up, looked_up, question.reason)
        else:
            answer = Answer(fresh.value, policy.FRESH, 0.0, fresh.version, 0.0)
        return self._counted(answer, asked_at, deadline)

    def keep(self, key: bytes, value: bytes, version: int | None) -> cache.Kept:
        """Hold a fresh value for worse times, here and on the broker."""
        kept = cache.Kept(value, time.time(), version)
        if self._caches and self._memory.put(self._prefix + key, kept):
            expiry = ("EX", max(1, int(self._times.hard_s))) if self._times.hard_s < 1e9 else ()
            self.plane.link.send("SET", self._cache_key(key), cache.pack(kept), *expiry)
        return kept

    def _counted(self, answer: Answer, asked_at: float, deadline: float) -> Answer:
        now = time.monotonic()
        self.counts.by_source[answer.source] += 1
        self.counts.latency.add(now - asked_at)
        if policy.is_expired(now, deadline):
            self.counts.late += 1
        return Answer(
            answer.value, answer.source, answer.age_s, answer.version, now - asked_at, answer.reason
        )

    def _cache_key(self, key: bytes) -> str:
        return self._keys.cache(self.promise.name, key.hex())

    def _look_up(self, key: bytes) -> asyncio.Future[None] | None:
        """Ask the broker's cache if the memory has nothing; its answer goes into the memory."""
        if not self._caches or self._memory.get(self._prefix + key) is not cache.NOTHING:
            return None
        looked_up: asyncio.Future[None] = self._loop.create_future()
        done: Done = partial(self._found, key, looked_up)
        return looked_up if self.plane.link.send("GET", self._cache_key(key), done=done) else None

    def _found(self, key: bytes, looked_up: asyncio.Future[None], result: object) -> None:
        kept = cache.unpack(result)
        if kept is not cache.NOTHING:
            self._memory.put(self._prefix + key, kept)
        if not looked_up.done():
            looked_up.set_result(None)

    async def _fall_back(
        self, body: Body, deadline: float, give_up: float, looked_up: asyncio.Future[None] | None, reason: str
    ) -> Answer:
        ladder = list(self.promise.fallback)
        if looked_up is not None and not looked_up.done() and (left := give_up - time.monotonic()) > 0.0:
            await asyncio.wait({looked_up}, timeout=left)
        while True:
            now = time.time()
            kept = self._memory.get(self._prefix + body.key) if CACHE in ladder else cache.NOTHING
            state = policy.cache_state(now, kept.at, self._times.soft_s, self._times.hard_s)
            defaults = [rung for rung in ladder if rung != CACHE]
            choice = policy.fallback(state, bool(defaults), bool(ladder) and ladder[0] != CACHE)
            if choice == policy.CACHED:
                return Answer(kept.value, choice, max(0.0, now - kept.at), kept.version, 0.0)
            if choice == policy.FAILED:
                return Answer(b"null", choice, 0.0, None, 0.0, reason or "no answer in time")
            ladder.remove(defaults[0])
            left = deadline - LAST_MOMENT_S - time.monotonic()
            value = await self._default(defaults[0], body, left / len(defaults))
            if value is not None:
                return Answer(value, choice, 0.0, None, 0.0)

    async def _default(self, run: str, body: Body, patience_s: float) -> bytes | None:
        work = self._loop.run_in_executor(self._threads, _call, self._defaults[run], body.fields)
        try:
            return await asyncio.wait_for(work, max(0.0, patience_s))
        except TimeoutError:
            reason = f"took longer than its {patience_s * 1000:.1f} ms"
        except Exception as error:  # the user's code may raise anything: the next rung answers
            reason = f"{type(error).__name__}: {error}"
        log.warning("default failed", extra={"endpoint": self.promise.name, "run": run, "reason": reason})
        return None


def _call(function: Default, fields: dict[str, Any]) -> bytes:  # Any: whatever JSON can say
    return wire.to_json(function(**fields))


class _Question:
    """One request on its way through the stages of its path.

    `decided` gets the fresh answer, or None with a `reason`. The last stage's answer is kept for the cache
    even if it comes after that.
    """

    __slots__ = ("_at", "_body", "_desk", "_give_up", "_missing", "_outputs", "_version", "decided", "reason")

    def __init__(self, desk: Desk, body: Body, give_up: float) -> None:
        self.decided: asyncio.Future[cache.Kept | None] = asyncio.get_running_loop().create_future()
        self.reason = ""
        self._desk = desk
        self._body = body
        self._give_up = give_up
        self._at = 0
        self._outputs: list[msgspec.Raw] = []
        self._missing = 0
        self._version: int | None = None

    def enter(self, at: int, inputs: list[msgspec.Raw]) -> None:
        """Send the inputs to all tasks of a stage, or decide at once if that is of no use."""
        desk = self._desk
        stops = desk.promise.stages[at]
        outputs = 0 if at == 0 else len(inputs)
        row = inputs[0] if len(inputs) == 1 else msgspec.Raw(wire.encode(inputs))
        lanes = [desk.plane.lane(stop, outputs) for stop in stops]
        reason = "" if desk.plane.link.takes else AWAY
        reason = reason or next(filter(None, (lane.refuses(self._give_up) for lane in lanes)), "")
        if reason:
            desk.counts.shed += 1
            self._decide(None, reason)
            return
        self._at = at
        self._missing = len(stops)
        self._outputs = [row] * len(stops)
        for index, lane in enumerate(lanes):
            lane.ask(row, self._give_up, partial(self._heard, at, index))

    def give_up(self) -> None:
        """Stop waiting for a fresh answer."""
        self._decide(None, "no fresh answer in time")

    def _heard(
        self, at: int, index: int, output: msgspec.Raw | None, reason: str, version: int | None
    ) -> None:
        if at != self._at or self._missing < 0:
            return
        if output is None:
            self._missing = -1
            if reason != AWAY:
                self._desk.counts.errors += 1
            self._decide(None, reason)
            return
        self._version = version if version is not None else self._version
        self._outputs[index] = output
        self._missing -= 1
        if self._missing > 0:
            return
        if at + 1 < len(self._desk.promise.stages):
            if not self.decided.done():
                self.enter(at + 1, self._outputs)
            return
        self._finish()

    def _finish(self) -> None:
        outputs = [wire.decode(sealed) for sealed in self._outputs]
        try:
            value = wire.to_json(outputs[0] if len(outputs) == 1 else outputs)
        except (TypeError, ValueError, msgspec.MsgspecError) as error:
            self._decide(None, f"the answer cannot be written as JSON: {error}")
            return
        if self.decided.done():
            self._desk.counts.late_replies += 1
        self._decide(self._desk.keep(self._body.key, value, self._version), "")

    def _decide(self, fresh: cache.Kept | None, reason: str) -> None:
        if not self.decided.done():
            self.reason = reason
            self.decided.set_result(fresh)
