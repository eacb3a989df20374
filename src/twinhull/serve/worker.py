"""How does a worker of the event lane answer the batches of its pool?

It takes several entries, calls each task once for the rows of all of them, and sends replies and
acknowledgements in one exchange. It outlives its broker, drops what nobody waits for any more, and swaps
models between batches.
"""

import argparse
import gc
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from redis.exceptions import RedisError

from twinhull import broker, logs, policy, processes
from twinhull.errors import TwinhullError, UserCodeError
from twinhull.handoff import notice
from twinhull.handoff.registry import Registry
from twinhull.rundir import RunDirectory
from twinhull.serve import layout, wire
from twinhull.serve.function import Function
from twinhull.serve.inbox import AT_ONCE, BLOCK_MS, Entry, Finished, Inbox
from twinhull.serve.layout import Stop
from twinhull.serve.models import Loaded, Slot
from twinhull.system.load import load
from twinhull.system.model import System

log = logging.getLogger(__name__)

TIMEOUT_S = 2.0  # of an exchange with the broker, beyond a wait for new entries
BACK_OFF_S, BACK_OFF_CAP_S = 0.05, 0.5
SAMPLE_ROWS = 8  # rows that warm up a new model
SAMPLE_EVERY_S = 10.0
ROUND_S = 0.05  # a worker takes no more at once than it can answer in about this time


@dataclass(slots=True)
class Counts:
    """What a worker has done since it began."""

    batches: int = 0
    rows: int = 0
    errors: int = 0
    expired: int = 0
    redelivered: int = 0
    dead_letters: int = 0


@dataclass(slots=True)
class Post:
    """One task of this worker: its function, its model's slot, the rows seen last."""

    stop: Stop
    function: Function
    slot: Slot | None = None
    sample: tuple[int, list[Any]] = (0, [])  # of so many outputs, rows; Any: decoded. Replaced as a whole
    sampled_at: float = 0.0

    def warm_up(self, model: object) -> None:
        """Call the function once with a new model and the rows seen last."""
        outputs, rows = self.sample
        self.function.check(rows, outputs, model)


