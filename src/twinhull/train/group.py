"""The ranks that train together: who they are, what they agree on and what rank 0 tells the others.

One rank needs no process group and pays for none. Values travel as plain numbers and msgpack, never as
pickles.
"""

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from twinhull.train.job import Job

_TRANSPORT = re.compile(r"gloo|NCCL|TCPStore|ProcessGroup|[Cc]onnection (reset|closed|refused)|Broken pipe")


@dataclass(frozen=True, slots=True)
class Group:
    """This rank's place among `world_size` ranks, and the device it computes on."""

    rank: int
    world_size: int
    device: torch.device

    @classmethod
    def join(cls, job: Job) -> "Group":
        """Join the group that torchrun's environment describes; alone if it describes none.

        Collectives fail a little after the job's hang timeout: the launcher's heartbeat comes first.
        """
        rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        device = torch.device("cpu")
        if torch.cuda.is_available():
            device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
            torch.cuda.set_device(device)
        elif world_size > 1:
            torch.set_num_threads(1)  # ranks share the cores; threads of threads only wait for each other
        if world_size > 1 and not dist.is_initialized():
            backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
            dist.init_process_group(backend, timeout=timedelta(seconds=job.hang_timeout_s + 10))
        return cls(rank, world_size, device)

    def most(self, numbers: list[int]) -> list[int]:
        """For each place of the list the largest number that any rank has put there."""
        if self.world_size == 1:
            return numbers
        together = torch.tensor(numbers, dtype=torch.int64)
        dist.all_reduce(together, op=dist.ReduceOp.MAX)
        return [int(number) for number in together.tolist()]

    def share(self, value: Any) -> Any:  # Any: whatever msgpack can carry
        """Rank 0's value on every rank; what the others pass is ignored."""
        if self.world_size == 1:
            return value
        packed = msgspec.msgpack.encode(value) if self.rank == 0 else b""
        size = torch.tensor([len(packed)], dtype=torch.int64)
        dist.broadcast(size, src=0)
        content = torch.empty(int(size.item()), dtype=torch.uint8)
        if self.rank == 0:
            content = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
        dist.broadcast(content, src=0)
        return msgspec.msgpack.decode(content.numpy().tobytes())

    def place(self, batch: Any) -> Any:  # Any: the user's own
        """The batch with its tensors on this rank's device."""
        return batch if self.device.type == "cpu" else _on(self.device, batch)

    def leave(self) -> None:
        """Leave on the clean path only: after an error a collective may never return."""
        if dist.is_initialized():
            dist.destroy_process_group()


def is_peer_lost(error: BaseException) -> bool:
    """Whether an exception says that another rank is gone, rather than that the code is wrong."""
    return any(
        isinstance(link, dist.DistError) or (isinstance(link, RuntimeError) and _TRANSPORT.search(str(link)))
        for link in _chain(error)
    )


def _chain(error: BaseException) -> Iterator[BaseException]:
    link: BaseException | None = error
    seen: set[int] = set()
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or link.__context__


def _on(device: torch.device, batch: Any) -> Any:  # Any: the user's own
    """The batch with its tensors on the device."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {name: _on(device, item) for name, item in batch.items()}
    if isinstance(batch, (list, tuple)):
        items: Iterable[Any] = batch  # Any: as above
        moved = [_on(device, item) for item in items]
        return type(batch)(*moved) if hasattr(batch, "_fields") else type(batch)(moved)
    return batch
