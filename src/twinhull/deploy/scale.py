"""How much of the system fits on this machine? Ranks and workers for its cores, and what was scaled."""

import os
from dataclasses import dataclass, field

from twinhull.system.model import Launch, Pool, System, Train
from twinhull.system.quantities import Range


@dataclass(frozen=True, slots=True)
class Local:
    """How many ranks each training job and how many workers each pool gets here, and what that changed.

    `hosts` are the jobs that train on machines which join, and on how many of them.
    """

    ranks: dict[str, int]
    workers: dict[str, int]
    notes: tuple[str, ...]
    hosts: dict[str, Range] = field(default_factory=dict)


def cores() -> int:
    """The cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return max(1, len(os.sched_getaffinity(0)))
    return max(1, os.cpu_count() or 1)


def scaled(
    system: System, *, num_cores: int, ranks: int | None, workers: int | None, joined: bool = False
) -> Local:
    """What runs here: what the file says, at most one process a core, or what the options say.

    If machines may be `joined`, a training job of several nodes is left to them.
    """
    notes: list[str] = []
    found_ranks: dict[str, int] = {}
    found_hosts: dict[str, Range] = {}
    for name, part in system.components.items():
        if isinstance(part, Train):
            pool = system.pools.get(part.pool or "")
            nodes = _nodes_of(part, pool)
            if joined and (nodes.high or nodes.low) > 1:
                found_hosts[name] = nodes
                continue
            found_ranks[name] = _fit(f"{name}: ranks", _ranks(part, pool), num_cores, ranks, notes)
    found_workers: dict[str, int] = {}
    for name, pool in system.pools.items():
        found_workers[name] = _fit(f"{name}: workers", _nodes(pool), num_cores, workers, notes)
    return Local(found_ranks, found_workers, tuple(notes), found_hosts)


def _fit(what: str, said: int, num_cores: int, option: int | None, notes: list[str]) -> int:
    if option is not None:
        return option
    here = max(1, min(said, num_cores))
    if here != said:
        notes.append(f"{what} {said} -> {here} on {num_cores} cores")
    return here


def _nodes(pool: Pool | None) -> int:
    return max(1, pool.nodes.low) if pool is not None and pool.nodes is not None else 1


def _nodes_of(train: Train, pool: Pool | None) -> Range:
    """From how many to how many nodes a job trains on: as elastic as the file says, else on all of them."""
    nodes = _nodes(pool)
    if train.elastic is None:
        return Range(nodes, nodes)
    return Range(train.elastic.low, train.elastic.high or max(nodes, train.elastic.low))


def _ranks(train: Train, pool: Pool | None) -> int:
    """One rank a GPU; without GPUs one a core, since a rank computes on one thread."""
    if train.launch is not None and train.launch.processes is not None:
        return _nodes(pool) * train.launch.processes
    if pool is None:
        return 1
    gpus = pool.gpus.count if pool.gpus is not None else None
    return _nodes(pool) * max(1, gpus or pool.cpus or 1)


def effective(system: System, local: Local) -> System:
    """The system as it runs here: the same names and promises, the numbers of this machine."""
    components = dict(system.components)
    for name, part in components.items():
        if isinstance(part, Train) and name in local.ranks:
            launch = (part.launch or Launch()).model_copy(update={"processes": local.ranks[name]})
            components[name] = part.model_copy(update={"launch": launch, "replicas": Range(1, 1)})
        elif part.kind == "worker" and part.pool in local.workers:
            count = local.workers[part.pool]
            components[name] = part.model_copy(update={"replicas": Range(count, count)})
    used = {part.pool for name, part in components.items() if name in local.ranks and part.pool}
    apart = {components[name].pool for name in local.hosts}
    pools = {
        name: pool.model_copy(update={"nodes": Range(1, 1) if name in used else Range(n, n)})
        for name, pool in system.pools.items()
        for n in [local.workers.get(name, 1)]
        if name not in apart
    }
    pools = {name: pools.get(name, pool) for name, pool in system.pools.items()}
    return system.model_copy(update={"components": components, "pools": pools})
