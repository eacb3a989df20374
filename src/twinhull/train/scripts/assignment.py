"""What does the system say of a command that trains, and how far is its work?"""

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from twinhull.errors import TwinhullError
from twinhull.rundir import RunDirectory, write_whole

_HANG_S = 300.0


@dataclass(frozen=True, slots=True)
class Command:
    """What the system says of one command. Times in seconds; `every_s` None: it runs once."""

    name: str
    system: str
    run: RunDirectory
    text: str
    publish: str | None
    every_s: float | None
    hang_s: float
    warning_s: float | None
    walltime_s: float | None
    notice: str
    keep_versions: int | None


def described(run: RunDirectory, name: str) -> Command:
    """The command of a run directory's system. Raises TwinhullError."""
    from twinhull.system.load import load
    from twinhull.system.model import State, Train

    system = load(run.system).system
    train = system.components.get(name)
    if not isinstance(train, Train) or train.command is None:
        raise TwinhullError(f"the system has no train workload {name} with a command to run.")
    registries = (c for c in system.components.values() if isinstance(c, State) and c.kind == "registry")
    registry = next(registries, None)
    return Command(name=name, system=system.name, run=run, text=train.command, publish=train.publish,
                   every_s=train.every, hang_s=train.hang_timeout or _HANG_S, warning_s=train.warning,
                   walltime_s=train.walltime, notice=train.notice or "",
                   keep_versions=registry.keep if registry else None)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Cycle:
    """Where the work stands: which cycle, since when, whether it is done; how many generations there were."""

    number: int = 1
    started: float = 0.0
    done: bool = False
    generation: int = 0

    @classmethod
    def read(cls, path: Path) -> "Cycle":
        """What was written, or the first one. Raises TwinhullError."""
        try:
            return cls(**json.loads(path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return cls(started=time.time())
        except (OSError, ValueError, TypeError) as error:
            hint = "Remove it to begin the cycle again."
            raise TwinhullError(f"{path} cannot be read: {error}.", hint=hint) from error

    def write(self, path: Path) -> None:
        """Replace what was written."""
        write_whole(path, json.dumps(asdict(self)))
