"""Where a training run keeps what it would lose: directories that are whole and verified, or absent.

    checkpoints/TRAIN/step-000000120/state.pt
    checkpoints/TRAIN/step-000000120/manifest.json     format, place, parts, files with size and sha256

A checkpoint is written beside its name, flushed to the disk and renamed. The manifest carries its own hash.
What does not verify is refused with a warning and the one before is taken.
"""

import hashlib
import json
import logging
import os
import re
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from twinhull.errors import CheckpointError

FORMAT = 1
STATE = "state.pt"
MANIFEST = "manifest.json"
_NAME = re.compile(r"step-(\d{9,})")
log = logging.getLogger(__name__)

State = dict[str, Any]  # Any: whatever the user's state_dict holds; torch.save defines the limits


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
    """A checkpoint on the disk, as its manifest describes it. `parts` are the kinds of what was wrapped."""

    path: Path
    place: Place
    parts: tuple[str, ...]
    world_size: int
    saved_at: float
    files: Mapping[str, Mapping[str, Any]]  # Any: size and sha256


class Store:
    """The checkpoints of one train workload. One process writes; any number may read.

    The law: whatever is killed at whatever moment, a directory named `step-N` is whole, and the newest one
    that verified stays until a newer one has.
    """

    def __init__(self, root: Path, keep: int = 3) -> None:
        self.root = root
        self.keep = max(1, keep)

    def clean(self) -> None:
        """Remove what a killed writer has left; to be called by the writer before it writes."""
        for path in self.root.glob("step-*.tmp") if self.root.is_dir() else ():
            shutil.rmtree(path, ignore_errors=True)

    def newest(self) -> Checkpoint | None:
        """The newest checkpoint that verifies; None if there is none at all.

        Raises CheckpointError if there are some and none can be trusted, or if a newer Twinhull wrote one.
        """
        found = self._names()
        for path in found:
            try:
                return _verified(path)
            except _Refused as refused:
                log.warning("checkpoint refused", extra={"checkpoint": path.name, "reason": str(refused)})
        if found:
            raise CheckpointError(
                f"none of the {len(found)} checkpoints in {self.root} can be trusted.",
                hint="Restore one of them, or move the directory away to begin again.",
            )
        return None

    def named(self, name: str) -> Checkpoint:
        """A checkpoint that another rank has verified."""
        try:
            return _described(self.root / name)
        except _Refused as refused:
            raise CheckpointError(f"{self.root / name} cannot be read here: {refused}.") from refused

    def last_place(self) -> Place | None:
        """Where the newest readable manifest says the run stood, without reading the state."""
        for path in self._names():
            with suppress(_Refused):
                return _described(path).place
        return None

    def load(self, checkpoint: Checkpoint) -> list[State]:
        """The states of what was wrapped, in the order of wrapping, on the CPU."""
        import torch

        states: list[State] = torch.load(checkpoint.path / STATE, map_location="cpu", weights_only=True)
        return states

    def save(
        self, place: Place, parts: tuple[str, ...], states: list[State], *, world_size: int
    ) -> Checkpoint:
        """Write a checkpoint and commit it. Raises CheckpointError; what was there before stays."""
        import torch

        final = self.root / f"step-{place.step:09d}"
        beside = final.with_suffix(".tmp")
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(beside, ignore_errors=True)
            beside.mkdir()
            with (beside / STATE).open("wb") as file:
                torch.save(states, file)
                file.flush()
                os.fsync(file.fileno())
            files = {STATE: {"bytes": (beside / STATE).stat().st_size, "sha256": _sha256(beside / STATE)}}
            made = Checkpoint(final, place, parts, world_size, time.time(), files)
            _write_manifest(beside / MANIFEST, made)
            _sync(beside)
            if final.exists():  # refused when we resumed, or we would stand beyond it
                _remove(final)
            beside.rename(final)
            _sync(self.root)
        except (OSError, RuntimeError) as error:  # torch reports a full disk as RuntimeError
            shutil.rmtree(beside, ignore_errors=True)
            raise CheckpointError(
                f"the checkpoint of step {place.step} cannot be written in {self.root}: {error}.",
                hint="The one before is still there.",
            ) from error
        self._retain(place.step)
        return made

    def change(self, checkpoint: Checkpoint, place: Place) -> Checkpoint:
        """Replace the place of a committed checkpoint at the same step; its state stays as it is."""
        changed = replace(checkpoint, place=place)
        beside = checkpoint.path / f"{MANIFEST}.tmp"
        try:
            _write_manifest(beside, changed)
            beside.replace(checkpoint.path / MANIFEST)
            _sync(checkpoint.path)
        except OSError as error:
            raise CheckpointError(f"the checkpoint {checkpoint.path} cannot be changed: {error}.") from error
        return changed

    def _names(self) -> list[Path]:
        """Paths of all committed checkpoints, newest first."""
        paths = self.root.iterdir() if self.root.is_dir() else iter(())
        return sorted((path for path in paths if _NAME.fullmatch(path.name)), key=_step, reverse=True)

    def _retain(self, step: int) -> None:
        """Remove what is too old, and what lies beyond `step`: it was refused when we resumed."""
        names = self._names()
        kept = [path for path in names if _step(path) <= step][: self.keep]
        for path in names:
            if path not in kept:
                with suppress(OSError):  # the next one tries again
                    _remove(path)


