"""Which checkpoints of a script that is not ours can be trusted? Those that were sealed when they were whole.

The script may write what it likes; it may die while it writes. An entry of its directory is sealed, with the
hashes of all its files, once

- a newer entry stands beside it, or it has not changed for a while in which the script went on beating, or
  the script has ended well;
- or, when the script was killed, each of its files shows by itself that it is whole (`whole.look`) and, for a
  directory, they are the same files that the sealed one before it has.

What is found unsealed when the script is started again, and cannot be sealed so, is moved aside. Only what is
sealed and whose hashes still hold is handed to the script.
"""

import hashlib
import json
import logging
import os
import re
import shutil
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from twinhull.errors import CheckpointError
from twinhull.rundir import write_whole
from twinhull.train import whole

FOLDER, TORN = ".twinhull", ".torn"
AGAIN_S = 5.0  # until what looked broken is looked at again
SETTLE_S = 5.0  # unchanged for so long while the script beats: it no longer writes there
_FILES = {".ckpt", ".pt", ".pth"}
_NUMBERED_FILES = {*_FILES, ".safetensors", ".npz", ".json", ".bin", ".pkl"}
log = logging.getLogger(__name__)

Signature = tuple[tuple[str, int, int, int], ...]  # of each file: name, inode, bytes, time of the last change


@dataclass(frozen=True, slots=True)
class Seal:
    """What an entry held when it was whole: of each file `bytes`, `sha256`, and when it was `changed`.

    `order` counts the seals of a directory.
    """

    order: int
    step: int | None
    files: Mapping[str, Mapping[str, str | int]]


@dataclass(slots=True)
class _Seen:
    signature: Signature
    since: float  # by the monotonic clock
    sealed: bool  # or on its way to it
    again_at: float = 0.0  # when it may be tried again


class Checkpoints:
    """The checkpoints of one script in one directory. Hashing is done by a thread of its own."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._seals = root / FOLDER
        self._seals.mkdir(parents=True, exist_ok=True)
        self._seen: dict[str, _Seen] = {}
        self._hashing: dict[str, Future[None]] = {}
        self._thread = ThreadPoolExecutor(1, "seals")
        self.count = self._last_order()

    def look(self, beat_at: float) -> bool:
        """Take one look at what the script writes, and seal what is whole; whether anything has changed.

        `beat_at` is when the script last gave a sign of life, by the monotonic clock.
        """
        now, found = time.monotonic(), {path.name: _signature(path) for path in entries(self.root)}
        for name in self._seen.keys() - found.keys():
            del self._seen[name]
            self._seal_of(name).unlink(missing_ok=True)
        changed = False
        for name, signature in found.items():
            seen = self._seen.get(name)
            if seen is None or seen.signature != signature:
                changed = True
                _warn_of_overwriting(name, seen, signature)
                sealed = self._is_sealed(name, signature)
                self._seen[name] = _Seen(signature, now, sealed=sealed)
        newest = max((seen.since for seen in self._seen.values()), default=0.0)
        for name, seen in self._seen.items():
            settled = beat_at - seen.since >= SETTLE_S
            is_due = (seen.since < newest or settled) and now >= seen.again_at and self._is_free(name)
            if not seen.sealed and is_due:
                seen.sealed = True
                self._hashing[name] = self._thread.submit(self._seal_live, name, seen)
        return changed

    def settle(self, *, well: bool) -> None:
        """Seal or move aside all that is not sealed; the script has left, and `well` says that it said so.

        Raises CheckpointError if that cannot be done.
        """
        wait(self._hashing.values())
        self._hashing.clear()
        try:
            for path in sorted(entries(self.root), key=_age):
                signature = _signature(path)
                if self._is_sealed(path.name, signature) or self._is_as_sealed(path, signature):
                    continue
                if (well and not _is_broken(path, signature)) or self._shows_whole(path, signature):
                    self._write_seal(path, signature)
                else:
                    self._move_aside(path, "checkpoint torn")
        except OSError as error:
            raise self._unsealable(error) from error
        self._seen.clear()

    def newest(self) -> Path | None:
        """The newest sealed checkpoint whose files are still as they were; those that are not move aside."""
        sealed = [(seal.order, path) for path in entries(self.root) if (seal := self.seal(path.name))]
        for _, path in sorted(sealed, reverse=True):
            seal = self.seal(path.name)
            try:
                if seal is not None and _hashes(_hashed(path, _signature(path))) == _hashes(seal.files):
                    return path
                self._move_aside(path, "checkpoint damaged")
            except OSError as error:
                raise self._unsealable(error) from error
        return None

    def seal(self, name: str) -> Seal | None:
        """The seal of an entry; None if it has none that can be read."""
        with suppress(OSError, ValueError, KeyError, TypeError):
            said = json.loads(self._seal_of(name).read_text(encoding="utf-8"))
            return Seal(int(said["order"]), said["step"], said["files"])
        return None

    def close(self) -> None:
        """Hash no more."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _seal_live(self, name: str, seen: _Seen) -> None:
        path = self.root / name
        try:
            if not _is_broken(path, seen.signature):
                self._write_seal(path, seen.signature)
                return
        except FileNotFoundError:  # the script has removed it meanwhile
            return
        except OSError as error:
            log.warning("checkpoint not sealed", extra={"checkpoint": name, "reason": str(error)})
        seen.sealed, seen.again_at = False, time.monotonic() + AGAIN_S

    def _write_seal(self, path: Path, signature: Signature) -> None:
        files = _hashed(path, signature)
        if not files or _signature(path) != signature:
            return  # it was changed under our hands
        seal = Seal(self.count + 1, step_of(path.name), files)
        write_whole(self._seal_of(path.name), json.dumps({"format": 1, **asdict(seal)}))
        self.count += 1
        log.info("checkpoint saved", extra={"step": seal.step, "checkpoint": path.name})

    def _is_sealed(self, name: str, signature: Signature) -> bool:
        """Whether an entry has a seal and has not been written to since; its hashes are for `newest`."""
        seal = self.seal(name)
        return seal is not None and {
            file: (facts["bytes"], facts["changed"]) for file, facts in seal.files.items()
        } == {file: (size, changed) for file, _, size, changed in signature}

    def _is_as_sealed(self, path: Path, signature: Signature) -> bool:
        """Whether an entry that was written to, or copied, holds what was sealed; then it is sealed anew."""
        seal = self.seal(path.name)
        if seal is None or _hashes(seal.files) != _hashes(_hashed(path, signature)):
            return False
        self._write_seal(path, signature)
        return True

    def _shows_whole(self, path: Path, signature: Signature) -> bool:
        """Whether an entry of a killed script proves itself."""
        if not path.is_dir():
            return whole.look(path) == "whole"
        like = self._sealed_like(path.name)
        if like is None or {name for name, *_ in signature} != set(like.files):
            return False
        known = set(_hashes(like.files).values())
        return all(
            whole.look(path / name) == "whole" or _sha256(path / name) in known for name, *_ in signature
        )

    def _sealed_like(self, name: str) -> Seal | None:
        """The newest seal of an entry that is called the same but for its numbers."""
        names = [path.name for path in entries(self.root) if path.name != name]
        kin = (self.seal(other) for other in names if _kind(other) == _kind(name))
        return max(filter(None, kin), key=lambda seal: seal.order, default=None)

    def _move_aside(self, path: Path, event: str) -> None:
        """Out of the script's sight, but not lost; one at a time, or they would fill the disk."""
        for old in self.root.glob(f"*{TORN}"):
            shutil.rmtree(old) if old.is_dir() else old.unlink()
        aside = path.with_name(path.name + TORN)
        path.rename(aside)
        self._seal_of(path.name).unlink(missing_ok=True)
        log.warning(event, extra={"checkpoint": path.name, "moved_to": aside.name})

    def _unsealable(self, error: OSError) -> CheckpointError:
        reason = error.strerror or error
        return CheckpointError(f"checkpoints in {self.root} cannot be read or sealed: {reason}.",
                               hint="Make room there, or make it writable.")  # fmt: skip

    def _is_free(self, name: str) -> bool:
        return name not in self._hashing or self._hashing[name].done()

    def _seal_of(self, name: str) -> Path:
        return self._seals / f"{name}.json"

    def _last_order(self) -> int:
        seals = (self.seal(path.name.removesuffix(".json")) for path in self._seals.glob("*.json"))
        return max((seal.order for seal in seals if seal is not None), default=0)


