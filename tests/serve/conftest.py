"""A serving hull of real processes for the tests of this room, and the user's functions that it calls."""

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis

from twinhull import broker
from twinhull.handoff import notice
from twinhull.handoff.registry import Registry, Version
from twinhull.rundir import RunDirectory

APP = '''
import os, signal, time
from dataclasses import dataclass
import numpy as np

@dataclass
class Row:
    user: int
    taste: np.ndarray

class Tiny:
    def __init__(self, weights):
        self.weights = weights

    @classmethod
    def from_tensors(cls, tensors):
        if tensors["weights"].shape != (2,):
            raise ValueError(f"weights have shape {tensors['weights'].shape}, not (2,)")
        return cls(tensors["weights"])

def features(user: int, shift: float = 0.0) -> Row:
    return Row(user, np.array([user, shift], dtype="f4"))

def rank(rows: list[Row], *, model: Tiny) -> list[float]:
    if not np.isfinite(model.weights).all():
        raise FloatingPointError("weights are not finite")
    return [float(row.taste @ model.weights) for row in rows]

def double(number: int) -> int:
    if number == 13:
        raise ValueError("thirteen")
    return 2 * number

def triple(number: int) -> int:
    return 3 * number

def add(left: int, right: int) -> int:
    return left + right

def slow(number: int, wait_s: float = 0.0) -> int:
    time.sleep(wait_s)
    return number

def once(number: int, mark: str) -> int:
    """Sleeps for ever the first time it is called with a mark, answers at once after that."""
    if not os.path.exists(mark):
        open(mark, "w").close()
        time.sleep(600)
    return number

def flaky(number: int, mark: str) -> int:
    """Fails the first time it is called with a mark."""
    if not os.path.exists(mark):
        open(mark, "w").close()
        raise ConnectionError("not yet")
    return number

def shout(number: int) -> str:
    return f"{number}!"

def poison(number: int) -> int:
    if number == 666:
        os.kill(os.getpid(), signal.SIGKILL)
    return number

def best(**body) -> list:
    return ["best"]

def broken_default(**body):
    raise RuntimeError("no default today")

def slow_default(**body):
    time.sleep(5.0)

def careful_default(**body):
    time.sleep(0.15)  # more than is kept back from the deadline, less than half of it
    return ["careful"]
'''

SYSTEM = """
twinhull: 1
name: test
pools:
  web: {nodes: 1, cpus: 1}
  scorers: {nodes: 1, cpus: 1}
  risky: {nodes: 1, cpus: 1}
  jobs: {nodes: 1, cpus: 1}
workloads:
  fit: {train: app:fit, pool: scorers}
  draft: {train: app:fit, pool: scorers}
  features: {task: app:features, pool: web}
  rank: {task: app:rank, pool: scorers, model: fit, batch: 8 within 2 ms}
  rank_draft: {task: app:rank, pool: scorers, model: draft}
  double: {task: app:double, pool: web, lane: event}
  triple: {task: app:triple, pool: web, lane: event}
  add: {task: app:add, pool: web, lane: event}
  slow: {task: app:slow, pool: web, lane: event}
  hold: {task: app:slow, pool: risky, lane: event}
  once: {task: app:once, pool: risky, lane: event}
  flaky: {task: app:flaky, pool: web, lane: event, retries: "2 after 10 ms, budget 100 %"}
  shout: {task: app:shout, pool: jobs, lane: job}
  poison: {task: app:poison, pool: risky, lane: event}
endpoints:
  recommend: {path: [features, rank], deadline: 400 ms, fallback: [cache, app:best]}
  drafted: {path: [features, rank_draft], deadline: 900 ms, fallback: [app:best]}
  bare: {path: [double], deadline: 900 ms, fallback: []}
  sum: {path: [[double, triple], add], deadline: 900 ms, fallback: []}
  late: {path: [slow], deadline: 300 ms, fallback: [cache]}
  careful: {path: [slow], deadline: 900 ms, fallback: [app:careful_default]}
  retried: {path: [flaky], deadline: 900 ms, fallback: []}
  crossing: {path: [hold, shout], deadline: 15 s, fallback: []}
  held: {path: [hold], deadline: 15 s, fallback: []}
  patient: {path: [once], deadline: 15 s, fallback: []}
  deadly: {path: [poison], deadline: 15 s, fallback: []}
  ladder:
    path: [double]
    deadline: 900 ms
    fallback: [app:broken_default, app:slow_default, cache, app:best]
"""

WEIGHTS = [1.0, 10.0]
STANDING = {"broker", "gateway", "worker-web-0", "worker-scorers-0"}
TASKS = ["features", "rank", "double", "triple", "add", "slow", "once", "flaky", "shout", "poison"]
DEFAULTS = ["best", "broken_default", "slow_default", "careful_default"]


