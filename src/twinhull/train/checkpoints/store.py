"""Where a training run keeps what it would lose: directories that are whole and verified, or absent.

    checkpoints/TRAIN/step-000000120/__0_0.distcp      tensors, one file a rank; .metadata says where each is
    checkpoints/TRAIN/step-000000120/state.pt          the skeleton: everything that is no tensor
    checkpoints/TRAIN/step-000000120/manifest.json     place, parts, size and sha256 of all files
    checkpoints/TRAIN/generation, lock                 who may commit, and whose directory it is

A checkpoint is written beside its name, flushed to the disk and renamed. What does not verify is refused with
a warning and the one before is taken.
"""

import logging
import shutil
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from pathlib import Path

from twinhull.errors import CheckpointError
from twinhull.rundir import RunDirectory
from twinhull.train.checkpoints import fence
from twinhull.train.checkpoints.manifest import (
    MANIFEST,
    Checkpoint,
    Place,
    Refused,
    check_files,
    described,
    encoded,
    name_of,
    step_of,
    sync,
    write_durably,
)
from twinhull.train.checkpoints.remote import Remote
from twinhull.train.job import Job

log = logging.getLogger(__name__)


class Store:
    """The checkpoints of one train workload. One run writes; any number of processes may read.

    With `remote` they are kept there, and `root` is only where they are written before they are sent.
    The law: whatever is killed at whatever moment, what `names` gives was whole when it was committed, and
    the newest one that verified stays until a newer one has.
    """

    def __init__(self, root: Path, keep: int = 3, remote: Remote | None = None, generation: int = 0) -> None:
        self.root = root
        self.keep = max(1, keep)
        self.remote = remote
        self.generation = generation  # of ranks; 0 is a run that nobody numbers

    @classmethod
    def of(cls, job: Job) -> "Store | None":
        """Where a job keeps its checkpoints; None without a run directory."""
        if job.directory is None:
            return None
        remote = Remote(f"{job.checkpoints.rstrip('/')}/{job.name}") if job.checkpoints else None
        root = RunDirectory(job.directory).checkpoints / job.name
        return cls(root, job.keep, remote, job.generation)

    def __str__(self) -> str:
        return self.remote.url if self.remote else str(self.root)

    def names(self) -> list[str]:
        """All committed checkpoints, newest first; those in `root` count as long as there is none remote."""
        found = self.remote.names() if self.remote else []
        return found or self._local()

    def newest(self) -> Checkpoint | None:
        """The newest checkpoint that verifies; None if there is none at all.

        Raises CheckpointError if there are some and none can be trusted, or if a newer Twinhull wrote one.
        """
        names = self.names()
        for name in names:
            try:
                return self.verified(name)
            except Refused as refused:
                log.warning("checkpoint refused", extra={"checkpoint": name, "reason": str(refused)})
        if names:
            raise self.untrusted(len(names))
        return None

    def untrusted(self, number: int) -> CheckpointError:
        """The error that says that none can be trusted."""
        return CheckpointError(
            f"none of the {number} checkpoints in {self} can be trusted.",
            hint="Restore one of them, or move the directory away to begin again.",
        )

    def described(self, name: str) -> Checkpoint:
        """What a checkpoint says of itself. Raises Refused."""
        if self.remote is None or (self.root / name).is_dir():
            return described(self.root / name)
        return described(self.root / f"{name}.fetched.tmp", self.remote.read(name, MANIFEST))

    def verified(self, name: str, index: int = 0, of: int = 1) -> Checkpoint:
        """A checkpoint, once all of its files have been read and compared. Raises Refused.

        The ranks of a host share the work: each reads every `of`-th file from `index` on. What is kept
        remote is then there as files too.
        """
        checkpoint = self.described(name)
        share = dict(list(checkpoint.files.items())[index::of])
        if self.remote is not None and checkpoint.path.suffix == ".tmp":
            self.remote.fetch(name, list(share), checkpoint.path)
        check_files(checkpoint.path, share)
        return checkpoint

    def size(self, name: str, file: str) -> int | None:
        """The size of a file of a checkpoint; None if it is not there."""
        if self.remote is not None and not (self.root / name).is_dir():
            return self.remote.size(name, file)
        path = self.root / name / file
        return path.stat().st_size if path.is_file() else None

    def last_place(self) -> Place | None:
        """Where the newest readable manifest says the run stood, without reading the state."""
        for name in self.names():
            with suppress(Refused):
                return self.described(name).place
        return None

    def clean(self) -> None:
        """Remove what a killed writer has left; to be called by the writer before it writes."""
        for path in self.root.glob("*.tmp") if self.root.is_dir() else ():
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)

    def beside(self, step: int) -> Path:
        """Where the checkpoint of a step is written before it is committed, apart from other generations."""
        return self.root / f"{name_of(step)}.{self.generation}.tmp"

    def commit(self, checkpoint: Checkpoint) -> None:
        """Make what lies `beside` a checkpoint; its files are on the disk, or sent. By one rank.

        Raises CheckpointError if a newer generation is at work, OSError if the disk refuses.
        """
        beside = self.beside(checkpoint.place.step)
        if self.remote is not None:
            self.check()
            self.remote.write(checkpoint.path.name, MANIFEST, encoded(checkpoint))  # from here on it counts
        else:
            write_durably(beside / MANIFEST, encoded(checkpoint))
            sync(beside)
            self.check()  # last: the time between this and the rename is all that an old one has
            old = checkpoint.path.with_name(f"{checkpoint.path.name}.old.tmp")
            shutil.rmtree(old, ignore_errors=True)
            if checkpoint.path.exists():  # refused when we resumed; or a new cycle has not made a step yet
                checkpoint.path.rename(old)
            beside.rename(checkpoint.path)
            sync(self.root)
            shutil.rmtree(old, ignore_errors=True)
        self._retain(checkpoint.place.step)

    def forget(self, step: int) -> None:
        """Remove this host's copies of what is kept remote: what was sent, and what the run began from."""
        if self.remote is not None:
            for path in (self.beside(step), *self.root.glob("*.fetched.tmp")):
                shutil.rmtree(path, ignore_errors=True)

    def send(self, step: int, files: list[str]) -> None:
        """Upload files of a checkpoint that is not committed yet, if it is to be kept remote."""
        if self.remote is not None:
            self.remote.send(name_of(step), files, self.beside(step))

    def make_room(self, step: int) -> None:
        """An empty directory for the checkpoint of a step, here and remote. Raises OSError."""
        shutil.rmtree(self.beside(step), ignore_errors=True)
        self.beside(step).mkdir(parents=True)
        if self.remote is not None:
            self.remote.remove(name_of(step))

    def change(self, checkpoint: Checkpoint, place: Place) -> Checkpoint:
        """Replace the place of a committed checkpoint at the same step; its state stays as it is."""
        changed = replace(checkpoint, place=place)
        name = name_of(place.step)
        self.check()
        try:
            if self.remote is not None and not (self.root / name).is_dir():
                self.remote.write(name, MANIFEST, encoded(changed))
                return changed
            beside = self.root / name / f"{MANIFEST}.tmp"
            write_durably(beside, encoded(changed))
            beside.replace(self.root / name / MANIFEST)
            sync(self.root / name)
        except OSError as error:
            raise CheckpointError(f"the checkpoint {name} in {self} cannot be changed: {error}.") from error
        return changed

    def remove(self, name: str) -> None:
        """Take a checkpoint away as a whole. Raises OSError."""
        if self.remote is not None and not (self.root / name).is_dir():
            self.remote.remove(name)
        else:
            _remove(self.root / name)

    def claim(self, generation: int) -> None:
        """Shut out all older generations. Raises CheckpointError if a newer one was here."""
        self.generation = generation
        self.check()
        fence.claim(self.root, generation)
        if self.remote is not None:
            self.remote.write("", fence.GENERATION, str(generation).encode())

    def claimed(self) -> int:
        """The newest generation that has claimed these checkpoints; 0 if none has."""
        newest = fence.claimed(self.root)
        if self.remote is not None and (text := self.remote.find("", fence.GENERATION)):
            newest = max(newest, fence.parsed(text.decode(errors="replace"), self))
        return newest

    def check(self) -> None:
        """Raises Overtaken if a generation newer than this one is at work."""
        if self.generation:
            fence.refuse_overtaken(self.claimed(), self.generation, str(self))

    def held(self) -> AbstractContextManager[None]:
        """Keeps every other launcher of this machine away. Raises RunInUse if one is at work."""
        return fence.held(self.root)

    def _local(self) -> list[str]:
        names = [path.name for path in self.root.iterdir()] if self.root.is_dir() else []
        return sorted((name for name in names if step_of(name) is not None), key=_step, reverse=True)

    def _retain(self, step: int) -> None:
        """Remove what is too old, and what lies beyond `step`: it was refused when we resumed."""
        names = self.names()
        kept = [name for name in names if _step(name) <= step][: self.keep]
        for name in names:
            if name not in kept:
                with suppress(OSError):  # the next one tries again
                    self.remove(name)
        if self.remote is not None:
            self.remote.tidy(kept)


def _remove(path: Path) -> None:
    """Take a directory away as a whole: a name without `.tmp` is never half there."""
    aside = path.with_name(f"{path.name}.old.tmp")
    shutil.rmtree(aside, ignore_errors=True)
    path.rename(aside)
    shutil.rmtree(aside)


def _step(name: str) -> int:
    return step_of(name) or 0
