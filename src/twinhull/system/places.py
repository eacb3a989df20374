"""Where each value of a YAML text stands: text -> plain data, with line and column of every key and value.

YAML is read as version 1.2: only `true` and `false` are booleans. Anchors, aliases and tags are refused, so a
value stands in one place, and no text is larger inside than outside.
"""

import math
import re
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from twinhull.system.problems import Problem, SystemFileError
from twinhull.units import quoted

# libyaml is eight times faster; without it the same events come from pure Python.
LOADER: type[yaml.SafeLoader] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
MOST_BYTES = 2_000_000
MOST_VALUES = 50_000
MOST_DEPTH = 20
MOST_DIGITS = 30
_UNPRINTABLE = re.compile("[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufefe\uff00-\ufffd\U00010000-\U0010ffff]")
_INTEGER = re.compile(r"[-+]?[0-9]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]{1,5})?")
_WORDS = {"true": True, "false": False, "null": None, "~": None, "": None}
_INFINITE = re.compile(r"([-+]?)\.(inf|Inf|INF)")

Data = None | bool | int | float | str | list["Data"] | dict[str, "Data"]
DataPath = tuple[str | int, ...]
Place = tuple[int, int]


@dataclass(slots=True)
class Document:
    """A YAML text as plain data. `keys` and `values` hold the place of each path's key and value."""

    file: str
    data: Data = None
    keys: dict[DataPath, Place] = field(default_factory=dict)
    values: dict[DataPath, Place] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def place(self, path: DataPath, *, at_key: bool = False) -> Place:
        """Line and column of a path's value or key; of its nearest parent where it is not written."""
        known = self.keys if at_key else self.values
        while path and path not in known:
            path = path[:-1]
        return known.get(path, (1, 1))


def spelled(path: DataPath) -> str:
    """A path as it is printed: `endpoints.recommend.path.1`."""
    return ".".join(_spelled(part) for part in path)


def _spelled(part: str | int) -> str:
    text = str(part)[:60]
    return text if text.isprintable() else "".join(c if c.isprintable() else "?" for c in text)


