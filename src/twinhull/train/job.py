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
    engine: str = ""  # of system.model.Engine; "" is ddp, or single on one rank
    shard: int | None = None  # ranks that share one copy of the model (hsdp); None: those of one node
    offload: bool = False
    precision: str = "fp32"
    recompute: bool = False
    micro_batch: int | None = None  # the most samples that a rank takes at a time
    full_size: int | None = (
        None  # ranks when all nodes are there; with fewer, a rank takes more micro-batches
    )
    stop_on_nan: bool = True
    warning_s: float | None = None  # from the notice of a preemption to the end of the node
    save_auto: bool = False  # the interval follows from the measured cost and `mtbf_s`
    mtbf_s: float | None = None  # between failures of the whole job
    checkpoints: str = ""  # a URL that keeps them; "" is the run directory
    generation: int = 0

    def to_json(self) -> str:
        """The one line that `from_json` reads."""
        return json.dumps({**asdict(self), "directory": str(self.directory) if self.directory else None})

    @classmethod
    def from_json(cls, text: str) -> "Job":
        """The job that `to_json` wrote."""
        values = json.loads(text)
        directory = values.pop("directory")
        return cls(**values, directory=Path(directory) if directory else None)