class Worker:
    """Answers batches until told to stop. Nothing that a user's function or the broker does ends it."""

    def __init__(self, system: System, url: str, registry: Registry, pool: str, index: int) -> None:
        self.counts = Counts()
        self._keys = broker.Keys(system.name)
        self._client = broker.connect(url, timeout_s=BLOCK_MS / 1000 + TIMEOUT_S)
        self._hints = broker.connect(url, timeout_s=0.5)
        self._registry = registry
        self._most_deliveries = layout.most_deliveries(system, pool)
        self._posts = {
            stop.task: Post(stop, Function(stop.run, batch=stop.batch))
            for stop in layout.event_stops(system, pool).values()
        }
        min_idle_s = max(0.2, 2 * layout.longest_deadline_s(system, pool))
        self._inbox = Inbox(self._client, self._keys, pool, f"{socket.gethostname()}-{index}", min_idle_s)
        self._slots = self._make_slots()
        self._stopping = False
        self._take = AT_ONCE
        self._told_at = 0.0
        self._name = f"{pool}-{index}"

    def stop(self) -> None:
        """Make `run` end after the batches in hand."""
        self._stopping = True

    def run(self) -> None:
        """Answer batches until stopped."""
        self._fetch_samples()
        for slot in self._slots:
            slot.start()
        log.info("worker ready", extra={"tasks": sorted(self._posts)})
        failures = 0
        while not self._stopping:
            try:
                self._turn()
                if failures:
                    log.info("broker reached")
                failures = 0
            except (RedisError, OSError) as error:
                if not failures:
                    log.warning("broker away", extra={"reason": f"{type(error).__name__}: {error}"})
                failures += 1
                self._inbox.recover()
                time.sleep(policy.restart_at(0.0, failures, BACK_OFF_S, BACK_OFF_CAP_S))
        for slot in self._slots:
            slot.stop()
        log.info("worker left", extra={"rows": self.counts.rows})

    def _make_slots(self) -> list[Slot]:
        """One slot per model and class; tasks with the same ones share it."""
        sharing: dict[tuple[str, type], list[Post]] = {}
        for post in self._posts.values():
            kind = post.function.model_class
            if kind is None:
                continue
            if post.stop.model is None:
                raise UserCodeError(
                    f"{post.stop.run} wants a model, but task {post.stop.task} names none.",
                    hint="Add `model:` with the name of a training workload.",
                )
            sharing.setdefault((post.stop.model, kind), []).append(post)
        slots = []
        for (name, kind), posts in sharing.items():
            hint = partial(notice.newest_hint, self._hints, self._keys, name)
            slot = Slot(self._registry, name, kind, warm_ups=[p.warm_up for p in posts], hint=hint)
            slots.append(slot)
            for post in posts:
                post.slot = slot
        return slots

    def _fetch_samples(self) -> None:
        """Rows that other workers have seen, to warm the first model with; none without a broker."""
        for post in self._posts.values():
            try:
                packed: Any = self._hints.get(self._keys.sample(post.stop.task))  # Any: redis-py's reply
                if packed:
                    outputs, rows = wire.decode(packed)
                    post.sample = (int(outputs), list(rows))
            except (RedisError, msgspec.MsgspecError, ValueError, TypeError) as error:
                log.info("no sample", extra={"task": post.stop.task, "reason": str(error)})

    def _turn(self) -> None:
        entries, redelivered = self._inbox.take(self._take)
        if entries:
            started = time.monotonic()
            finished = Finished({}, [], [], {})
            self._work(entries, redelivered, finished)
            self._inbox.finish(finished)
            each_s = (time.monotonic() - started) / len(entries)
            self._take = max(1, min(AT_ONCE, int(ROUND_S / each_s)))
        self._tell()

    def _work(self, entries: list[Entry], redelivered: bool, finished: Finished) -> None:
        together: dict[tuple[str, int], list[tuple[Entry, wire.Batch]]] = {}
        for entry in entries:
            batch = self._opened(entry, finished)
            if batch is not None:
                together.setdefault((batch.task, batch.outputs), []).append((entry, batch))
        if redelivered:
            self.counts.redelivered += len(entries)
        for (task, outputs), members in together.items():
            for portion in _portions(members, self._posts[task].stop.size):
                self._answer(self._posts[task], outputs, portion, finished)

    def _opened(self, entry: Entry, finished: Finished) -> wire.Batch | None:
        """The batch of an entry, or None if it is not to be answered: then it is finished here."""
        if not entry.packed:  # the stream was trimmed while the entry was pending
            finished.done.append(entry.id)
            return None
        try:
            batch = wire.decode_batch(entry.packed)
        except (msgspec.MsgspecError, ValueError, TypeError) as error:
            self._set_aside(entry, "", f"unreadable: {error}", finished)
            return None
        if policy.is_poison(entry.deliveries, self._most_deliveries):
            reason = f"handed out {self._most_deliveries} times without an end"
        elif batch.task not in self._posts:
            reason = f"no task {batch.task!r} in this pool"
        elif policy.is_expired(time.time(), batch.deadline):
            self.counts.expired += 1
            finished.done.append(entry.id)
            return None
        else:
            return batch
        self._set_aside(entry, batch.task, reason, finished)
        errors = dict.fromkeys(range(len(batch.rows)), reason)
        reply = wire.Reply(batch.id, [None] * len(batch.rows), errors)
        finished.replies.setdefault(batch.reply_to, []).append(wire.encode(reply))
        return None

    def _set_aside(self, entry: Entry, task: str, reason: str, finished: Finished) -> None:
        self.counts.dead_letters += 1
        finished.dead.append((entry, task, reason))
        log.error("dead letter", extra={"task": task, "entry": entry.id.decode(), "reason": reason})

    def _answer(
        self, post: Post, outputs: int, portion: list[tuple[Entry, wire.Batch]], finished: Finished
    ) -> None:
        started = time.monotonic()
        rows = [row for _, batch in portion for row in batch.rows]
        loaded: Loaded | None = None if post.slot is None else post.slot.current
        outcome = post.function.answer(rows, outputs, None if loaded is None else loaded.model)
        took_s = time.monotonic() - started
        begin = 0
        for entry, batch in portion:
            end = begin + len(batch.rows)
            errors = {i - begin: reason for i, reason in outcome.errors.items() if begin <= i < end}
            version = None if loaded is None else loaded.number
            reply = wire.Reply(batch.id, outcome.rows[begin:end], errors, version, took_s)
            finished.replies.setdefault(batch.reply_to, []).append(wire.encode(reply))
            finished.done.append(entry.id)
            begin = end
        self.counts.batches += 1
        self.counts.rows += len(rows)
        self.counts.errors += len(outcome.errors)
        self._remember(post, outputs, [r for i, r in enumerate(rows) if i not in outcome.errors], finished)

    def _remember(self, post: Post, outputs: int, rows: list[Any], finished: Finished) -> None:
        """Keep rows that were answered well, now and then also for workers that start later."""
        now = time.monotonic()
        if rows:
            post.sample = (outputs, rows[:SAMPLE_ROWS])
            if now >= post.sampled_at + SAMPLE_EVERY_S or not post.sampled_at:
                post.sampled_at = now
                finished.samples[post.stop.task] = wire.encode(post.sample)

    def _tell(self) -> None:
        now = time.monotonic()
        if now >= self._told_at + 1.0:
            self._told_at = now
            prefix = f"serve.worker.{self._name}."
            logs.sample({f"{prefix}{name}": getattr(self.counts, name) for name in Counts.__slots__})


def _portions(members: list[tuple[Entry, wire.Batch]], size: int) -> Iterator[list[tuple[Entry, wire.Batch]]]:
    """Whole entries, as many as make at most `size` rows; one that is larger by itself comes alone."""
    portion: list[tuple[Entry, wire.Batch]] = []
    rows = 0
    for entry, batch in members:
        if portion and rows + len(batch.rows) > size:
            yield portion
            portion = []
            rows = 0
        portion.append((entry, batch))
        rows += len(batch.rows)
    if portion:
        yield portion


def main(arguments: list[str] | None = None) -> int:
    """Run one worker of the event lane, as the supervisor starts it."""
    processes.die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parser = argparse.ArgumentParser(prog="python -m twinhull.serve.worker", description=__doc__)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--pool", required=True)
    parser.add_argument("--index", type=int, default=0)
    given = parser.parse_args(arguments)
    logs.setup(f"worker:{given.pool}-{given.index}")
    directory = RunDirectory(given.run)
    try:
        system = load(directory.system).system
        url = os.environ[broker.VARIABLE]
        worker = Worker(system, url, Registry(directory.registry), given.pool, given.index)
    except TwinhullError as error:
        log.error(str(error))  # noqa: TRY400  # one clear line
        return error.exit_code
    signal.signal(signal.SIGTERM, lambda *_: worker.stop())
    gc.freeze()
    worker.run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
