"""Where batches of events come from: the durable stream, read once from a kept offset to a fixed end."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from twinhull.errors import BrokerError
from twinhull.handoff.events import START, Event, Offset, Reader
from twinhull.train.data.loader import Collate, Part, Start

_CHUNK = 10_000
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Stream:
    """A stream of events; `reader` is None on all ranks but the first, and where there is no broker."""

    name: str
    reader: Reader | None


@dataclass(frozen=True, slots=True)
class EventLoader:
    """Events in global batches, in the order in which they came."""

    source: Stream
    batch_size: int
    collate: Collate | None

    def start(self, at: Start) -> "EventPass":
        """A pass from what is trained to the end of what has settled now, or the pass that was saved.

        The end is fixed when the pass begins, so a pass that is taken up again has the same batches.
        """
        saved = at.saved
        if saved is None:
            offset = at.offsets.get(self.source.name)
            begin = Offset(**offset) if offset else START
            end = asdict(_settled_end(self.source, begin)) if at.group.rank == 0 else None
            saved = {"begin": asdict(begin), "end": at.group.share(end), "at": asdict(begin), "epoch": 0}
        return EventPass(self, at, saved)


class EventPass:
    """From one offset of a stream to another. Rank 0 reads and shares, so all ranks see the same events."""

    def __init__(self, loader: EventLoader, at: Start, saved: Mapping[str, Any]) -> None:
        self._loader, self._start, self._group, self._epochs = loader, at, at.group, at.epochs
        self._begin, self._end = Offset(**saved["begin"]), Offset(**saved["end"])
        self._at, self._epoch = Offset(**saved["at"]), int(saved["epoch"])
        self._next: tuple[list[Any], Offset] | None = None

    @property
    def offset(self) -> tuple[str, dict[str, Any]]:
        """The stream and how far it is trained; the next pass begins there."""
        return self._loader.source.name, asdict(self._at if self._epoch == 0 else self._end)

    def fetch(self) -> list[Part] | None:
        """This rank's micro-batches of the next events."""
        while self._next is None:
            if self._at.index >= self._end.index:
                self._end = self._at if self._epoch == 0 else self._end
                self._epoch += 1
                self._at = self._begin
            if self._epoch >= self._epochs or self._begin.index >= self._end.index:
                return None
            bodies, after = self._read()
            if bodies:
                self._next = bodies, after
            else:  # what is unreadable or gone is logged and counted by the reader
                if after.index <= self._at.index or after.born != self._at.born:
                    self._end = after
                self._at = after
        bodies = self._next[0]
        collate = self._loader.collate or list
        parts = self._start.split(len(bodies), self._loader.batch_size)
        return [Part(collate(bodies[mine]), share) for mine, share in parts]

    def advance(self) -> None:
        """The batch was trained."""
        assert self._next is not None
        self._at = self._next[1]
        self._next = None

    def state(self) -> dict[str, Any]:
        """Begin, end and position of the pass."""
        ends = {"begin": asdict(self._begin), "end": asdict(self._end), "at": asdict(self._at)}
        return {**ends, "epoch": self._epoch}

    def batches_left(self) -> int:
        """How many global batches are still to come, if nothing is dropped unread."""
        size = self._loader.batch_size
        whole = -(-(self._end.index - self._begin.index) // size)
        return max(0, self._epochs - self._epoch - 1) * whole + -(-(self._end.index - self._at.index) // size)

    def close(self) -> None:
        """Nothing is kept open."""

    def _read(self) -> tuple[list[Any], Offset]:
        limit = min(self._loader.batch_size, self._end.index - self._at.index)
        read: Any = None
        if self._group.rank == 0:
            assert self._loader.source.reader is not None
            reader, at = self._loader.source.reader, self._at
            events, after = _patiently(lambda: reader.read(at, limit))
            read = [[event.body for event in events], asdict(after)]
        bodies, said = self._group.share(read)
        return bodies, Offset(**said)


def _settled_end(source: Stream, begin: Offset) -> Offset:
    """The offset behind the last settled event; `begin` when there is none, or no broker."""
    if source.reader is None:
        log.warning("no broker, no events", extra={"stream": source.name})
        return begin
    reader, at = source.reader, begin
    while True:
        here = at
        events, at = _patiently(lambda here=here: reader.read(here, _CHUNK))
        if not events:
            return at


def _patiently(read: Callable[[], tuple[Sequence[Event], Offset]]) -> tuple[Sequence[Event], Offset]:
    """Read as soon as the broker answers. Training floats without it; only this read has to wait."""
    wait_s = 0.1
    while True:
        try:
            return read()
        except BrokerError as error:
            if wait_s == 0.1:
                log.warning("waiting for the broker", extra={"reason": str(error)})
            time.sleep(wait_s)
            wait_s = min(wait_s * 2, 2.0)
