"""The broker of the run that this process trains for, if it has one: a train may always go on without."""

import logging
import os
from typing import TYPE_CHECKING

from twinhull.errors import BrokerError

if TYPE_CHECKING:  # redis costs a rank's start a sixth of a second, and most ranks never need it
    import redis

log = logging.getLogger(__name__)


def client(system: str) -> "redis.Redis | None":
    """A client of the run's broker; None if it has none, or it cannot be reached at all."""
    from twinhull import broker

    url = os.environ.get(broker.VARIABLE)
    if url is None or not system:
        return None
    try:
        return broker.connect(url)
    except BrokerError as error:
        log.warning("no broker", extra={"reason": str(error)})
        return None


def announce(system: str, model: str, number: int) -> None:
    """Tell serving that a version is out; it finds it by itself if this does not reach it."""
    if (found := client(system)) is None:
        return
    from twinhull.broker import Keys
    from twinhull.handoff import notice

    with found:
        notice.announce(found, Keys(system), model, number)
