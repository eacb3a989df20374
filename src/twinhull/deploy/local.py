"""`twinhull up`: one supervisor on this machine that starts every process of a system and ends them all.

The law: when `up` returns, however it returns, nothing that it started lives. The kernel ends the children of
a supervisor that is killed; what training and serving keep on disk lets the next `up` continue.
"""

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from twinhull import __version__, broker, processes
from twinhull.deploy import children, preflight, record, scale
from twinhull.deploy.board import Board
from twinhull.deploy.journal import Keeper
from twinhull.deploy.record import Record
from twinhull.deploy.screen import Lines, LiveScreen, Screen
from twinhull.errors import TwinhullError
from twinhull.processes import Child, Command, Exit
from twinhull.rundir import RunDirectory, default_for, write_whole
from twinhull.system.load import load
from twinhull.system.model import State, System
from twinhull.system.runnable import missing
from twinhull.system.write import dump

HOST = "127.0.0.1"
_TICK_S = 0.5
_STOPPED_AND_SAVED = 75
_INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line may say about one `up`."""

    run: Path | None = None
    only: children.Plane | None = None
    port: int = 7474
    ranks: int | None = None
    workers: int | None = None
    join_at: str | None = None
    plain: bool = False
    log_format: Literal["console", "json"] = "console"


def up(file: Path, options: Options) -> int:
    """Run the system of a file until Ctrl-C, SIGTERM or the end of a training that runs alone.

    Gives the exit code.
    Raises TwinhullError for whatever the user can mend, before anything is started.
    """
    described = load(file)
    system = described.system
    if lacking := missing(system):
        raise TwinhullError(f"{file} cannot be run yet, it lacks: " + "; ".join(lacking) + ".")
    for name, value in (("--ranks", options.ranks), ("--workers", options.workers)):
        if value is not None and value < 1:
            raise TwinhullError(f"{name} {value}: there must be at least one.")
    run = RunDirectory(options.run.resolve()) if options.run else default_for(file, system.name)
    run.create()
    with run.held():
        return _prepare(system, run, file.resolve().parent, options)


def _prepare(system: System, run: RunDirectory, code: Path, options: Options) -> int:
    """Everything that may be refused, then the supervisor, then whatever it left."""
    local = scale.scaled(
        system,
        num_cores=scale.cores(),
        ranks=options.ranks,
        workers=options.workers,
        joined=options.join_at is not None,
    )
    if options.join_at is not None and not local.hosts:
        raise TwinhullError(
            f"--join-at {options.join_at}: no training of {system.name} is for several nodes.",
            hint="State nodes of its pool, or elastic.",
        )
    here = scale.effective(system, local)
    planes = children.planes(system, options.only)
    holder = system.components.get("broker")
    source = broker.find(holder.url if isinstance(holder, State) else None)
    url = source.url or broker.address(run.broker)
    at = children.place(run, url, code)
    if "training" in planes:
        preflight.need_torch(children.trains(system))
    with contextlib.ExitStack() as opened:
        listener: socket.socket | None = None
        if "serving" in planes:
            listener = opened.enter_context(preflight.listen(HOST, options.port))
        print(f"twinhull {__version__}: importing your code ...", file=sys.stderr, flush=True)
        preflight.import_functions(children.functions(system, planes), at)
        write_whole(run.system, dump(here))
        commands = children.training(here, local, at, options.join_at) if "training" in planes else []
        if listener is not None:
            commands += children.serving(here, local, at, listener.fileno())
        server = children.server(at, source) if source.url is None else None
        opened.callback(_clear, run, source)
        supervisor = Supervisor(here, run, source, url, server, commands, listener, options, local.notes)
        return asyncio.run(supervisor.run())


def _clear(run: RunDirectory, source: broker.Source) -> None:
    """Leave no process, no socket and no word of what runs."""
    for name in processes.end_descendants():
        print(f"twinhull: ended what was left of: {name}", file=sys.stderr)
    if source.url is None:
        broker.clear(run.broker)
    run.up.unlink(missing_ok=True)


@dataclass(slots=True)
class Supervisor:
    """Starts the children, listens to them, keeps them running, ends them.

    States: starting, running, stopping. A child is started again whenever it leaves, unless its exit code is
    final; training that is done, failed or stopped stays down and serving goes on without it.
    """

    system: System
    directory: RunDirectory
    source: broker.Source
    url: str
    server: Command | None
    commands: list[Command]
    listener: socket.socket | None
    options: Options
    notes: tuple[str, ...]
    board: Board = field(default_factory=Board)
    _children: dict[str, Child] = field(default_factory=dict)
    _runs: set[asyncio.Task[None]] = field(default_factory=set)
    _stop: asyncio.Event = field(default_factory=asyncio.Event)
    _code: int = 0
    _last_word: str = ""
    _keeper: Keeper = field(init=False)
    _screen: Screen = field(init=False)
    _started: float = field(default_factory=time.time)

    async def run(self) -> int:
        """Everything from the first child to the last."""
        processes.adopt_orphans()
        loop = asyncio.get_running_loop()
        for ending, code in ((signal.SIGINT, _INTERRUPTED), (signal.SIGTERM, 0), (signal.SIGHUP, 0)):
            loop.add_signal_handler(ending, self._asked_to_stop, code)
        self._keeper = Keeper(self.directory)
        self._screen = self._make_screen()
        showing = asyncio.create_task(self._screen.run())
        ticking = asyncio.create_task(self._tick())
        try:
            await self._start()
            await self._stop.wait()
        finally:
            await self._end()
            for task in (ticking, showing):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
            self._keeper.close()
        return self._exit_code()

    @property
    def gateway_url(self) -> str:
        """Where the gateway answers; "" without one."""
        return f"http://{HOST}:{self.listener.getsockname()[1]}" if self.listener is not None else ""

    async def _start(self) -> None:
        self._say("up", version=__version__, system=self.system.name, run=str(self.directory.root))
        for note in self.notes:
            self._say("scaled to this machine", note=note)
        if self.server is not None:
            self._launch(self.server)
            ready = asyncio.create_task(asyncio.to_thread(broker.wait_ready, self.url))
            gone = asyncio.create_task(self._children["broker"].ended.wait())
            stopped = asyncio.create_task(self._stop.wait())
            await asyncio.wait({ready, gone, stopped}, return_when=asyncio.FIRST_COMPLETED)
            gone.cancel()
            stopped.cancel()
            if self._stop.is_set():
                ready.cancel()
                return
            await ready
        self._say("broker ready", broker=str(self.source))
        for command in self.commands:
            self._launch(command)
        if self.gateway_url:
            self._say("gateway", url=self.gateway_url)

    def _launch(self, command: Command) -> None:
        child = Child(command, self._heard, self._begun, self._left)
        self._children[command.name] = child
        task = asyncio.create_task(child.run())
        self._runs.add(task)
        task.add_done_callback(self._runs.discard)

    async def _end(self) -> None:
        """Everything but the broker at once, so that it takes one grace; then the broker."""
        others = [child for name, child in self._children.items() if name != "broker"]
        await asyncio.gather(*(child.stop() for child in others))
        if (server := self._children.get("broker")) is not None:
            await server.stop()
        await asyncio.gather(*self._runs)
        self._say("down", lasted_s=round(time.time() - self._started, 1))

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            self._keeper.flush()
            processes.reap({child.pid for child in self._children.values() if child.pid})

    def _heard(self, name: str, line: bytes) -> None:
        if (said := record.read(name, line)) is not None:
            self._keeper.keep_line(name, line)
            if name == "broker":  # chatty: its log file has it all, its last word is told when it is lost
                self._last_word = str(said.facts.get("text", ""))
            else:
                self._note(said)

    def _begun(self, name: str, pid: int) -> None:
        self._say("started", process=name, pid=pid)
        self._write_up()

    def _left(self, end: Exit) -> None:
        facts: dict[str, object] = {"process": end.name, "exit": end.code, "lived_s": round(end.lived_s, 2)}
        if end.back_in_s is not None:
            word = {"said": self._last_word} if end.name == "broker" else {}
            self._tell("lost", {**facts, "back_in_s": end.back_in_s, **word}, level="warning")
        else:
            self._tell("ended", facts)
            if end.name.startswith("train:") and not self._stop.is_set():
                self._training_ended(end)
        self._write_up()

    def _training_ended(self, end: Exit) -> None:
        if end.code not in {0, _STOPPED_AND_SAVED}:
            self._code = 1 if end.code == 1 else 2
        still = any(
            name.startswith("train:") and name != end.name and not child.ended.is_set()
            for name, child in self._children.items()
        )
        if self.listener is None and not still:
            self._stop.set()

    def _asked_to_stop(self, code: int) -> None:
        if self._stop.is_set():  # asked twice: do not wait for anybody's grace
            for child in self._children.values():
                if child.pid is not None:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(child.pid, signal.SIGKILL)
            return
        self._code = code or self._code
        self._say("stopping")
        self._stop.set()

    def _exit_code(self) -> int:
        if self._code:
            return self._code
        codes = {child.code for name, child in self._children.items() if name.startswith("train:")}
        return _STOPPED_AND_SAVED if _STOPPED_AND_SAVED in codes else 0

    def _say(self, kind: str, **facts: object) -> None:
        self._tell(kind, facts)

    def _tell(self, kind: str, facts: dict[str, object], level: str = "info") -> None:
        self._note(Record(time.time(), "up", kind, level, facts))

    def _note(self, said: Record) -> None:
        self.board.hear(said)
        self._keeper.keep(said)
        self._screen.hear(said)

    def _make_screen(self) -> Screen:
        if self.options.plain or self.options.log_format == "json" or not sys.stdout.isatty():
            return Lines(self.options.log_format)
        deadlines = {name: end.deadline or 1.0 for name, end in self.system.endpoints.items()}
        served = deadlines if self.listener is not None else {}
        return LiveScreen(
            self.board, self.system.name, self.gateway_url, served, lambda: self._asked_to_stop(0)
        )

    def _write_up(self) -> None:
        self._keeper.write_up(
            {
                "format": 1,
                "twinhull": __version__,
                "pid": os.getpid(),
                "started": self._started,
                "url": self.gateway_url,
                "broker": {"url": broker.masked(self.url), "software": str(self.source)},
                "processes": dict(self.board.alive),
            }
        )
