"""What is a checkpoint in the directory of a script that is not ours, and has it changed since?"""

import hashlib
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from twinhull.train.scripts import whole

Files = Mapping[str, Mapping[str, str | int]]  # of each file: bytes, sha256, and when it was changed
_LAST = "trainer_state.json"  # what Hugging Face's Trainer writes last into a checkpoint
_FILES = {".ckpt", ".pt", ".pth"}
_NUMBERED_FILES = {*_FILES, ".safetensors", ".npz", ".json", ".bin", ".pkl"}


@dataclass(frozen=True, slots=True)
class File:
    """One file of an entry. `changed` is in ns."""

    name: str
    inode: int
    bytes: int
    changed: int


@dataclass(frozen=True, slots=True)
class Entry:
    """A checkpoint as it was when it was looked at: a directory, or a file that is its only one."""

    path: Path
    files: tuple[File, ...]

    @classmethod
    def look(cls, path: Path) -> "Entry":
        """The entry of this moment; without files if it is gone."""
        inside = path.is_dir()
        found: list[File] = []
        for file in sorted(path.rglob("*")) if inside else [path]:
            with suppress(FileNotFoundError):
                facts = file.stat()
                if file.is_file():
                    name = str(file.relative_to(path)) if inside else path.name
                    found.append(File(name, facts.st_ino, facts.st_size, facts.st_mtime_ns))
        return cls(path, tuple(found))

    @property
    def name(self) -> str:
        """What the script calls it."""
        return self.path.name

    @property
    def kind(self) -> str:
        """Its name without its numbers: what it has in common with those before it."""
        return re.sub(r"\d+", "#", self.name)

    @property
    def age(self) -> tuple[int, int]:
        """By which entries are sorted: the last change, then the step."""
        return max((file.changed for file in self.files), default=0), step_of(self.name) or 0

    @property
    def is_directory(self) -> bool:
        """Whether it has files of its own names."""
        return self.path.is_dir()

    def place(self, file: File) -> Path:
        """Where one of its files lies."""
        return self.path / file.name if self.is_directory else self.path

    def is_broken(self) -> bool:
        """Whether a file of it shows that it is not whole."""
        return any(whole.look(self.place(file)) == "broken" for file in self.files)

    def has_what_comes_last(self) -> bool:
        """Whether it holds the file that a known trainer writes after all others."""
        return any(file.name == _LAST for file in self.files)

    def hashed(self) -> Files:
        """Its files with their hashes; they are on the disk when this returns. Raises OSError."""
        return {
            file.name: {"bytes": file.bytes, "sha256": sha256(self.place(file)), "changed": file.changed}
            for file in self.files
        }


def entries(root: Path) -> list[Entry]:
    """What counts as a checkpoint in a directory: directories that end with a number, and files of state.

    A link is another name for one of them.
    """
    found = (path for path in root.iterdir() if not path.name.startswith((".", "tmp")))
    return [Entry.look(path) for path in found if not path.is_symlink() and _is_entry(path)]


def step_of(name: str) -> int | None:
    """The step that a checkpoint's name tells: what follows "step", else its last number."""
    said = re.findall(r"step[=_-]?(\d+)", name) or re.findall(r"\d+", name)
    return int(said[-1]) if said else None


def sha256(path: Path) -> str:
    """The hash of a file, which is on the disk when this returns."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        return hashlib.file_digest(file, "sha256").hexdigest()


def hashes(files: Files) -> dict[str, str]:
    """The hashes alone: a copy has other times."""
    return {name: str(facts["sha256"]) for name, facts in files.items()}


def _is_entry(path: Path) -> bool:
    if path.is_dir():
        return path.name[-1:].isdecimal()
    numbered = path.suffix in _NUMBERED_FILES and any(letter.isdecimal() for letter in path.stem)
    return path.suffix in _FILES or (numbered and "-of-" not in path.name)
