"""Who may commit checkpoints here? The newest generation alone, whatever older ones still do.

The launcher claims the directory for a generation before it starts its ranks; a rank asks right before a
commit. A rank that was cut off or stopped, and comes back when others have taken over, changes nothing.
"""

import fcntl
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from twinhull.errors import CheckpointError, RunInUse
from twinhull.train.checkpoints.manifest import sync, write_durably

GENERATION = "generation"
LOCK = "lock"


class Overtaken(CheckpointError):
    """Raised in a generation of ranks when a newer one is at work."""


def claimed(root: Path) -> int:
    """The newest generation that has claimed this directory; 0 if none has."""
    try:
        text = (root / GENERATION).read_text(encoding="utf-8")
    except FileNotFoundError:
        return 0
    return parsed(text, root)


def claim(root: Path, generation: int) -> None:
    """Shut out all older generations. Raises CheckpointError if a newer one was here."""
    check(root, generation)
    try:
        root.mkdir(parents=True, exist_ok=True)
        aside = root / f"{GENERATION}.tmp"
        write_durably(aside, str(generation).encode())
        aside.replace(root / GENERATION)
        sync(root)
    except OSError as error:
        raise CheckpointError(f"{root} cannot be claimed: {error.strerror or error}.") from error


def check(root: Path, generation: int) -> None:
    """Raises Overtaken if a newer generation has claimed this directory.

    Generation 0 is a run without a launcher, which nobody numbers.
    """
    refuse_overtaken(claimed(root) if generation else 0, generation, str(root))


def refuse_overtaken(newest: int, generation: int, where: str) -> None:
    """Raises Overtaken if `newest` is above `generation`."""
    if generation and newest > generation:
        raise Overtaken(
            f"generation {generation} was overtaken by generation {newest}, which has claimed {where}.",
            hint="Nothing is to be done: the newer one trains on.",
        )


def parsed(text: str, where: object) -> int:
    """The number in a generation file."""
    if not text.strip().isdecimal():
        raise CheckpointError(
            f"{GENERATION} in {where} is damaged.", hint="Remove that file, when no run is at work there."
        )
    return int(text)


@contextmanager
def held(root: Path) -> Generator[None]:
    """Keep every other launcher away from this directory. Raises RunInUse if one is at work in it."""
    root.mkdir(parents=True, exist_ok=True)
    with (root / LOCK).open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RunInUse(
                f"another run keeps its checkpoints in {root}.",
                hint="Stop that one, or choose another run directory with --run DIR.",
            ) from error
        except OSError as error:  # a file system without locks
            raise CheckpointError(
                f"{root} cannot be locked: {error.strerror or error}.", hint="Choose another with --run DIR."
            ) from error
        yield
