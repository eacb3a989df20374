"""What does the launcher know of machines across the network? Who has joined, and how each is doing.

A host that joins is told of the run and says what it has seen of its ranks whenever that changes. The
launcher never opens a connection, so hosts may stand behind a firewall and come and go as they like.
"""

import logging
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from twinhull.train.supervise import lease, wire
from twinhull.train.supervise.hosts import STACKS_S, Left, Order, Sight
from twinhull.train.supervise.wire import Connection, Refused

_BACKLOG = 64
_LEAVE_S = 2.0
_ANSWER_S = 60.0  # a host imports PyTorch before it says that it is ready
log = logging.getLogger(__name__)


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """What a host must know of the run. In `directory` it finds `mark` if it sees the same disk."""

    directory: str
    mark: str
    lease_s: float
    grace_s: float
    notice: str
    nice: int
    env: dict[str, str]


class Start(msgspec.Struct, frozen=True, tag="start"):
    """Start the ranks of a generation."""

    order: Order


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    """Ask the ranks to save and leave."""


class Kill(msgspec.Struct, frozen=True, tag="kill"):
    """End the ranks."""


class Dump(msgspec.Struct, frozen=True, tag="dump"):
    """Say where these ranks are."""

    ranks: list[int]


class Bye(msgspec.Struct, frozen=True, tag="bye"):
    """The run is over: leave with this exit code."""

    code: int


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """A host is ready. `life` is another one each time the host's process is started."""

    name: str
    life: str
    num_ranks: int
    endpoint: str


class Unfit(msgspec.Struct, frozen=True, tag="unfit"):
    """A host cannot take part, and why."""

    reason: str


class Seen(msgspec.Struct, frozen=True, tag="seen"):
    """What a host sees of the ranks of a generation; `endpoint` is for the next one."""

    generation: int
    sight: Sight
    endpoint: str


class Stacks(msgspec.Struct, frozen=True, tag="stacks"):
    """Where ranks are: the answer to Dump."""

    by_rank: dict[int, str]


class Line(msgspec.Struct, frozen=True, tag="line"):
    """What a rank has printed."""

    text: str


class Going(msgspec.Struct, frozen=True, tag="going"):
    """The host is about to go: its ranks should save and leave."""


FromLauncher = Welcome | Start | Ask | Kill | Dump | Bye
FromHost = Hello | Unfit | Seen | Stacks | Line | Going


class Member:
    """A machine that has joined: a `hosts.Host` whose other end is `join.py`. Once lost it stays lost."""

    def __init__(self, hello: Hello, connection: Connection, lease_s: float) -> None:
        self.name, self.life, self.num_ranks = hello.name, hello.life, hello.num_ranks
        self.is_going = False
        self._connection, self._patience_s = connection, lease_s + lease.margin_s(lease_s)
        self._endpoint, self._generation, self._sight = hello.endpoint, 0, Sight(left=Left())
        self._stacks: dict[int, str] | None = None

    @property
    def lost(self) -> str:
        """Why it is lost; "" while it is there."""
        return self._connection.lost(self._patience_s)

    def endpoint(self) -> str:
        """The one that it has named last."""
        return self._endpoint

    def start(self, order: Order) -> None:
        """Tell it to start ranks."""
        self._generation, self._sight = order.generation, Sight()
        self._connection.send(Start(order))

    def look(self) -> Sight:
        """What it has told last; lines that its ranks have printed are printed here."""
        while (message := self._connection.take(0.0)) is not None:
            self._hear(message)
        return self._sight

    def ask(self) -> None:
        """Tell it to ask its ranks."""
        self._connection.send(Ask())

    def kill(self) -> None:
        """Tell it to end its ranks."""
        self._connection.send(Kill())

    def stacks(self, ranks: list[int]) -> dict[int, str]:
        """Ask it, and wait a while for the answer."""
        self._stacks = None
        self._connection.send(Dump(ranks))
        until = wire.now() + 2 * STACKS_S
        while self._stacks is None and wire.now() < until and not self.lost:
            time.sleep(0.01)
            self.look()
        return self._stacks or {}

    def bye(self, code: int) -> None:
        """Send it away: the run is over."""
        self._connection.send(Bye(code))

    def replaced(self) -> None:
        """The same process has connected again, which it does only after it has ended its ranks."""
        self._connection.close("it has connected anew", peer_left=True)

    def _hear(self, message: FromHost) -> None:
        match message:
            case Seen(generation, sight, endpoint) if generation == self._generation:
                self._sight, self._endpoint = sight, endpoint
            case Stacks(by_rank):
                self._stacks = by_rank
            case Line(text):
                print(text, flush=True)
            case Going():
                self.is_going = True
            case _:  # of a generation that is over
                pass


@dataclass(frozen=True, slots=True)
class Terms:
    """What every host is told, and the token that it must know."""

    token: bytes
    welcome: Welcome


class Door:
    """Lets hosts in. Whoever cannot prove the token is turned away with a line in the log."""

    is_going = False

    def __init__(self, listener: socket.socket, terms: Terms) -> None:
        self._terms, self._members, self._lock = terms, list[Member](), threading.Lock()
        self._listener = listener
        threading.Thread(target=self._open, daemon=True).start()

    def hosts(self) -> list[Member]:
        """Those who are here to stay, in the order in which they came."""
        with self._lock:
            known = list(self._members)
        for member in known:
            member.look()
            if member.lost:
                log.warning("host lost", extra={"host": member.name, "reason": member.lost})
                with self._lock:
                    self._members.remove(member)
        return [member for member in known if not member.lost and not member.is_going]

    def close(self, code: int) -> None:
        """Let nobody in any more, send everybody away and see them leave: a word that is not read is lost."""
        self._listener.close()
        with self._lock:
            for member in self._members:
                member.bye(code)
            until = wire.now() + _LEAVE_S
            while wire.now() < until and not all(member.lost for member in self._members):
                time.sleep(0.01)

    def _open(self) -> None:
        with suppress(OSError):  # closed
            while True:
                sock, peer = self._listener.accept()
                threading.Thread(target=self._admit, args=(sock, peer[0]), daemon=True).start()

    def _admit(self, sock: socket.socket, address: str) -> None:
        try:
            wire.accept(sock, self._terms.token)
        except (OSError, Refused) as refused:
            log.warning("host refused", extra={"address": address, "reason": str(refused)})
            sock.close()
            return
        connection = Connection(sock, FromHost)
        connection.send(self._terms.welcome)
        answer = connection.take(_ANSWER_S)
        if isinstance(answer, Hello):
            self._enter(answer, connection)
            return
        reason = answer.reason if isinstance(answer, Unfit) else "it did not say that it is ready"
        log.warning("host refused", extra={"address": address, "reason": reason})
        connection.close(reason)

    def _enter(self, hello: Hello, connection: Connection) -> None:
        with self._lock:
            taken = {member.name for member in self._members if member.life != hello.life}
            named = msgspec.structs.replace(hello, name=_apart(hello.name, taken))
            for member in self._members:
                if member.life == hello.life:
                    member.replaced()
            self._members.append(Member(named, connection, self._terms.welcome.lease_s))
        log.info("host joined", extra={"host": named.name, "ranks": named.num_ranks})


def _apart(name: str, taken: set[str]) -> str:
    """The name, with a number if another host has it."""
    number, found = 1, name
    while found in taken:
        number += 1
        found = f"{name}-{number}"
    return found
