"""How a system file becomes a `System` whose every value knows where it came from."""

from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from twinhull.system.expand import expand
from twinhull.system.face import Complaint, Face, read_face
from twinhull.system.model import Part, System
from twinhull.system.places import Document, Path_, compose, read, spelled
from twinhull.system.problems import Problem, SystemFileError
from twinhull.system.references import check_references
from twinhull.system.words import MOST_TOLD, complaints_of

How = Literal["measured", "read", "drawn", "default", "assumed"]


@dataclass(frozen=True, slots=True)
class Origin:
    """How a value came to be known, and the place in the user's text that says or causes it."""

    how: How
    file: str
    line: int
    col: int
    note: str = ""

    def __str__(self) -> str:
        note = f", {self.note}" if self.note else ""
        return f"{self.how}, {self.file}:{self.line}:{self.col}{note}"


@dataclass(frozen=True, slots=True)
class Described:
    """A system and, for each path of it that has a value, where that came from."""

    system: System
    origins: dict[str, Origin]
    source: Path

    def origin(self, path: str) -> Origin:
        """Where the value of a path such as `components.fit.checkpoint.every` came from.

        For a path without a value of its own: where the nearest thing above it came from. Raises KeyError if
        there is nothing above it either.
        """
        at = path
        while at not in self.origins:
            at, dot, _ = at.rpartition(".")
            if not dot:
                raise KeyError(path)
        return self.origins[at]


def load(path: Path) -> Described:
    """The system of a file. Raises SystemFileError with all problems of the file at once."""
    return load_text(read(path), path)


def load_text(text: str, source: Path) -> Described:
    """The system of a text that stands in `source`, or would."""
    document = compose(text, str(source))
    face = read_face(document)
    if face.too_new:
        raise SystemFileError([_problem(complaint, document) for complaint in face.complaints])
    system, mistakes = _validated(face)
    told = islice(check_references(face), MOST_TOLD)
    dangling = [replace(complaint, path=face.user_path(complaint.path)) for complaint in told]
    complaints = [*face.complaints, *mistakes, *dangling]
    problems = [*document.problems, *(_problem(complaint, document) for complaint in complaints)]
    if problems or system is None:
        raise SystemFileError(problems)
    whole, causes = system, dict[str, str]()
    if face.roles or "workloads" in (document.data if isinstance(document.data, dict) else {}):
        expanded = expand(system)
        whole, causes = expanded.system, expanded.causes
    return Described(whole, _origins(whole, system, causes, face, document), source)


def _validated(face: Face) -> tuple[System | None, list[Complaint]]:
    try:
        return System.model_validate(face.said, by_alias=True, by_name=False), []
    except ValidationError as error:
        return None, complaints_of(error, face)


def _problem(complaint: Complaint, document: Document) -> Problem:
    line, col = document.place(complaint.path, at_key=complaint.at_key)
    message = "".join(c if c.isprintable() else "?" for c in complaint.message)
    return Problem(line, col, spelled(complaint.path), message, document.file)


def _origins(
    system: System, said: System, causes: dict[str, str], face: Face, document: Document
) -> dict[str, Origin]:
    """The origin of each value of the whole system, by what was said of it."""
    origins: dict[str, Origin] = {}

    def note(part: object, read_part: object, path: Path_, cause: Path_) -> None:
        if part is None:
            return
        cause = tuple(causes[spelled(path)].split(".")) if spelled(path) in causes else cause
        filled = read_part is None
        if len(path) > 1 or not isinstance(part, (dict, tuple)):  # a section is only a heading
            how: How = "default" if filled else "read"
            at_key = filled or isinstance(part, Part)
            place = document.place(face.user_path(cause if filled else path), at_key=at_key)
            origins[spelled(path)] = Origin(how, document.file, *place)
        for key, value, read_value in _inside(part, read_part):
            note(value, read_value, (*path, key), cause if filled else path)

    for key, value, read_value in _inside(system, said):
        note(value, read_value, (key,), ())
    return origins


def _inside(part: object, said: object) -> list[tuple[str | int, object, object]]:
    """What a thing holds: name, value, and what the file said of it."""
    if isinstance(part, Part):
        fields = type(part).model_fields
        keys = [(name, field.alias or name) for name, field in fields.items()]
        return [(key, getattr(part, name), getattr(said, name, None)) for name, key in keys]
    if isinstance(part, dict):
        known = said if isinstance(said, dict) else {}
        return [(name, value, known.get(name)) for name, value in part.items()]
    if isinstance(part, tuple) and part and isinstance(part[0], Part):
        known = said if isinstance(said, tuple) else ()
        return [(i, value, known[i] if i < len(known) else None) for i, value in enumerate(part)]
    return []
