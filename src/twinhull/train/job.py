"""What one train workload asks of its ranks: the few facts that travel from the launcher to each of them."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Job:
    """One train workload, as its ranks need to know it. Times in seconds.

    `directory` is the run directory; without one nothing is saved and nothing is published.
    """

    name: str
    system: str = ""
    run: str = ""
    directory: Path | None = None
    save_every_s: float | None = None
    save_every_steps: int | None = None
    keep: int = 3
    keep_versions: int | None = None
    hang_timeout_s: float = 300.0
    seed: int = 0
    cycle_started: float = 0.0
    furthest_step: int = 0

    def to_json(self) -> str:
        """The one line that `from_json` reads."""
        return json.dumps({**asdict(self), "directory": str(self.directory) if self.directory else None})

    @classmethod
    def from_json(cls, text: str) -> "Job":
        """The job that `to_json` wrote."""
        values = json.loads(text)
        directory = values.pop("directory")
        return cls(**values, directory=Path(directory) if directory else None)
