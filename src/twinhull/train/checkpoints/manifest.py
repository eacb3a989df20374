"""What does a checkpoint say of itself? A manifest that carries its own hash, and names every other file.

Format 1 held all state in `state.pt`; format 2 has DCP shards beside it and hashes all of them.
"""

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from twinhull.errors import CheckpointError

FORMAT = 2
MANIFEST = "manifest.json"
STATE = "state.pt"
_NAME = re.compile(r"step-(\d{9,})")

Files = Mapping[str, Mapping[str, Any]]  # Any: `bytes` is a number, `sha256` a text


@dataclass(frozen=True, slots=True)
class Place:
    """Where the run stood: completed steps, the cycle and loop, the loop's own position, offsets of events.

    `loop` numbers the loops of the user's function; those before it are finished. `passing` is what the
    unfinished one needs to go on. `done` says that the cycle is finished and published.
    """

    step: int = 0
    cycle: int = 1
    loop: int = 0
    passing: Mapping[str, Any] | None = None  # Any: plain JSON
    events: Mapping[str, Any] = field(default_factory=dict)  # Any: plain JSON
    cycle_started: float = 0.0
    done: bool = False


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint as its manifest describes it. `parts` are the kinds of what was wrapped.

    `path` is where its files are, or would be. One with `own_files` cannot be loaded by another number of
    ranks: what was wrapped keeps files of its own, and Twinhull does not know what is in them.
    """

    path: Path
    place: Place
    parts: tuple[str, ...]
    world_size: int
    saved_at: float
    files: Files
    took_s: float = 0.0
    own_files: bool = False
    format: int = FORMAT

    @property
    def bytes(self) -> int:
        """Of all files together, without the manifest."""
        return sum(int(facts["bytes"]) for facts in self.files.values())


class Refused(Exception):
    """Raised when a checkpoint does not verify; says why."""


def name_of(step: int) -> str:
    """The name of the directory that holds the checkpoint of a step."""
    return f"step-{step:09d}"


def step_of(name: str) -> int | None:
    """The step that a directory's name says; None if it is no committed checkpoint's name."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


def described(path: Path, raw: bytes | None = None) -> Checkpoint:
    """What the manifest of a checkpoint says, once its own hash holds; `raw` if it was read already.

    Raises Refused if it is damaged, CheckpointError if a newer Twinhull wrote it.
    """
    said = _proven(path, _read(path) if raw is None else raw)
    place = Place(**said["place"])
    if path.name.removesuffix(".fetched.tmp") != name_of(place.step):
        raise Refused(f"it says that it is of step {place.step}")
    return Checkpoint(
        path, place, tuple(said["parts"]), said["world_size"], said["saved_at"], said["files"],
        took_s=said.get("took_s", 0.0), own_files=said.get("own_files", False), format=said["format"],
    )  # fmt: skip


def check_files(path: Path, files: Files) -> None:
    """Read every file and compare it with its size and hash. Raises Refused for the first that differs."""
    for name, expected in files.items():
        file = path / name
        if not file.is_file():
            raise Refused(f"{name} is missing")
        if file.stat().st_size != expected["bytes"]:
            raise Refused(f"{name} has {file.stat().st_size} bytes instead of {expected['bytes']}")
        if sha256(file) != expected["sha256"]:
            raise Refused(f"the content of {name} has changed since it was written")


def encoded(checkpoint: Checkpoint) -> bytes:
    """The manifest of a checkpoint, with its own hash."""
    from twinhull import __version__

    said = {
        "format": checkpoint.format,
        "written_by": __version__,
        "place": asdict(checkpoint.place),
        "parts": list(checkpoint.parts),
        "world_size": checkpoint.world_size,
        "saved_at": checkpoint.saved_at,
        "took_s": checkpoint.took_s,
        "own_files": checkpoint.own_files,
        "bytes": checkpoint.bytes,
        "files": dict(checkpoint.files),
    }
    return _json({**said, "sha256": _digest(said)})


def facts(file: Path) -> dict[str, Any]:  # Any: as in Files
    """Size and hash of a file, as a manifest names them."""
    return {"bytes": file.stat().st_size, "sha256": sha256(file)}


def sha256(path: Path) -> str:
    """The hash of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_durably(path: Path, content: bytes) -> None:
    """Write a file and wait until it is on the disk. Raises OSError."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync(directory: Path) -> None:
    """Wait until the names in a directory are on the disk."""
    opened = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def _read(path: Path) -> bytes:
    try:
        return (path / MANIFEST).read_bytes()
    except OSError as error:
        raise Refused(f"{MANIFEST} cannot be read: {error.strerror}") from error


def _proven(path: Path, raw: bytes) -> dict[str, Any]:  # Any: plain JSON
    try:
        said = json.loads(raw)
        version, digest = said["format"], said.pop("sha256")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Refused(f"{MANIFEST} is damaged") from error
    if _digest(said) != digest or _json({**said, "sha256": digest}) != raw:
        raise Refused(f"{MANIFEST} is damaged")
    if version > FORMAT:
        raise CheckpointError(
            f"{path} has format {version} and this Twinhull reads up to {FORMAT}.",
            hint=f"Use the newer Twinhull that wrote it ({said.get('written_by', 'unknown')}).",
        )
    return said


def _json(said: Mapping[str, Any]) -> bytes:  # Any: plain JSON
    return json.dumps(said, sort_keys=True, indent=1).encode()


def _digest(said: Mapping[str, Any]) -> str:  # Any: plain JSON
    return hashlib.sha256(_json(said)).hexdigest()