def entries(root: Path) -> list[Path]:
    """What counts as a checkpoint in a directory: directories that end with a number, and files of state.

    A link is another name for one of them.
    """
    found = (path for path in root.iterdir() if not path.name.startswith((".", "tmp")))
    return [path for path in found if not path.is_symlink() and _is_entry(path)]


def step_of(name: str) -> int | None:
    """The step that a checkpoint's name tells: what follows "step", else its last number."""
    said = re.findall(r"step[=_-]?(\d+)", name) or re.findall(r"\d+", name)
    return int(said[-1]) if said else None


def _is_entry(path: Path) -> bool:
    if path.is_dir():
        return path.name[-1:].isdecimal()
    numbered = path.suffix in _NUMBERED_FILES and any(letter.isdecimal() for letter in path.stem)
    return path.suffix in _FILES or (numbered and "-of-" not in path.name)


def _kind(name: str) -> str:
    return re.sub(r"\d+", "#", name)


def _age(path: Path) -> tuple[int, int]:
    changed = max((time for *_, time in _signature(path)), default=0)
    return changed, step_of(path.name) or 0


def _signature(path: Path) -> Signature:
    """What tells whether an entry has changed; empty for what is gone, or holds no file."""
    files = sorted(one for one in path.rglob("*")) if path.is_dir() else [path]
    found: list[tuple[str, int, int, int]] = []
    for file in files:
        with suppress(FileNotFoundError):
            facts = file.stat()
            if file.is_file():
                name = str(file.relative_to(path)) if file != path else path.name
                found.append((name, facts.st_ino, facts.st_size, facts.st_mtime_ns))
    return tuple(found)


def _hashed(path: Path, signature: Signature) -> dict[str, dict[str, str | int]]:
    inside = path.is_dir()
    return {
        name: {"bytes": size, "sha256": _sha256(path / name if inside else path), "changed": changed}
        for name, _, size, changed in signature
    }


def _hashes(files: Mapping[str, Mapping[str, str | int]]) -> dict[str, str]:
    return {name: str(facts["sha256"]) for name, facts in files.items()}


def _is_broken(path: Path, signature: Signature) -> bool:
    inside = path.is_dir()
    return any(whole.look(path / name if inside else path) == "broken" for name, *_ in signature)


def _sha256(path: Path) -> str:
    """The hash of a file, which is on the disk when this returns."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        return hashlib.file_digest(file, "sha256").hexdigest()


def _warn_of_overwriting(name: str, seen: _Seen | None, signature: Signature) -> None:
    """A file that is written again in place leaves nothing to go back to if its writer dies."""
    if seen is not None and seen.sealed and len(signature) == 1 and signature[0][1] == seen.signature[0][1]:
        reason = "a kill at this moment leaves none: save under a new name, or rename"
        log.warning("checkpoint overwritten in place", extra={"checkpoint": name, "reason": reason})
