"""How tensors reach the disk, each rank its part, and come back at any number of ranks: PyTorch's DCP."""

import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner


def write(directory: Path, tensors: dict[str, torch.Tensor], group: dist.ProcessGroup | None) -> None:
    """Write this rank's part of the tensors, on all ranks together; replicated ones are written once.

    `group` is None for a single rank.
    """
    _quiet()
    dcp.save(
        tensors,
        storage_writer=dcp.FileSystemWriter(directory, overwrite=False, per_thread_copy_ahead=0),
        planner=DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
        process_group=group,
        no_dist=group is None,
    )


def read(directory: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Fill the tensors from the shards: of a DTensor only what this rank holds. Without the other ranks.

    DCP's index is a pickle: its hash must have held before.
    """
    _quiet()
    dcp.load(
        tensors,
        storage_reader=dcp.FileSystemReader(directory),
        planner=DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
        no_dist=True,
    )


def written_by(rank: int, directory: Path) -> list[str]:
    """The names of the files that `write` has made on a rank; DCP's own index is rank 0's."""
    names = [path.name for path in directory.glob(f"__{rank}_*.distcp")]
    return sorted([*names, ".metadata"] if rank == 0 else names)


def _quiet() -> None:
    """One rank needs no process group, and its user no warning about it."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
