"""Where does a run show itself? On a terminal as the live view, else as one line a record."""

import asyncio
import contextlib
import sys
import termios
import time
import tty
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Literal, Protocol

from twinhull.deploy import plain
from twinhull.deploy.board import Board
from twinhull.deploy.record import Record


class Screen(Protocol):
    """What the supervisor tells while the run goes on."""

    def hear(self, record: Record) -> None:
        """Something happened."""
        ...

    async def run(self) -> None:
        """Keep showing until cancelled."""
        ...


@dataclass(slots=True)
class Lines:
    """One line a record on standard output; a reader that has left is no reason to stop."""

    fmt: Literal["console", "json"]

    def hear(self, record: Record) -> None:
        """Print it."""
        if record.kind:
            with contextlib.suppress(BrokenPipeError):
                sys.stdout.write(plain.line(record, self.fmt) + "\n")
                sys.stdout.flush()

    async def run(self) -> None:
        """Nothing moves by itself."""
        await asyncio.Event().wait()


@dataclass(slots=True)
class LiveScreen:
    """The live view, drawn four times a second; `q` calls `stop`."""

    board: Board
    name: str
    url: str
    deadlines: dict[str, float]
    stop: Callable[[], None]

    def hear(self, record: Record) -> None:
        """The board has heard it already."""

    async def run(self) -> None:
        """Draw until cancelled, then leave the terminal as it was."""
        from rich.console import Console
        from rich.live import Live

        from twinhull.deploy.live import view

        console = Console()
        with _keys(self._key), Live(console=console, auto_refresh=False, screen=True) as live:
            while True:
                shown = view(
                    self.board,
                    name=self.name,
                    url=self.url,
                    deadlines=self.deadlines,
                    height=console.size.height,
                    now=time.time(),
                )
                live.update(shown, refresh=True)
                await asyncio.sleep(0.25)

    def _key(self) -> None:
        if sys.stdin.read(1) in {"q", "Q"}:
            self.stop()


@contextlib.contextmanager
def _keys(heard: Callable[[], None]) -> Generator[None]:
    """Hand single key presses to `heard` while inside; nothing happens without a terminal to read from."""
    if not sys.stdin.isatty():
        yield
        return
    loop, fd = asyncio.get_running_loop(), sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    tty.setcbreak(fd)
    loop.add_reader(fd, heard)
    try:
        yield
    finally:
        loop.remove_reader(fd)
        termios.tcsetattr(fd, termios.TCSADRAIN, before)
