import asyncio

import pytest

from twinhull import broker
from twinhull.errors import BrokerError
from twinhull.handoff import events, progress
from twinhull.handoff.events import START, Reader

pytestmark = pytest.mark.live


def test_a_stream_that_nobody_wrote_to_holds_nothing(server, client):
    assert progress.waiting(client, server.keys, "sales") == progress.Waiting(0, 0, None, is_read=False)


def test_all_waits_while_training_has_told_nothing(server, client):
    events.append(client, server.keys, "sales", [1, 2, 3])
    found = progress.waiting(client, server.keys, "sales")
    assert (found.count, found.added) == (3, 3)
    assert found.oldest_age_s is not None


def test_what_training_has_read_no_longer_waits(server, client):
    events.append(client, server.keys, "sales", [1, 2, 3])
    reader = Reader(client, server.keys, "sales", settle_s=0)
    found, offset = reader.read(limit=2)
    assert len(found) == 2
    progress.note_read(client, server.keys, "sales", offset)
    assert progress.waiting(client, server.keys, "sales").count == 1
    _, offset = reader.read(offset)
    progress.note_read(client, server.keys, "sales", offset)
    assert progress.waiting(client, server.keys, "sales") == progress.Waiting(0, 3, None, is_read=True)


def test_what_was_dropped_does_not_wait(server, client):
    for number in range(1000):
        events.append(client, server.keys, "sales", [number], bound=10)
    left = client.xlen(server.keys.events("sales"))
    assert progress.waiting(client, server.keys, "sales").count == left < 1000


def test_progress_in_a_stream_that_is_gone_does_not_count_in_the_next_one(server, client):
    events.append(client, server.keys, "sales", [1, 2, 3])
    _, offset = Reader(client, server.keys, "sales", settle_s=0).read()
    client.flushall()
    progress.note_read(client, server.keys, "sales", offset)
    events.append(client, server.keys, "sales", [9])
    assert progress.waiting(client, server.keys, "sales").count == 1


def test_waiting_is_the_same_for_asyncio(server, client):
    async def ask() -> progress.Waiting:
        async with broker.connect_async(server.url) as asynchronous:
            return await progress.waiting_async(asynchronous, server.keys, "sales")

    events.append(client, server.keys, "sales", [1, 2])
    assert asyncio.run(ask()).count == 2


def test_a_broker_that_is_away_is_an_error_to_ask_and_none_to_tell(server, client, caplog):
    server.kill()
    with pytest.raises(BrokerError, match="the broker did not take or give events"):
        progress.waiting(client, server.keys, "sales")
    progress.note_read(client, server.keys, "sales", START)
    assert "progress not shown" in caplog.text
