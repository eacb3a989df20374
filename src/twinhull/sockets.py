"""Where a unix socket lies, when the path to its directory may be longer than the kernel allows."""

import hashlib
import os
import shutil
import stat
import tempfile
from pathlib import Path

LONGEST = 100  # bytes; sun_path holds 104 on macOS and 108 on Linux, with the closing zero


def place(directory: Path, name: str) -> Path:
    """Path of a directory's socket: in it, or, if that is too long, in a private place named after it.

    Raises ValueError when the machine's places for temporary files are too long as well.
    """
    directory = directory.resolve()
    if _fits(near := directory / name):
        return near
    digest = hashlib.sha256(os.fsencode(directory)).hexdigest()[:16]
    for base in (tempfile.gettempdir(), "/tmp"):  # noqa: S108  # used only after it proved private, see prepare
        if _fits(far := Path(base).resolve() / f"twinhull-{os.geteuid()}-{digest}" / name):
            return far
    raise ValueError(f"no path for a socket of {directory} is short enough")


def prepare(directory: Path, socket: Path) -> None:
    """Make the private place if there is one. Raises PermissionError if somebody else could reach into it."""
    private = socket.parent
    if private == directory.resolve():
        return
    private.mkdir(mode=0o700, exist_ok=True)
    about = private.lstat()
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.geteuid() or about.st_mode & 0o077:
        raise PermissionError(f"{private} is not a private directory of ours")


def clear(directory: Path, socket: Path) -> None:
    """Remove what `prepare` and a server that has ended have left."""
    socket.unlink(missing_ok=True)
    if socket.parent != directory.resolve():
        shutil.rmtree(socket.parent, ignore_errors=True)


def _fits(path: Path) -> bool:
    return len(os.fsencode(path)) <= LONGEST
