"""Which names of a file lead nowhere, and what in it contradicts itself.

Works on plain data that may have any other mistake in it, so that all mistakes of a file are told at once.
"""

from collections.abc import Callable, Iterator
from typing import TypeVar

from twinhull.system.face import Complaint, Face, mapping
from twinhull.system.names import RESERVED_ENDPOINTS, is_entry, name_problem
from twinhull.system.places import Data, Path_
from twinhull.system.quantities import Batch
from twinhull.units import RATE, SECONDS, closest, quoted

T = TypeVar("T")


def check_references(face: Face) -> Iterator[Complaint]:
    """All complaints about names and contradictions."""
    yield from _names(face)
    for name, component in _parts(face, "components"):
        yield from _component(face, ("components", name), component)
    yield from _hosts(face)
    for name, endpoint in _parts(face, "endpoints"):
        yield from _endpoint(face, ("endpoints", name), endpoint)
    links = face.said.get("links")
    for index, link in enumerate(links if isinstance(links, list) else []):
        yield from _link(face, ("links", index), mapping(link))


def _parts(face: Face, section: str) -> list[tuple[str, dict[str, Data]]]:
    return [(name, mapping(part)) for name, part in mapping(face.said.get(section)).items()]


def _names(face: Face) -> Iterator[Complaint]:
    name = face.said.get("name")
    if isinstance(name, str) and name_problem(name):
        yield Complaint(("name",), name_problem(name))
    for section in ("pools", "components", "endpoints"):
        for key in mapping(face.said.get(section)):
            path = (section, key)
            if name_problem(key):
                yield Complaint(path, name_problem(key), at_key=True)
            if section == "endpoints" and key in RESERVED_ENDPOINTS:
                yield Complaint(
                    path, f"/{key} is answered by the gateway itself; choose another name", at_key=True
                )
    for workload in face.roles:
        if workload in face.brought:
            what = face.brought[workload]
            message = f"is the name of the {what} that comes with the workloads; choose another name"
            yield Complaint(("components", workload), message, at_key=True)


def _component(face: Face, at: Path_, component: dict[str, Data]) -> Iterator[Complaint]:
    pools = list(mapping(face.said.get("pools")))
    pool, host, model = (component.get(key) for key in ("pool", "host", "model"))
    if isinstance(pool, str) and pool not in pools:
        yield Complaint((*at, "pool"), _no("pool", pool, pools))
    if isinstance(host, str) and host not in face.known:
        yield Complaint((*at, "host"), _no("component", host, face.known))
    if isinstance(model, str):
        trains = [name for name, part in _parts(face, "components") if part.get("kind") == "train"]
        if model not in face.known:
            yield Complaint((*at, "model"), _no("training workload", model, trains))
        elif model in _kinds(face) and model not in trains:
            message = (
                f"{quoted(model)} is a {_kinds(face)[model]}; a model is named after the train that makes it"
            )
            yield Complaint((*at, "model"), message)
    to = mapping(component.get("checkpoint")).get("to")
    if isinstance(to, str) and to not in face.known:
        yield Complaint((*at, "checkpoint", "to"), _no("component", to, face.known))


def _hosts(face: Face) -> Iterator[Complaint]:
    """Complains once about each circle of hosts."""
    host_of = {name: part.get("host") for name, part in _parts(face, "components")}
    done: set[str] = set()
    for name in host_of:
        trail: list[str] = []
        at: Data = name
        while isinstance(at, str) and at in host_of and at not in done and at not in trail:
            trail.append(at)
            at = host_of[at]
        if isinstance(at, str) and at in trail:
            circle = [*trail[trail.index(at) :], at]
            yield Complaint(("components", at, "host"), f"goes in a circle: {' in '.join(circle[:9])}")
        done.update(trail)