@dataclass
class Hull:
    """A broker, a gateway and workers, each started and ended by name."""

    root: Path
    run: RunDirectory
    url: str
    env: dict[str, str]
    listener: socket.socket
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    version: int = 0  # the published version with WEIGHTS
    said_before: dict[str, int] = field(default_factory=dict)

    @property
    def client(self) -> redis.Redis:
        return broker.connect(self.url)

    @property
    def keys(self) -> broker.Keys:
        return broker.Keys("test")

    def start_broker(self) -> None:
        self._start("broker", *broker.command(self.run.broker))
        broker.wait_ready(self.url)
        until(self._answers)

    def _answers(self) -> bool:
        """Whether the broker has read its file and takes commands."""
        with self.client as client, contextlib.suppress(redis.RedisError):
            return bool(client.ping())
        return False

    def start_gateway(self) -> None:
        fd = str(self.listener.fileno())
        self._start("gateway", *self._module("gateway", "--fd", fd), pass_fds=(int(fd),))

    def start_worker(self, pool: str, index: int = 0) -> str:
        name = f"worker-{pool}-{index}"
        self._start(name, *self._module("worker", "--pool", pool, "--index", str(index)))
        return name

    def mend(self) -> None:
        """Have everything stand again as tests expect it, whatever the last one did."""
        for name in set(self.processes):
            self.signal(name, signal.SIGCONT)
            if name not in STANDING or self.processes[name].poll() is not None:
                self.kill(name)
        if "broker" not in self.processes:
            self.start_broker()
        if "gateway" not in self.processes:
            self.start_gateway()
        for pool in ("web", "scorers"):
            if f"worker-{pool}-0" not in self.processes:
                self.start_worker(pool)
        newest = Registry(self.run.registry).newest("fit")
        if newest is None or newest.number != self.version:
            self.version = self.publish(WEIGHTS).number
        for user in range(4):
            until(lambda user=user: self.fresh("/recommend", {"user": user})["model_version"] == self.version)
        self.fresh("/bare", {"number": 0})
        self.said_before = {name: len(self._log(name)) for name in self.processes}

    def start_jobs(self, pool: str) -> str:
        name = f"jobs-{pool}"
        self._start(name, *self._module("jobs", "--pool", pool))
        return name

    def signal(self, name: str, number: signal.Signals) -> None:
        self.processes[name].send_signal(number)

    def kill(self, name: str) -> None:
        """SIGKILL, and wait until it is gone."""
        process = self.processes.pop(name)
        process.kill()
        process.wait()

    def end(self, name: str) -> int:
        """SIGTERM; the exit code."""
        process = self.processes.pop(name)
        process.terminate()
        return process.wait(10)

    def ask(
        self, path: str, body: Any, *, method: str = "POST", headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, Any]]:
        """Status and JSON of one request; `body` may be bytes as they are."""
        connection = http.client.HTTPConnection(*self.listener.getsockname(), timeout=18)
        try:
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            connection.request(method, path, data if method == "POST" else None, headers or {})
            reply = connection.getresponse()
            text = reply.read()
            kind = reply.headers.get_content_type()
            return reply.status, json.loads(text) if kind == "application/json" else {"text": text.decode()}
        finally:
            connection.close()

    def fresh(self, path: str, body: Any) -> dict[str, Any]:
        """The first fresh answer, asked for until there is one."""
        return until(lambda: found if (found := self.ask(path, body)[1]).get("source") == "fresh" else None)

    def publish(self, weights: list[float], model: str = "fit") -> Version:
        """Publish a version of a model, and tell of it."""
        tensors = {"weights": np.array(weights, dtype="f4")}
        version = Registry(self.run.registry).publish(model, tensors, metrics={}, made_by={})
        with self.client as client:
            notice.announce(client, self.keys, model, version.number)
        return version

    def said(self, name: str, event: str) -> list[dict[str, Any]]:
        """The log lines of a process that say `event`, since the last mending."""
        lines = self._log(name)[self.said_before.get(name, 0) :]
        found = [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]
        return [line for line in found if line.get("event") == event]

    def close(self) -> None:
        for process in self.processes.values():
            process.send_signal(signal.SIGCONT)
            process.kill()
        for process in self.processes.values():
            process.wait()
        self.listener.close()
        broker.clear(self.run.broker)

    def _log(self, name: str) -> list[str]:
        return (self.run.logs / name).read_text().splitlines()

    def _start(self, name: str, *command: str, pass_fds: tuple[int, ...] = ()) -> None:
        with (self.run.logs / name).open("ab") as log:
            self.processes[name] = subprocess.Popen(
                command, env=self.env, cwd=self.root, stdout=log, stderr=log, pass_fds=pass_fds
            )

    def _module(self, module: str, *arguments: str) -> list[str]:
        return [sys.executable, "-m", f"twinhull.serve.{module}", "--run", str(self.run.root), *arguments]


def until(look: Callable[[], Any], patience_s: float = 15.0) -> Any:
    """What `look` gives once it gives something; fails when that takes too long."""
    end = time.monotonic() + patience_s
    while not (found := look()):
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)
    return found


def make_hull(root: Path) -> Hull:
    """A hull with its broker and gateway up."""
    (root / "app.py").write_text(APP)
    run = RunDirectory(root / "run")
    run.create()
    run.system.write_text(SYSTEM)
    url = broker.address(run.broker)
    env = {
        **os.environ,
        "TWINHULL_RUN": str(run.root),
        "TWINHULL_BROKER": url,
        "TWINHULL_LOG_FORMAT": "json",
        "PYTHONPATH": str(root),
        "OMP_NUM_THREADS": "1",
    }
    listener = socket.create_server(("127.0.0.1", 0))
    hull = Hull(root, run, url, env, listener)
    hull.start_broker()
    run.entries.write_bytes(
        subprocess.run(
            [sys.executable, "-m", "twinhull.serve.entry", *(f"app:{name}" for name in TASKS + DEFAULTS)],
            env=env,
            cwd=root,
            stdout=subprocess.PIPE,
            check=True,
        ).stdout
    )
    hull.start_gateway()
    return hull


@pytest.fixture(name="until", scope="session")
def give_until() -> Callable[..., Any]:
    """Wait for something to happen: `until(look)`."""
    return until


@pytest.fixture(scope="session")
def only_hull(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hull]:
    """Starting one takes seconds, so all tests of the room share it."""
    made = make_hull(tmp_path_factory.mktemp("hull"))
    yield made
    made.close()


@pytest.fixture
def hull(only_hull: Hull) -> Hull:
    """A hull of broker, gateway, two workers and a model, answering; a test may break what it likes."""
    only_hull.mend()
    return only_hull
