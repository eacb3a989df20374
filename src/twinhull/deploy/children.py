"""Which processes make up a run on this machine, and how is each started?"""

import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from twinhull import broker, logs, rundir
from twinhull.deploy.scale import Local
from twinhull.errors import TwinhullError
from twinhull.processes import Command
from twinhull.rundir import RunDirectory
from twinhull.serve import layout
from twinhull.system.lanes import lanes_of
from twinhull.system.model import System, Task, Train
from twinhull.train.supervise import place as join

Plane = Literal["training", "serving"]
_TRAINING_ENDS = frozenset({0, 1, 2, 75})  # done, failed for good, the user's to mend, stopped and saved


@dataclass(frozen=True, slots=True)
class Place:
    """Where children run: the run directory, their environment, and the directory of the user's modules."""

    run: RunDirectory
    env: dict[str, str]
    code: Path


def place(run: RunDirectory, url: str, code: Path) -> Place:
    """The place for the children of a run whose broker is at `url`."""
    paths = [str(code), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {
        "OMP_NUM_THREADS": "1",  # a process a core is the unit of scaling here
        **os.environ,
        rundir.VARIABLE: str(run.root),
        broker.VARIABLE: url,
        logs.VARIABLE: "json",
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONUNBUFFERED": "1",
    }
    return Place(run, env, code)


def server(at: Place, source: broker.Source) -> Command:
    """The broker of ours."""
    argv = (sys.executable, "-m", "twinhull.processes", *broker.command(at.run.broker, source.program))
    return Command("broker", argv, at.env, at.code, hold=at.run.holds / "broker")


def training(system: System, local: Local, at: Place, join_at: str | None = None) -> list[Command]:
    """One launcher a training job, for this machine or for those that join; each gets a port of its own."""
    found: list[Command] = []
    for name, train in trains(system).items():
        where = ("--ranks", str(local.ranks.get(name, 1)))
        if train.command and name in local.hosts:
            raise TwinhullError(
                f"{name} runs a command, which trains on one machine only, and its pool has several nodes.",
                hint="Give it a pool of one node, or leave --join-at out.",
            )
        if join_at is not None and name in local.hosts:
            address, port = join.parsed(join_at)
            number = port and port + list(local.hosts).index(name)
            where = ("--listen", f"{address}:{number}", "--nodes", str(local.hosts[name]))
        module = "twinhull.train.scripts.command" if train.command else "twinhull.train.supervise.launch"
        command = _module(at, f"train:{name}", module, "--train", name, *where)
        found.append(replace(command, grace_s=train.warning or command.grace_s))
    return found


def serving(system: System, local: Local, at: Place, listener: int) -> list[Command]:
    """Gateway, event workers, job workers and, if a task runs by the clock, the clock."""
    found = [_module(at, "gateway", "twinhull.serve.gateway", "--fd", str(listener), pass_fds=(listener,))]
    for pool in layout.pools(system):
        for index in range(local.workers.get(pool, 1)):
            name, which = f"worker:{pool}-{index}", ("--pool", pool, "--index", str(index))
            found.append(_module(at, name, "twinhull.serve.worker", *which))
    found += [
        _module(at, f"jobs:{pool}", "twinhull.serve.jobs", "--pool", pool)
        for pool in sorted(_job_pools(system))
    ]
    if any(task.every is not None for task in tasks(system).values()):
        found.append(_module(at, "clock", "twinhull.serve.jobs", "--beat"))
    return found


def trains(system: System) -> dict[str, Train]:
    """The training jobs of a system, by name."""
    return {name: part for name, part in system.components.items() if isinstance(part, Train)}


def tasks(system: System) -> dict[str, Task]:
    """The tasks of a system, by name."""
    return {name: part for name, part in system.components.items() if isinstance(part, Task)}


def planes(system: System, only: Plane | None) -> list[Plane]:
    """The planes that the system has, or the one that is asked for. Raises TwinhullError if it has not."""
    has: dict[Plane, bool] = {
        "training": bool(trains(system)),
        "serving": bool(system.endpoints or tasks(system)),
    }
    if only is not None and not has[only]:
        raise TwinhullError(f"--only {only}: {system.name} has nothing for it.", hint="Leave --only out.")
    return [plane for plane, there in has.items() if there and only in (None, plane)]


def functions(system: System, planes: Iterable[Plane]) -> dict[Plane, list[str]]:
    """The user's functions that these planes call, as module:function."""
    found: dict[Plane, list[str]] = {}
    if "training" in planes:
        found["training"] = [t.run for t in trains(system).values() if t.run]
    if "serving" in planes:
        rungs = [rung for end in system.endpoints.values() for rung in end.fallback or () if ":" in rung]
        found["serving"] = [*(t.run for t in tasks(system).values() if t.run), *rungs]
    return {plane: sorted(set(names)) for plane, names in found.items()}


def _job_pools(system: System) -> set[str]:
    """The pools with work for Celery: by their lane, or because the clock sends it."""
    return {
        layout.pool_of(system, task)
        for name, task in tasks(system).items()
        if task.every is not None or "job" in lanes_of(system, name)
    }


def _module(at: Place, name: str, module: str, *arguments: str, pass_fds: tuple[int, ...] = ()) -> Command:
    return Command(
        name,
        (sys.executable, "-m", module, "--run", str(at.run.root), *arguments),
        at.env,
        at.code,
        pass_fds=pass_fds,
        final=_TRAINING_ENDS if name.startswith("train:") else frozenset(),
        hold=at.run.holds / name,
    )
