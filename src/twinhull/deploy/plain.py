"""How is one record printed as one line? For logs, pipes and `--plain`."""

import json
import time
from typing import Literal

from twinhull.deploy.record import SAID, Record

_MARKS = {"info": " ", "warning": "!", "error": "x", "critical": "x", "debug": " "}


def line(record: Record, fmt: Literal["console", "json"]) -> str:
    """One line for people, or one JSON object for machines."""
    if fmt == "json":
        fields = {"t": record.t, "role": record.role, "level": record.level, "event": record.kind}
        return json.dumps({**fields, **record.facts}, default=str)
    clock = time.strftime("%H:%M:%S", time.localtime(record.t))
    mark = _MARKS.get(record.level, " ")
    if record.kind == SAID:
        return f"{clock} {mark} {record.role:<18} | {record.facts.get('text', '')}"
    return f"{clock} {mark} {record.role:<18} {record.kind:<20} {facts(record)}".rstrip()


def facts(record: Record) -> str:
    """The facts of a record as `name=value`, numbers short, a traceback on lines of its own."""
    shown = [f"{k}={_short(v)}" for k, v in record.facts.items() if k != "exception" and v is not None]
    text = " ".join(shown)
    trace = record.facts.get("exception")
    return f"{text}\n{trace}" if trace else text


def _short(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k}: {_short(v)}" for k, v in value.items()) + "}"
    text = str(value)
    return f'"{text}"' if " " in text else text
