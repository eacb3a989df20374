"""Which batches are this worker's to answer now: new ones, those it left behind, those of a dead worker?

A pool's queue is one stream with one consumer group. An entry stays pending under its worker's name until it
is finished; whoever finds it pending for too long takes it over, and sees how often it was handed out.
"""

import time
from dataclasses import dataclass
from typing import Any

import redis
from redis.exceptions import ResponseError

from twinhull import broker
from twinhull.broker import Keys

GROUP = "workers"
FIELD = b"batch"
BLOCK_MS = 500  # short, so that a worker notices a wish to stop and a broker that is gone
AT_ONCE = 16  # entries in one read
REPLY_KEPT_S = 60  # a gateway that has gone leaves its list behind no longer than this
DEAD_LETTERS_KEPT = 10_000


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of the queue: its packed batch, and how often it was handed out before this time."""

    id: bytes
    packed: bytes
    deliveries: int = 1


@dataclass(slots=True)
class Finished:
    """What a round of work leaves: replies by list, entries that are done, those set aside with a reason."""

    replies: dict[str, list[bytes]]
    done: list[bytes]
    dead: list[tuple[Entry, str, str]]  # entry, task, reason
    samples: dict[str, bytes]


class Inbox:
    """The queue of a pool as one worker sees it. Methods raise redis.RedisError when the broker is away."""

    def __init__(self, client: redis.Redis, keys: Keys, pool: str, consumer: str, min_idle_s: float) -> None:
        self._client = client
        self._keys = keys
        self._stream = keys.queue(pool)
        self._pool = pool
        self._consumer = consumer
        self._min_idle_ms = int(min_idle_s * 1000)
        self._claim_every_s = max(0.5, min_idle_s)
        self._claim_at = 0.0
        self._left_behind = True  # entries pending under our own name, from a life or a connection before
        self._after = b"0"

    def recover(self) -> None:
        """After a lost connection: what was read but not finished is pending under our name again."""
        self._left_behind = True
        self._after = b"0"

    def take(self, count: int) -> tuple[list[Entry], bool]:
        """The next entries, and whether they were handed out before. Waits up to BLOCK_MS for new ones."""
        try:
            if self._left_behind:
                mine = self._own()
                if mine:
                    return mine, True
            if time.monotonic() >= self._claim_at:
                self._claim_at = time.monotonic() + self._claim_every_s
                taken_over = self._claimed()
                if taken_over:
                    self._claim_at = 0.0
                    return taken_over, True
            return self._read(b">", count, BLOCK_MS), False
        except ResponseError as error:
            if not str(error).startswith("NOGROUP"):
                raise
            self._make_group()
            return [], False

    def finish(self, finished: Finished) -> None:
        """Send the replies and drop what is done from the queue, in one exchange."""
        with self._client.pipeline(transaction=False) as pipeline:
            for reply_to, replies in finished.replies.items():
                pipeline.rpush(reply_to, *replies)
                pipeline.expire(reply_to, REPLY_KEPT_S)
            for task, sample in finished.samples.items():
                pipeline.set(self._keys.sample(task), sample, ex=24 * 3600)
            for entry, task, reason in finished.dead:
                pipeline.xadd(
                    self._keys.dead_letters,
                    self._letter(entry, task, reason),
                    maxlen=DEAD_LETTERS_KEPT,
                    approximate=True,
                )
            gone = [*finished.done, *(entry.id for entry, _, _ in finished.dead)]
            if gone:
                pipeline.xack(self._stream, GROUP, *gone)
                pipeline.xdel(self._stream, *gone)
            pipeline.execute(raise_on_error=True)

    def _letter(self, entry: Entry, task: str, reason: str) -> dict[Any, Any]:  # Any: redis-py's field types
        return {
            "lane": "event",
            "task": task,
            "id": entry.id,
            "pool": self._pool,
            "reason": reason,
            "at": repr(time.time()),
            "body": entry.packed,
        }

    def _own(self) -> list[Entry]:
        """One entry of those that were ours before; they are taken singly, as one of them may be poison."""
        found = self._read(self._after, 1, None)
        if not found:
            self._left_behind = False
            return []
        self._after = found[0].id
        return self._counted(found)

    def _claimed(self) -> list[Entry]:
        """One entry whose worker has been silent for too long, made ours."""
        reply: Any = self._client.xautoclaim(
            self._stream, GROUP, self._consumer, self._min_idle_ms, count=1
        )  # Any: redis-py's nested lists
        return self._counted(_entries([[self._stream, reply[1]]]))

    def _read(self, after: bytes, count: int, block_ms: int | None) -> list[Entry]:
        reply = self._client.xreadgroup(
            GROUP, self._consumer, {self._stream: after}, count=count, block=block_ms
        )
        return _entries(reply)

    def _counted(self, found: list[Entry]) -> list[Entry]:
        counted = []
        for entry in found:
            pending: Any = self._client.xpending_range(
                self._stream, GROUP, entry.id, entry.id, 1
            )  # Any: redis-py's list of dicts
            deliveries = int(pending[0]["times_delivered"]) if pending else 1
            counted.append(Entry(entry.id, entry.packed, deliveries))
        return counted

    def _make_group(self) -> None:
        """Make the group from the stream's beginning: what was sent before it existed is still to be read."""
        try:
            self._client.xgroup_create(self._stream, GROUP, id="0", mkstream=True)
        except ResponseError as error:
            if not str(error).startswith("BUSYGROUP"):
                raise
        self.recover()


def _entries(reply: Any) -> list[Entry]:  # Any: its shape depends on the protocol
    return [Entry(id_, fields.get(FIELD, b"")) for id_, fields in broker.entries(reply)]
