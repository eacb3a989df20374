"""What comes with the workloads of a file by itself: broker, queues, workers, gateway, cache, registry.

A second, generated draft, over which the file is laid field by field; what the file says wins.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from twinhull.system import names
from twinhull.system.model import (
    CLASS_BY_KIND,
    Checkpoint,
    Endpoint,
    Link,
    LinkKind,
    Part,
    System,
    Task,
    Train,
)
from twinhull.system.quantities import Range, Retries, Span

P = TypeVar("P", bound=Part)
NEVER = float("inf")
HANG_TIMEOUT = 300.0
CHECKPOINT_EVERY = Span(seconds=600.0)
QUEUE_BOUND = 10_000.0  # a burst of seconds; more would only be answered after every deadline
ONE = Range(1, 1)


@dataclass(slots=True)
class Draft:
    """Generated components and links, and the path that caused each."""

    kinds: dict[str, str] = field(default_factory=dict)  # of each component
    fields: dict[str, dict[str, Any]] = field(default_factory=dict)  # Any: of each component, its fields
    causes: dict[str, str] = field(default_factory=dict)  # of each component, the path that needs it
    links: dict[Link, str] = field(default_factory=dict)  # each with the path that needs it

    def add(self, name: str, kind: str, cause: str, **fields: Any) -> None:  # Any: the fields of the kind
        """Add a component, unless an earlier cause has added it."""
        if name not in self.kinds:
            self.kinds[name], self.fields[name], self.causes[name] = kind, fields, cause

    def link(
        self, source: str, target: str, kind: LinkKind, cause: str, **fields: Any
    ) -> None:  # Any: see add
        """Add a link, unless it is there exactly so."""
        link = Link.model_construct(source=source, target=target, kind=kind, **fields)
        self.links.setdefault(link, cause)


def expand(said: System, workloads: Collection[str]) -> tuple[System, dict[str, str]]:
    """The system of a file with everything filled in that comes with these of its components.

    Beside it, for each generated component and link, by its path, the path of what needs it.
    """
    draft = Draft()
    for name in workloads:
        part = said.components[name]
        if isinstance(part, Task):
            _task(draft, said, name, part)
        elif isinstance(part, Train):
            _train(draft, said, name, part)
    endpoints = {name: _endpoint(draft, said, name, part) for name, part in said.endpoints.items()}
    components = {name: overlaid(part, draft.fields.get(name, {})) for name, part in said.components.items()}
    for name, kind in draft.kinds.items():
        if name not in components:
            build: Any = CLASS_BY_KIND[kind].model_construct  # Any: each class has its own kinds
            components[name] = build(kind=kind, **draft.fields[name])
    links, caused = _links(draft, said)
    causes = {f"components.{name}": cause for name, cause in draft.causes.items()} | caused
    update = {"components": components, "links": links, "endpoints": endpoints}
    return said.model_copy(update=update), causes


def overlaid(said: P, filled: Mapping[str, object]) -> P:
    """What was said, with what was filled in where nothing was said."""
    update: dict[str, object] = {}
    for name, ours in filled.items():
        theirs = getattr(said, name)
        if isinstance(ours, Part) and isinstance(theirs, Part):
            update[name] = overlaid(theirs, dict(ours))
        elif theirs is None and ours is not None:
            update[name] = ours
    return said.model_copy(update=update) if update else said


def _shared(draft: Draft, said: System, cause: str) -> None:
    """What any task or endpoint needs. Of a broker at an address of the user's nothing is known but that."""
    broker, cache = said.components.get(names.BROKER), said.components.get(names.CACHE)
    ours = {"software": "redis", "replicas": ONE, "syncs": 1.0, "lost_with": "node"}
    draft.add(names.BROKER, "broker", cause, **({} if getattr(broker, "url", None) else ours))
    draft.add(names.CACHE, "cache", cause, **({} if getattr(cache, "url", None) else {"host": names.BROKER}))


