"""How serving hears early that a version was published: a number on the broker, a hint and nothing more.

The registry is the truth. A worker reads the hint in the round trip it makes anyway and looks at the registry
every few seconds regardless, so a notice that is lost costs seconds, never a version.
"""

import logging

import redis

from twinhull.broker import Keys
from twinhull.handoff.stream import AWAY

log = logging.getLogger(__name__)


def announce(client: redis.Redis, keys: Keys, model: str, version: int) -> bool:
    """Leave the hint that `version` is out; whether the broker took it. A broker away is only logged."""
    try:
        client.set(keys.notice(model), version)
    except AWAY as error:
        log.warning("notice not sent", extra={"model": model, "version": version, "reason": str(error)})
        return False
    return True


def newest_hint(client: redis.Redis, keys: Keys, model: str) -> int | None:
    """The announced number, or None when there is none or the broker is away."""
    try:
        return announced(client.get(keys.notice(model)))
    except AWAY:
        return None


def announced(reply: object) -> int | None:
    """The number in the broker's reply to `GET keys.notice(model)`, for those who fetch it in a pipeline."""
    return int(reply) if isinstance(reply, bytes) and reply.isdigit() else None
