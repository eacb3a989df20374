"""What did a child say? A line of its output as a record: an event, numbers of the moment, or plain text."""

import json
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_NOT_FACTS = {"t", "role", "event", "level", "sample", "logger"}


@dataclass(frozen=True, slots=True)
class Record:
    """One thing said by `role` at `t` (unix seconds). `kind` is the event; "" for samples alone."""

    t: float
    role: str
    kind: str
    level: str = "info"
    facts: Mapping[str, Any] = field(default_factory=dict)  # Any: whatever the speaker added, as JSON
    sample: Mapping[str, float] = field(default_factory=dict)


SAID = "said"  # kind of a line that is no record: a user's print, a library's complaint, a traceback


def read(role: str, line: bytes) -> Record | None:
    """The record in a line of a child's output; None for an empty line."""
    text = line.decode(errors="replace").rstrip()
    if not text:
        return None
    if text.startswith("{"):
        try:
            return _from_fields(role, _parsed(text))
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
            pass
    return Record(time.time(), role, SAID, facts={"text": text})


def _parsed(text: str) -> dict[str, Any]:  # Any: JSON
    said = json.loads(text)
    if "\\ud" in text.lower():  # half a surrogate pair can be neither stored nor printed: UnicodeEncodeError
        json.dumps(said, ensure_ascii=False).encode()
    return said


def _from_fields(role: str, said: dict[str, Any]) -> Record:  # Any: JSON
    sample = said.get("sample", {})
    if not isinstance(sample, dict) or not math.isfinite(float(said["t"])):
        raise ValueError("a user's own JSON")
    numbers = {k: float(v) for k, v in sample.items() if isinstance(v, int | float) and math.isfinite(v)}
    kind = "" if "sample" in said else str(said["event"])
    return Record(
        t=float(said["t"]),
        role=str(said.get("role") or role),
        kind=kind,
        level=str(said.get("level", "info")),
        facts={k: v for k, v in said.items() if k not in _NOT_FACTS},
        sample=numbers,
    )
