"""One generation: a set of ranks with a fresh store under torchrun, watched until all of them have left.

torchrun starts ranks and does no more: the first rank that leaves with an error ends the generation, what
still runs is asked to leave and killed soon after, and a group that completes nothing for too long is killed.
"""

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

from twinhull.train import live
from twinhull.train.job import Job
from twinhull.train.live import Failure, Phase, Record

LAGGARD_S = 1.0  # between SIGTERM and SIGKILL for the ranks that outlive a lost one
STOP_S = 3.0  # the same when the whole run is asked to stop: they save first
START_S = 120.0  # imports on a busy machine are slow, and no hang
AGENT_S = 5.0  # for torchrun to say how its ranks left, once they are gone
POLL_S = 0.05
_EXTERNAL = {-signal.SIGKILL, -signal.SIGINT, -signal.SIGHUP, -signal.SIGQUIT}
log = logging.getLogger(__name__)

How = Literal["done", "stopped", "loss", "crash", "refused"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a generation ended. `steps` of it were completed in `stepped_s`, up to `step`."""

    how: How
    step: int
    steps: int
    stepped_s: float
    failure: Failure | None


class Agent:
    """torchrun, which serves one generation after another: PyTorch is imported once, each store is fresh."""

    def __init__(self, nice: int) -> None:
        local = {
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # a shared one hands out dead addresses
            "OMP_NUM_THREADS": "1",
        }
        loopback = "lo0" if sys.platform == "darwin" else "lo"
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "twinhull.train.torchrun",
                "--parent",
                str(os.getpid()),
                "--nice",
                str(nice),
            ],
            stdin=subprocess.PIPE,
            env={"GLOO_SOCKET_IFNAME": loopback, **os.environ, **local},
            text=True,
            start_new_session=True,  # a signal to the launcher's group is the launcher's to pass on
        )

    @property
    def lives(self) -> bool:
        """Whether it can start ranks."""
        return self.process.poll() is None

    def start(self, job: Job, num_ranks: int, folder: Path, exits: Path) -> None:
        """Let it start ranks; when all of them have left it writes how into `exits`."""
        order = {"ranks": num_ranks, "job": job.to_json(), "live": str(folder), "exits": str(exits)}
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # it is dead; whoever waits for it will see
            self.process.stdin.write(json.dumps(order) + "\n")
            self.process.stdin.flush()

    def end(self) -> None:
        """Kill it."""
        self.process.kill()
        self.process.wait()
        if self.process.stdin is not None:
            with suppress(BrokenPipeError):
                self.process.stdin.close()


class Generation:
    """States: started, stepping (a step is complete), leaving (somebody left or was asked to), ended."""

    def __init__(self, job: Job, agent: Agent, folder: Path, num_ranks: int) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self._job, self._agent, self._folder, self._num_ranks = job, agent, folder, num_ranks
        self._started = self._beat_at = time.monotonic()
        self._beats, self._first_step_at = -1, 0.0
        self._records: dict[int, Record] = {}
        self._killed: set[int] = set()
        self._leave_by: float | None = None
        self._hung = False
        self._agent_s = AGENT_S
        self._exits = folder / "exits.json"
        agent.start(job, num_ranks, folder, self._exits)

    @property
    def is_stepping(self) -> bool:
        """Whether a step was completed."""
        return self._first_step_at > 0

    def watch(self, stopping: Callable[[], bool]) -> Outcome:
        """Wait until all its ranks have ended."""
        while self._agent.lives and not self._exits.exists():
            self._look()
            if self._leave_by is None:
                self._consider(stopping=stopping())
            elif time.monotonic() >= self._leave_by:
                self._kill()
            time.sleep(POLL_S)
        self._records = live.read(self._folder)
        self._kill()
        return self._outcome(stopping=stopping())

    def _look(self) -> None:
        self._records = live.read(self._folder)
        beats = sum(record.beats for record in self._records.values())
        if beats != self._beats:
            self._beats, self._beat_at = beats, time.monotonic()
        if not self.is_stepping and any(r.step > r.started_at_step for r in self._records.values()):
            self._first_step_at = time.monotonic()

    def _consider(self, *, stopping: bool) -> None:
        """Whether it is time for all ranks to leave."""
        now = time.monotonic()
        if stopping:
            self._agent_s = 0.0
            self._leave(STOP_S if len(self._records) == self._num_ranks else 0.0)  # nothing to save yet
        elif now - self._beat_at > self._patience_s:
            self._hung = True
            log.error("hang", extra={"step": self._step, "without_a_step_s": round(now - self._beat_at, 1)})
            self._leave(0.0)
        elif any(not _lives(record) and record.phase not in (Phase.DONE, Phase.STOPPED)
                 for record in self._records.values()):  # fmt: skip
            self._leave(LAGGARD_S)

    def _leave(self, grace_s: float) -> None:
        self._leave_by = time.monotonic() + grace_s
        for record in self._records.values():
            _signal(record, signal.SIGTERM)

    def _kill(self) -> None:
        """End the ranks that still run, with all they have started, and a torchrun that outlives them."""
        for rank, record in self._records.items():
            if _lives(record):
                self._killed.add(rank)
            _signal(record, signal.SIGKILL)
        if not self._exits.exists() and time.monotonic() > (self._leave_by or 0.0) + self._agent_s:
            self._agent.end()

    @property
    def _patience_s(self) -> float:
        """How long without a sign of progress is a hang; a start may always take START_S."""
        up = len(self._records) == self._num_ranks and all(r.phase for r in self._records.values())
        return self._job.hang_timeout_s if up else max(self._job.hang_timeout_s, START_S)

    @property
    def _step(self) -> int:
        return max((record.step for record in self._records.values()), default=0)

    def _outcome(self, *, stopping: bool) -> Outcome:
        records = self._records
        began = min((record.started_at_step for record in records.values()), default=0)
        stepped_s = time.monotonic() - self._first_step_at if self.is_stepping else 0.0
        phases = {rank: record.phase for rank, record in records.items()}
        failed = [r for r, phase in phases.items() if phase in (Phase.FAILED, Phase.REFUSED)]
        failure = live.failure(self._folder, failed[0]) if failed else None
        how: How = "loss"
        if len(phases) == self._num_ranks and set(phases.values()) == {Phase.DONE}:
            how = "done"
        elif any(phase is Phase.REFUSED for phase in phases.values()):
            how = "refused"
        elif stopping:
            how = "stopped"
        elif failed:
            how = "crash"
        elif not self._hung:
            how, failure = self._cause()
        step = failure.step if failure is not None else self._step
        return Outcome(how, step, max(0, self._step - began), stepped_s, failure)

    def _cause(self) -> tuple[How, Failure | None]:
        """Whose fault it is that ranks left without a word: somebody's from outside, or the code's."""
        if not self._exits.exists():
            code = self._agent.process.wait()
            said = f"torchrun left with exit {code}"
            return ("loss", None) if code < 0 else ("crash", Failure(self._step, said, ""))
        exits = {int(rank): int(code) for rank, code in json.loads(self._exits.read_text()).items()}
        peers = {rank for rank, record in self._records.items() if record.phase is Phase.PEER_LOST}
        # torchrun sends SIGTERM to the others when one has left: theirs is never the cause
        own = {rank: c for rank, c in exits.items() if rank not in self._killed and c != -signal.SIGTERM}
        first = {rank: code for rank, code in own.items() if rank not in peers}
        for rank, code in first.items():
            log.warning("rank left", extra={"rank": rank, "exit": code, "step": self._step})
        if any(code in _EXTERNAL for code in first.values()) or not own:
            return "loss", None
        if first:
            rank, code = next(iter(first.items()))
            return "crash", Failure(self._step, f"rank {rank} left with exit {code} and said nothing", "")
        if len(peers) < self._num_ranks:  # somebody left without being seen: killed, as far as anybody knows
            return "loss", None
        return "crash", live.failure(self._folder, min(peers))


def _lives(record: Record) -> bool:
    try:
        return psutil.Process(record.pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _signal(record: Record, number: signal.Signals) -> None:
    """To the rank alone to ask; to its whole group, which is its own session, to end."""
    with suppress(ProcessLookupError, PermissionError):
        if number == signal.SIGKILL:
            os.killpg(record.pid, number)
        else:
            os.kill(record.pid, number)
