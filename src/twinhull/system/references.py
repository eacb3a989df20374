"""Which names of a file lead nowhere, and what in it contradicts itself.

Works on plain data that may have any other mistake in it, so that all mistakes of a file are told at once.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from twinhull.system.face import Complaint, Face, mapping
from twinhull.system.names import (
    MOST_LETTERS,
    MOST_LETTERS_OF_POOL,
    RESERVED_ENDPOINTS,
    is_entry,
    name_problem,
)
from twinhull.system.places import Data, DataPath
from twinhull.system.quantities import Batch
from twinhull.system.script import directory_problem, words_problem
from twinhull.units import RATE, SECONDS, closest, quoted

T = TypeVar("T")
_Parts = dict[str, dict[str, Data]]


@dataclass(frozen=True, slots=True)
class _Known:
    """What a name can mean. `components` also holds the names of what is broken, or filled in later."""

    pools: _Parts
    components: set[str]
    trains: set[str]
    tasks: set[str]
    broken: set[str]  # a name that is written, of something that cannot be read
    parts: _Parts


def check_references(face: Face) -> Iterator[Complaint]:
    """All complaints about names and contradictions, under the paths of `System`."""
    parts = _parts(face, "components")
    known = _Known(
        pools=_parts(face, "pools"),
        components=face.known,
        trains={name for name, part in parts.items() if part.get("kind") == "train"},
        tasks={name for name, part in parts.items() if part.get("kind") == "task"},
        broken={name for name in face.known if name not in parts and name not in face.brought},
        parts=parts,
    )
    yield from _names(face)
    for name, component in parts.items():
        yield from _component(known, ("components", name), component)
    yield from _hosts(parts)
    for name, endpoint in _parts(face, "endpoints").items():
        yield from _endpoint(known, ("endpoints", name), endpoint)
    links = face.said.get("links")
    for index, link in enumerate(links if isinstance(links, list) else []):
        yield from _link(known, ("links", index), mapping(link))


def _parts(face: Face, section: str) -> _Parts:
    return {name: mapping(part) for name, part in mapping(face.said.get(section)).items()}


def _names(face: Face) -> Iterator[Complaint]:
    name = face.said.get("name")
    if isinstance(name, str) and name_problem(name):
        yield Complaint(("name",), name_problem(name))
    for section in ("pools", "components", "endpoints"):
        for key in mapping(face.said.get(section)):
            path = (section, key)
            problem = name_problem(key, MOST_LETTERS_OF_POOL if section == "pools" else MOST_LETTERS)
            if problem:
                yield Complaint(path, problem, at_key=True)
            if section == "endpoints" and key in RESERVED_ENDPOINTS:
                yield Complaint(
                    path, f"/{key} is answered by the gateway itself; choose another name", at_key=True
                )
    for workload in face.roles:
        if workload in face.brought:
            what = face.brought[workload]
            message = f"is the name of the {what} that comes with the workloads; choose another name"
            yield Complaint(("components", workload), message, at_key=True)


def _component(known: _Known, at: DataPath, component: dict[str, Data]) -> Iterator[Complaint]:
    pool, host, model = (component.get(key) for key in ("pool", "host", "model"))
    if isinstance(pool, str) and pool not in known.pools:
        yield Complaint((*at, "pool"), _no("pool", pool, set(known.pools)))
    if isinstance(host, str) and host not in known.components:
        yield Complaint((*at, "host"), _no("component", host, known.components))
    if isinstance(model, str) and model not in known.trains | known.broken:
        if model in known.components:
            what = "a task" if model in known.tasks else "no train"
            message = f"{quoted(model)} is {what}; a model has the name of the train that makes it"
        else:
            message = _no("training workload", model, known.trains)
        yield Complaint((*at, "model"), message)
    yield from _checkpoint(known, at, component)
    yield from _script(at, component)


def _checkpoint(known: _Known, at: DataPath, component: dict[str, Data]) -> Iterator[Complaint]:
    said = component.get("checkpoint")
    to, every = mapping(said).get("to"), mapping(said).get("every", said)
    if isinstance(to, str) and to not in known.components:
        yield Complaint((*at, "checkpoint", "to"), _no("component", to, known.components))
    pool = component.get("pool")
    if every != "auto" or (
        isinstance(pool, str) and (pool not in known.pools or "mtbf" in known.pools[pool])
    ):
        return
    way_out = f"write it into pool {quoted(pool)}" if isinstance(pool, str) else "name its pool, and there"
    message = f'"auto" needs to know how often a node fails; {way_out}: mtbf: 30 day'
    yield Complaint((*at, "checkpoint", "every"), message)


def _script(at: DataPath, component: dict[str, Data]) -> Iterator[Complaint]:
    """Complains about a command that cannot be run, or that stands beside what it replaces."""
    command, publish = component.get("command"), component.get("publish")
    if isinstance(command, str) and command.strip() and (problem := words_problem(command)):
        yield Complaint((*at, "command"), problem)
    if isinstance(publish, str) and (problem := directory_problem(publish)):
        yield Complaint((*at, "publish"), problem)
    if command is not None and "run" in component:
        yield Complaint((*at, "command"), "stands beside run, a function; keep one of them", at_key=True)
    if publish is not None and command is None and "run" in component:
        message = "is where a command leaves its model; a function calls run.publish(model) instead"
        yield Complaint((*at, "publish"), message, at_key=True)


def _hosts(parts: _Parts) -> Iterator[Complaint]:
    """Complains once about each circle of hosts."""
    done: set[str] = set()
    for name in parts:
        trail: dict[str, None] = {}
        at: Data = name
        while isinstance(at, str) and at in parts and at not in done and at not in trail:
            trail[at] = None
            at = parts[at].get("host")
        if isinstance(at, str) and at in trail:
            members = list(trail)
            circle = members[members.index(at) :]
            circle = [*circle[:8], "...", at] if len(circle) > 8 else [*circle, at]
            yield Complaint(("components", at, "host"), f"goes in a circle: {' in '.join(circle)}")
        done.update(trail)


def _endpoint(known: _Known, at: DataPath, endpoint: dict[str, Data]) -> Iterator[Complaint]:
    client = endpoint.get("client")
    if isinstance(client, str) and client not in known.components:
        yield Complaint((*at, "client"), _no("component", client, known.components))
    members = list(_members(endpoint, at))
    yield from _path(known, members)
    yield from _fallback(known, (*at, "fallback"), endpoint.get("fallback"))
    rate, peak = (_parsed(RATE.parse, endpoint.get(key)) for key in ("rate", "peak"))
    if rate is not None and peak is not None and peak < rate:
        yield Complaint(
            (*at, "peak"), f"{quoted(endpoint['peak'])} is below the rate, {quoted(endpoint['rate'])}"
        )
    yield from _waits(known, at, endpoint, [name for _, name in members])


def _members(endpoint: dict[str, Data], at: DataPath) -> Iterator[tuple[DataPath, str]]:
    path = endpoint.get("path")
    for index, member in enumerate(path if isinstance(path, list) else []):
        if isinstance(member, str):
            yield (*at, "path", index), member
        for second, inner in enumerate(member if isinstance(member, list) else []):
            if isinstance(inner, str):
                yield (*at, "path", index, second), inner


def _path(known: _Known, members: list[tuple[DataPath, str]]) -> Iterator[Complaint]:
    seen: set[str] = set()
    for at, name in members:
        if name not in known.components:
            yield Complaint(at, _no("task or component", name, known.tasks or known.components))
        elif name in known.trains:
            message = (
                f"{quoted(name)} is a train; a path holds tasks, and a task gets its model by model: {name}"
            )
            yield Complaint(at, message)
        elif name in seen:
            yield Complaint(at, f"{quoted(name)} is in this path twice; name it once")
        seen.add(name)


def _fallback(known: _Known, at: DataPath, fallback: Data) -> Iterator[Complaint]:
    seen: set[str] = set()
    for index, rung in enumerate(fallback if isinstance(fallback, list) else []):
        if not isinstance(rung, str):
            continue
        if rung in seen:
            yield Complaint((*at, index), f"{quoted(rung)} is there twice; remove one")
        seen.add(rung)
        if rung not in known.components and rung != "cache" and not is_entry(rung):
            near = closest(rung, ["cache", *known.components])
            message = f"{quoted(rung)} is neither cache nor a component nor module:function.{near}"
            yield Complaint((*at, index), message)


def _waits(known: _Known, at: DataPath, endpoint: dict[str, Data], path: list[str]) -> Iterator[Complaint]:
    """Complains about each batch that would be waited for longer than an answer may take."""
    deadline = _parsed(SECONDS.parse, endpoint.get("deadline"))
    for name in path if deadline else []:
        batch = _parsed(Batch.parse, known.parts.get(name, {}).get("batch"))
        if deadline and batch is not None and batch.within >= deadline:
            wait = f"the {SECONDS.show(batch.within)} that {name} waits to fill a batch"
            yield Complaint((*at, "deadline"), f"{quoted(endpoint['deadline'])} is not longer than {wait}")


def _link(known: _Known, at: DataPath, link: dict[str, Data]) -> Iterator[Complaint]:
    for key in ("from", "to"):
        end = link.get(key)
        if isinstance(end, str) and end not in known.components and end not in known.pools:
            yield Complaint((*at, key), _no("component or pool", end, known.components | set(known.pools)))
    task = link.get("task")
    if isinstance(task, str) and task not in known.tasks and task not in known.broken:
        yield Complaint((*at, "task"), _no("task", task, known.tasks))


def _no(what: str, name: str, known: set[str]) -> str:
    near = closest(name, sorted(known))
    some = ", ".join([*sorted(known)[:8], "..."] if len(known) > 8 else sorted(known))
    return f"there is no {what} {quoted(name)}.{near or f' Known: {some}' if known else ' None is written.'}"


def _parsed(parse: Callable[[object], T], value: Data) -> T | None:
    """The quantity, or None where it is not written or already complained about."""
    try:
        return None if value is None else parse(value)
    except ValueError:
        return None
