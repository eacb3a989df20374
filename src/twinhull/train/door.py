"""How does a launcher let hosts in? The token, the mark of its directory, and what to type on a host."""

import logging
import os
import secrets
import socket
from pathlib import Path

from twinhull import broker, logs, rundir
from twinhull.errors import TwinhullError
from twinhull.rundir import write_whole
from twinhull.train.grace import grace_s
from twinhull.train.join import MARK
from twinhull.train.members import Door, Terms, Welcome
from twinhull.train.workload import Workload

TOKEN, TOKEN_FILE = "TWINHULL_TOKEN", "join.token"
PORT = 7475
_TAKEN = (
    rundir.VARIABLE,
    broker.VARIABLE,
    logs.VARIABLE,
)  # what ranks elsewhere must find in their environment
log = logging.getLogger(__name__)


def opened(workload: Workload, listen: str, lease_s: float, nice: int) -> Door:
    """A door at `listen`, open; the log says how to come in. Raises TwinhullError."""
    job = workload.job
    assert job.directory is not None
    address, port = parsed(listen)
    try:
        listener = socket.create_server((address, port), backlog=64)
    except OSError as error:
        raise TwinhullError(
            f"hosts cannot join at {listen}: {error.strerror or error}.",
            hint="Choose another address or port.",
        ) from error
    mark = secrets.token_hex(16)
    write_whole(job.directory / MARK, mark)
    env = {name: os.environ[name] for name in _TAKEN if name in os.environ}
    welcome = Welcome(
        str(job.directory), "" if job.checkpoints else mark, lease_s, grace_s(job.warning_s),
        workload.notice, nice, env,
    )  # fmt: skip
    door = Door(listener, Terms(_token(job.directory / TOKEN_FILE), welcome))
    own = socket.gethostname() if address in ("", "0.0.0.0", "::") else address  # noqa: S104  # compared only
    there = f"{own}:{listener.getsockname()[1]}"
    command = f"twinhull join {there} --token-file {job.directory / TOKEN_FILE}"
    log.info("waiting for hosts: type on each", extra={"command": command})
    return door


def parsed(place: str) -> tuple[str, int]:
    """Address and port of `ADDRESS[:PORT]`. Raises TwinhullError."""
    address, _, port = place.rpartition(":") if ":" in place else (place, "", str(PORT))
    if not port.isdecimal() or int(port) > 65535:
        raise TwinhullError(f"{place}: the port must be a number up to 65535.", hint="Write ADDRESS:PORT.")
    return address.strip("[]"), int(port)


def read_token(file: Path | None) -> bytes:
    """The token that a host was given, by file or environment. Raises TwinhullError."""
    if file is None:
        if not (said := os.environ.get(TOKEN)):
            raise TwinhullError(
                "joining needs the launcher's token.", hint=f"Give --token-file FILE or set {TOKEN}."
            )
        return said.encode()
    try:
        return file.read_bytes().strip()
    except OSError as error:
        raise TwinhullError(f"the token file {file} cannot be read: {error.strerror or error}.") from error


def _token(file: Path) -> bytes:
    """The token of the environment, else the one that the run has had before, else a new one."""
    if said := os.environ.get(TOKEN):
        return said.encode()
    if not file.exists():
        with open(os.open(file, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), "w") as opened_file:  # noqa: PTH123
            opened_file.write(secrets.token_hex(32))
    return file.read_bytes().strip()