def read(path: Path) -> str:
    """The text of a system file. Raises SystemFileError if it cannot be read, is too large or is no text."""
    file = str(path)
    try:
        with path.open("rb") as stream:
            raw = stream.read(MOST_BYTES + 1)
    except FileNotFoundError:
        raise _error(file, "there is no such file; twinhull init DIR writes one to start from") from None
    except IsADirectoryError:
        raise _error(file, "is a directory; name the system file in it") from None
    except (OSError, ValueError) as error:
        raise _error(file, f"cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if len(raw) > MOST_BYTES:
        raise _error(file, f"is larger than {MOST_BYTES // 1_000_000} MB; that is no system file")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line, col = _position(raw[: error.start].decode("utf-8", "replace"))
        raise _error(file, "is not text in UTF-8; save it as UTF-8", (line, col)) from None
    odd = _UNPRINTABLE.search(text)
    if odd is not None:
        what = f"the character U+{ord(odd[0]):04X} cannot be in a text file; remove it"
        raise _error(file, what, _position(text[: odd.start()]))
    return text


def compose(text: str, file: str) -> Document:
    """A YAML text as plain data with places. Raises SystemFileError where it is no YAML, or no mapping.

    What can be read past (duplicate keys, empty values, anchors, tags) is collected in `problems`.
    """
    composer = _Composer(text, file)
    try:
        composer.run()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = (mark.line + 1, mark.column + 1) if mark else (1, 1)
        raise _error(file, _in_our_words(error, text, place), place) from None
    except yaml.YAMLError as error:
        raise _error(file, f"is not YAML: {error}") from None
    return composer.document


class _Composer:
    """Builds a document from the events of a YAML text; only `MOST_DEPTH` levels deep."""

    def __init__(self, text: str, file: str) -> None:
        self.document = Document(file)
        self.count = 0
        self.events = yaml.parse(text, Loader=LOADER)

    def run(self) -> None:
        next(self.events)  # the start of the stream
        start = next(self.events)
        if isinstance(start, yaml.StreamEndEvent):
            raise _error(self.document.file, _EMPTY)
        first = next(self.events)
        data = self._value(first, ())
        next(self.events)  # the end of the document
        rest = next(self.events)
        if not isinstance(rest, yaml.StreamEndEvent):
            self._complain("a second document starts here; a system file has one", rest, ())
        if data is None and isinstance(first, yaml.ScalarEvent):
            raise _error(self.document.file, _EMPTY, _start(first))
        if not isinstance(data, dict):
            raise _error(self.document.file, f"is {_kind(data)}, not a mapping; {_BEGIN}", _start(first))
        self.document.data = data

    def _value(self, event: yaml.Event, path: DataPath) -> Data:
        """The data of one node, read to its end; None where it holds nothing usable."""
        self.document.values[path] = _start(event)
        self.count += 1
        if self.count > MOST_VALUES:
            message = f"has more than {MOST_VALUES} values; that is no system file"
            raise _error(self.document.file, message, _start(event))
        if isinstance(event, yaml.AliasEvent):
            self._complain("an alias (*) is not read here; write the value out", event, path)
            return None
        assert isinstance(event, (yaml.ScalarEvent, yaml.CollectionStartEvent))
        if event.anchor is not None:
            self._complain("an anchor (&) is not read here; write the value out in each place", event, path)
        if event.tag is not None:
            self._complain(f"a tag ({quoted(event.tag)}) is not read here; remove it", event, path)
        if isinstance(event, yaml.ScalarEvent):
            return event.value if event.style else resolved(event.value)
        if len(path) > MOST_DEPTH:
            raise _error(self.document.file, f"is nested deeper than {MOST_DEPTH} levels", _start(event))
        return self._mapping(path) if isinstance(event, yaml.MappingStartEvent) else self._list(path)

    def _mapping(self, path: DataPath) -> Data:
        mapping: dict[str, Data] = {}
        while not isinstance(event := next(self.events), yaml.MappingEndEvent):
            key = event.value if isinstance(event, yaml.ScalarEvent) else ""
            inner: DataPath = (*path, key)
            if not isinstance(event, yaml.ScalarEvent):
                self._value(event, inner)
                self._complain("a key is a plain name, not a mapping, a list or an alias", event, path)
                self._value(next(self.events), inner)
                continue
            first = self.document.keys.get(inner)
            if first is not None:
                self._complain(f"is there twice; the first is in line {first[0]}", event, inner)
                self._value(next(self.events), (*inner, "again"))
                continue
            self.document.keys[inner] = _start(event)
            value = self._present(next(self.events), inner, event)
            if key == "<<":
                self._complain("<< is not read here; write the values out", event, inner)
            elif value is not None:
                mapping[key] = value
        return mapping

    def _list(self, path: DataPath) -> Data:
        members: list[Data] = []
        while not isinstance(event := next(self.events), yaml.SequenceEndEvent):
            inner = (*path, len(members))
            self.document.keys[inner] = _start(event)
            value = self._present(event, inner, event)
            if value is not None:
                members.append(value)
        return members

    def _present(self, event: yaml.Event, path: DataPath, key: yaml.Event) -> Data:
        value = self._value(event, path)
        if value is None and isinstance(event, yaml.ScalarEvent):
            self._complain("has no value; write one, or leave it out", key, path)
        return value

    def _complain(self, message: str, event: yaml.Event, path: DataPath) -> None:
        line, col = _start(event)
        self.document.problems.append(Problem(line, col, spelled(path), message, self.document.file))


def resolved(text: str) -> Data:
    """What an unquoted scalar means by the core schema of YAML 1.2."""
    if text in _WORDS:
        return _WORDS[text]
    if len(text) <= MOST_DIGITS:
        if _INTEGER.fullmatch(text):
            return int(text)
        if _FLOAT.fullmatch(text):
            return float(text)
    if text in (".nan", ".NaN", ".NAN"):
        return math.nan
    infinite = _INFINITE.fullmatch(text)
    return float(f"{infinite[1]}inf") if infinite else text


_BEGIN = 'begin with "name: shop" and see twinhull init'
_EMPTY = f"is empty; {_BEGIN}"


def _in_our_words(error: yaml.MarkedYAMLError, text: str, place: Place) -> str:
    line = text.splitlines()[place[0] - 1 : place[0]]
    if line and "\t" in line[0][: place[1]] and not line[0][: place[1] - 1].strip():
        return "a tab indents this line; YAML wants spaces"
    if (
        line
        and line[0][place[1] - 1 : place[1]] in ("@", "`", "%")
        and "cannot start" in (error.problem or "")
    ):
        return f"a value cannot start with {line[0][place[1] - 1]} unless it is in quotes"
    context = f" {error.context}" if error.context else ""
    return f"is not YAML: {error.problem or 'it breaks off'}{context}"


def _error(file: str, message: str, place: Place = (1, 1)) -> SystemFileError:
    return SystemFileError([Problem(*place, "", message, file)])


def _start(event: yaml.Event) -> Place:
    assert event.start_mark is not None
    return event.start_mark.line + 1, event.start_mark.column + 1


def _position(before: str) -> Place:
    """Line and column of what follows this text."""
    lines = re.split("\r\n|\n|\r", before)
    return len(lines), len(lines[-1]) + 1


def _kind(data: Data) -> str:
    return "a list" if isinstance(data, list) else f"only {quoted(data)}"
