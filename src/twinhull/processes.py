"""How a child process is started, watched, restarted and ended, so that none is ever left behind.

`python -m twinhull.processes PROGRAM ARGUMENT...` runs a foreign program that ends with its parent.
"""

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from twinhull import policy

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_PR_SET_CHILD_SUBREAPER = 36
_STEADY_S = 10.0  # a child that lived this long has recovered: its next loss is its first
_NOT_STARTED = 127  # the exit code of a shell that finds no program
_BASE_S, _CAP_S = 0.2, 10.0  # back-off between restarts


def die_with_parent(ending: signal.Signals = signal.SIGKILL) -> None:
    """Make this process end when its parent does, however the parent ends.

    Linux delivers `ending` by itself, also after an exec; elsewhere a thread looks twice a second whether the
    parent has changed. Call it first thing in a child's `main`.
    """
    parent = os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(ending), 0, 0, 0)
    else:
        threading.Thread(target=_watch_parent, args=(parent, ending), daemon=True).start()
    if os.getppid() != parent:  # it left during the call
        os.kill(os.getpid(), ending)


def adopt_orphans() -> None:
    """Become the parent of grandchildren that lose theirs, so that `end_descendants` finds them (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_descendants(patience_s: float = 2.0) -> list[str]:
    """Kill whatever this process has started and still lives; give back how it called itself."""
    import psutil

    found = psutil.Process().children(recursive=True)
    names: list[str] = []
    for process in found:
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE:
                names.append(" ".join(process.cmdline()[:6]))
                process.kill()
    psutil.wait_procs(found, timeout=patience_s)
    return names


def reap(spared: set[int]) -> None:
    """Collect ended grandchildren that were adopted; `spared` are the pids somebody else waits for."""
    import psutil

    for process in psutil.Process().children():
        with contextlib.suppress(psutil.Error, ChildProcessError):
            if process.pid not in spared and process.status() == psutil.STATUS_ZOMBIE:
                os.waitpid(process.pid, os.WNOHANG)


@dataclass(frozen=True, slots=True)
class Command:
    """What to run. `grace_s` is how long it may take to leave after SIGTERM before it is killed."""

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    cwd: Path
    grace_s: float = 3.5
    pass_fds: tuple[int, ...] = ()
    final: frozenset[int] = frozenset()  # exit codes after which it is not started again
    hold: Path | None = None  # while this file exists it stays down


@dataclass(frozen=True, slots=True)
class Exit:
    """How a child left: `code` is negative for a signal; `back_in_s` is None if it stays down."""

    name: str
    code: int
    lived_s: float
    back_in_s: float | None


@dataclass(slots=True)
class Child:
    """One child kept running until `stop`.

    States: not started, running (`pid` set), waiting to come back, ended (`ended` set, `code` final).
    The law: after `stop` returns, or after `run` returns, nothing of its process group lives.
    """

    command: Command
    on_line: Callable[[str, bytes], None]
    on_start: Callable[[str, int], None]
    on_exit: Callable[[Exit], None]
    pid: int | None = None
    code: int | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    _stopping: asyncio.Event = field(default_factory=asyncio.Event)
    _process: asyncio.subprocess.Process | None = None

    async def run(self) -> None:
        """Start it, start it again whenever it leaves, return when it is to stay down."""
        failures = 0
        try:
            while not await self._held():
                started = time.monotonic()
                code = await self._once()
                lived = time.monotonic() - started
                failures = 1 if lived >= _STEADY_S else failures + 1
                self.code = code
                stays_down = self._stopping.is_set() or code in self.command.final
                wait_s = policy.restart_at(0.0, failures, _BASE_S, _CAP_S)
                self.on_exit(Exit(self.command.name, code, lived, None if stays_down else wait_s))
                if stays_down:
                    return
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stopping.wait(), wait_s)
        finally:
            self._end_group(signal.SIGKILL)
            self.ended.set()

    async def stop(self) -> None:
        """Ask it to leave, kill its group after the grace, return when it is gone."""
        self._stopping.set()
        self._end_group(signal.SIGTERM)
        try:
            await asyncio.wait_for(self.ended.wait(), self.command.grace_s)
        except TimeoutError:
            self._end_group(signal.SIGKILL)
            await self.ended.wait()

    async def _held(self) -> bool:
        """Wait while the hold file exists; True when asked to stop."""
        while not self._stopping.is_set():
            if self.command.hold is None or not self.command.hold.exists():
                return False
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), 0.1)
        return True

    async def _once(self) -> int:
        command = self.command
        ours, theirs = os.pipe()  # not asyncio's pipe: an orphan that holds it open must not hold up `wait`
        reader = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(ours, "rb", buffering=0)
        )
        try:
            process = await asyncio.create_subprocess_exec(
                *command.argv,
                env=dict(command.env),
                cwd=command.cwd,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=theirs,
                stderr=asyncio.subprocess.STDOUT,
                pass_fds=command.pass_fds,
                start_new_session=True,  # Ctrl-C in the terminal reaches the supervisor alone
            )
        except OSError as error:  # its directory or program is gone, or there is no room for a process
            transport.close()
            self.on_line(command.name, f"cannot be started: {error}".encode())
            return _NOT_STARTED
        finally:
            os.close(theirs)
        self._process, self.pid = process, process.pid
        self.on_start(command.name, process.pid)
        if self._stopping.is_set():  # asked to stop while it was being started
            self._end_group(signal.SIGTERM)
        pump = asyncio.create_task(self._pump(reader))
        code = await process.wait()
        self._end_group(signal.SIGKILL)  # what it may have left of its group
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(pump, 1.0)
        transport.close()
        self._process = self.pid = None
        return code

    async def _pump(self, stream: asyncio.StreamReader) -> None:
        rest = b""
        while chunk := await stream.read(1 << 16):
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                self.on_line(self.command.name, line)
            if len(rest) > 1 << 20:  # a line without end is cut rather than kept
                self.on_line(self.command.name, rest)
                rest = b""
        if rest:
            self.on_line(self.command.name, rest)

    def _end_group(self, ending: signal.Signals) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, ending)


def _watch_parent(parent: int, ending: signal.Signals) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os.kill(os.getpid(), ending)


def main() -> None:
    """Become the program in the arguments, bound to the parent's life: SIGTERM when it ends."""
    die_with_parent(signal.SIGTERM)
    os.execvp(sys.argv[1], sys.argv[1:])  # noqa: S606  # no shell is wanted


if __name__ == "__main__":
    main()
