"""By which lane a call travels: event (an answer in milliseconds) or job (long, or in no hurry)."""

import math

from twinhull.system.expand import members_of
from twinhull.system.model import Endpoint, Lane, System, Task

LONG_CALL_S = 0.05  # above this a call's own time hides what the job lane costs
NO_HURRY_S = 1.0


def lane_of(system: System, endpoint: str | None, task: str) -> Lane:
    """The lane of a task for the requests of one endpoint; without one, of a call outside of any request.

    The task's own `lane` wins. Else `job` when a call takes 50 ms or more, or when 1 s or more of the
    deadline is left as the call begins; else `event`. Raises KeyError if there is no such task or endpoint.
    """
    component = system.components[task]
    if not isinstance(component, Task):
        raise KeyError(task)
    if component.lane is not None:
        return component.lane
    left = _deadline_left(system, system.endpoints[endpoint], task) if endpoint is not None else math.inf
    return "job" if left >= NO_HURRY_S or _seconds(system, task) >= LONG_CALL_S else "event"


def lanes_of(system: System, task: str) -> frozenset[Lane]:
    """All lanes by which a task is called: by each endpoint that holds it, and by nobody or `every`."""
    callers: list[str | None] = [
        name for name, endpoint in system.endpoints.items() if task in members_of(endpoint)
    ]
    component = system.components[task]
    if not callers or (isinstance(component, Task) and component.every is not None):
        callers.append(None)
    return frozenset(lane_of(system, caller, task) for caller in callers)


def _deadline_left(system: System, endpoint: Endpoint, task: str) -> float:
    """Seconds of the deadline left when a task of the path begins, if all before takes its usual time."""
    left = math.inf if endpoint.deadline is None else endpoint.deadline
    for member in endpoint.path or ():
        together = [member] if isinstance(member, str) else member
        if task in together:
            return left
        left -= max(_seconds(system, name) for name in together)
    return math.inf


def _seconds(system: System, name: str) -> float:
    component = system.components.get(name)
    time = component.service_time if isinstance(component, Task) else None
    return time.mean if time else 0.0
