"""Where do batches go, and which lane hears a reply? The gateway's view of everything behind it."""

import logging
import os
from collections.abc import Callable
from functools import partial

import msgspec

from twinhull.broker import Keys
from twinhull.serve import wire
from twinhull.serve.lane import Lane, Unheard
from twinhull.serve.layout import DEFAULT_BOUND, Stop
from twinhull.serve.link import LOST, Link

log = logging.getLogger(__name__)

FIELD = "batch"  # of a stream entry
AWAY = "the broker is away"

Carry = Callable[[wire.Batch], None]


class Plane:
    """All lanes of a gateway, made when first needed, and the way back for replies.

    `jobs` carries batches of the job lane; `bounds` says how many entries each pool's stream may hold.
    """

    def __init__(
        self, url: str, keys: Keys, bounds: dict[str, int], jobs: Carry | None, reply_to: str
    ) -> None:
        self.link = Link(url, reply_to, self._hear)
        self.lanes: list[Lane] = []
        self.unknown = 0  # replies that nobody waits for any more, or for a second time
        self.unreadable = 0
        self._keys = keys
        self._bounds = bounds
        self._jobs = jobs
        self._reply_to = reply_to
        self._by_place: dict[tuple[str, str, int], Lane] = {}
        self._mark = os.urandom(6)

    def lane(self, stop: Stop, outputs: int) -> Lane:
        """The lane of a task whose rows are the outputs of so many tasks (0: a request's body)."""
        place = (stop.task, stop.lane, outputs)
        found = self._by_place.get(place)
        if found is None:
            # A batch's name begins with its lane's number, so that a reply finds its lane.
            prefix = len(self.lanes).to_bytes(2) + self._mark
            carry = self._carry_job if stop.lane == "job" else self._carry_event
            most = self._bounds.get(stop.pool, DEFAULT_BOUND)
            found = Lane(stop, outputs, self._reply_to, prefix, carry, most=most)
            self.lanes.append(found)
            self._by_place[place] = found
        return found

    def _carry_event(self, batch: wire.Batch, stop: Stop) -> None:
        bound = self._bounds.get(stop.pool, DEFAULT_BOUND)
        words = ("XADD", self._keys.queue(stop.pool), "MAXLEN", "~", bound, "*", FIELD, wire.encode(batch))
        if not self.link.send(*words, done=partial(self._sent, batch.id)):
            raise Unheard(AWAY)

    def _carry_job(self, batch: wire.Batch, stop: Stop) -> None:
        if self._jobs is None:
            raise Unheard(f"there is no job lane for {stop.task}")
        self._jobs(batch)

    def _sent(self, name: bytes, result: object) -> None:
        if result is LOST and (lane := self._lane_of(name)) is not None:
            lane.lose(name, AWAY)

    def _hear(self, packed: list[bytes]) -> None:
        together: dict[int, tuple[Lane, int, float]] = {}
        for data in packed:
            try:
                reply = wire.decode_sealed(data)
            except msgspec.MsgspecError as error:
                self.unreadable += 1
                log.warning("reply unreadable", extra={"reason": str(error)})
                continue
            lane = self._lane_of(reply.id)
            known = None if lane is None else lane.knows(reply.id)
            if lane is None or known is None:
                self.unknown += 1
                continue
            _, rows, since = together.get(id(lane), (lane, 0, known[1]))
            together[id(lane)] = (lane, rows + known[0], min(since, known[1]))
            lane.hear(reply)
        for lane, rows, since in together.values():
            lane.heard_together(rows, since)

    def _lane_of(self, name: bytes) -> Lane | None:
        index = int.from_bytes(name[:2])
        return self.lanes[index] if index < len(self.lanes) else None
