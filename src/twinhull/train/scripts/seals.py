"""Which checkpoints of a script that is not ours can be trusted? Those that were sealed when they were whole.

The script may write what it likes; it may die while it writes. An entry of its directory is sealed, with the
hashes of all its files, once

- a newer entry stands beside it, or it has not changed for a while in which the script went on beating, or
  the script has ended well;
- or, when the script was killed, each of its files shows by itself that it is whole (`whole.look`) and, for a
  directory, they are the same files that the sealed one before it has, or the one that comes last is there.

What is found unsealed when the script is started again, and cannot be sealed so, is moved aside. Only what is
sealed and whose hashes still hold is handed to the script.
"""

import json
import logging
import shutil
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from twinhull.errors import CheckpointError
from twinhull.rundir import write_whole
from twinhull.train.scripts import whole
from twinhull.train.scripts.entries import Entry, Files, entries, hashes, sha256, step_of

FOLDER, TORN = ".twinhull", ".torn"
AGAIN_S = 5.0  # until what looked broken is looked at again
SETTLE_S = 5.0  # unchanged for so long while the script beats: it no longer writes there
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Seal:
    """What an entry held when it was whole. `order` counts the seals of a directory."""

    order: int
    step: int | None
    files: Files


@dataclass(slots=True)
class _Seen:
    entry: Entry
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
        now, found = time.monotonic(), entries(self.root)
        for name in self._seen.keys() - {entry.name for entry in found}:
            del self._seen[name]
            self._seal_of(name).unlink(missing_ok=True)
        changed = False
        for entry in found:
            seen = self._seen.get(entry.name)
            if seen is None or seen.entry != entry:
                changed = True
                _warn_of_overwriting(seen, entry)
                self._seen[entry.name] = _Seen(entry, now, sealed=self._is_sealed(entry))
        self._seal_due(now, beat_at)
        return changed

    def settle(self, *, well: bool) -> None:
        """Seal or move aside all that is not sealed; the script has left, and `well` says that it said so.

        Raises CheckpointError if that cannot be done.
        """
        wait(self._hashing.values())
        self._hashing.clear()
        self._seen.clear()
        try:
            for entry in sorted(entries(self.root), key=lambda entry: entry.age):
                if self._is_sealed(entry) or self._is_as_sealed(entry):
                    continue
                if (well and not entry.is_broken()) or self._shows_whole(entry):
                    self._write_seal(entry)
                else:
                    self._move_aside(entry, "checkpoint torn")
        except OSError as error:
            raise self._unsealable(error) from error

    def newest(self) -> Path | None:
        """The newest sealed checkpoint whose files are still as they were; those that are not move aside.

        Raises CheckpointError.
        """
        sealed = [
            (seal.order, seal, entry) for entry in entries(self.root) if (seal := self.seal(entry.name))
        ]
        try:
            for _, seal, entry in sorted(sealed, key=lambda one: one[0], reverse=True):
                if hashes(entry.hashed()) == hashes(seal.files):
                    return entry.path
                self._move_aside(entry, "checkpoint damaged")
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

    def _seal_due(self, now: float, beat_at: float) -> None:
        newest = max((seen.since for seen in self._seen.values()), default=0.0)
        for name, seen in self._seen.items():
            is_over = seen.since < newest or beat_at - seen.since >= SETTLE_S
            is_free = name not in self._hashing or self._hashing[name].done()
            if not seen.sealed and is_over and is_free and now >= seen.again_at:
                seen.sealed = True
                self._hashing[name] = self._thread.submit(self._seal_live, seen)

    def _seal_live(self, seen: _Seen) -> None:
        try:
            if not seen.entry.is_broken():
                self._write_seal(seen.entry)
                return
        except FileNotFoundError:  # the script has removed it meanwhile
            return
        except OSError as error:
            log.warning("checkpoint not sealed", extra={"checkpoint": seen.entry.name, "reason": str(error)})
        seen.sealed, seen.again_at = False, time.monotonic() + AGAIN_S

    def _write_seal(self, entry: Entry) -> None:
        files = entry.hashed()
        if not files or Entry.look(entry.path) != entry:
            return  # it was changed under our hands
        seal = Seal(self.count + 1, step_of(entry.name), files)
        write_whole(self._seal_of(entry.name), json.dumps({"format": 1, **asdict(seal)}))
        self.count += 1
        log.info("checkpoint saved", extra={"step": seal.step, "checkpoint": entry.name})

    def _is_sealed(self, entry: Entry) -> bool:
        """Whether an entry has a seal and has not been written to since; its hashes are for `newest`."""
        seal = self.seal(entry.name)
        return seal is not None and {
            name: (facts["bytes"], facts["changed"]) for name, facts in seal.files.items()
        } == {file.name: (file.bytes, file.changed) for file in entry.files}

    def _is_as_sealed(self, entry: Entry) -> bool:
        """Whether an entry that was written to, or copied, holds what was sealed; then it is sealed anew."""
        seal = self.seal(entry.name)
        if seal is None or hashes(seal.files) != hashes(entry.hashed()):
            return False
        self._write_seal(entry)
        return True

    def _shows_whole(self, entry: Entry) -> bool:
        """Whether an entry of a killed script proves itself."""
        if not entry.is_directory:
            return whole.look(entry.path) == "whole"
        if entry.has_what_comes_last():
            return not entry.is_broken()
        like = self._sealed_like(entry)
        if like is None or {file.name for file in entry.files} != set(like.files):
            return False
        known = set(hashes(like.files).values())
        places = [entry.place(file) for file in entry.files]
        return all(whole.look(place) == "whole" or sha256(place) in known for place in places)

    def _sealed_like(self, entry: Entry) -> Seal | None:
        """The newest seal of an entry that is called the same but for its numbers."""
        kin: Sequence[Seal | None] = [
            self.seal(other.name)
            for other in entries(self.root)
            if other.kind == entry.kind and other.name != entry.name
        ]
        return max(filter(None, kin), key=lambda seal: seal.order, default=None)

    def _move_aside(self, entry: Entry, event: str) -> None:
        """Out of the script's sight, but not lost; one at a time, or they would fill the disk."""
        for old in self.root.glob(f"*{TORN}"):
            shutil.rmtree(old) if old.is_dir() else old.unlink()
        aside = entry.path.with_name(entry.name + TORN)
        entry.path.rename(aside)
        self._seal_of(entry.name).unlink(missing_ok=True)
        log.warning(event, extra={"checkpoint": entry.name, "moved_to": aside.name})

    def _unsealable(self, error: OSError) -> CheckpointError:
        return CheckpointError(
            f"checkpoints in {self.root} cannot be read or sealed: {error.strerror or error}.",
            hint="Make room there, or make it writable.",
        )

    def _seal_of(self, name: str) -> Path:
        return self._seals / f"{name}.json"

    def _last_order(self) -> int:
        seals = (self.seal(path.name.removesuffix(".json")) for path in self._seals.glob("*.json"))
        return max((seal.order for seal in seals if seal is not None), default=0)


def _warn_of_overwriting(seen: _Seen | None, entry: Entry) -> None:
    """A file that is written again in place leaves nothing to go back to if its writer dies."""
    if seen is None or not seen.sealed or len(entry.files) != 1 or not seen.entry.files:
        return
    if entry.files[0].inode == seen.entry.files[0].inode:
        reason = "a kill at this moment leaves none: save under a new name, or rename"
        log.warning("checkpoint overwritten in place", extra={"checkpoint": entry.name, "reason": reason})
