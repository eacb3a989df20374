"""What can be done with a machine that trains: start ranks, look at them, ask them to leave, end them.

`Host` is that for any machine, `LocalHost` is this one: torchrun's agent, and a folder with ranks' records.
A machine across the network is a `members.Member`, whose other end, `join.py`, uses a `LocalHost`.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Protocol

import psutil

from twinhull.train.supervise import live, memory, stacks
from twinhull.train.supervise.live import Failure, Phase, Record
from twinhull.train.supervise.notice import Notice
from twinhull.train.supervise.wire import now

AGENT_S = 5.0  # for torchrun to say how its ranks left, once they are gone
STACKS_S = 1.0  # for ranks to say where they are
_LONGEST = 1 << 14  # of a line that a rank prints and of a traceback: messages are bounded
FINAL = frozenset({Phase.DONE, Phase.STOPPED, Phase.FAILED, Phase.PEER_LOST, Phase.REFUSED})


@dataclass(frozen=True, slots=True)
class Order:
    """One generation as a host must know it. `endpoint` is where the first host keeps the store."""

    job: str
    node: int
    num_nodes: int
    endpoint: str
    generation: int


@dataclass(frozen=True, slots=True)
class Left:
    """How the ranks of a host have left: the exits that are known, by rank.

    `agent` is how torchrun left if it left before it could tell; `no_memory` says that the kernel killed for
    want of memory meanwhile.
    """

    exits: dict[int, int] = field(default_factory=dict)
    agent: int | None = None
    no_memory: bool = False


@dataclass(frozen=True, slots=True)
class Sight:
    """What is to be seen of a host's ranks: records, those that are gone, what they said of failures."""

    records: dict[int, Record] = field(default_factory=dict)
    gone: frozenset[int] = frozenset()
    failures: dict[int, Failure] = field(default_factory=dict)
    left: Left | None = None


class Host(Protocol):
    """A machine that trains. States: idle, training (until `look().left` is there), lost (`lost` says why).

    `is_going` says that it was told to be about to go, by whoever owns the machine.
    """

    name: str
    num_ranks: int

    @property
    def lost(self) -> str: ...  # noqa: D102  # said above
    @property
    def is_going(self) -> bool: ...  # noqa: D102
    def endpoint(self) -> str:
        """An address and a port that is free now, for the store of the next generation."""
        ...

    def start(self, order: Order) -> None:
        """Start the ranks of a generation."""
        ...

    def look(self) -> Sight:
        """What is to be seen now."""
        ...

    def ask(self) -> None:
        """Ask all ranks to save and leave."""
        ...

    def kill(self) -> None:
        """End all ranks with all that they have started."""
        ...

    def stacks(self, ranks: list[int]) -> dict[int, str]:
        """Where these of its ranks are; it takes a moment."""
        ...


