"""How a file with `workloads` is said in the words of `System`: as components of kind train or task."""

from dataclasses import dataclass, field

from twinhull.system import names
from twinhull.system.places import Data, DataPath, Document
from twinhull.units import closest, quoted

VERSION = 1
FILE_KEYS = ("twinhull", "name", "pools", "workloads", "endpoints", "budget", "components", "links")
_ROLES = ("task", "train")
_TRAIN_KEYS = ("run", "command", "publish")  # of `train: {...}`; `train: app:fit` is short for run


@dataclass(frozen=True, slots=True)
class Complaint:
    """What is wrong at a path of the file; told at the path's key, or at its value."""

    path: DataPath
    message: str
    at_key: bool = False


@dataclass(slots=True)
class Face:
    """A file in the words of `System`, and the way back to the user's words."""

    said: dict[str, Data]
    friendly: bool = False  # it has workloads, so what comes with them is filled in
    roles: dict[str, str] = field(default_factory=dict)  # of each workload that has one: task or train
    spelled_out: set[str] = field(default_factory=set)  # the workloads with `train: {...}`
    brought: dict[str, str] = field(default_factory=dict)  # what is filled in: name -> kind
    known: set[str] = field(default_factory=set)  # all names of components, also of those that are broken
    too_new: bool = False  # nothing else that this version could say about it would be right
    complaints: list[Complaint] = field(default_factory=list)

    def user_path(self, path: DataPath) -> DataPath:
        """The path under which the user wrote what stands at this path of the system."""
        if len(path) < 2 or path[0] != "components" or path[1] not in self.roles:
            return path
        name = path[1]
        rest = path[2:]
        if rest and rest[0] in _TRAIN_KEYS and name in self.spelled_out:
            rest = (self.roles[name], *rest)
        elif rest and rest[0] in ("run", "kind"):
            rest = (self.roles[name],)
        return ("workloads", name, *rest)


def read_face(document: Document) -> Face:
    """The file in the words of `System`; what cannot be said so is complained about and left out."""
    data = dict(mapping(document.data))
    face = Face({key: value for key, value in data.items() if key not in ("twinhull", "workloads")})
    _check_version(face, data)
    face.friendly = "workloads" in data
    if face.friendly:
        components = data.get("components", {})
        if isinstance(components, dict):
            workloads = _components_of(face, data["workloads"])
            face.brought = _brought(workloads, mapping(data.get("endpoints")))
            face.said["components"] = {**workloads, **_with_kinds(face, components)}
    face.known.update(mapping(face.said.get("components")), face.brought)
    return face


def mapping(data: Data) -> dict[str, Data]:
    """The data if it is a mapping; else an empty one, for checks that go on after a mistake."""
    return data if isinstance(data, dict) else {}


def _check_version(face: Face, data: dict[str, Data]) -> None:
    version = data.get("twinhull", VERSION)
    if isinstance(version, bool) or not isinstance(version, int) or version < 1:
        face.complaints.append(Complaint(("twinhull",), f"{quoted(version)} is no format version; write 1"))
    elif version > VERSION:
        message = f"format {version} needs a newer twinhull; this one reads format {VERSION}. Upgrade it"
        face.complaints.append(Complaint(("twinhull",), message))
        face.too_new = True


def _components_of(face: Face, workloads: Data) -> dict[str, Data]:
    if not isinstance(workloads, dict):
        message = (
            f"{quoted(workloads)} is not a mapping; write for example {{rank: {{task: app:rank, pool: web}}}}"
        )
        face.complaints.append(Complaint(("workloads",), message))
        return {}
    face.known.update(workloads)
    components: dict[str, Data] = {}
    for name, workload in workloads.items():
        at: DataPath = ("workloads", name)
        if not isinstance(workload, dict):
            message = f"{quoted(workload)} is not a mapping; write for example {{task: app:rank, pool: web}}"
            face.complaints.append(Complaint(at, message))
            continue
        roles = [role for role in _ROLES if role in workload]
        if len(roles) != 1:
            what = "is a task and a train at once; write" if roles else "is neither a task nor a train; write"
            message = f"{what} for example task: app:function, or train: app:function"
            face.complaints.append(Complaint(at, message, at_key=True))
            continue
        role = roles[0]
        inside = _TRAIN_KEYS if role == "train" else ("run",)
        for key in (*inside, "kind"):
            if key in workload:
                face.complaints.append(Complaint((*at, key), _said_by(role, key, workload), at_key=True))
        rest = {key: value for key, value in workload.items() if key not in (role, *inside, "kind")}
        face.roles[name] = role
        components[name] = {"kind": role, **_work(face, name, role, workload[role]), **rest}
    return components


def _said_by(role: str, key: str, workload: dict[str, Data]) -> str:
    if key in ("command", "publish"):
        return "belongs into train; write train: {command: python train.py, publish: out/}"
    return f'is said by "{role}: {quoted(workload[role]).strip(chr(34))}" already; remove it'


def _work(face: Face, name: str, role: str, said: Data) -> dict[str, Data]:
    """What a workload runs: a function, or for training a command and what it publishes."""
    if role != "train" or not isinstance(said, dict):
        return {"run": said}
    face.spelled_out.add(name)
    at: DataPath = ("workloads", name, role)
    for key in said:
        if key not in _TRAIN_KEYS:
            near = closest(key, list(_TRAIN_KEYS)) or f" Known: {', '.join(_TRAIN_KEYS)}"
            face.complaints.append(Complaint((*at, key), f"is no field of train.{near}", at_key=True))
    if "run" not in said and "command" not in said:
        message = "says nothing to run; write train: app:function, or train: {command: python train.py}"
        face.complaints.append(Complaint(at, message, at_key=True))
    return {key: said[key] for key in _TRAIN_KEYS if key in said}


def _brought(workloads: dict[str, Data], endpoints: dict[str, Data]) -> dict[str, str]:
    """The names and kinds of what is filled in for these workloads and endpoints; `expand` fills them."""
    parts = [mapping(part) for part in workloads.values()]
    tasks = [part for part in parts if part.get("kind") == "task"]
    trains = [part for part in parts if part.get("kind") == "train"]
    brought: dict[str, str] = {}
    if tasks or endpoints:
        brought |= {names.BROKER: "broker", names.CACHE: "cache"}
    for pool in (part.get("pool") for part in tasks):
        if isinstance(pool, str):
            brought |= {names.queue_of(pool): "queue", names.worker_of(pool): "worker"}
    if trains:
        brought |= {names.CHECKPOINTS: "store"}
    if trains or any("model" in part for part in tasks):
        brought |= {names.REGISTRY: "registry"}
    if endpoints:
        brought |= {names.GATEWAY: "gateway", names.CLIENTS: "client"}
    return brought


def _with_kinds(face: Face, components: dict[str, Data]) -> dict[str, Data]:
    """The components beside the workloads; what is brought by itself need not say its kind."""
    said: dict[str, Data] = {}
    for name, component in components.items():
        at: DataPath = ("components", name)
        if name in face.known:
            message = "is a workload already; say it there"
            face.complaints.append(Complaint(at, message, at_key=True))
        elif not isinstance(component, dict) or name not in face.brought:
            said[name] = component
        else:
            kind = face.brought[name]
            if component.get("kind", kind) != kind:
                message = f"is the {kind} that comes with the workloads; give yours another name"
                face.complaints.append(Complaint(at, message, at_key=True))
            else:
                said[name] = {"kind": kind, **component}
    return said
