"""How does a launcher let hosts in? It opens a door, leaves token and mark, says what to type on a host."""

import logging
import os
import secrets
import socket

from twinhull import broker, logs, rundir
from twinhull.errors import TwinhullError
from twinhull.rundir import write_whole
from twinhull.train.supervise import place
from twinhull.train.supervise.grace import grace_s
from twinhull.train.supervise.members import Door, Terms, Welcome
from twinhull.train.supervise.workload import Workload

_TAKEN = (rundir.VARIABLE, broker.VARIABLE, logs.VARIABLE)  # ranks elsewhere need these variables too
log = logging.getLogger(__name__)


def opened(workload: Workload, listen: str, lease_s: float, nice: int) -> Door:
    """A door at `listen`, open; the log says how to come in. Raises TwinhullError."""
    job = workload.job
    assert job.directory is not None
    address, port = place.parsed(listen)
    try:
        listener = socket.create_server((address, port), backlog=64)
    except OSError as error:
        raise TwinhullError(
            f"hosts cannot join at {listen}: {error.strerror or error}.",
            hint="Choose another address or port.",
        ) from error
    token_file = job.directory / place.TOKEN_FILE
    mark = secrets.token_hex(16)
    write_whole(job.directory / place.MARK, mark)
    env = {name: os.environ[name] for name in _TAKEN if name in os.environ}
    welcome = Welcome(
        str(job.directory), "" if job.checkpoints else mark, lease_s, grace_s(job.warning_s),
        workload.notice, nice, env,
    )  # fmt: skip
    door = Door(listener, Terms(place.own_token(token_file), welcome))
    own = socket.gethostname() if address in ("", "0.0.0.0", "::") else address  # noqa: S104  # compared only
    there = f"{own}:{listener.getsockname()[1]}"
    known = "" if place.TOKEN in os.environ else f" --token-file {token_file}"
    log.info("waiting for hosts: type on each", extra={"command": f"twinhull join {there}{known}"})
    return door
