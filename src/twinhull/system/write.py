"""How a `System` is written as YAML that loads back equal."""

import json
import re

from twinhull.system.face import VERSION
from twinhull.system.model import System
from twinhull.system.places import Data, resolved

_WIDTH = 100
# What needs no quotes anywhere, also not inside braces.
_PLAIN = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_./+%-]|:(?=[A-Za-z0-9_/])| (?=[A-Za-z0-9+%]))*")
# Line breaks for YAML, and what no editor shows; JSON leaves them as they are.
_HIDDEN = re.compile("[\x7f-\xa0\u2028\u2029\ufeff]")


def dump(system: System) -> str:
    """The whole system as a file without workloads: nothing is filled in at loading, so it loads equal."""
    data = system.model_dump(exclude_none=True, by_alias=True)
    components: dict[str, dict[str, Data]] = data["components"]
    data["components"] = {name: {"kind": part["kind"], **part} for name, part in components.items()}
    filled = {key: value for key, value in data.items() if key == "budget" or value}
    return f"twinhull: {VERSION}\n" + "".join(_block(key, value, "") for key, value in filled.items())


def _block(key: str, value: Data, indent: str) -> str:
    """One key with its value, on one line where that is short enough; sections never are."""
    line = f"{indent}{_scalar(key)}: {_flow(value)}\n"
    if not isinstance(value, (dict, list, tuple)) or not value or (indent and len(line) <= _WIDTH):
        return line
    if isinstance(value, dict):
        inner = "".join(_block(name, part, f"{indent}  ") for name, part in value.items())
    else:
        inner = "".join(f"{indent}  - {_flow(member)}\n" for member in value)
    return f"{indent}{_scalar(key)}:\n{inner}"


def _flow(value: Data) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_scalar(key)}: {_flow(part)}" for key, part in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_flow(member) for member in value) + "]"
    return _scalar(value) if isinstance(value, str) else json.dumps(value)


def _scalar(text: str) -> str:
    if _PLAIN.fullmatch(text) and isinstance(resolved(text), str):
        return text
    quoted = json.dumps(text, ensure_ascii=False)
    return _HIDDEN.sub(lambda match: f"\\u{ord(match[0]):04x}", quoted)
