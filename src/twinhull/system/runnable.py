"""What a system lacks before `twinhull up` can run it."""

import math
from collections.abc import Iterator

from twinhull.system.expand import tasks_of
from twinhull.system.model import Endpoint, System, Task, Train
from twinhull.system.names import is_entry


def missing(system: System) -> list[str]:
    """What has to be written before `up` can run it, one sentence each, under the path of its component."""
    lacking: list[str] = []
    workloads = {name: part for name, part in system.components.items() if isinstance(part, Task | Train)}
    if not workloads:
        lacking.append(
            "workloads: there is nothing to run; write for example rank: {task: app:rank, pool: web}"
        )
    for name, part in workloads.items():
        if part.run is None:
            lacking.append(f"components.{name}.run: which function it is; write module:function")
        if part.pool is None:
            lacking.append(f"workloads.{name}.pool: where it runs; name a pool")
    for name, endpoint in system.endpoints.items():
        lacking += [f"endpoints.{name}.{problem}" for problem in _of_endpoint(system, endpoint)]
    return lacking


def _of_endpoint(system: System, endpoint: Endpoint) -> Iterator[str]:
    if endpoint.path is None:
        yield "path: which tasks answer it, in which order"
    if endpoint.deadline is None:
        yield "deadline: by when it is answered; write for example 200 ms"
    elif math.isinf(endpoint.deadline):
        yield "deadline: a time; never is no promise that can be kept"
    for member in tasks_of(endpoint):
        if not isinstance(system.components[member], Task):
            yield f"path: only tasks; {member} is a {system.components[member].kind}"
    for rung in endpoint.fallback or ():
        if rung != "cache" and not is_entry(rung):
            yield f"fallback: cache or module:function; {rung} is a {system.components[rung].kind}"
