"""`twinhull join`: this machine trains for a launcher elsewhere, for as long as the launcher can reach it.

States: connecting, idle, training, going. The law: ranks live only while the connection is open and the lease
lasts, so a machine that is cut off stops by itself. It then connects again, for ever, until it is told that
the run is over or is told to go.
"""

import importlib.util
import logging
import os
import shutil
import signal
import socket
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from twinhull import logs
from twinhull.errors import TwinhullError
from twinhull.train.supervise import lease, place, scratch, wire
from twinhull.train.supervise.hosts import LocalHost, Sight
from twinhull.train.supervise.members import (
    Ask,
    Bye,
    Dump,
    FromLauncher,
    Going,
    Hello,
    Kill,
    Line,
    Seen,
    Stacks,
    Start,
    Unfit,
    Welcome,
)
from twinhull.train.supervise.wire import Connection, Ping, Pong, now

STOPPED = 75
TICK_S = 0.05
FIRST_WAIT_S, LONGEST_WAIT_S = 0.2, 5.0  # between two tries to connect
_CONNECT_S = 5.0
_LAST_S = 1.0  # beyond the launcher's grace, before a machine that must go ends its ranks itself
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line says about one `join`; `code` is the directory of the user's modules."""

    address: str
    port: int
    token: bytes
    name: str
    num_ranks: int
    code: Path

    @classmethod
    def of(
        cls, launcher: str, *, ranks: int | None, name: str | None, token_file: Path | None, code: Path
    ) -> "Options":
        """What was typed, with what is usual for the rest. Raises TwinhullError."""
        if ranks is not None and ranks < 1:
            raise TwinhullError(f"--ranks {ranks}: there must be at least one.")
        if not code.is_dir():
            raise TwinhullError(f"--code {code}: there is no such directory.")
        address, port = place.parsed(launcher)
        token = place.given_token(token_file)
        return cls(
            address, port, token, name or socket.gethostname(), ranks or default_ranks(), code.resolve()
        )


def join(options: Options) -> int:
    """Train for the launcher until the run is over. Gives the exit code. Raises TwinhullError."""
    if importlib.util.find_spec("torch") is None:
        raise TwinhullError("training needs PyTorch:", hint="pip install 'twinhull[train]'")
    logs.setup(f"join:{options.name}")
    joined = Joined(options)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, joined.go)
    try:
        return joined.run()
    finally:
        joined.end()


def default_ranks() -> int:
    """One rank a GPU; without GPUs one a core, since a rank computes on one thread."""
    gpus = len(list(Path("/dev").glob("nvidia[0-9]*")))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return gpus or cores or 1


