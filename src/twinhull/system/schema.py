"""What may stand in a system file, as JSON Schema: editors complete, explain and underline with it."""

import json

from twinhull.system import names
from twinhull.system.face import VERSION
from twinhull.system.fields import JsonSchema
from twinhull.system.model import System

_NAMES = {"pattern": "^[A-Za-z0-9][A-Za-z0-9_-]{0,62}$"}
_BROUGHT = {
    names.BROKER: "State",
    names.CACHE: "State",
    names.REGISTRY: "State",
    names.CHECKPOINTS: "State",
    names.GATEWAY: "Process",
    names.CLIENTS: "Process",
}


def json_schema() -> str:
    """The JSON Schema of a system file with its workloads, as text."""
    schema = _tidied(System.model_json_schema(by_alias=True))
    parts: JsonSchema = schema["$defs"]
    parts["TaskWorkload"] = _workload(parts["Task"], "task")
    parts["TrainWorkload"] = _workload(parts["Train"], "train", ("command", "publish"))
    for name in ("State", "Process"):
        parts[f"Brought{name}"] = {**parts[name], "required": []}
    parts["Checkpoint"] = _or_short(parts["Checkpoint"], "every")
    parts["Budget"] = _or_short(parts["Budget"], "money")
    fields: JsonSchema = schema["properties"]
    fields["components"] |= {
        "description": "what comes with the workloads, changed by its name; and what else there is",
        "properties": {name: _part(f"Brought{kind}") for name, kind in _BROUGHT.items()},
        "patternProperties": {"-queue$": _part("BroughtState"), "-worker$": _part("BroughtProcess")},
    }
    workloads: JsonSchema = {
        "type": "object",
        "description": "your functions",
        "additionalProperties": {"oneOf": [_part("TaskWorkload"), _part("TrainWorkload")]},
    }
    for section in (fields["pools"], fields["components"], fields["endpoints"], workloads):
        section["propertyNames"] = _NAMES
    version = {"const": VERSION, "description": "the version of this format"}
    schema["properties"] = {"twinhull": version, **fields, "workloads": workloads}
    described = "Twinhull system file"
    dialect = "https://json-schema.org/draft/2020-12/schema"
    return json.dumps({"$schema": dialect, "title": described, **schema}, indent=2)


def _part(name: str) -> JsonSchema:
    return {"$ref": f"#/$defs/{name}"}


def _workload(component: JsonSchema, role: str, inside: tuple[str, ...] = ()) -> JsonSchema:
    """A component as it is written under `workloads`: `task: app:rank` instead of kind and run.

    The fields that stand `inside` the role make it a mapping, for which the function's name is short.
    """
    said = component["properties"]
    fields = {key: value for key, value in said.items() if key not in ("kind", "run", *inside)}
    work: JsonSchema = said["run"]
    if inside:
        keys = {key: said[key] for key in ("run", *inside)}
        spelled_out = {"type": "object", "properties": keys, "additionalProperties": False}
        described = "your function, as module:function; or {command, publish}, a script of your own"
        work = {"anyOf": [work, spelled_out], "description": described}
    return {**component, "properties": {role: work, **fields}, "required": [role]}


def _or_short(part: JsonSchema, field: str) -> JsonSchema:
    return {"anyOf": [part["properties"][field], part], "description": part["description"]}


def _tidied(schema: JsonSchema) -> JsonSchema:
    """Without what pydantic adds for Python: titles, defaults, and null, which a file never holds."""
    tidy: JsonSchema = {}
    for key, value in schema.items():
        if key in ("title", "default"):
            continue
        if isinstance(value, dict):
            tidy[key] = _tidied(value)
        elif isinstance(value, list):
            tidy[key] = [_tidied(item) if isinstance(item, dict) else item for item in value]
        else:
            tidy[key] = value
    tidy.pop("discriminator", None)
    options = [option for option in tidy.get("anyOf", []) if option != {"type": "null"}]
    if len(options) == 1:
        del tidy["anyOf"]
        return {**options[0], **tidy}
    return {**tidy, "anyOf": options} if options else tidy