class LocalHost:
    """This machine. PyTorch is imported once, by the agent, which serves one generation after another."""

    lost = ""

    def __init__(
        self, num_ranks: int, folder: Path, *, name: str = "here", address: str = "127.0.0.1", nice: int = 0,
        notice: str = "", env: Mapping[str, str] | None = None, cwd: Path | None = None, pipes: bool = False,
    ) -> None:  # fmt: skip
        self.name, self.num_ranks, self._address, self._folder = name, num_ranks, address, folder
        self._nice, self._pipes, self._cwd = nice, pipes, cwd
        self._env = _interfaces(address) | os.environ | dict(env or {})
        self._notice = Notice(notice, self._env)
        self.say: Callable[[str], None] = lambda _: None  # what to do with lines of ranks, if they are piped
        self._exits = folder / "exits.json"
        self._agent: subprocess.Popen[bytes] | None = None
        self._reserved: socket.socket | None = None
        self._left: Left | None = Left()
        self._kill_agent_at: float | None = None
        self._memory_kills = 0
        self._warming: int | None = None

    @property
    def is_going(self) -> bool:
        """Whether the notice was given."""
        return self._notice.is_given

    @property
    def is_warm(self) -> bool:
        """Whether ranks start without further imports."""
        if self._warming is not None:
            with suppress(BlockingIOError):
                os.read(self._warming, 1)  # end of file: the agent has let go of it, or has died
                os.close(self._warming)
                self._warming = None
        return self._warming is None

    def warm(self) -> None:
        """Have the agent import what ranks need, before they are needed."""
        if self._agent is None or self._agent.poll() is not None:
            self._agent = self._start_agent()

    def endpoint(self) -> str:
        """The port is held until the next start: nobody else can be given it meanwhile."""
        if self._reserved is None:
            self._reserved = socket.socket()
            self._reserved.bind((self._address, 0))
        return f"{self._address}:{self._reserved.getsockname()[1]}"

    def start(self, order: Order) -> None:
        """Let the agent start ranks; when all of them have left it writes how into a file."""
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True)
        self.warm()
        if self._reserved is not None:
            self._reserved.close()
            self._reserved = None
        self._left, self._kill_agent_at, self._memory_kills = None, None, memory.kills()
        said = {
            "run": str(order.generation),
            "node": order.node,
            "nodes": order.num_nodes,
            "endpoint": order.endpoint,
            "address": self._address,
            "ranks": self.num_ranks,
            "job": order.job,
            "live": str(self._folder),
            "exits": str(self._exits),
        }
        agent = self._agent
        assert agent is not None
        assert agent.stdin is not None
        with suppress(BrokenPipeError):  # it is dead; whoever looks will see
            agent.stdin.write(json.dumps(said).encode() + b"\n")
            agent.stdin.flush()

    def look(self) -> Sight:
        """The records are read anew; an agent that outlives its killed ranks is ended."""
        if self._left is None:
            self._left = self._how_left()
        records = live.read(self._folder)
        gone = frozenset(rank for rank, record in records.items() if not _lives(record))
        failures = {
            rank: replace(failure, error=failure.error[:_LONGEST], traceback=failure.traceback[-_LONGEST:])
            for rank, record in records.items()
            if record.phase in FINAL and (failure := live.failure(self._folder, rank)) is not None
        }
        return Sight(records, gone, failures, self._left)

    def ask(self) -> None:
        """SIGTERM to each rank alone."""
        for record in live.read(self._folder).values():
            with suppress(ProcessLookupError, PermissionError):
                os.kill(record.pid, signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL to each rank's group, which is its session; soon after to an agent that says nothing."""
        records = live.read(self._folder)
        for record in records.values():
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(record.pid, signal.SIGKILL)
        if self._kill_agent_at is None and self._left is None:
            self._kill_agent_at = now() + (AGENT_S if records else 0.0)

    def stacks(self, ranks: list[int]) -> dict[int, str]:
        """What each rank writes when it is asked, or why it cannot."""
        records = live.read(self._folder)
        asked = {rank: records[rank] for rank in ranks if rank in records}
        return stacks.collect(self._folder, asked, STACKS_S)

    def end(self) -> None:
        """End the agent, and with it all ranks."""
        self._notice.end()
        if self._agent is None:  # nothing of ours is in the folder
            return
        self._agent.kill()
        self._agent.wait()
        assert self._agent.stdin is not None
        with suppress(BrokenPipeError):
            self._agent.stdin.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _how_left(self) -> Left | None:
        agent = self._agent
        assert agent is not None
        code = None if self._exits.exists() else agent.poll()
        if code is None and not self._exits.exists():
            if self._kill_agent_at is None or now() < self._kill_agent_at:
                return None
            agent.kill()  # it waits for a node that is gone, or for a rank that left without an error
            agent.wait()
            self.warm()
        told = json.loads(self._exits.read_text()) if self._exits.exists() else {}
        exits = {int(rank): int(exit_code) for rank, exit_code in told.items()}
        for rank, record in live.read(self._folder).items():
            with suppress(FileNotFoundError, ValueError):
                exits[rank] = int((self._folder / f"exit-{record.pid}").read_text())
        return Left(exits, code, memory.kills() > self._memory_kills)

    def _start_agent(self) -> subprocess.Popen[bytes]:
        local = {
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # a shared one hands out dead addresses
            "OMP_NUM_THREADS": "1",
        }
        self._warming, theirs = os.pipe()
        os.set_blocking(self._warming, False)
        words = ["--parent", str(os.getpid()), "--nice", str(self._nice), "--warming", str(theirs)]
        agent = subprocess.Popen(
            [sys.executable, "-m", "twinhull.train.supervise.torchrun", *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE if self._pipes else None,
            stderr=subprocess.STDOUT if self._pipes else None,
            env=self._env | local,
            cwd=self._cwd,
            pass_fds=(theirs,),
            start_new_session=True,  # a signal to the launcher's group is the launcher's to pass on
        )
        os.close(theirs)
        if agent.stdout is not None:
            threading.Thread(target=self._pump, args=(agent.stdout,), daemon=True).start()
        return agent

    def _pump(self, stream: IO[bytes]) -> None:
        with stream:
            for line in stream:
                self.say(line[:_LONGEST].decode(errors="replace").rstrip("\n"))


def _interfaces(address: str) -> dict[str, str]:
    """The network interface that has the address, in the words of gloo and NCCL: they would guess."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address == address for one in addresses):
            return {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": name}
    return {}


def _lives(record: Record) -> bool:
    try:
        return psutil.Process(record.pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
