"""Where is a rank that does not come on? The Python stacks of all its threads, asked for from outside.

The rank needs to do nothing: its interpreter's own handler writes them, also while it waits inside a library.
"""

import faulthandler
import os
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import psutil

from twinhull.train.supervise.live import Record

SIGNAL = signal.SIGUSR2
_POLL_S = 0.02
_FRAMES, _OTHER_FRAMES, _MOST = 40, 4, 8000  # of the first thread, of each other one; characters of all
_DEAF = {
    psutil.STATUS_STOPPED: "stopped by a signal (SIGSTOP)",
    psutil.STATUS_TRACING_STOP: "stopped by a debugger",
    psutil.STATUS_ZOMBIE: "gone",
}
_WORDS = {**_DEAF, psutil.STATUS_DISK_SLEEP: "in uninterruptible sleep: a disk or a driver does not answer"}


def arm(folder: Path, rank: int) -> None:
    """Let this process write its stacks into `folder` whenever it is sent SIGUSR2."""
    path = _file(folder, rank)
    beside = path.with_suffix(".arming")
    file = os.open(beside, os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    faulthandler.register(SIGNAL, file=file, all_threads=True)
    beside.rename(path)  # there, it says that the signal can be sent: it kills who does not expect it


def collect(folder: Path, records: Mapping[int, Record], within_s: float = 2.0) -> dict[int, str]:
    """What each rank is doing: its stacks, that of the main thread first, or in words why it has none."""
    asked = {rank: _ask(folder, rank, record.pid) for rank, record in records.items()}
    found = {rank: said for rank, said in asked.items() if isinstance(said, str)}
    waiting = {rank: size for rank, size in asked.items() if isinstance(size, int)}
    end = time.monotonic() + within_s
    while waiting and time.monotonic() < end:
        time.sleep(_POLL_S)
        for rank, size in list(waiting.items()):
            text = _written(folder, rank, size)
            if "Current thread" in text and text == found.get(rank):  # nothing came since the last look
                del waiting[rank]
            found[rank] = text
    for rank in waiting:
        status = _status(records[rank].pid)
        found[rank] = found.get(rank) or f"did not answer: {_WORDS.get(status, status)}"
    return {rank: trimmed(text) for rank, text in sorted(found.items())}


def moved(before: str, after: str) -> bool:
    """Whether the main thread was at different places: then it works, however long that takes."""
    return _is_stack(before) and _is_stack(after) and _threads(before)[0] != _threads(after)[0]


def trimmed(text: str) -> str:
    """The thread that was asked, which is the main one, in full before the ends of all others."""
    if not _is_stack(text):
        return text.strip()
    first, *others = _threads(text)
    lines = first[: _FRAMES + 1]
    for other in others:
        lines += other[: _OTHER_FRAMES + 1]
    whole = "\n".join(lines)
    return whole if len(whole) <= _MOST else whole[:_MOST] + "\n..."


def _ask(folder: Path, rank: int, pid: int) -> int | str:
    """The size of the rank's file before it was asked, or why it was not."""
    if (status := _status(pid)) in _DEAF:
        return _DEAF[status]
    try:
        size = _file(folder, rank).stat().st_size
        os.kill(pid, SIGNAL)
    except FileNotFoundError:
        return "has only just begun to start"
    except ProcessLookupError:
        return _DEAF[psutil.STATUS_ZOMBIE]
    return size


def _written(folder: Path, rank: int, after: int) -> str:
    with suppress(FileNotFoundError), _file(folder, rank).open("rb") as file:
        file.seek(after)
        return file.read().decode(errors="replace")
    return ""


def _status(pid: int) -> str:
    try:
        return psutil.Process(pid).status()
    except psutil.NoSuchProcess:
        return psutil.STATUS_ZOMBIE


def _is_stack(text: str) -> bool:
    return "(most recent call first)" in text


def _threads(text: str) -> list[list[str]]:
    """The lines of each thread, first of the one that took the signal."""
    threads: list[list[str]] = []
    for line in text.strip().splitlines():
        if not line.startswith(" ") and line:
            threads.append([])
        if line and threads:
            threads[-1].append(line)
    return sorted(threads, key=lambda lines: not lines[0].startswith("Current thread"))


def _file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.stack"