def _endpoint(face: Face, at: Path_, endpoint: dict[str, Data]) -> Iterator[Complaint]:
    client = endpoint.get("client")
    if isinstance(client, str) and client not in face.known:
        yield Complaint((*at, "client"), _no("component", client, face.known))
    members = list(_members(endpoint, at))
    yield from _path(face, members)
    fallback = endpoint.get("fallback")
    for index, rung in enumerate(fallback if isinstance(fallback, list) else []):
        if isinstance(rung, str) and rung not in face.known and rung != "cache" and not is_entry(rung):
            near = closest(rung, ["cache", *face.known])
            message = f"{quoted(rung)} is neither cache nor a component nor module:function.{near}"
            yield Complaint((*at, "fallback", index), message)
        if isinstance(fallback, list) and rung in fallback[:index]:
            yield Complaint((*at, "fallback", index), f"{quoted(rung)} is there twice; remove one")
    rate, peak = (_parsed(RATE.parse, endpoint.get(key)) for key in ("rate", "peak"))
    if rate is not None and peak is not None and peak < rate:
        yield Complaint(
            (*at, "peak"), f"{quoted(endpoint['peak'])} is below the rate, {quoted(endpoint['rate'])}"
        )
    yield from _waits(face, at, endpoint, [name for _, name in members])


def _members(endpoint: dict[str, Data], at: Path_) -> Iterator[tuple[Path_, str]]:
    path = endpoint.get("path")
    for index, member in enumerate(path if isinstance(path, list) else []):
        if isinstance(member, str):
            yield (*at, "path", index), member
        for second, inner in enumerate(member if isinstance(member, list) else []):
            if isinstance(inner, str):
                yield (*at, "path", index, second), inner


def _path(face: Face, members: list[tuple[Path_, str]]) -> Iterator[Complaint]:
    kinds = _kinds(face)
    seen: set[str] = set()
    for at, name in members:
        if name not in face.known:
            tasks = [task for task, kind in kinds.items() if kind == "task"]
            yield Complaint(at, _no("task or component", name, tasks or face.known))
        elif kinds.get(name) == "train":
            message = (
                f"{quoted(name)} is a train; a path holds tasks, and a task gets its model by model: {name}"
            )
            yield Complaint(at, message)
        elif name in seen:
            yield Complaint(at, f"{quoted(name)} is in this path twice; name it once")
        seen.add(name)


def _waits(face: Face, at: Path_, endpoint: dict[str, Data], path: list[str]) -> Iterator[Complaint]:
    """Complains about each batch that would be waited for longer than an answer may take."""
    deadline = _parsed(SECONDS.parse, endpoint.get("deadline"))
    components = mapping(face.said.get("components"))
    for name in path:
        batch = _parsed(Batch.parse, mapping(components.get(name)).get("batch"))
        if deadline and batch is not None and batch.within >= deadline:
            wait = f"the {SECONDS.show(batch.within)} that {name} waits to fill a batch"
            yield Complaint((*at, "deadline"), f"{quoted(endpoint['deadline'])} is not longer than {wait}")


def _link(face: Face, at: Path_, link: dict[str, Data]) -> Iterator[Complaint]:
    ends = {*face.known, *mapping(face.said.get("pools"))}
    for key in ("from", "to"):
        end = link.get(key)
        if isinstance(end, str) and end not in ends:
            yield Complaint((*at, key), _no("component or pool", end, ends))
    task = link.get("task")
    if isinstance(task, str) and _kinds(face).get(task, "task" if task in face.known else "") != "task":
        tasks = [name for name, kind in _kinds(face).items() if kind == "task"]
        yield Complaint((*at, "task"), _no("task", task, tasks))


def _kinds(face: Face) -> dict[str, Data]:
    return {**face.brought, **{name: part.get("kind") for name, part in _parts(face, "components")}}


def _no(what: str, name: str, known: list[str] | set[str]) -> str:
    near = closest(name, sorted(known))
    listed = ", ".join(sorted(known)[:8])
    more = ", ..." if len(known) > 8 else ""
    return f"there is no {what} {quoted(name)}.{near or (f' Known: {listed}{more}' if known else '')}"


def _parsed(parse: Callable[[object], T], value: Data) -> T | None:
    """The quantity, or None where it is not written or already complained about."""
    try:
        return None if value is None else parse(value)
    except ValueError:
        return None
