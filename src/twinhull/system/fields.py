"""How each type of field reads in a file, is shown again, and is described to editors."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, core_schema

from twinhull.system import quantities
from twinhull.system.names import entry_point
from twinhull.units import BYTES, FLOW, NUMBER, RATE, SECONDS, SHARE, USD, Measure, quoted, refused

JsonSchema = dict[str, Any]  # Any: JSON


@dataclass(frozen=True, slots=True, eq=False)
class Text:
    """Tells pydantic how a field's text becomes its value and back, and its JSON Schema."""

    parse: Callable[[object], object]
    show: Callable[[Any], object]  # Any: the type of the field that this annotates
    schema: JsonSchema

    def __get_pydantic_core_schema__(self, _: object, __: GetCoreSchemaHandler) -> CoreSchema:
        shown = core_schema.plain_serializer_function_ser_schema(self.show)
        return core_schema.no_info_plain_validator_function(self.parse, serialization=shown)

    def __get_pydantic_json_schema__(self, _: CoreSchema, __: GetJsonSchemaHandler) -> JsonSchema:
        return self.schema


def _same(value: object) -> object:
    return value


def _written(text: str) -> int | str:
    """Digits alone are a number in YAML, and need no quotes there."""
    return int(text) if text.isdigit() else text


def _listed(value: tuple[object, ...]) -> list[object]:
    return [list(member) if isinstance(member, tuple) else member for member in value]


def _measure(measure: Measure, *, least: str = "") -> Text:
    """A quantity with a unit; `least` says why it must be above 0."""

    def parse(value: object) -> float:
        number = measure.parse(value)
        if number == 0 and least:
            raise refused(value, least, measure.example)
        return number

    bare = {"type": "number", "minimum": 0} if "" in measure.units else {"const": 0}
    text = {"type": "string", "pattern": measure.pattern}
    return Text(
        parse,
        lambda number: _written(measure.show(number)),
        {"anyOf": [text] if least else [text, bare], "examples": [measure.example]},
    )


def _whole(least: int) -> Text:
    def parse(value: object) -> int:
        if isinstance(value, str):
            raise refused(value, "is not a whole number", str(max(least, 1)))
        number = quantities.whole(value, "a whole number", str(max(least, 1)))
        if number < least:
            raise ValueError(f"{quoted(value)} is too small; write {least} or more")
        return number

    return Text(parse, _same, {"type": "integer", "minimum": least})


def _pause(value: object) -> quantities.Span:
    span = quantities.Span.parse(value)
    if 0 in (span.seconds, span.steps):
        raise refused(value, "is no interval", "10 min or 500 steps")
    return span


def _span(value: object) -> quantities.Span:
    span = _pause(value)
    if span.auto:
        raise refused(value, "is no length", "10 min or 500 steps")
    return span


def _word(value: object) -> str:
    if not isinstance(value, str):
        example = "one name" if isinstance(value, (dict, list, tuple)) else f'"{quoted(value)}" in quotes'
        raise refused(value, "is not a text", example)
    if not value.strip():
        raise ValueError("is empty; write it, or leave the line out")
    if len(value) > 500 or not value.isprintable():
        raise ValueError(f"{quoted(value)} is too long, or has characters that cannot be printed")
    return value


def _words(value: object) -> tuple[str, ...]:
    if not isinstance(value, (list, tuple)):
        raise refused(value, "is not a list", "[cache, app:popular]")
    return tuple(_word(member) for member in value)


def _path(value: object) -> tuple[str | tuple[str, ...], ...]:
    example = "[features, rank]; an inner list runs at the same time: [[a, b], merge]"
    if not isinstance(value, (list, tuple)):
        raise refused(value, "is not a list", example)
    if not value or [] in value or () in value:
        raise refused(value, "with an empty list leads nowhere", example)
    if any(
        isinstance(inner, (list, tuple)) for member in value if isinstance(member, list) for inner in member
    ):
        raise refused(value, "in a list in a list is too deep", example)
    return tuple(_words(member) if isinstance(member, (list, tuple)) else _word(member) for member in value)


def _parts(kind: Any, pattern: str, *examples: str) -> Text:  # Any: a class with `parse`
    return Text(
        kind.parse,
        lambda part: _written(str(part)),
        {"type": ["string", "integer"], "pattern": pattern, "examples": [*examples]},
    )


_AMOUNT = r"[0-9][0-9.eE-]*\s*[A-Za-z]+"

Seconds = Annotated[float, _measure(SECONDS)]
Interval = Annotated[float, _measure(SECONDS, least="is no time at all")]
Bytes = Annotated[float, _measure(BYTES)]
Flow = Annotated[float, _measure(FLOW)]
Rate = Annotated[float, _measure(RATE)]
Share = Annotated[float, _measure(SHARE)]
Usd = Annotated[float, _measure(USD)]
Number = Annotated[float, _measure(NUMBER)]
Whole = Annotated[int, _whole(0)]
Positive = Annotated[int, _whole(1)]
Word = Annotated[str, Text(_word, _same, {"type": "string", "minLength": 1})]
Words = Annotated[tuple[str, ...], Text(_words, _listed, {"type": "array", "items": {"type": "string"}})]
Entry = Annotated[
    str, Text(entry_point, _same, {"type": "string", "pattern": r"^[\w.]+:\w+$", "examples": ["app:fit"]})
]
Path = Annotated[
    tuple[str | tuple[str, ...], ...],
    Text(
        _path,
        _listed,
        {
            "type": "array",
            "minItems": 1,
            "items": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]},
            "examples": [["features", "rank"], [["a", "b"], "merge"]],
        },
    ),
]
Range = Annotated[
    quantities.Range, _parts(quantities.Range, r"^\s*\d+\s*(\.\.\s*\d*\s*)?$", "3", "3..9", "3..")
]
Gpus = Annotated[quantities.Gpus, _parts(quantities.Gpus, r"^(\d+|(\d+ *x *)?[A-Za-z].*)$", "8 x H100", "8")]
Network = Annotated[
    quantities.Network,
    _parts(quantities.Network, r"^(\d+ *x *)?[\d.]+ *\S+.*$", "100 GbE", "8 x 400 Gb/s InfiniBand"),
]
Span = Annotated[
    quantities.Span,
    Text(
        _span,
        str,
        {"type": "string", "pattern": rf"^({_AMOUNT}|never)$", "examples": ["10 min", "500 steps", "never"]},
    ),
]
Pause = Annotated[
    quantities.Span,
    Text(
        _pause,
        str,
        {
            "type": "string",
            "pattern": rf"^({_AMOUNT}|never|auto)$",
            "examples": ["10 min", "500 steps", "never", "auto"],
        },
    ),
]
Time = Annotated[
    quantities.Time,
    _parts(quantities.Time, rf"^{_AMOUNT}.*$", "80 ms", "80 ms, p99 200 ms", "5 ms + 0.1 ms each, p99 12 ms"),
]
Batch = Annotated[quantities.Batch, _parts(quantities.Batch, r"^\d+ +within +\S.*$", "32 within 5 ms")]
Retries = Annotated[
    quantities.Retries,
    _parts(quantities.Retries, r"^(\d|unlimited).*$", "2", "3 after 2 s", "3 after 2 s, budget 10 %"),
]
