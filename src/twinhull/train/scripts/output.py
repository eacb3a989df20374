"""What does a script say? Its output, passed on line by line, and what can be learned from it."""

import os
import re
import sys
import threading
import time
from collections import deque
from typing import IO

PROGRESS_S = 10.0  # between two states of a progress bar that are passed on
_KEPT = 400  # lines: a report of torchrun and the tracebacks before it
_LONGEST = 1 << 20  # a line without end is cut rather than kept
_CLOSING = re.compile(r"Sending process \d+ closing signal SIG")
_EXIT = re.compile(r"exitcode\s*: (-?\d+)")
_ERROR = re.compile(r"^(?:\[rank\d+\]:\s*)?((?:\w+\.)*\w*(?:Error|Exception|Interrupt)\b.*)")
_TORCHRUN = "torch.distributed.elastic"  # its own exception says nothing


class Output:
    """Reads what a process and all that it starts print, until all of them have closed it.

    A progress bar rewrites its line with carriage returns: only its last state is a line, and now and then
    one before. `said_at` is when anything was said, by the monotonic clock; None if nothing was.
    """

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream, self._rest, self._shown_at = stream, b"", 0.0
        self._tail: deque[str] = deque(maxlen=_KEPT)
        self.said_at: float | None = None
        self.closing_at: float | None = None  # when torchrun began to end the ranks that outlive a lost one
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def finish(self, within_s: float) -> None:
        """Wait for the last line."""
        self._thread.join(within_s)

    @property
    def rank_exit(self) -> int | None:
        """How the first rank left, as torchrun reports it in the end; its report names that one last."""
        found = [match[1] for line in self._tail if (match := _EXIT.search(line))]
        return int(found[-1]) if found else None

    @property
    def error(self) -> str:
        """The last line that reads like a Python error; empty without one."""
        for line in reversed(self._tail):
            if (match := _ERROR.match(line)) and _TORCHRUN not in line:
                return match[1][:500]
        return ""

    def _read(self) -> None:
        while chunk := os.read(self._stream.fileno(), 1 << 16):
            self.said_at = time.monotonic()
            *lines, self._rest = (self._rest + chunk).split(b"\n")
            for line in lines:
                self._pass_on(line)
            self._condense()
        if self._rest:
            self._pass_on(self._rest)

    def _condense(self) -> None:
        """Of a line that goes on, keep only what is not overwritten, and show it from time to time."""
        before, back, last = self._rest.rpartition(b"\r")
        now = time.monotonic()
        if len(self._rest) > _LONGEST:
            self._pass_on(self._rest)
            self._rest = b""
        elif back and now - self._shown_at >= PROGRESS_S:
            self._shown_at = now
            self._pass_on(before)
            self._rest = last
        elif back:
            self._rest = before.rpartition(b"\r")[2] + back + last

    def _pass_on(self, line: bytes) -> None:
        states = [state for state in line.decode(errors="replace").split("\r") if state.strip()]
        text = states[-1].rstrip() if states else ""
        if not text:
            return
        if _CLOSING.search(text) and self.closing_at is None:
            self.closing_at = time.monotonic()
        self._tail.append(text)
        sys.stdout.write(text + "\n")  # one call a line: another thread logs
        sys.stdout.flush()
