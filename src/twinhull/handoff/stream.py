"""What a stream of events is on the broker, and what reading on from an offset means.

Beside the stream stands a hash: `added` counts every event ever appended, `born` is the id of the first one
and tells this stream from a later one of the same name, `format` is the version of all this. Each entry
carries its own number `n`, so a reader that finds 18 after 12 knows that 5 were dropped before it came.
"""

from dataclasses import dataclass, replace
from typing import Any

import msgspec
from redis.exceptions import RedisError

from twinhull.errors import BrokerError, TwinhullError

FORMAT = 1
AWAY = (RedisError, OSError)  # what a client raises when the broker does not do its part
SETTLE_S = 2.5  # a killed broker forgets up to 2 s of what it acknowledged (append-only file, everysec)

# KEYS stream state once; ARGV bound, seconds to remember the key, known id, key, at, bodies...
# One script is one transaction in the append-only file too: a torn tail holds all of an append or nothing.
APPEND = """
local format = redis.call('HGET', KEYS[2], 'format')
if format and tonumber(format) > 1 then
  return redis.error_reply('the stream has format ' .. format .. ', this Twinhull writes 1')
end
local done = redis.call('GET', KEYS[3])
if done then return {0, done} end
if ARGV[3] ~= '' then
  local kept = redis.call('XRANGE', KEYS[1], ARGV[3], ARGV[3])[1]
  if kept and kept[2][2] == ARGV[4] .. '/0' then return {0, ARGV[3]} end
end
local count = #ARGV - 5
local before = redis.call('HINCRBY', KEYS[2], 'added', count) - count
local first
for i = 1, count do
  local id = redis.call('XADD', KEYS[1], 'MAXLEN', '~', ARGV[1], '*', 'id', ARGV[4] .. '/' .. (i - 1),
    'at', ARGV[5], 'n', before + i, 'body', ARGV[5 + i])
  first = first or id
end
redis.call('HSETNX', KEYS[2], 'born', first)
redis.call('HSETNX', KEYS[2], 'format', 1)
redis.call('SET', KEYS[3], first, 'EX', ARGV[2])
return {count, first}
"""

# KEYS stream state; ARGV after, limit, milliseconds to settle, an id seen at least that long ago
READ = """
local about = redis.call('HMGET', KEYS[2], 'born', 'added', 'format')
local newest = redis.call('XREVRANGE', KEYS[1], '+', '-', 'COUNT', 1)[1]
local now = redis.call('TIME')
local settled = now[1] * 1000 + math.floor(now[2] / 1000) - ARGV[3]
local till = ARGV[4]
if settled >= tonumber(string.match(till, '^%d+')) then till = string.format('%.0f', settled) end
return {about[1] or '', about[2] or 0, about[3] or 1, newest and newest[1] or '0-0',
  redis.call('XRANGE', KEYS[1], '(' .. ARGV[1], till, 'COUNT', ARGV[2])}
"""

# KEYS stream state read
WAITING = """
local added = tonumber(redis.call('HGET', KEYS[2], 'added') or 0)
local read = redis.call('HMGET', KEYS[3], 'id', 'index', 'born')
local after, index = '0-0', 0
if read[3] and read[3] == redis.call('HGET', KEYS[2], 'born') then
  after, index = read[1], tonumber(read[2])
end
local oldest = redis.call('XRANGE', KEYS[1], '(' .. after, '+', 'COUNT', 1)[1]
local now = redis.call('TIME')
return {math.max(0, math.min(added - index, redis.call('XLEN', KEYS[1]))), added, oldest and oldest[1] or '',
  string.format('%.0f', now[1] * 1000 + math.floor(now[2] / 1000)), read[3] and 1 or 0}
"""


@dataclass(frozen=True, slots=True)
class Event:
    """One event: what was posted or answered, and when (unix seconds, by the writer's clock)."""

    id: str
    at: float
    body: Any  # Any: whatever JSON can say


@dataclass(frozen=True, slots=True)
class Offset:
    """How far a reader has come: it has done with event number `index`, whose entry is `id`.

    Plain text and numbers, so that a checkpoint can hold it. `born` names the stream that the numbers belong
    to; `lost` counts, over the reader's whole life, the events that were dropped before they could be read.
    """

    id: str = "0-0"
    index: int = 0
    born: str = ""
    lost: int = 0


START = Offset()


def order(id_: str) -> tuple[int, int]:
    """A stream id as numbers that compare as the entries lie."""
    milliseconds, _, sequence = id_.partition("-")
    return int(milliseconds), int(sequence or 0)


@dataclass(frozen=True, slots=True)
class Found:
    """One look at the stream: who it is, how far it goes, and the settled entries after some offset."""

    born: str
    added: int
    newest: str
    entries: list[tuple[str, dict[bytes, bytes]]]


def found(reply: Any) -> Found:  # Any: what the script gives
    """The reply of READ. Raises TwinhullError for a stream in a format newer than ours."""
    born, added, form, newest, entries = reply
    if int(form) > FORMAT:
        raise TwinhullError(
            f"the stream of events has format {int(form)} and this Twinhull reads up to {FORMAT}.",
            hint="Use the newer Twinhull that wrote it.",
        )
    pairs = [(id_.decode(), dict(zip(fields[::2], fields[1::2], strict=True))) for id_, fields in entries]
    return Found(born.decode(), int(added), newest.decode(), pairs)


def corrected(after: Offset, look: Found) -> Offset:
    """The offset to read on from: another one than `after` when the broker has lost what `after` stands for.

    Another stream of the same name: from its beginning. The same stream, shorter than what was read (its file
    was cut by more than a kill can explain): from its present end, since all that comes is new.
    """
    if after.born and after.born != look.born:
        return Offset(born=look.born, lost=after.lost)
    if after.index > look.added:
        return replace(after, id=look.newest, index=look.added)
    return after


def advance(after: Offset, look: Found) -> tuple[list[Event], Offset, int]:
    """The events found, the offset behind them, and how many of them could not be read as events."""
    events: list[Event] = []
    broken = 0
    offset = replace(after, born=look.born)
    for id_, fields in look.entries:
        number = int(fields.get(b"n", offset.index + 1))
        lost = max(0, number - offset.index - 1)
        try:
            body = msgspec.msgpack.decode(fields[b"body"])
            events.append(Event(fields[b"id"].decode(), float(fields[b"at"]), body))
        except (KeyError, ValueError, msgspec.DecodeError):
            broken += 1
            lost += 1
        offset = Offset(id_, number, look.born, offset.lost + lost)
    return events, offset, broken


def unreachable(error: Exception) -> BrokerError:
    """What the user reads when the broker did not do its part."""
    return BrokerError(f"the broker did not take or give events: {error}.")
