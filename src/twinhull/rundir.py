"""Where a run keeps what: the one place that knows the names inside a run directory."""

import fcntl
import os
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from twinhull.errors import RunInUse, TwinhullError

VARIABLE = "TWINHULL_RUN"  # tells child processes, and the user's code in them, which run they belong to


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """Paths of one run. Everything a run leaves behind lies under `root`."""

    root: Path

    @property
    def lock(self) -> Path:
        """Held by the supervisor; holds its process id."""
        return self.root / "lock"

    @property
    def up(self) -> Path:
        """Process ids, ports and versions of what runs now; absent when nothing does."""
        return self.root / "up.json"

    @property
    def system(self) -> Path:
        """The effective system: what the file said, scaled to this machine."""
        return self.root / "system.yaml"

    @property
    def entries(self) -> Path:
        """What the user's functions take and return, as found when they were imported at the start."""
        return self.root / "entries.json"

    @property
    def journal(self) -> Path:
        """Events and samples; written by the supervisor alone."""
        return self.root / "journal.sqlite"

    @property
    def broker(self) -> Path:
        """The data of a broker of ours."""
        return self.root / "broker"

    @property
    def checkpoints(self) -> Path:
        """TRAIN/step-N/ below it."""
        return self.root / "checkpoints"

    @property
    def metrics(self) -> Path:
        """TRAIN.jsonl below it: the numbers of each step."""
        return self.root / "metrics"

    @property
    def registry(self) -> Path:
        """MODEL/N/ below it."""
        return self.root / "registry"

    @property
    def schedule(self) -> Path:
        """When each task with `every` ran last."""
        return self.root / "schedule.json"

    @property
    def logs(self) -> Path:
        """One file a process."""
        return self.root / "logs"

    @property
    def holds(self) -> Path:
        """A file named after a process in here keeps that process down until the file is gone."""
        return self.root / "holds"

    def create(self) -> None:
        """Make the directory. Raises TwinhullError if that cannot be done or nothing can be written in it."""
        try:
            for path in (self.root, self.broker, self.checkpoints, self.registry, self.logs, self.holds):
                path.mkdir(parents=True, exist_ok=True)
            probe = self.root / ".probe"
            probe.write_bytes(b".")  # an empty file fits on a full disk
            probe.unlink()
        except OSError as error:
            raise TwinhullError(
                f"the run directory {self.root} cannot be written: {error.strerror or error}.",
                hint="Choose another with --run DIR.",
            ) from error

    @contextmanager
    def held(self) -> Generator[None]:
        """Hold the run for this process alone; the kernel lets go however the process ends.

        Raises RunInUse when another process holds it, TwinhullError when it cannot be locked at all.
        """
        file = self._locked()
        with file:
            file.truncate(0)
            file.write(str(os.getpid()))
            file.flush()
            try:
                yield
            finally:
                file.truncate(0)

    def _locked(self) -> TextIO:
        try:
            file = self.lock.open("a+", errors="replace")
        except OSError as error:
            raise self._unlockable(error) from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            with file:
                file.seek(0)
                holder = file.read(100).strip()
            raise RunInUse(
                f"the run directory {self.root} is in use by process {holder or 'unknown'}.",
                hint="Stop that one, or choose another with --run DIR.",
            ) from error
        except OSError as error:  # a file system without locks
            file.close()
            raise self._unlockable(error) from error
        return file

    def _unlockable(self, error: OSError) -> TwinhullError:
        return TwinhullError(
            f"the run directory {self.root} cannot be locked: {error.strerror or error}.",
            hint="Choose another with --run DIR.",
        )


def default_for(system_file: Path, name: str) -> RunDirectory:
    """The run directory of a system file when `--run` is not given: `.twinhull/NAME` beside the file."""
    return RunDirectory(system_file.resolve().parent / ".twinhull" / name)


def write_whole(path: Path, text: str) -> None:
    """Replace a small file: a reader sees the old text or the new one. Raises OSError."""
    aside = path.with_name(path.name + ".tmp")
    aside.write_text(text, encoding="utf-8")
    aside.replace(path)
