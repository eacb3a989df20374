import asyncio
import random
import threading
import time
from collections.abc import Callable

import pytest

from twinhull import broker
from twinhull.errors import BrokerError
from twinhull.handoff import events
from twinhull.handoff.events import START, Event, Offset, Reader, Writer

pytestmark = pytest.mark.live


def until(done: Callable[[], bool], seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end, "not done in time"
        time.sleep(0.01)


async def until_async(done: Callable[[], bool], seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while True:
        if done():
            return
        assert time.monotonic() < end, "not done in time"
        await asyncio.sleep(0.01)


def read_until(reader: Reader, count: int, after: Offset = START) -> tuple[list[Event], Offset]:
    found: list[Event] = []

    def done() -> bool:
        nonlocal after
        new, after = reader.read(after)
        found.extend(new)
        return len(found) >= count

    until(done)
    return found, after


def test_events_come_back_in_order_with_body_time_and_id(server, client):
    before = time.time()
    bodies = [{"user": 1, "bought": [2, 3.5, None, "ü"]}, [], "text", -1]
    assert events.append(client, server.keys, "sales", bodies, key="k") == 4
    found, offset = read_until(Reader(client, server.keys, "sales", settle_s=0), 4)
    assert [event.body for event in found] == bodies
    assert [event.id for event in found] == ["k/0", "k/1", "k/2", "k/3"]
    assert all(before <= event.at <= time.time() for event in found)
    assert (offset.index, offset.lost) == (4, 0)


def test_an_append_is_done_once_per_key(server, client):
    assert events.append(client, server.keys, "sales", [1, 2], key="k") == 2
    assert events.append(client, server.keys, "sales", [1, 2], key="k") == 0
    assert events.append(client, server.keys, "sales", [3], key="other") == 1
    assert client.xlen(server.keys.events("sales")) == 3


def test_appends_without_a_key_are_all_done(server, client):
    assert [events.append(client, server.keys, "sales", [1]) for _ in range(3)] == [1, 1, 1]
    assert events.append(client, server.keys, "sales", []) == 0


def test_streams_of_one_system_are_apart(server, client):
    events.append(client, server.keys, "a", [1], key="k")
    events.append(client, server.keys, "b", [2], key="k")
    found, _ = read_until(Reader(client, server.keys, "b", settle_s=0), 1)
    assert [event.body for event in found] == [2]


def test_what_is_not_settled_is_not_read(server, client):
    events.append(client, server.keys, "sales", [1])
    reader = Reader(client, server.keys, "sales", settle_s=1e6)
    assert reader.read()[0] == []
    assert reader.read()[1].index == 0


def test_a_clock_set_back_delays_reading_only_by_the_time_to_settle(server, client):
    events.append(client, server.keys, "sales", [1])
    later = int(time.time() * 1000) + 3_600_000
    client.xadd(server.keys.events("sales"), {"id": "x", "at": 0, "n": 2, "body": b"\x02"}, id=f"{later}-0")
    client.hincrby(server.keys.events_state("sales"), "added", 1)
    events.append(client, server.keys, "sales", [3])
    found, _ = read_until(Reader(client, server.keys, "sales", settle_s=0.1), 3)
    assert [event.body for event in found] == [1, 2, 3]


def test_limits_and_offsets_walk_through_the_stream(server, client):
    events.append(client, server.keys, "sales", list(range(10)))
    reader, offset, seen = Reader(client, server.keys, "sales", settle_s=0), START, []
    read_until(reader, 10)
    for limit in (3, 1, 4, 9):
        found, offset = reader.read(offset, limit)
        seen.append([event.body for event in found])
    assert seen == [[0, 1, 2], [3], [4, 5, 6, 7], [8, 9]]
    assert reader.read(offset) == ([], offset)


def test_overflow_is_counted_to_the_event_and_logged(server, client, caplog):
    reader = Reader(client, server.keys, "sales", settle_s=0)
    events.append(client, server.keys, "sales", [0])
    _, offset = read_until(reader, 1)
    for start in range(1, 5000, 100):
        events.append(client, server.keys, "sales", list(range(start, start + 100)), bound=200)
    left = client.xlen(server.keys.events("sales"))
    assert 200 <= left < 500
    found, offset = read_until(reader, left, offset)
    assert [event.body for event in found] == list(range(5001 - left, 5001))
    assert offset.lost == 5000 - left
    assert "events dropped unread" in caplog.text


def test_training_that_begins_late_learns_what_it_missed(server, client):
    for number in range(1000):
        events.append(client, server.keys, "sales", [number], bound=10)
    left = client.xlen(server.keys.events("sales"))
    _, offset = read_until(Reader(client, server.keys, "sales", settle_s=0), left)
    assert offset.lost == 1000 - left > 0


def test_a_broker_that_lost_everything_is_noticed_and_its_new_events_are_read(server, client, caplog):
    events.append(client, server.keys, "sales", [1, 2, 3])
    reader = Reader(client, server.keys, "sales", settle_s=0)
    _, offset = read_until(reader, 3)
    client.flushall()
    assert reader.read(offset) == ([], Offset())
    assert "the broker lost events" in caplog.text
    events.append(client, server.keys, "sales", [4])
    found, _ = read_until(reader, 1, offset)
    assert [event.body for event in found] == [4]


def test_a_broker_that_is_away_is_one_clear_error(server, client):
    reader = Reader(client, server.keys, "sales")
    server.kill()
    for use in (lambda: events.append(client, server.keys, "sales", [1]), reader.read):
        with pytest.raises(BrokerError, match="the broker did not take or give events"):
            use()


def test_a_stream_of_a_newer_format_is_not_written_to(server, client):
    client.hset(server.keys.events_state("sales"), "format", 2)
    with pytest.raises(BrokerError, match="format 2"):
        events.append(client, server.keys, "sales", [1])
    assert client.exists(server.keys.events("sales")) == 0


def test_a_writer_appends_once_per_key_and_forgets_what_is_settled(server, client):
    async def write() -> None:
        async with (
            broker.connect_async(server.url) as asynchronous,
            Writer(asynchronous, server.keys, "sales", settle_s=0.1) as writer,
        ):
            assert await writer.append([1, 2], key="k") == 2
            assert await writer.append([1, 2], key="k") == 0
            assert await writer.append([]) == 0
            await until_async(lambda: writer.unsettled == 0)
            assert (writer.dropped, writer.repeated) == (0, 0)

    asyncio.run(write())
    assert client.xlen(server.keys.events("sales")) == 2


def test_a_writer_repeats_what_a_broker_that_lost_power_has_forgotten(server):
    """Also long after: the loss is noticed by the writer itself, with no append to stumble over it."""

    async def write() -> None:
        async with (
            broker.connect_async(server.url) as client,
            Writer(client, server.keys, "sales", settle_s=1) as writer,
        ):
            await writer.append(["kept"])
            await until_async(lambda: server.logged(b"kept"))
            server.note_size()
            await writer.append(["forgotten", "too"])
            await until_async(lambda: server.logged(b"too"))
            assert server.lose_power(seconds=60) > 0
            server.start()
            await until_async(lambda: writer.repeated == 2)

    asyncio.run(write())
    with broker.connect(server.url) as client:
        found, offset = read_until(Reader(client, server.keys, "sales", settle_s=0), 3)
        assert [event.body for event in found] == ["kept", "forgotten", "too"]
        assert offset.lost == 0


def test_a_writer_does_not_repeat_what_survived_though_its_key_is_long_expired(server, client):
    async def write() -> None:
        async with (
            broker.connect_async(server.url) as asynchronous,
            Writer(asynchronous, server.keys, "sales", settle_s=1) as writer,
        ):
            await writer.append([1, 2], key="k")
            client.delete(server.keys.events_once("sales", "k"))
            client.set("mark", "all of this")
            await until_async(lambda: server.logged(b"all of this"))
            server.kill()
            server.start()
            await until_async(lambda: writer.unsettled == 0)
            assert writer.repeated == 0

    asyncio.run(write())
    with broker.connect(server.url) as fresh:
        assert fresh.xlen(server.keys.events("sales")) == 2


def test_a_writer_without_room_counts_what_it_cannot_protect(server):
    async def write() -> None:
        async with broker.connect_async(server.url) as client:
            writer = Writer(client, server.keys, "sales", memory_bytes=1000)
            for _ in range(5):
                await writer.append(["x" * 300, "y" * 100])
            assert writer.dropped == 6
            assert writer.unsettled == 4

    asyncio.run(write())


@pytest.mark.timeout(90)
def test_ten_thousand_events_are_read_once_each_through_five_lost_brokers(server):
    """The broker loses power again and again; the reader dies as often and reads on from what it saved."""
    batches = [[{"n": n} for n in range(start, start + 25)] for start in range(0, 10_000, 25)]
    finished = threading.Event()
    repeated: list[int] = []

    async def write() -> None:
        async with (
            broker.connect_async(server.url, timeout_s=1.0) as client,
            Writer(client, server.keys, "sales") as writer,
        ):
            for number, batch in enumerate(batches):
                while True:
                    try:
                        await writer.append(batch, key=f"batch-{number}")
                        break
                    except BrokerError:
                        await asyncio.sleep(0.02)
                await asyncio.sleep(0.015)
            await until_async(lambda: writer.unsettled == 0)
            repeated.append(writer.repeated)

    def write_all() -> None:
        asyncio.run(write())
        finished.set()

    def trouble() -> None:
        chance = random.Random(7)
        for _ in range(5):
            end = time.monotonic() + chance.uniform(0.9, 1.4)
            while time.monotonic() < end:
                server.note_size()
                time.sleep(0.02)
            server.lose_power(seconds=chance.uniform(0.2, 0.9))
            server.start()

    threads = [threading.Thread(target=write_all), threading.Thread(target=trouble)]
    for thread in threads:
        thread.start()
    saved, consumed, deaths = START, [], 0
    end = time.monotonic() + 80
    while len(consumed) < 10_000 and time.monotonic() < end:
        with broker.connect(server.url) as client:
            reader, offset, kept = Reader(client, server.keys, "sales"), saved, []
            try:
                for _ in range(random.randint(1, 4)):
                    found, offset = reader.read(offset, limit=random.randint(1, 400))
                    kept += [event.body["n"] for event in found]
                    time.sleep(0.01)
            except BrokerError:
                time.sleep(0.02)
            if random.random() < 0.3:  # dies before its checkpoint: what it read since is read again
                deaths += 1
                continue
            saved, consumed = offset, consumed + kept
    for thread in threads:
        thread.join()
    assert finished.is_set()
    assert repeated[0] > 0, "no broker ever forgot anything"
    assert deaths > 0
    assert sorted(consumed) == list(range(10_000))
    assert (saved.index, saved.lost) == (10_000, 0)
