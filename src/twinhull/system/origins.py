"""Where does each value of a system come from?"""

from dataclasses import dataclass
from functools import cache
from typing import Literal

from twinhull.system.face import Face
from twinhull.system.model import Part, System
from twinhull.system.places import DataPath, Document, Place

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


def origins_of(
    system: System, said: System, causes: dict[str, str], face: Face, document: Document
) -> dict[str, Origin]:
    """The origin of each value of a whole system, of which `said` is what the file says itself.

    `causes` gives, for each part that was filled in, the path of the part that needs it.
    """
    cause_of = {
        path: document.place(face.user_path(tuple(cause.split("."))), at_key=True)
        for path, cause in causes.items()
    }
    notes = _Notes(face, document, {})
    for section, part in system:
        told = getattr(said, section)
        for key, one in _members(part):
            path = section if key is None else f"{section}.{key}"
            user: DataPath = (section,) if key is None else face.user_path((section, key))
            notes.add(
                one, told if key is None else _member(told, key), path, user, cause_of.get(path, (1, 1))
            )
    return notes.origins


@dataclass(frozen=True, slots=True)
class _Notes:
    face: Face
    document: Document
    origins: dict[str, Origin]

    def add(self, part: object, told: object, path: str, user: DataPath, cause: Place) -> None:
        """Note where a value came from, and all within it; `told` is what the file says of it."""
        how: How = "default" if told is None else "read"
        place = cause if told is None else self.document.place(user, at_key=isinstance(part, Part))
        self.origins[path] = Origin(how, self.document.file, *place)
        if not isinstance(part, Part):
            return
        spelled = _spellings(part.__class__)
        for field, value in part:
            if value is not None:
                key = spelled.get(field, field)
                inner = self._inner(user, key)
                written = key != "kind" or inner in self.document.values  # of what is brought it is filled in
                self.add(
                    value, getattr(told, field, None) if written else None, f"{path}.{key}", inner, place
                )

    def _inner(self, user: DataPath, key: str) -> DataPath:
        if user[0] == "workloads" and len(user) == 2:  # the workload says kind and run in its own way
            return self.face.user_path(("components", user[1], key))
        return (*user, key)


@cache
def _spellings(part: type[Part]) -> dict[str, str]:
    """The fields that a file spells differently."""
    return {name: field.alias for name, field in part.model_fields.items() if field.alias}


def _members(section: object) -> list[tuple[str | int | None, object]]:
    """What a section holds; a section that is one value holds itself, without a key."""
    if isinstance(section, dict):
        return list(section.items())
    if isinstance(section, tuple):
        return list(enumerate(section))
    return [] if section is None else [(None, section)]


def _member(section: object, key: str | int) -> object:
    if isinstance(section, dict):
        return section.get(key)
    return (
        section[key] if isinstance(section, tuple) and isinstance(key, int) and key < len(section) else None
    )
