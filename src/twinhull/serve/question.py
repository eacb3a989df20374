"""How does one request go through the stages of its path, and what does it become on the way?"""

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import msgspec

from twinhull import policy
from twinhull.serve import wire
from twinhull.serve.cache import Kept
from twinhull.serve.function import NO_MODEL
from twinhull.serve.latency import Latency
from twinhull.serve.layout import Stop
from twinhull.serve.plane import AWAY, Plane

BACK_OFF_CAP_S = 30.0  # between tries of one row

Keep = Callable[[bytes, int | None], Kept]  # JSON of a fresh value, model version


@dataclass(slots=True)
class Counts:
    """Requests of one endpoint since the gateway began; `by_source` as FRESH, CACHED, DEFAULT, FAILED."""

    asked: int = 0
    by_source: list[int] = field(default_factory=lambda: [0, 0, 0, 0])
    late: int = 0  # answered after the deadline
    late_replies: int = 0  # fresh values that came too late and went into the cache
    shed: int = 0  # not sent because the answer would have come too late
    errors: int = 0  # rows that the user's code failed on
    retried: int = 0
    defaults_failed: int = 0  # default functions that raised or were too slow
    latency: Latency = field(default_factory=Latency)


class Question:
    """One request: under way until `decided` has its fresh answer, or None with a `reason`.

    The last stage's answer is kept for the cache even if it comes after that; earlier stages are not followed
    any further then.
    """

    __slots__ = (
        "_at", "_counts", "_give_up", "_keep", "_missing", "_outputs", "_plane", "_row", "_stages", "_tries",
        "_version", "decided", "reason",
    )  # fmt: skip

    def __init__(
        self,
        stages: tuple[tuple[Stop, ...], ...],
        plane: Plane,
        counts: Counts,
        *,
        give_up: float,
        keep: Keep,
    ) -> None:
        self.decided: asyncio.Future[Kept | None] = asyncio.get_running_loop().create_future()
        self.reason = ""
        self._stages = stages
        self._plane = plane
        self._counts = counts
        self._give_up = give_up
        self._keep = keep
        self._at = 0
        self._row = msgspec.Raw()
        self._outputs: list[msgspec.Raw] = []
        self._missing = 0
        self._tries = 0
        self._version: int | None = None

    def enter(self, at: int, inputs: list[msgspec.Raw]) -> None:
        """Send the inputs to all tasks of a stage, or decide at once if that is of no use."""
        stops = self._stages[at]
        self._at = at
        self._missing = len(stops)
        self._outputs = [msgspec.Raw()] * len(stops)
        self._row = inputs[0] if len(inputs) == 1 else msgspec.Raw(wire.encode(inputs))
        outputs = 0 if at == 0 else len(inputs)
        if reason := next(filter(None, (self._refusal(stop, outputs) for stop in stops)), ""):
            self._counts.shed += 1
            self._fail(reason)
            return
        for index in range(len(stops)):
            self._ask(at, index, outputs)

    def give_up(self) -> None:
        """Stop waiting for a fresh answer."""
        self._decide(None, "no fresh answer in time")

    def _refusal(self, stop: Stop, outputs: int) -> str:
        return self._plane.lane(stop, outputs).refuses(self._give_up) if self._plane.link.takes else AWAY

    def _ask(self, at: int, index: int, outputs: int) -> None:
        lane = self._plane.lane(self._stages[at][index], outputs)
        lane.ask(self._row, self._give_up, partial(self._heard, at, index, outputs))

    def _heard(  # noqa: PLR0917  # the first three are bound where the row is sent
        self,
        at: int,
        index: int,
        outputs: int,
        output: msgspec.Raw | None,
        reason: str,
        version: int | None,
    ) -> None:
        if at != self._at or self._missing < 0:
            return
        if output is None:
            if not self._tries_again(at, index, outputs, reason):
                self._fail(reason)
            return
        self._version = version if version is not None else self._version
        self._outputs[index] = output
        self._missing -= 1
        if self._missing > 0:
            return
        if at + 1 == len(self._stages):
            self._finish()
        elif not self.decided.done():
            self.enter(at + 1, self._outputs)

    def _tries_again(self, at: int, index: int, outputs: int, reason: str) -> bool:
        """Whether a row that failed is asked once more, in time and within the budget for that."""
        if reason in (AWAY, NO_MODEL):
            return False
        self._counts.errors += 1
        stop = self._stages[at][index]
        asked, retried = float(self._counts.asked), float(self._counts.retried)
        if not policy.may_retry(self._tries, stop.retries, retried, asked, stop.retry_budget):
            return False
        now = time.monotonic()
        again_at = policy.retry_at(
            now,
            self._tries,
            stop.retry_after_s,
            BACK_OFF_CAP_S,
            random.random(),  # noqa: S311  # no secret
        )
        if again_at > self._give_up:
            return False
        self._tries += 1
        self._counts.retried += 1
        self.decided.get_loop().call_later(again_at - now, self._again, at, index, outputs)
        return True

    def _again(self, at: int, index: int, outputs: int) -> None:
        if self.decided.done() or self._missing < 0:
            return
        if reason := self._refusal(self._stages[at][index], outputs):
            self._fail(reason)
        else:
            self._ask(at, index, outputs)

    def _finish(self) -> None:
        try:
            outputs = [wire.decode(sealed) for sealed in self._outputs]
            value = wire.to_json(outputs[0] if len(outputs) == 1 else outputs)
        except (TypeError, ValueError, RecursionError, msgspec.MsgspecError) as error:
            self._fail(f"the answer cannot be written as JSON: {error}")
            return
        if self.decided.done():
            self._counts.late_replies += 1
        self._decide(self._keep(value, self._version), "")

    def _fail(self, reason: str) -> None:
        self._missing = -1
        self._decide(None, reason)

    def _decide(self, fresh: Kept | None, reason: str) -> None:
        if not self.decided.done():
            self.reason = reason
            self.decided.set_result(fresh)
