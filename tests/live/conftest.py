"""A `twinhull up` under test: started for real, listened to, killed in parts, ended without remains."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from twinhull.rundir import RunDirectory


class Up:
    def __init__(self, file: Path, *options: str) -> None:
        self.directory = RunDirectory(file.parent / "run")
        self.records: list[dict[str, Any]] = []
        command = [sys.executable, "-m", "twinhull", "up", str(file), "--run", str(self.directory.root)]
        command += ["--plain", "--log-format", "json", *options]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.records.append(json.loads(line))

    @property
    def url(self) -> str:
        return str(self.wait_for("gateway")["url"])

    def seen(self, event: str, **facts: object) -> list[dict[str, Any]]:
        return [
            r
            for r in list(self.records)
            if r["event"] == event and all(r.get(name) == value for name, value in facts.items())
        ]

    def wait_for(self, event: str, limit_s: float = 60.0, **facts: object) -> dict[str, Any]:
        self.until(lambda: self.seen(event, **facts), limit_s, f"{event} {facts}")
        return self.seen(event, **facts)[0]

    def pid(self, role: str) -> int:
        self.until(lambda: role in self.roles(), 30, f"{role} running")
        return self.roles()[role]

    def roles(self) -> dict[str, int]:
        try:
            return dict(json.loads(self.directory.up.read_text())["processes"])
        except FileNotFoundError:
            return {}

    def kill(self, role: str) -> None:
        """SIGKILL a process and everything below it."""
        top = psutil.Process(self.pid(role))
        for process in [top, *top.children(recursive=True)]:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue

    @contextmanager
    def held_down(self, role: str) -> Generator[None]:
        hold = self.directory.holds / role
        hold.touch()
        try:
            yield
        finally:
            hold.unlink()

    def stop(self, ending: signal.Signals = signal.SIGINT, limit_s: float = 15.0) -> int:
        if self.process.poll() is None:
            self.process.send_signal(ending)
        code = self.process.wait(limit_s)
        self._listener.join(5)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code

    def until(self, holds: Callable[[], object], limit_s: float, what: str) -> None:
        """Wait for something, as long as `up` lives."""
        end = time.monotonic() + limit_s
        while not holds():
            ended = self.process.poll()
            assert ended is None, f"up ended with {ended} before: {what}; {self.records[-5:]}"
            assert time.monotonic() < end, f"waited {limit_s:.0f} s in vain for: {what}"
            time.sleep(0.05)

    def end(self) -> None:
        """End it the hard way if it still runs."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(5)
        self._listener.join(5)
        if self.process.stdout:
            self.process.stdout.close()

    def left_over(self) -> list[str]:
        return [" ".join(p.cmdline()) for p in psutil.process_iter() if self._is_ours(p)]

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            alive = process.status() != psutil.STATUS_ZOMBIE
            return alive and process.environ().get("TWINHULL_RUN") == str(self.directory.root)
        except psutil.Error:
            return False


StartUp = Callable[..., Up]


@pytest.fixture
def start_up() -> Generator[StartUp]:
    """Starts a `twinhull up` on a system file; whatever the test does, it is ended at the end."""
    runs: list[Up] = []

    def start(file: Path, *options: str) -> Up:
        runs.append(Up(file, *options))
        return runs[-1]

    yield start
    for run in runs:
        run.end()
