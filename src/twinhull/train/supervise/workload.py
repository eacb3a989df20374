"""What does the effective system say of a train workload? Its job, when it runs, on how many hosts."""

import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING

from twinhull.errors import TwinhullError
from twinhull.rundir import RunDirectory
from twinhull.train.job import Job

if TYPE_CHECKING:
    from twinhull.system.model import Pool, Train

_SAVE_EVERY_S = 600.0
_HANG_S = 300.0


@dataclass(frozen=True, slots=True)
class Workload:
    """A job and what its launcher alone must know. Times in seconds; `every_s` None: it runs once.

    `notice` is a function of the user's that says whether a machine is about to be taken.
    """

    job: Job
    every_s: float | None = None
    walltime_s: float | None = None
    notice: str = ""
    gang: bool = False


def described(run: RunDirectory, name: str) -> Workload:
    """The workload `name` of a run directory. Raises TwinhullError."""
    from twinhull.system.load import load
    from twinhull.system.model import State, Train

    if importlib.util.find_spec("torch") is None:
        raise TwinhullError("training needs PyTorch:", hint="pip install 'twinhull[train]'")
    system = load(run.system).system
    train = system.components.get(name)
    if not isinstance(train, Train) or train.run is None:
        raise TwinhullError(f"the system has no train workload {name} with a function to run.")
    saving, parallel = train.checkpoint, train.parallel
    every = saving.every if saving else None
    registry = next(
        (c for c in system.components.values() if isinstance(c, State) and c.kind == "registry"), None
    )
    kept_in = system.components.get((saving.to if saving else None) or "")
    pool = system.pools.get(train.pool or "")
    job = Job(name=name, system=system.name, run=train.run, directory=run.root.resolve(),
              save_every_s=every.seconds if every else _SAVE_EVERY_S,
              save_every_steps=every.steps if every else None,
              keep=(saving.keep if saving else None) or 3,
              keep_versions=registry.keep if registry else None,
              hang_timeout_s=train.hang_timeout or _HANG_S,
              engine=(parallel.engine if parallel else None) or "",
              shard=parallel.shard if parallel else None,
              offload=bool(parallel and parallel.offload),
              precision=train.precision or "fp32", recompute=bool(train.recompute),
              micro_batch=train.micro_batch, stop_on_nan=train.nan != "ignore",
              warning_s=train.warning,
              save_auto=bool(every and every.auto),
              mtbf_s=_mtbf_s(train, pool),
              checkpoints=(kept_in.url if isinstance(kept_in, State) else None) or "")  # fmt: skip
    return Workload(job, train.every, train.walltime, train.notice or "", bool(train.gang))


def _mtbf_s(train: "Train", pool: "Pool | None") -> float | None:
    """Between failures of the whole job: any of its nodes is enough."""
    if pool is None or pool.mtbf is None:
        return None
    nodes = train.elastic or pool.nodes
    return pool.mtbf / max(1, (nodes.high or nodes.low) if nodes else 1)
