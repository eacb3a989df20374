"""Checkpoints kept behind a URL that fsspec knows: s3://, gs://, memory://, file:///.

Object stores have no rename. Everything is sent first and the manifest last: it is the commit, and a
directory without one is no checkpoint.
"""

from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from twinhull.errors import CheckpointError
from twinhull.train.checkpoints.manifest import MANIFEST, Refused, step_of


class Remote:
    """The directory of one train workload behind a URL. Every method raises CheckpointError if it fails."""

    def __init__(self, url: str) -> None:
        import fsspec

        self.url = url
        try:
            found: tuple[Any, str] = fsspec.core.url_to_fs(url)  # Any: fsspec has no types
        except (ImportError, ValueError) as error:
            raise CheckpointError(f"checkpoints cannot be kept in {url}: {error}.") from error
        self._files, self._root = found

    def names(self) -> list[str]:
        """All committed checkpoints, newest first."""
        names = [name for name in self._directories() if self._exists(name, MANIFEST)]
        return sorted(names, key=lambda name: step_of(name) or 0, reverse=True)

    def find(self, name: str, file: str) -> bytes | None:
        """The content of a small file; None if there is none."""
        with _failing("read", self._at(name, file)), suppress(FileNotFoundError):
            content: bytes = self._files.cat_file(self._at(name, file))
            return content
        return None

    def read(self, name: str, file: str) -> bytes:
        """The content of a small file. Raises Refused if there is none."""
        content = self.find(name, file)
        if content is None:
            raise Refused(f"{file} is missing")
        return content

    def size(self, name: str, file: str) -> int | None:
        """The size of a file; None if it is not there."""
        with _failing("read", self._at(name, file)), suppress(FileNotFoundError):
            return int(self._files.size(self._at(name, file)))
        return None

    def write(self, name: str, file: str, content: bytes) -> None:
        """Put a small file there, whole or not at all."""
        at = self._at(name, file)
        with _failing("write", at):
            self._files.makedirs(at.rpartition("/")[0], exist_ok=True)
            with self._files.transaction:  # written aside where there is a rename
                self._files.pipe_file(at, content)

    def send(self, name: str, files: list[str], directory: Path) -> None:
        """Upload files of a directory."""
        for file in files:
            at = self._at(name, file)
            with _failing("write", at):
                self._files.makedirs(at.rpartition("/")[0], exist_ok=True)
                self._files.put_file(str(directory / file), at)

    def fetch(self, name: str, files: list[str], directory: Path) -> None:
        """Download files into a directory. Raises Refused if one is not there."""
        for file in files:
            at, here = self._at(name, file), directory / file
            try:
                with _failing("read", at):
                    here.parent.mkdir(parents=True, exist_ok=True)
                    self._files.get_file(at, str(here))
            except CheckpointError as error:
                if isinstance(error.__cause__, FileNotFoundError):
                    raise Refused(f"{file} is missing") from error
                raise

    def remove(self, name: str) -> None:
        """Take a checkpoint away, its manifest first."""
        at = self._at(name, "").rstrip("/")
        with _failing("remove", at):
            with suppress(FileNotFoundError):
                self._files.rm_file(self._at(name, MANIFEST))
            with suppress(FileNotFoundError):
                self._files.rm(at, recursive=True)
            self._files.invalidate_cache()

    def tidy(self, kept: list[str]) -> None:
        """Remove what a killed writer has left: directories without a manifest."""
        for name in self._directories():
            if name not in kept and not self._exists(name, MANIFEST):
                with suppress(CheckpointError):  # the next one tries again
                    self.remove(name)

    def _directories(self) -> Iterator[str]:
        with _failing("list", self.url):
            self._files.invalidate_cache()
            paths: list[str] = []
            with suppress(FileNotFoundError):
                paths = self._files.ls(self._root, detail=False)
        names = (path.rstrip("/").rpartition("/")[2] for path in paths)
        return (name for name in names if step_of(name) is not None)

    def _exists(self, name: str, file: str) -> bool:
        with _failing("read", self._at(name, file)):
            return bool(self._files.exists(self._at(name, file)))

    def _at(self, name: str, file: str) -> str:
        return "/".join(part for part in (self._root.rstrip("/"), name, file) if part)


@contextmanager
def _failing(what: str, where: str) -> Generator[None]:
    try:
        yield
    except Exception as error:  # every store has exceptions of its own, and they share no other base
        raise CheckpointError(f"cannot {what} {where}: {error or type(error).__name__}.") from error