class Joined:
    """One machine's membership, over as many connections as it takes."""

    def __init__(self, options: Options) -> None:
        self._options, self._life = options, uuid.uuid4().hex
        self._scratch, self._held = scratch.make()
        self._asked_to_go, self._waits_s = 0, FIRST_WAIT_S
        self._terms: tuple[Welcome, str] | None = None
        self._host: LocalHost | None = None

    def run(self) -> int:
        """Connect, serve, and connect again when the connection is lost."""
        while not self._asked_to_go:
            if (sock := self._connect()) is not None and (code := self._serve(sock)) is not None:
                return code
            self._rest()
        return STOPPED

    def go(self, _number: int, _frame: FrameType | None) -> None:
        """A signal: this machine is about to go. Asked twice it goes at once."""
        self._asked_to_go += 1

    def end(self) -> None:
        """End everything that it has started."""
        if self._host is not None:
            self._host.end()
        self._held.close()
        shutil.rmtree(self._scratch, ignore_errors=True)

    def _connect(self) -> socket.socket | None:
        """A socket on which both sides have proved the token. Raises wire.Refused."""
        sock: socket.socket | None = None
        try:
            sock = socket.create_connection((self._options.address, self._options.port), _CONNECT_S)
            wire.introduce(sock, self._options.token)
        except OSError as error:
            if sock is not None:
                sock.close()
            if self._waits_s == FIRST_WAIT_S:
                there = f"{self._options.address}:{self._options.port}"
                log.warning("no launcher there, trying on", extra={"launcher": there, "reason": str(error)})
            return None
        return sock

    def _rest(self) -> None:
        until = now() + self._waits_s
        self._waits_s = min(self._waits_s * 2, LONGEST_WAIT_S)
        while now() < until and not self._asked_to_go:
            time.sleep(TICK_S)

    def _serve(self, sock: socket.socket) -> int | None:
        """Obey until the connection ends; an exit code if it shall not be opened again."""
        connection = Connection(sock, FromLauncher)
        welcome = connection.take(wire.HANDSHAKE_S)
        if not isinstance(welcome, Welcome):
            connection.close("the launcher did not answer")
            return None
        if unfit := _unfit(welcome):
            connection.send(Unfit(unfit))
            raise TwinhullError(unfit, hint="Give all hosts the same file system at the same path.")
        host = self._host_for(welcome, sock.getsockname()[0], connection)
        while not host.is_warm and not self._asked_to_go and not connection.closed:
            time.sleep(TICK_S)
        if connection.closed:
            return None
        began = now()
        connection.send(Hello(self._options.name, self._life, host.num_ranks, host.endpoint()))
        log.info("joined", extra={"ranks": host.num_ranks, "run": welcome.directory})
        self._waits_s = FIRST_WAIT_S
        service = _Service(host, connection, welcome, self._scratch, began + welcome.lease_s)
        try:
            return service.run(lambda: self._asked_to_go)
        finally:
            host.kill()
            _until_left(host)
            connection.close("leaving")

    def _host_for(self, welcome: Welcome, address: str, connection: Connection) -> LocalHost:
        """The same as before if nothing has changed: its agent is warm."""
        if self._host is None or self._terms != (welcome, address):
            if self._host is not None:
                self._host.end()
            paths = [str(self._options.code), *filter(None, [os.environ.get("PYTHONPATH")])]
            env = {**welcome.env, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
            self._host = LocalHost(
                self._options.num_ranks, self._scratch / "live", name=self._options.name, address=address,
                nice=welcome.nice, env=env, cwd=self._options.code, notice=welcome.notice, pipes=True,
            )  # fmt: skip
            self._terms = welcome, address
        self._host.say = lambda text: connection.send(Line(text))
        self._host.warm()
        return self._host


@dataclass(slots=True)
class _Service:
    """One connection, obeyed. `until` is when the lease ends."""

    host: LocalHost
    connection: Connection
    welcome: Welcome
    scratch: Path
    until: float
    _generation: int = 0
    _told: Sight | None = None
    _ping_at: float = 0.0
    _go_by: float | None = None

    def run(self, asked_to_go: Callable[[], int]) -> int | None:
        """An exit code when the machine shall leave the run; None when the connection is lost."""
        lease.write(self.scratch, self.until)
        while True:
            if self.connection.closed or now() > self.until:
                reason = self.connection.closed or "the launcher was not heard"
                log.warning("cut off: ending our ranks", extra={"reason": reason})
                self.host.kill()
                return None
            self._ping()
            if (code := self._obey()) is not None:
                return code
            self._tell()
            if (asked_to_go() or self.host.is_going) and self._gone(at_once=asked_to_go() > 1):
                return STOPPED

    def _ping(self) -> None:
        if now() >= self._ping_at:
            self._ping_at = now() + lease.PING_S
            self.connection.send(Ping(now()))

    def _obey(self) -> int | None:
        """Wait a moment for orders and carry them out; the run's exit code when it is over."""
        message = self.connection.take(TICK_S)
        while message is not None:
            match message:
                case Pong(sent):
                    self.until = max(self.until, sent + self.welcome.lease_s)
                    lease.write(self.scratch, self.until)
                case Start(order):
                    self._generation, self._told = order.generation, None
                    self.host.start(order)
                case Ask():
                    self.host.ask()
                case Kill():
                    self.host.kill()
                case Dump(ranks):
                    self.connection.send(Stacks(self.host.stacks(ranks)))
                case Bye(code):
                    log.info("the run is over", extra={"exit": code})
                    return code
                case _:
                    pass
            message = self.connection.take(0.0)
        return None

    def _tell(self) -> None:
        sight = self.host.look()
        if sight != self._told:
            self._told = sight
            endpoint = self.host.endpoint() if sight.left is not None else ""
            self.connection.send(Seen(self._generation, sight, endpoint))

    def _gone(self, *, at_once: bool) -> bool:
        """Tell that this machine is about to go; whether its ranks have left, or had the time to."""
        if self._go_by is None:
            self._go_by = now() + self.welcome.grace_s + _LAST_S
            log.info("going", extra={"within_s": self.welcome.grace_s})
            self.connection.send(Going())
        return at_once or self.host.look().left is not None or now() > self._go_by


def _until_left(host: LocalHost) -> None:
    """Wait until ranks that were killed are gone: nothing of them may live when the launcher hears of us."""
    while host.look().left is None:
        time.sleep(TICK_S / 5)
        host.kill()


def _unfit(welcome: Welcome) -> str:
    """Why this machine cannot take part; "" if it can."""
    if not welcome.mark:
        return ""
    try:
        same = (Path(welcome.directory) / place.MARK).read_text(encoding="utf-8") == welcome.mark
    except OSError:
        return f"the run directory {welcome.directory} of the launcher is not to be seen from here."
    return "" if same else f"{welcome.directory} here is not the launcher's run directory but another one."
