"""What must gateway and workers know of the system? Its endpoints, stages and tasks as plain numbers."""

from dataclasses import dataclass
from typing import Literal

from twinhull.errors import TwinhullError
from twinhull.system.lanes import lane_of
from twinhull.system.model import Endpoint, State, System, Task

ASSUMED_DEADLINE_S = 1.0  # of an endpoint whose file promises none: a caller still wants an answer
DEFAULT_TTL_S = 600.0  # until a cached answer counts as old
STALE_FACTOR = 10.0  # an old answer with its age told is better than none for ten lives
DEFAULT_BATCH = 32  # rows that share one message, where the file gives the task no batch
DEFAULT_WINDOW_S = 0.001
DEFAULT_BOUND = 10_000  # entries that a pool's stream may hold: far above what an open breaker lets in
DEFAULT_RETRY_BUDGET = 0.1  # of all requests: what is down is not helped by asking it again and again
LONGEST_DEADLINE_S = 3600.0  # of an endpoint that promises later, or never
DELIVERIES = 3  # after as many tries work is poison, where the file's queue says nothing else
CACHE = "cache"  # the rung of a fallback ladder that is not a function


@dataclass(frozen=True, slots=True)
class Stop:
    """A task as a request visits it: where it is queued, how its rows are gathered, what it calls.

    `batch` says whether the file gives the task a batch; `size` and `window_s` hold either way.
    """

    task: str
    run: str
    pool: str
    lane: Literal["event", "job"]
    batch: bool
    size: int
    window_s: float
    model: str | None
    retries: float = 0.0
    retry_after_s: float = 0.0
    retry_budget: float = DEFAULT_RETRY_BUDGET


@dataclass(frozen=True, slots=True)
class Promise:
    """An endpoint: its stages in order (the stops of one stage work at the same time) and its ladder."""

    name: str
    stages: tuple[tuple[Stop, ...], ...]
    deadline_s: float
    fallback: tuple[str, ...]

    @property
    def defaults(self) -> tuple[str, ...]:
        """The functions of the ladder."""
        return tuple(rung for rung in self.fallback if rung != CACHE)


@dataclass(frozen=True, slots=True)
class CacheTimes:
    """How long an answer is young, how long it may be given at all, how many bytes one gateway may hold."""

    soft_s: float
    hard_s: float
    most_bytes: float


def promises(system: System) -> dict[str, Promise]:
    """What every endpoint with a path promises, by its name."""
    return {
        name: _promise(system, name, endpoint) for name, endpoint in system.endpoints.items() if endpoint.path
    }


def event_stops(system: System, pool: str) -> dict[str, Stop]:
    """The tasks that the event workers of a pool answer, by name."""
    found = _stops(system)
    return {s.task: s for s in found if s.pool == pool and s.lane == "event"}


def longest_deadline_s(system: System, pool: str) -> float:
    """The longest deadline of the endpoints that wait for this pool."""
    made = promises(system).values()
    return max(
        (p.deadline_s for p in made if any(s.pool == pool for stage in p.stages for s in stage)),
        default=ASSUMED_DEADLINE_S,
    )


def pools(system: System) -> tuple[str, ...]:
    """The pools whose event workers the gateway talks to."""
    return tuple(sorted({s.pool for s in _stops(system) if s.lane == "event"}))


def cache_times(system: System) -> CacheTimes:
    """The life of cached answers, from the file's cache."""
    cache = next((c for c in system.components.values() if isinstance(c, State) and c.kind == "cache"), None)
    soft_s = DEFAULT_TTL_S if cache is None or cache.ttl is None else cache.ttl
    size = None if cache is None else cache.size
    return CacheTimes(soft_s, STALE_FACTOR * soft_s, 64e6 if size is None else size)


def queue_bound(system: System, pool: str) -> int:
    """How many entries the stream of a pool may hold."""
    queue = _queue(system, pool)
    bound = None if queue is None else queue.bound
    return DEFAULT_BOUND if bound is None else int(min(bound, 1_000_000))


def most_deliveries(system: System, pool: str) -> int:
    """How often an entry is handed out before it is set aside."""
    queue = _queue(system, pool)
    deliveries = None if queue is None else queue.deliveries
    return DELIVERIES if deliveries is None else int(min(deliveries, 1_000_000))


def _queue(system: System, pool: str) -> State | None:
    found = system.components.get(f"{pool}-queue")
    return found if isinstance(found, State) else None


def _stops(system: System) -> list[Stop]:
    return [s for p in promises(system).values() for stage in p.stages for s in stage]


def _promise(system: System, name: str, endpoint: Endpoint) -> Promise:
    stages = tuple(
        tuple(_stop(system, name, task) for task in ((stage,) if isinstance(stage, str) else stage))
        for stage in endpoint.path or ()
    )
    return Promise(
        name=name,
        stages=stages,
        deadline_s=min(
            LONGEST_DEADLINE_S, ASSUMED_DEADLINE_S if endpoint.deadline is None else endpoint.deadline
        ),
        fallback=(CACHE,) if endpoint.fallback is None else tuple(endpoint.fallback),
    )


def _stop(system: System, endpoint: str, name: str) -> Stop:
    task = system.components.get(name)
    if not isinstance(task, Task) or task.run is None:
        raise TwinhullError(f"endpoints.{endpoint}.path: {name} is no task with a function to run.")
    batch, retries = task.batch, task.retries
    return Stop(
        task=name,
        run=task.run,
        pool=pool_of(system, task),
        lane=lane_of(system, endpoint, name),
        batch=batch is not None,
        size=DEFAULT_BATCH if batch is None else batch.size,
        window_s=DEFAULT_WINDOW_S if batch is None or batch.within is None else batch.within,
        model=task.model,
        retries=0.0 if retries is None else retries.count,
        retry_after_s=0.0 if retries is None or retries.after is None else retries.after,
        retry_budget=DEFAULT_RETRY_BUDGET if retries is None or retries.budget is None else retries.budget,
    )


def pool_of(system: System, task: Task) -> str:
    """The pool that a task runs in: its own, or that of the worker which holds it."""
    host = None if task.host is None else system.components.get(task.host)
    pool = task.pool or (None if host is None else host.pool)
    if pool is None:
        raise TwinhullError(f"task {task.run} has no pool to run in.", hint="Add `pool:`.")
    return pool
