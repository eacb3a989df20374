"""Is a system file well said, and what does it say? For `twinhull check`."""

import json
import sys
from pathlib import Path
from typing import Any, Literal

from twinhull.system.load import Described, load
from twinhull.system.model import Endpoint, System, Task, Train
from twinhull.system.problems import SystemFileError
from twinhull.system.runnable import missing
from twinhull.units import RATE, SECONDS

Json = dict[str, Any]  # Any: JSON


def check(path: Path, fmt: Literal["text", "json"] = "text") -> int:
    """Print what the system is, in one line, or every problem of its file; the exit code is 0 or 2."""
    try:
        described = load(path)
    except SystemFileError as error:
        _print(json.dumps(_refusal(path, error)) if fmt == "json" else str(error))
        return 2
    _print(json.dumps(_report(path, described)) if fmt == "json" else f"{path}: {summary(described.system)}")
    return 0


def _print(text: str) -> None:
    """Print on any terminal: what its encoding lacks is escaped, for the file may quote any script."""
    encoding = sys.stdout.encoding or "utf-8"
    print(text.encode(encoding, "backslashreplace").decode(encoding))


def summary(system: System) -> str:
    """What a system is, in one line."""
    components = system.components.values()
    counts = [
        (sum(isinstance(part, Train) for part in components), "training job"),
        (sum(isinstance(part, Task) for part in components), "task"),
    ]
    others = len(components) - sum(number for number, _ in counts)
    said = [_count(number, what) for number, what in counts if number] or [_count(others, "component")]
    promises = "; ".join(f"{name}: {_promise(endpoint)}" for name, endpoint in system.endpoints.items())
    endpoints = _count(len(system.endpoints), "endpoint")
    said.append(f"{endpoints} ({promises})" if promises else endpoints)
    said.append(_count(len(system.pools), "pool"))
    lacking = missing(system)
    more = f" (and {len(lacking) - 1} more)" if len(lacking) > 1 else ""
    return f"{system.name}: {', '.join(said)}" + (f"; up needs {lacking[0]}{more}" if lacking else "")


def _promise(endpoint: Endpoint) -> str:
    deadline = "no deadline" if endpoint.deadline is None else SECONDS.show(endpoint.deadline)
    rate = "" if endpoint.rate is None else RATE.show(endpoint.rate)
    ladder = "no fallback" if not endpoint.fallback else " > ".join(("fresh", *endpoint.fallback))
    return ", ".join(part for part in (deadline, rate, ladder) if part)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _refusal(path: Path, error: SystemFileError) -> Json:
    problems = [
        {"file": one.file, "line": one.line, "col": one.col, "path": one.path, "message": one.message}
        for one in error.problems
    ]
    return {"file": str(path), "ok": False, "problems": problems}


def _report(path: Path, described: Described) -> Json:
    system = described.system
    origins = {
        key: {"how": origin.how, "file": origin.file, "line": origin.line, "col": origin.col}
        for key, origin in described.origins.items()
    }
    return {
        "file": str(path),
        "ok": True,
        "problems": [],
        "summary": summary(system),
        "up_needs": missing(system),
        "system": system.model_dump(mode="json", exclude_none=True, by_alias=True),
        "origins": origins,
    }