class _Refused(Exception):
    """Raised when a checkpoint does not verify; says why."""


def _verified(path: Path) -> Checkpoint:
    checkpoint = _described(path)
    for name, expected in checkpoint.files.items():
        file = path / name
        if not file.is_file():
            raise _Refused(f"{name} is missing")
        if file.stat().st_size != expected["bytes"]:
            raise _Refused(f"{name} has {file.stat().st_size} bytes instead of {expected['bytes']}")
        if _sha256(file) != expected["sha256"]:
            raise _Refused(f"the content of {name} has changed since it was written")
    return checkpoint


def _described(path: Path) -> Checkpoint:
    """What the manifest says, once its own hash holds."""
    try:
        raw = (path / MANIFEST).read_bytes()
    except OSError as error:
        raise _Refused(f"{MANIFEST} cannot be read: {error.strerror}") from error
    try:
        said = json.loads(raw)
        version, digest = said["format"], said.pop("sha256")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _Refused(f"{MANIFEST} is damaged") from error
    if isinstance(version, int) and version > FORMAT and _digest(said) == digest:
        raise CheckpointError(
            f"{path} has format {version} and this Twinhull reads up to {FORMAT}.",
            hint=f"Use the newer Twinhull that wrote it ({said.get('written_by', 'unknown')}).",
        )
    if _digest(said) != digest or _encoded({**said, "sha256": digest}) != raw:
        raise _Refused(f"{MANIFEST} is damaged")
    place = Place(**said["place"])
    if path.name != f"step-{place.step:09d}":
        raise _Refused(f"it says that it is of step {place.step}")
    return Checkpoint(path, place, tuple(said["parts"]), said["world_size"], said["saved_at"], said["files"])


def _write_manifest(path: Path, checkpoint: Checkpoint) -> None:
    from twinhull import __version__

    said = {
        "format": FORMAT,
        "written_by": __version__,
        "place": asdict(checkpoint.place),
        "parts": list(checkpoint.parts),
        "world_size": checkpoint.world_size,
        "saved_at": checkpoint.saved_at,
        "files": dict(checkpoint.files),
    }
    with path.open("wb") as file:
        file.write(_encoded({**said, "sha256": _digest(said)}))
        file.flush()
        os.fsync(file.fileno())


def _encoded(said: Mapping[str, Any]) -> bytes:  # Any: plain JSON
    return json.dumps(said, sort_keys=True, indent=1).encode()


def _digest(said: Mapping[str, Any]) -> str:  # Any: plain JSON
    return hashlib.sha256(_encoded(said)).hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _remove(path: Path) -> None:
    """Take a checkpoint away as a whole: a name without `.tmp` is never half there."""
    aside = path.with_name(f"{path.name}.old.tmp")
    shutil.rmtree(aside, ignore_errors=True)
    path.rename(aside)
    shutil.rmtree(aside)


def _sync(directory: Path) -> None:
    opened = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def unfit(value: object, where: str) -> Iterator[str]:
    """The places in a state that a checkpoint cannot hold, each with what stands there."""
    import torch

    if value is None or isinstance(value, bool | int | float | complex | str | bytes | torch.Tensor):
        if type(value).__module__ == "numpy":  # a numpy float is a float to Python, not to torch.load
            yield f"{where} is a {type(value).__module__}.{type(value).__name__}"
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from unfit(item, f"{where}[{key!r}]")
    elif isinstance(value, (list, tuple, set)):
        items: Iterable[object] = value
        for index, item in enumerate(items):
            yield from unfit(item, f"{where}[{index}]")
    else:
        yield f"{where} is a {type(value).__module__}.{type(value).__name__}"
