"""What a system lacks before `twinhull up` can run it."""

import math
from collections.abc import Iterator

from twinhull.system.expand import members_of
from twinhull.system.model import Component, Endpoint, System, Task, Train
from twinhull.system.names import is_entry


def missing(system: System) -> list[str]:
    """What has to be written before `up` can run it, a few words each."""
    workloads = {name: part for name, part in system.components.items() if isinstance(part, Task | Train)}
    lacking = [] if workloads else ["a workload, for example rank: {task: app:rank, pool: web}"]
    for name, part in workloads.items():
        if part.run is None and not (isinstance(part, Train) and part.command):
            lacking.append(f"the function of {name}, as module:function")
        if _pool_of(system, part) is None:
            lacking.append(f"the pool that {name} runs in")
    for name, endpoint in system.endpoints.items():
        lacking += [f"{what} of endpoint {name}" for what in _of_endpoint(system, endpoint)]
    return lacking


def _pool_of(system: System, part: Component) -> str | None:
    host = system.components.get(part.host or "")
    return part.pool or (host.pool if host else None)


def _of_endpoint(system: System, endpoint: Endpoint) -> Iterator[str]:
    if endpoint.path is None:
        yield "the path"
    if endpoint.deadline is None or math.isinf(endpoint.deadline):
        yield "a deadline, for example 200 ms,"
    for member in members_of(endpoint):
        if not isinstance(system.components[member], Task):
            yield f"a task instead of the {system.components[member].kind} {member} in the path"
    for rung in endpoint.fallback or ():
        if rung != "cache" and not is_entry(rung):
            yield f"cache or module:function instead of {rung} in the fallback"
