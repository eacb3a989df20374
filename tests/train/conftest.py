"""A launcher as a real process, and what it says."""

import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from twinhull.rundir import RunDirectory
from twinhull.train.job import Job
from twinhull.train.supervise import live

APPS = Path(__file__).parent / "apps"

PYTHONPATH = os.pathsep.join([str(APPS), *filter(None, [os.environ.get("PYTHONPATH")])])

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

    def __init__(self, job: Job, ranks: int, every_s: float, env: dict[str, str], *more: str) -> None:
        self.job = job
        self.lines: list[Line] = []
        self.noise: list[str] = []
        self.process = subprocess.Popen(
            [sys.executable, str(APPS / "launch_job.py"), job.to_json(), str(every_s), str(ranks), *more],
            env={**os.environ, "TWINHULL_LOG_FORMAT": "json", "PYTHONPATH": PYTHONPATH, **env},
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


class Joined:
    """One `twinhull join`; `enter` is what to put before the command to run it somewhere else."""

    def __init__(self, argv: list[str], env: dict[str, str], log: Path, enter: list[str]) -> None:
        self._log = log
        with log.open("w") as file:
            self.process = subprocess.Popen(
                [*enter, sys.executable, "-m", "twinhull", "join", *argv],
                env={**os.environ, "PYTHONPATH": PYTHONPATH, **env}, stdout=file, stderr=file,
            )  # fmt: skip

    def text(self) -> str:
        return self._log.read_text()

    def family(self) -> list[psutil.Process]:
        """The host's own process and all that it has started."""
        own = psutil.Process(self.process.pid)
        return [own, *own.children(recursive=True)]

    def ranks(self) -> dict[int, live.Record]:
        """The records of its ranks, from the scratch directory in the environment of its agent."""
        for process in self.family():
            for file in process.open_files() if process.is_running() else ():
                if Path(file.path).name.startswith("rank-"):
                    return live.read(Path(file.path).parent)
        return {}

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


class Crew:
    """A launcher that listens on a free port, and the hosts that join it."""

    def __init__(self, job: Job, env: dict[str, str], scratch: Path, listen: str, *sizes: str) -> None:
        assert job.directory is not None
        self._job, self._scratch, self._sizes = job, scratch, sizes
        self._env = {"SEEN": str(scratch / "seen"), "GO": str(scratch / "go"), **env}
        self.directory, self.hosts = job.directory, list[Joined]()
        self.directory.mkdir(parents=True, exist_ok=True)
        self.launcher = Launched(job, 0, 0.0, self._env, listen, *sizes)
        self.listen = self.launcher.until_said("waiting for hosts: type on each")[0]["command"].split()[2]
        self.port = int(self.listen.rpartition(":")[2])

    def relaunch(self) -> None:
        self.launcher.close()
        self.launcher = Launched(self._job, 0, 0.0, self._env, self.listen, *self._sizes)

    def host(self, name: str, token: str = "", ranks: int = 2, enter: list[str] | None = None) -> Joined:
        argv = [self.listen, "--ranks", str(ranks), "--name", name, "--code", str(APPS)]
        argv += [] if token else ["--token-file", str(self.directory / "join.token")]
        env = {**self._env, "TWINHULL_TOKEN": token} if token else self._env
        log = self._scratch / f"{name}-{len(self.hosts)}.log"
        self.hosts.append(Joined(argv, env, log, enter or []))
        return self.hosts[-1]

    def until_steps(self, generation: int, steps: int) -> None:
        """Wait until a generation has noted so many steps."""
        seen = Path(self._env["SEEN"])

        def enough() -> bool:
            assert self.launcher.process.poll() is None, (self.launcher.lines[-20:], self.launcher.noise)
            lines = seen.read_text().splitlines() if seen.exists() else []
            noted = {line.split()[1] for line in lines if line.split()[0] == str(generation)}
            return len(noted) >= steps

        until(enough)

    def noted(self) -> list[tuple[int, int, int, list[str]]]:
        """Generation, step, rank and samples of each step, as the ranks have noted them."""
        lines = [line.split() for line in Path(self._env["SEEN"]).read_text().splitlines()]
        return [
            (int(generation), int(step), int(rank), numbers) for generation, step, rank, *numbers in lines
        ]

    def ends(self, code: int = 0) -> None:
        """Let it train at full speed to its end."""
        (self._scratch / "go").touch()
        assert self.launcher.ends() == code, (self.launcher.lines[-20:], self.launcher.noise)

    def causes(self) -> list[str]:
        """Why its generations have ended."""
        return [line["cause"] for line in self.launcher.said("generation ended")]

    def ranks(self) -> list[int]:
        """How many ranks each generation had."""
        return [line["ranks"] for line in self.launcher.said("generation started")]

    def assert_each_sample_once(self, size: int = 203, epochs: int = 8) -> None:
        """In each epoch of the final history: of a step that was done again only the last time counts."""
        noted = self.noted()
        last = {step: generation for generation, step, _, _ in noted}
        kept = [numbers for generation, step, _, numbers in noted if last[step] == generation]
        assert Counter(n for numbers in kept for n in numbers) == {str(n): epochs for n in range(size)}

    def close(self) -> None:
        self.launcher.close()
        for host in self.hosts:
            host.kill()


@pytest.fixture
def crew(tmp_path: Path) -> Iterator[Callable[..., Crew]]:
    """Start a launcher that waits for hosts, for a function of apps/tiny.py."""
    started: list[Crew] = []

    def start(
        function: str = "notes", *, low: int = 1, high: int = 2, lease_s: float = 10.0,
        listen: str = "127.0.0.1:0", env: dict[str, str] | None = None, **facts: Any
    ) -> Crew:  # fmt: skip
        job = Job(name="fit", run=f"tiny:{function}", directory=tmp_path / "run", **facts)
        started.append(Crew(job, env or {}, tmp_path, listen, str(low), str(high), str(lease_s)))
        return started[-1]

    yield start
    for one in started:
        one.close()
