"""How does every accepted request get an answer by its deadline? Fresh, else cached, else default."""

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import Any

from twinhull import policy
from twinhull.broker import Keys
from twinhull.serve import cache, wire
from twinhull.serve.bodies import Body
from twinhull.serve.layout import CACHE, CacheTimes, Promise
from twinhull.serve.link import Done
from twinhull.serve.plane import Plane
from twinhull.serve.question import Counts, Question

log = logging.getLogger(__name__)

RESERVE_S = 0.020  # kept back from the deadline for the ladder and the way to the client
RESERVE_SHARE = 0.1  # but never more than this share of a short deadline
LAST_MOMENT_S = 0.002  # kept back even from a default function
PREPARE_SHARE = 0.5  # of the deadline: who waits that long has a default made ready, in case
COMPLAIN_EVERY_S = 1.0  # about a default function that fails

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
        self._complained_at: dict[str, float] = {}

    async def ask(self, body: Body) -> Answer:
        """Answer a request, by its deadline whatever becomes of the plane."""
        asked_at = time.monotonic()
        self.counts.asked += 1
        deadline = asked_at + self.promise.deadline_s
        give_up = policy.give_up_at(asked_at, self.promise.deadline_s, RESERVE_S, RESERVE_SHARE)
        looked_up = self._look_up(body.key)
        question = Question(
            self.promise.stages, self.plane, self.counts, give_up=give_up, keep=partial(self.keep, body.key)
        )
        question.enter(0, [body.sealed])
        ready: list[asyncio.Future[bytes]] = []
        if not question.decided.done():
            timers = [self._loop.call_later(give_up - asked_at, question.give_up)]
            if self.promise.defaults:
                prepare = policy.prepare_at(asked_at, self.promise.deadline_s, PREPARE_SHARE)
                timers.append(self._loop.call_later(prepare - asked_at, self._prepare, body, ready))
            await question.decided
            for timer in timers:
                timer.cancel()
        fresh = question.decided.result()
        if fresh is None:
            if looked_up is not None and not looked_up.done() and (left := give_up - time.monotonic()) > 0.0:
                await asyncio.wait({looked_up}, timeout=left)
            answer = await self._fall_back(body, deadline, ready, question.reason)
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
        self, body: Body, deadline: float, ready: list[asyncio.Future[bytes]], reason: str
    ) -> Answer:
        ladder = list(self.promise.fallback)
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
            work = ready.pop() if ready else self._start(defaults[0], body)
            value = await self._default(defaults[0], work, left / len(defaults))
            if value is not None:
                return Answer(value, choice, 0.0, None, 0.0)

    def _prepare(self, body: Body, ready: list[asyncio.Future[bytes]]) -> None:
        """Make the first default ready, unless the cache stands before it and has something."""
        first_rung = self.promise.fallback[0]
        if first_rung != CACHE or self._memory.get(self._prefix + body.key) is cache.NOTHING:
            work = self._start(self.promise.defaults[0], body)
            work.add_done_callback(_heard)
            ready.append(work)

    def _start(self, run: str, body: Body) -> asyncio.Future[bytes]:
        return self._loop.run_in_executor(self._threads, _call, self._defaults[run], body.fields)

    async def _default(self, run: str, work: asyncio.Future[bytes], patience_s: float) -> bytes | None:
        try:
            return await asyncio.wait_for(work, max(0.0, patience_s))
        except TimeoutError:
            reason = f"took longer than its {patience_s * 1000:.1f} ms"
        except Exception as error:  # the user's code may raise anything: the next rung answers
            reason = f"{type(error).__name__}: {error}"
        self.counts.defaults_failed += 1
        now = time.monotonic()
        if now >= self._complained_at.get(run, -COMPLAIN_EVERY_S) + COMPLAIN_EVERY_S:
            self._complained_at[run] = now
            facts = {"endpoint": self.promise.name, "run": run, "reason": reason}
            log.warning("default failed", extra={**facts, "so_far": self.counts.defaults_failed})
        return None


def _heard(work: asyncio.Future[bytes]) -> None:
    """Look at the outcome of a default that nobody may need, so that asyncio does not report it as lost."""
    if not work.cancelled():
        work.exception()


def _call(function: Default, fields: dict[str, Any]) -> bytes:  # Any: whatever JSON can say
    return wire.to_json(function(**fields))
