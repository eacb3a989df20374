"""How much waits for training, for people to see; what is truly read stands in training's checkpoint."""

import logging
from dataclasses import dataclass
from typing import Any

import redis
import redis.asyncio

from twinhull.broker import Keys
from twinhull.handoff import stream
from twinhull.handoff.stream import Offset

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Waiting:
    """What a stream holds for training."""

    count: int  # not yet read, as far as training has told
    added: int  # ever appended
    oldest_age_s: float | None  # None: nothing waits
    is_read: bool  # whether training has ever told of this stream


def note_read(client: redis.Redis, keys: Keys, name: str, offset: Offset) -> None:
    """Tell how far training has read, after a checkpoint holds it; a broker that is away is only logged."""
    fields: dict[Any, Any] = {"id": offset.id, "index": offset.index, "born": offset.born}  # Any: redis-py's
    try:
        client.hset(keys.events_read(name), mapping=fields)
    except stream.AWAY as error:
        log.warning("progress not shown", extra={"stream": name, "reason": str(error)})


def waiting(client: redis.Redis, keys: Keys, name: str) -> Waiting:
    """What waits for training. Raises BrokerError."""
    try:
        return _waiting(client.execute_command("EVAL", *_question(keys, name)))
    except stream.AWAY as error:
        raise stream.unreachable(error) from error


async def waiting_async(client: redis.asyncio.Redis, keys: Keys, name: str) -> Waiting:
    """The same for asyncio."""
    try:
        return _waiting(await client.execute_command("EVAL", *_question(keys, name)))
    except stream.AWAY as error:
        raise stream.unreachable(error) from error


def _question(keys: Keys, name: str) -> list[str | int]:
    return [stream.WAITING, 3, keys.events(name), keys.events_state(name), keys.events_read(name)]


def _waiting(reply: Any) -> Waiting:  # Any: what the script gives
    count, added, oldest, now, read = reply
    age = max(0.0, (int(now) - int(oldest.partition(b"-")[0])) / 1000) if oldest and count else None
    return Waiting(int(count), int(added), age, bool(read))
