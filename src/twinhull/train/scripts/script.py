"""One generation of a script that is not ours: its processes, watched until all of them have left.

Nothing is asked of it but to print or to touch a file while it makes progress, and to leave on SIGTERM.
"""

import contextlib
import logging
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

from twinhull.train.scripts.output import Output
from twinhull.train.scripts.seals import Checkpoints
from twinhull.train.supervise import memory

MARK = "TWINHULL_SCRIPT"  # in the environment of all that a script starts: whose it is
LAGGARD_S = 3.0  # for the ranks that outlive a lost one, after torchrun has asked them to leave
START_S = 120.0  # until the first sign of life: imports on a busy machine are slow, and no hang
POLL_S = 0.05
LOOK_S = 0.5  # between two looks at its files
LAST_WORDS_S = 1.0
UNKILLABLE_S = 5.0
_SHELLS = {"sh", "bash", "dash", "zsh", "ksh", "fish"}
_EXTERNAL = {-signal.SIGKILL, -signal.SIGINT, -signal.SIGHUP, -signal.SIGQUIT, -signal.SIGTERM}
log = logging.getLogger(__name__)

How = Literal["done", "stop", "rank", "hang", "crash"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a generation ended; `code` is how the script itself left, negative for a signal."""

    how: How
    code: int
    error: str
    lived_s: float


class Script:
    """States: started, leaving (it was asked to), ended. When it has ended, none of its processes is left."""

    def __init__(self, words: Sequence[str], env: Mapping[str, str], checkpoints: Checkpoints) -> None:
        self._mark, self._checkpoints = env[MARK], checkpoints
        self._heartbeat = Path(env["TWINHULL_HEARTBEAT"])
        self._beat_ns = _changed(self._heartbeat)
        self._started = self._beat_at = time.monotonic()
        self._is_up = False
        self._looked_at = 0.0
        self._leave_by: float | None = None
        self._asked: set[int] = set()
        self._memory_kills = memory.kills()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "twinhull.processes", *words],  # it ends when we do, however we do
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        self._output = Output(self._process.stdout)

    def watch(self, stopping: Callable[[], bool], grace_s: float, hang_s: float) -> Outcome:
        """Wait for its end. When `stopping`, it gets SIGTERM and then `grace_s`, a hang gets neither."""
        how: How | None = None
        while not self._has_left():
            self._look()
            now = time.monotonic()
            if self._leave_by is not None:
                if now >= self._leave_by:
                    break
                self._ask()
            elif stopping():
                how, self._leave_by = "stop", now + grace_s
            elif now - self._beat_at > (hang_s if self._is_up else max(hang_s, START_S)):
                how = "hang"
                log.error("hang", extra={"silent_s": round(now - self._beat_at, 1)})
                break
            elif self._output.closing_at is not None and now - self._output.closing_at > LAGGARD_S:
                log.warning("laggards are ended", extra={"after_s": LAGGARD_S})
                break
            time.sleep(POLL_S)
        return self._end(how)

    def _has_left(self) -> bool:
        """Whether it is over: its first process alone says so, unless it was asked to leave."""
        gone = self._process.poll() is not None
        return gone and (self._leave_by is None or not family(self._mark))

    def _look(self) -> None:
        """Whether there was a sign of life: a word, a beat, a byte of a checkpoint."""
        now = time.monotonic()
        if self._output.said_at is not None and self._output.said_at > self._beat_at:
            self._is_up, self._beat_at = True, self._output.said_at
        if now - self._looked_at < LOOK_S:
            return
        self._looked_at = now
        if (beat_ns := _changed(self._heartbeat)) != self._beat_ns:
            self._is_up, self._beat_ns, self._beat_at = True, beat_ns, now
        if self._checkpoints.look(self._beat_at):
            self._beat_at = now

    def _ask(self) -> None:
        """SIGTERM, once to each, to the first process and to those that have lost the one above them.

        Not to all: the processes that load data must live until what they feed has saved.
        """
        pids = {self._process.pid} if self._process.poll() is None else _orphans(family(self._mark))
        for pid in pids - self._asked:
            self._asked.add(pid)
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                is_shell = Path(process.name()).name in _SHELLS
                for one in [process, *(process.children() if is_shell else [])]:
                    self._asked.add(one.pid)
                    one.send_signal(signal.SIGTERM)

    def _end(self, how: How | None) -> Outcome:
        left = self._process.poll()
        end_family(self._mark, self._process.pid)
        code = self._process.wait()
        self._output.finish(LAST_WORDS_S)
        lived_s = time.monotonic() - self._started
        if how is not None:
            return Outcome(how, code, "", lived_s)
        if left == 0:
            return Outcome("done", 0, "", lived_s)
        first = self._output.rank_exit if self._output.rank_exit is not None else left
        if first is not None and first > 128:  # a shell says so what signal its command has got
            first = 128 - first
        if memory.kills() > self._memory_kills:
            return Outcome("crash", code, "the kernel killed a process: memory ran out", lived_s)
        if first in _EXTERNAL or (first is None and not self._output.error):
            return Outcome("rank", code, "", lived_s)
        said = self._output.error or f"the command left with exit {first} and said nothing"
        return Outcome("crash", code, said, lived_s)


def family(mark: str) -> list[psutil.Process]:
    """All processes that carry this mark, whoever their parents are now."""
    found: list[psutil.Process] = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def end_family(mark: str, first: int | None = None) -> int:
    """Kill all of a script's processes, and what they start meanwhile; how many there were.

    Also those below its `first` one that have thrown their environment away. Returns when all are gone, for
    nothing may train beside one that cannot be killed (it hangs in a driver or on a disk).
    """
    ended: set[int] = set()
    tell_at = time.monotonic() + UNKILLABLE_S
    below: list[psutil.Process] = []
    with contextlib.suppress(psutil.Error):
        below = psutil.Process(first).children(recursive=True) if first is not None else []
    while found := [one for one in {*family(mark), *below} if _lives(one)]:
        for process in found:
            with contextlib.suppress(psutil.Error):
                process.kill()
                ended.add(process.pid)
        time.sleep(POLL_S)  # not psutil's wait: it would take our own child's exit code away
        if time.monotonic() > tell_at:
            tell_at = math.inf
            log.error("processes that cannot be killed", extra={"pids": [one.pid for one in found]})
    return len(ended)


def _lives(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def _orphans(processes: Sequence[psutil.Process]) -> set[int]:
    """Those whose parent is none of them."""
    pids, found = {process.pid for process in processes}, set[int]()
    for process in processes:
        with contextlib.suppress(psutil.Error):
            if process.ppid() not in pids:
                found.add(process.pid)
    return found


def _changed(path: Path) -> int:
    try:
        return os.stat(path).st_mtime_ns  # noqa: PTH116  # a path that may not be there
    except FileNotFoundError:
        return 0
