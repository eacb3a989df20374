"""A launcher as a real process, and what it says."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from twinhull.rundir import RunDirectory
from twinhull.train import live
from twinhull.train.job import Job

APPS = Path(__file__).parent / "apps"

Line = dict[str, Any]


def until(condition: Callable[[], Any], within_s: float = 60.0) -> Any:
    """What the condition gives once it gives something true."""
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        if found := condition():
            return found
        time.sleep(0.01)
    raise AssertionError(f"not within {within_s} s")


class Launched:
    """One launcher. `lines` is what it and its ranks have said so far, `noise` what was no log line."""

    def __init__(self, job: Job, ranks: int, every_s: float, env: dict[str, str]) -> None:
        self.job = job
        self.lines: list[Line] = []
        self.noise: list[str] = []
        self.process = subprocess.Popen(
            [sys.executable, str(APPS / "launch_job.py"), job.to_json(), str(every_s), str(ranks)],
            env={**os.environ, "TWINHULL_LOG_FORMAT": "json", "PYTHONPATH": str(APPS), **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            try:
                self.lines.append(json.loads(line))
            except ValueError:
                self.noise.append(line)

    def said(self, event: str) -> list[Line]:
        return [line for line in self.lines if line.get("event") == event]

    def until_said(self, event: str, times: int = 1, within_s: float = 60.0) -> list[Line]:
        def enough() -> list[Line]:
            assert self.process.poll() is None or len(self.said(event)) >= times, (self.lines, self.noise)
            return self.said(event) if len(self.said(event)) >= times else []

        return until(enough, within_s)

    @property
    def ranks(self) -> dict[int, live.Record]:
        assert self.job.directory is not None
        return live.read(live.directory(RunDirectory(self.job.directory), self.job.name))

    def until_training(self, generation: int = 1, ranks: int = 2, beyond: int = 0) -> dict[int, live.Record]:
        """The records of a generation's ranks once all of them have completed a step."""
        self.until_said("generation started", generation)

        def stepping() -> dict[int, live.Record]:
            found = self.ranks
            ready = all(r.step > r.started_at_step + beyond and r.phase == 1 for r in found.values())
            return found if len(found) == ranks and ready else {}

        return until(stepping)

    def ends(self, within_s: float = 60.0) -> int:
        code = self.process.wait(within_s)
        self._reader.join(5)
        return code

    def family(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._reader.join(10)
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Launched]]:
    """Start a launcher for a function of apps/tiny.py in this test's run directory."""
    started: list[Launched] = []

    def start(
        function: str = "fit", *, ranks: int = 2, every_s: float = 0.0, env: dict[str, str] | None = None,
        directory: Path | None = None, **facts: Any
    ) -> Launched:  # fmt: skip
        job = Job(name="fit", run=f"tiny:{function}", directory=directory or tmp_path / "run", **facts)
        started.append(Launched(job, ranks, every_s, env or {}))
        return started[-1]

    yield start
    for launched in started:
        launched.close()


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
