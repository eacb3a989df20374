import asyncio
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from twinhull import policy
from twinhull.serve import lane as lanes
from twinhull.serve.lane import Lane, Unheard
from twinhull.serve.layout import Stop
from twinhull.serve.wire import Batch, SealedReply

pytestmark = pytest.mark.anyio
STOP = Stop("rank", "app:rank", "scorers", "event", True, 4, 0.005, None)
ROW = msgspec.Raw(b"\x01")
ANSWER = msgspec.Raw(b"\x02")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Rows:
    """A lane, what it carried and what its rows heard."""

    def __init__(self, most: int = 100) -> None:
        self.carried: list[Batch] = []
        self.heard: list[tuple[str, bytes | None, str, int | None]] = []
        self.lane = Lane(
            STOP, 0, "replies", b"\0\0abcdef", lambda batch, _: self.carried.append(batch), most=most
        )

    def ask(self, name: str = "", within_s: float = 5.0) -> None:
        def heard(output: msgspec.Raw | None, reason: str, version: int | None) -> None:
            self.heard.append((name, None if output is None else bytes(output), reason, version))

        self.lane.ask(ROW, time.monotonic() + within_s, heard)

    def reply(self, batch: Batch, version: int | None = 3) -> bool:
        return self.lane.hear(SealedReply(batch.id, [ANSWER] * len(batch.rows), {}, version))


async def happens(look: Callable[[], Any]) -> None:
    end = time.monotonic() + 5
    while not look():
        assert time.monotonic() < end
        await asyncio.sleep(0.001)


async def test_a_lone_row_leaves_at_once():
    rows = Rows()
    rows.ask()
    assert [len(batch.rows) for batch in rows.carried] == [1]


async def test_rows_gather_while_a_batch_is_under_way_until_the_batch_is_full():
    rows = Rows()
    for _ in range(6):
        rows.ask()
    assert [len(batch.rows) for batch in rows.carried] == [1, 4]


async def test_rows_that_gather_leave_when_the_window_is_over():
    rows = Rows()
    rows.ask()
    rows.ask()
    await happens(lambda: len(rows.carried) == 2)


async def test_rows_that_gather_leave_when_nothing_is_under_way_any_more():
    rows = Rows()
    rows.ask()
    rows.ask()
    rows.reply(rows.carried[0])
    rows.lane.heard_together(1, time.monotonic())
    assert len(rows.carried) == 2


async def test_every_row_hears_its_own_answer():
    rows = Rows()
    rows.ask("first")
    for name in ("a", "b", "c", "d"):
        rows.ask(name)
    batch = rows.carried[1]
    rows.lane.hear(SealedReply(batch.id, [ANSWER, ANSWER, ANSWER], {1: "bad row"}, 7))
    assert rows.heard == [
        ("a", b"\x02", "", 7),
        ("b", None, "bad row", 7),
        ("c", b"\x02", "", 7),
        ("d", None, "no answer for this row", 7),
    ]


async def test_a_reply_is_heard_once_and_a_stranger_never():
    rows = Rows()
    rows.ask("a")
    assert rows.reply(rows.carried[0])
    assert not rows.reply(rows.carried[0])
    assert len(rows.heard) == 1


async def test_a_batch_that_is_lost_gives_its_place_back_at_the_deadline():
    rows = Rows()
    rows.ask(within_s=0.02)
    await happens(lambda: rows.lane.in_flight == 0)
    assert rows.lane.tally.timeouts == 1
    rows.ask()
    assert len(rows.carried) == 2


async def test_a_late_reply_is_still_heard():
    rows = Rows()
    rows.ask("a", within_s=0.02)
    await happens(lambda: rows.lane.tally.timeouts == 1)
    assert rows.reply(rows.carried[0])
    assert (rows.heard, rows.lane.tally.late) == ([("a", b"\x02", "", 3)], 1)
    assert rows.lane.in_flight == 0


async def test_a_batch_that_never_left_is_told_to_its_rows_at_once():
    rows = Rows()
    rows.ask("a")
    rows.lane.lose(rows.carried[0].id, "the broker is away")
    assert rows.heard == [("a", None, "the broker is away", None)]
    assert rows.lane.in_flight == 0


async def test_a_carrier_that_refuses_is_told_to_the_rows_at_once():
    def refuse(_batch: Batch, _stop: Stop) -> None:
        raise Unheard("full")

    heard: list[str] = []
    lane = Lane(STOP, 0, "replies", b"\0\0abcdef", refuse, most=10)
    lane.ask(ROW, time.monotonic() + 1, lambda _output, reason, _version: heard.append(reason))
    assert (heard, lane.in_flight) == (["full"], 0)


async def test_batches_that_nobody_answers_open_the_breaker_and_a_probe_closes_it():
    rows = Rows()
    for number in range(lanes.TRIP):
        rows.ask(within_s=0.002)
        await happens(lambda number=number: rows.lane.tally.timeouts == number + 1)
    assert rows.lane.breaker == policy.OPEN
    assert rows.lane.refuses(time.monotonic() + 9) == "the breaker is open"
    await happens(lambda: not rows.lane.refuses(time.monotonic() + 9))
    rows.ask("probe")
    assert rows.lane.refuses(time.monotonic() + 9) == "the breaker is open"
    rows.reply(rows.carried[-1])
    assert rows.lane.refuses(time.monotonic() + 9) == ""


async def test_a_plane_that_only_answers_late_opens_the_breaker():
    rows = Rows()
    for number in range(lanes.TRIP):
        rows.ask(within_s=0.002)
        await happens(lambda number=number: rows.lane.tally.timeouts == number + 1)
        rows.reply(rows.carried[-1])
    assert rows.lane.breaker == policy.OPEN


async def test_a_full_queue_takes_no_more():
    rows = Rows(most=10)
    for _ in range(37):
        rows.ask()
    assert (len(rows.carried), rows.lane.refuses(time.monotonic() + 9)) == (10, "the queue is full")


async def test_a_row_that_would_wait_too_long_is_refused():
    rows = Rows()
    rows.ask()
    await asyncio.sleep(0.01)
    rows.reply(rows.carried[0])
    rows.lane.heard_together(1, time.monotonic() - 0.01)  # at most 100 rows a second
    for _ in range(40):
        rows.ask()
    assert rows.lane.refuses(time.monotonic() + 0.1) == "the queue is too long"
    assert rows.lane.refuses(time.monotonic() + 10) == ""
