"""What a mistake that pydantic found is called in the user's words."""

import re
from typing import Any

from pydantic import BaseModel, ValidationError

from twinhull.system.face import FILE_KEYS, Complaint, Face, mapping
from twinhull.system.model import (
    CLASS_BY_KIND,
    Budget,
    Checkpoint,
    Endpoint,
    Launch,
    Link,
    Parallel,
    Pool,
    Shape,
)
from twinhull.system.places import DataPath
from twinhull.units import closest, quoted

Mistake = Any  # pydantic's ErrorDetails: a dict whose input and context can be anything
MOST_TOLD = 200
_INNER = {"checkpoint": Checkpoint, "launch": Launch, "parallel": Parallel, "shape": Shape}
_EXAMPLES = {
    "pools": "{web: {nodes: 4, cpus: 8}}",
    "components": "{sales: {kind: store, software: s3}}",
    "links": "[{from: fit, to: sales, kind: read}]",
    "endpoints": "{recommend: {path: [rank], deadline: 200 ms}}",
    "budget": "50000 USD/month",
    "covers": "[gpu, storage]",
    "name": "name: shop",
    "from": "from: fit",
    "to": "to: sales",
}


def complaints_of(error: ValidationError, face: Face) -> list[Complaint]:
    """One complaint for each mistake, under the path that the user wrote."""
    return [_complaint(mistake, face) for mistake in error.errors(include_url=False)[:MOST_TOLD]]


def _complaint(mistake: Mistake, face: Face) -> Complaint:
    location: DataPath = mistake["loc"]
    if location[0] == "components" and len(location) > 2:
        location = (*location[:2], *location[3:])  # pydantic puts the kind after the name
    kind, value = mistake["type"], mistake["input"]
    path = face.user_path(location)
    if kind == "value_error":
        return Complaint(path, str(mistake["ctx"]["error"]))
    if kind == "extra_forbidden":
        return Complaint(path, _unknown(location, face), at_key=True)
    if kind == "missing":
        example = _EXAMPLES.get(str(location[-1]), f"{location[-1]}: ...")
        return Complaint(path, f"is missing; write for example {example}", at_key=True)
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        return _kind_complaint(path, value, face)
    return Complaint(path, _mismatch(kind, value, mistake, path))


def _mismatch(kind: str, value: object, mistake: Mistake, path: DataPath) -> str:
    if kind == "literal_error":
        options = re.findall(r"'([^']+)'", mistake["ctx"]["expected"])
        near = closest(value, options) if isinstance(value, str) else ""
        return f"{quoted(value)} is not one of {', '.join(options)}.{near}"
    if kind == "bool_type":
        return f"{quoted(value)} is not true or false; write one of them, without quotes"
    example = _EXAMPLES.get(str(path[0] if len(path) == 1 else path[-1]), "")
    way_out = f"; write for example {example}" if example else ""
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        return f"{quoted(value)} is not a mapping{way_out}"
    if kind in ("tuple_type", "list_type"):
        return f"{quoted(value)} is not a list{way_out}"
    return f"{quoted(value)}: {mistake['msg']}"


def _kind_complaint(path: DataPath, value: object, face: Face) -> Complaint:
    kinds = ", ".join(CLASS_BY_KIND)
    kind = value.get("kind") if isinstance(value, dict) else None
    if kind is None:
        near = closest(str(path[-1]), list(face.brought)) or f" Kinds: {kinds}"
        return Complaint(path, f"has no kind.{near}", at_key=True)
    near = closest(kind, list(CLASS_BY_KIND)) if isinstance(kind, str) else ""
    return Complaint((*path, "kind"), f"{quoted(kind)} is no kind of component.{near or f' Kinds: {kinds}'}")


def _unknown(location: DataPath, face: Face) -> str:
    """Says that a key is not known, of what, and which key was probably meant."""
    whose, fields = _fields_at(location[:-1], face)
    key = str(location[-1])
    near = closest(key, fields)
    return f"is no field of {whose}.{near or ' Known: ' + ', '.join(fields)}"


def _fields_at(path: DataPath, face: Face) -> tuple[str, list[str]]:
    """The thing at a path, in words, and the keys it may have."""
    if not path:
        return "a system file", list(FILE_KEYS)
    if path[0] == "components":
        name = str(path[1])
        if len(path) > 2 and path[2] in _INNER:
            return f"{path[2]}", _keys(_INNER[str(path[2])])
        component = mapping(mapping(face.said.get("components")).get(name))
        kind = str(component.get("kind"))
        keys = _keys(CLASS_BY_KIND[kind])
        if name not in face.roles:
            return f"a {kind}", keys
        inside = ("kind", "run", "command", "publish")  # said by `task: ...` or `train: ...`
        return f"a {kind}", [kind, *(key for key in keys if key not in inside)]
    whose, part = {
        "pools": ("a pool", Pool),
        "links": ("a link", Link),
        "endpoints": ("an endpoint", Endpoint),
    }.get(str(path[0]), ("the budget", Budget))
    return whose, _keys(part)


def _keys(part: type[BaseModel]) -> list[str]:
    return [field.alias or name for name, field in part.model_fields.items()]
