"""What do the ranks tell each other about a checkpoint? Plain values, over a group of their own.

The training's group is not theirs to use: a writer's collective beside a step's would meet the wrong one.
"""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from twinhull.errors import CheckpointError
from twinhull.train.checkpoints.failures import reason
from twinhull.train.group import Group

# The slowest rank's disk, not a hang: a rank that is gone breaks the connection, and the launcher's heartbeat
# is there for one that is stuck.
TIMEOUT = timedelta(hours=1)


class Peers:
    """All ranks of a run, for one thread at a time. Made on all ranks at the same time."""

    def __init__(self, group: Group) -> None:
        self.rank, self.world_size = group.rank, group.world_size
        self.group: dist.ProcessGroup | None = None
        if group.world_size > 1:
            made = dist.new_group(backend="gloo", timeout=TIMEOUT)
            assert isinstance(made, dist.ProcessGroup)
            self.group = made

    def together(self, action: Callable[[], Any]) -> list[Any]:  # Any: whatever msgpack can carry
        """Do the same on all ranks and give what each has returned: a failure on one is one everywhere.

        The rank that fails raises what it met, the others CheckpointError.
        """
        result, problem, caught = None, "", None
        try:
            result = action()
        except BaseException as error:  # DCP's is no Exception; and nothing may pass before the vote
            caught, problem = error, _said(error)
        said = self._tell([problem, result])
        if caught is not None:
            raise caught
        for rank, (theirs, _) in enumerate(said):
            if theirs:
                raise CheckpointError(f"{theirs} (rank {rank})")
        return [value for _, value in said]

    def _tell(self, value: Any) -> list[Any]:  # Any: as above
        """The values of all ranks, in their order."""
        if self.group is None:
            return [value]
        packed = torch.frombuffer(bytearray(msgspec.msgpack.encode(value)), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world_size)]
        dist.all_gather(sizes, torch.tensor([len(packed)]), group=self.group)
        padded = torch.zeros(max(int(size) for size in sizes), dtype=torch.uint8)
        padded[: len(packed)] = packed
        said = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(said, padded, group=self.group)
        return [
            msgspec.msgpack.decode(part[: int(size)].numpy().tobytes())
            for part, size in zip(said, sizes, strict=True)
        ]


def _said(error: BaseException) -> str:
    try:
        return reason(error) or "unknown"
    except BaseException as interrupt:  # that DCP has wrapped; it is raised after the vote
        return type(interrupt).__name__
