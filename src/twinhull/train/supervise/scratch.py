"""Where does a machine that has joined keep the records of its ranks? What killed ones have left goes."""

import fcntl
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import TextIO

PREFIX = "twinhull-join-"
YOUNG_S = 60.0  # one that is just made is about to be held


def make() -> tuple[Path, TextIO]:
    """A new directory, and the open file that holds it as long as it is open.

    It is held by a lock and not by a process id: another container may share the directory and not the ids.
    """
    for lock in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/lock"):
        with suppress(OSError), lock.open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if time.time() - lock.stat().st_mtime > YOUNG_S:
                shutil.rmtree(lock.parent, ignore_errors=True)
    made = Path(tempfile.mkdtemp(prefix=PREFIX))
    held = (made / "lock").open("w")
    fcntl.flock(held, fcntl.LOCK_EX)
    return made, held