def _task(draft: Draft, said: System, name: str, task: Task) -> None:
    cause = f"components.{name}"
    _shared(draft, said, cause)
    if task.model is not None:
        draft.add(names.REGISTRY, "registry", cause, keep=3)
    pool = said.pools.get(task.pool or "")
    if task.pool is None or pool is None:
        draft.add(name, "task", cause, ack="late", redelivered=True)
        return
    queue, worker = names.queue_of(task.pool), names.worker_of(task.pool)
    draft.add(
        queue,
        "queue",
        cause,
        host=names.BROKER,
        order="fifo",
        bound=QUEUE_BOUND,
        deliveries=3.0,
        dead_letter=True,
    )
    slots = 1 if pool.gpus and pool.gpus.count != 0 else pool.cpus or None
    draft.add(
        worker,
        "worker",
        cause,
        pool=task.pool,
        replicas=pool.nodes,
        concurrency=slots,
        gpus=pool.gpus,
        prefetch=1,
    )
    draft.link(worker, queue, "consume", cause)
    draft.add(name, "task", cause, host=worker, ack="late", redelivered=True)
    if task.model is not None:
        draft.link(worker, names.REGISTRY, "read", cause, when="start")


def _train(draft: Draft, said: System, name: str, train: Train) -> None:
    cause = f"components.{name}"
    pool = said.pools.get(train.pool or "")
    checkpoint = Checkpoint.model_construct(
        every=CHECKPOINT_EVERY, to=names.CHECKPOINTS, keep=3, atomic=True, asynchronous=True
    )
    draft.add(
        name,
        "train",
        cause,
        replicas=pool.nodes if pool else None,
        gpus=pool.gpus if pool else None,
        restarts=NEVER,
        requeue=True,
        gang=True,
        hang_timeout=HANG_TIMEOUT,
        checkpoint=checkpoint,
    )
    draft.add(names.CHECKPOINTS, "store", cause)
    draft.add(names.REGISTRY, "registry", cause, keep=3)
    draft.link(name, names.REGISTRY, "write", cause, overwrites=False)


def _endpoint(draft: Draft, said: System, name: str, endpoint: Endpoint) -> Endpoint:
    """The endpoint with its client."""
    cause = f"endpoints.{name}"
    _shared(draft, said, cause)
    draft.add(names.GATEWAY, "gateway", cause, replicas=ONE)
    draft.add(names.CLIENTS, "client", cause)
    client, deadline = endpoint.client or names.CLIENTS, endpoint.deadline
    draft.link(client, names.GATEWAY, "call", cause, timeout=deadline)
    for member in members_of(endpoint):
        task = said.components.get(member)
        pool = (task.pool if task else None) or ""
        if member in draft.kinds and names.queue_of(pool) in draft.kinds:
            draft.link(
                names.GATEWAY,
                names.queue_of(pool),
                "publish",
                cause,
                task=member,
                wait="await",
                timeout=deadline,
                expires=deadline,
                retries=Retries(0.0),
            )
    for rung in endpoint.fallback or ():
        if rung in said.components or rung in draft.kinds:
            draft.link(names.GATEWAY, rung, "read", cause, when="late")
    return endpoint.model_copy(update={"client": client})


def members_of(endpoint: Endpoint) -> list[str]:
    """The members of an endpoint's path, inner lists flattened."""
    members: list[str] = []
    for member in endpoint.path or ():
        members += [member] if isinstance(member, str) else member
    return members


def _links(draft: Draft, said: System) -> tuple[tuple[Link, ...], dict[str, str]]:
    """The user's links first, as in the file, each laid over the generated one that it repeats."""
    open_links = dict(draft.links)
    by_ends: dict[object, list[Link]] = {}
    for link in open_links:
        by_ends.setdefault((link.source, link.target, link.kind), []).append(link)
    links: list[Link] = []
    for link in said.links:
        twins = by_ends.get((link.source, link.target, link.kind), [])
        twin = next((one for one in twins if link.task in (None, one.task)), None)
        if twin is not None:
            twins.remove(twin)
            del open_links[twin]
        links.append(overlaid(link, dict(twin) if twin else {}))
    causes = {f"links.{len(links) + index}": cause for index, cause in enumerate(open_links.values())}
    return (*links, *open_links), causes
