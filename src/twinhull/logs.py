"""Logging, set up once per process: one line an event, with its role, rank and run as fields.

Library code only calls `logging.getLogger(__name__).info("swapped", extra={"model": "fit", "version": 12})`.
A child of a supervisor prints JSON lines on its standard output; the supervisor reads them back, so the same
line is log, journal entry and live view. Numbers that are sampled over time go the same way: `sample(...)`.
"""

import json
import logging
import math
import os
import sys
import time
from typing import Any, Literal

VARIABLE = "TWINHULL_LOG_FORMAT"  # a supervisor sets it to json for its children

Format = Literal["console", "json"]
_role = ""


def setup(role: str, *, fmt: Format | None = None, level: int = logging.INFO) -> None:
    """Send all logs of this process to standard output, as console lines or JSON lines.

    `role` says who speaks (`up`, `gateway`, `worker:scorers-0`, `train:fit`, `rank:fit-1`).
    """
    import structlog

    global _role  # noqa: PLW0603  # one process has one role
    _role = role
    chosen: str = fmt or os.environ.get(VARIABLE, "console")
    shared: list[Any] = [  # Any: structlog's processors have no common type
        structlog.contextvars.merge_contextvars,
        _with_facts(structlog.stdlib.ExtraAdder()),
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt=None, key="t") if chosen == "json" else _clock,
    ]
    last: list[Any] = (
        [structlog.processors.format_exc_info, _with_role, _rendered]
        if chosen == "json"
        else [structlog.dev.ConsoleRenderer(colors=sys.stdout.isatty(), pad_event_to=28, timestamp_key="t")]
    )
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=shared,
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last],
    )
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)


def sample(values: dict[str, float]) -> None:
    """Hand numbers of this moment to the supervisor, by full name (`train.fit.loss`); at most a few a second.

    Without a supervisor nobody listens and nothing is printed. What is not finite is left out: no journal in
    SQLite could hold it.
    """
    if os.environ.get(VARIABLE) == "json":
        numbers = {name: float(value) for name, value in values.items() if math.isfinite(value)}
        line = json.dumps({"t": time.time(), "role": _role, "sample": numbers})
        sys.stdout.write(line + "\n")
        sys.stdout.flush()


def _clock(_logger: object, _method: str, event: dict[str, Any]) -> dict[str, Any]:
    event["t"] = time.strftime("%H:%M:%S")
    return event


def _with_facts(add: Any) -> Any:  # Any: structlog's processors have no common type
    """The processor `add`, which adds the facts, kept from replacing the event by a fact of that name."""

    def added(logger: object, method: str, event: dict[str, Any]) -> dict[str, Any]:
        return {**add(logger, method, dict(event)), "event": event["event"]}

    return added


def _with_role(_logger: object, _method: str, event: dict[str, Any]) -> dict[str, Any]:
    event["role"] = _role
    return event


def _rendered(_logger: object, _method: str, event: dict[str, Any]) -> str:
    """One JSON line, whatever the facts are: a line that cannot be said would be lost."""
    try:
        return json.dumps(event, default=_plain)
    except (TypeError, ValueError, RecursionError):
        plain = {k: v if isinstance(v, str | int | float | None) else _text(v) for k, v in event.items()}
        return json.dumps(plain)


def _plain(value: Any) -> Any:  # Any: what json cannot say
    """A number of numpy or torch as a number, all else as text."""
    try:
        return value.item()
    except (AttributeError, TypeError, ValueError, RuntimeError):
        return _text(value)


def _text(value: object) -> str:
    try:
        return str(value)
    except Exception:  # a fact of the user's own class; the event matters more
        return f"<{type(value).__name__}>"
