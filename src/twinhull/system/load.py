"""How a system file becomes a `System` whose every value knows where it came from."""

from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from pydantic import ValidationError

from twinhull.system.expand import expand
from twinhull.system.face import Complaint, Face, read_face
from twinhull.system.model import System
from twinhull.system.origins import Origin, origins_of
from twinhull.system.places import MOST_VALUES, Document, compose, read, spelled
from twinhull.system.problems import Problem, SystemFileError
from twinhull.system.references import check_references
from twinhull.system.words import MOST_TOLD, complaints_of

# With what comes with its workloads a file grows up to tenfold, and must still be one that can be read back.
MOST_SAID = MOST_VALUES // 10


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
    """The system of a text that stands in `source`, or would. Raises SystemFileError as `load` does."""
    document = compose(text, str(source))
    face = read_face(document)
    if face.friendly and len(document.values) > MOST_SAID:
        message = f"has more than {MOST_SAID} values; describe it as several systems"
        raise SystemFileError([_problem(Complaint((), message), document)])
    if face.too_new:
        raise SystemFileError([_problem(complaint, document) for complaint in face.complaints])
    said, mistakes = _validated(face)
    told = islice(check_references(face), MOST_TOLD)
    dangling = [replace(complaint, path=face.user_path(complaint.path)) for complaint in told]
    complaints = [*face.complaints, *mistakes, *dangling]
    problems = [*document.problems, *(_problem(complaint, document) for complaint in complaints)]
    if problems or said is None:
        raise SystemFileError(problems)
    system, causes = expand(said, face.roles) if face.friendly else (said, {})
    return Described(system, origins_of(system, said, causes, face, document), source)


def _validated(face: Face) -> tuple[System | None, list[Complaint]]:
    try:
        return System.model_validate(face.said, by_alias=True, by_name=False), []
    except ValidationError as error:
        return None, complaints_of(error, face)


def _problem(complaint: Complaint, document: Document) -> Problem:
    line, col = document.place(complaint.path, at_key=complaint.at_key)
    message = "".join(c if c.isprintable() else "?" for c in complaint.message)
    return Problem(line, col, spelled(complaint.path), message, document.file)
