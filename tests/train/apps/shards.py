"""Ranks made by fork that save and load under every engine; each line that is printed is a fact that held."""

import logging
import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch._dynamo  # the first optimizer step imports it: once here instead of in every rank
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from twinhull.errors import CheckpointError
from twinhull.train.checkpoints.keep import Keeper
from twinhull.train.checkpoints.manifest import Place
from twinhull.train.checkpoints.store import Store
from twinhull.train.group import Group
from twinhull.train.job import Job
from twinhull.train.pace import Pace

STEP = 7
LOADS = {
    "ddp": [("ddp", 1), ("fsdp", 2)],
    "fsdp": [("ddp", 2), ("hsdp", 4)],
    "hsdp": [("fsdp", 2)],
}


class Net(nn.Module):
    """Uneven sizes, a buffer and tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.last = nn.Linear(6, 3)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return self.last(torch.relu(self.second(torch.relu(self.first(x)))))


def ranks(number: int, directory: Path, body: Callable[[Group], None]) -> None:
    """Run the body on so many ranks, all forked; ends this program if one fails."""
    store = directory / f"store-{len(list(directory.iterdir()))}"
    pids = []
    for rank in range(number):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                if number > 1:
                    dist.init_process_group(
                        "gloo", init_method=f"file://{store}", rank=rank, world_size=number,
                        timeout=timedelta(seconds=30),
                    )  # fmt: skip
                os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(number))
                body(Group(rank, number, torch.device("cpu")))
                code = 0
            except BaseException:
                traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        pids.append(pid)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    if any(codes):
        sys.exit(f"ranks ended with {codes}")


def build(engine: str, group: Group) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    plain = Net()
    net: nn.Module = plain
    if engine in {"fsdp", "hsdp"}:
        size = (group.world_size,) if engine == "fsdp" else (group.world_size // 2, 2)
        mesh = init_device_mesh("cpu", size, mesh_dim_names=("a", "b")[: len(size)])
        fully_shard(plain.last, mesh=mesh)
        fully_shard(net, mesh=mesh)
    elif engine == "ddp" and group.world_size > 1:
        net = DistributedDataParallel(net)
    return net, torch.optim.AdamW(net.parameters(), lr=0.01)


def step(net: nn.Module, optimizer: torch.optim.Optimizer, pace: Pace) -> None:
    torch.manual_seed(5)
    net(torch.randn(12, 6)).pow(2).mean().backward()
    for wait in pace.before_update:
        wait()
    optimizer.step()
    optimizer.zero_grad()


def own(net: nn.Module) -> nn.Module:
    return net.module if isinstance(net, DistributedDataParallel) else net


def whole(net: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """All tensors, gathered on every rank."""
    states = {f"model/{name}": value for name, value in own(net).state_dict().items()}
    for index, kept in optimizer.state_dict()["state"].items():
        states |= {f"{index}/{name}": value for name, value in kept.items()}
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).clone()
        for name, value in states.items()
    }


def keeper(group: Group, directory: Path, pace: Pace) -> Keeper:
    url = f"file://{directory}/away" if directory.name == "hsdp" else ""
    return Keeper(Job(name="fit", directory=directory, checkpoints=url), group, pace)


def save(engine: str, directory: Path) -> Callable[[Group], None]:
    def body(group: Group) -> None:
        pace = Pace()
        kept = keeper(group, directory, pace)
        net, optimizer = build(engine, group)
        kept.add(own(net), "Net")
        kept.add(optimizer, "AdamW")
        for _ in range(3):
            step(net, optimizer, pace)
        kept.save(Place(step=STEP), required=True)
        at_save = whole(net, optimizer)
        step(net, optimizer, pace)  # the next one runs while it is written
        kept.settle()
        then = whole(net, optimizer)
        if group.rank == 0:
            torch.save({"at_save": at_save, "then": then}, directory / "expected.pt")

    return body


def load(engine: str, directory: Path) -> Callable[[Group], None]:
    def body(group: Group) -> None:
        pace = Pace()
        kept = keeper(group, directory, pace)
        net, optimizer = build(engine, group)
        kept.add(own(net), "Net")
        kept.add(optimizer, "AdamW")
        assert kept.place.step == kept.saved_step == STEP
        expected = torch.load(directory / "expected.pt")
        torch.testing.assert_close(whole(net, optimizer), expected["at_save"], rtol=0, atol=0)
        if engine in {"fsdp", "hsdp"}:
            moments = [kept["exp_avg"] for kept in optimizer.state.values()]
            assert all(isinstance(moment, DTensor) for moment in moments)
        step(net, optimizer, pace)
        torch.testing.assert_close(whole(net, optimizer), expected["then"], rtol=1e-5, atol=1e-6)

    return body


class Files:
    """Keeps its state in files of its own, one a rank."""

    own_files = True

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def save_files(self, directory: Path) -> None:
        (directory / f"part-{self.rank}").write_text(str(self.rank))

    def load_files(self, directory: Path) -> None:
        assert (directory / f"part-{self.rank}").read_text() == str(self.rank)


def keep_files(directory: Path, *, saving: bool) -> Callable[[Group], None]:
    def body(group: Group) -> None:
        kept = keeper(group, directory, Pace())
        try:
            kept.add(Files(group.rank), "Files")
        except CheckpointError as error:
            assert "is of 4 ranks and does not fit 2: Files keeps files" in str(error), error
            assert group.world_size == 2
            return
        assert group.world_size == 4
        if saving:
            kept.save(Place(step=1), required=True)
            kept.settle()

    return body


def finds_damage(directory: Path) -> Callable[[Group], None]:
    """The part that rank 3 wrote is damaged, and read by one of two ranks alone."""

    def body(group: Group) -> None:
        try:
            keeper(group, directory, Pace())
        except CheckpointError as error:
            assert "none of the 1 checkpoints" in str(error), error
        else:
            raise AssertionError("damage was not found")

    return body


def one_fails(directory: Path) -> Callable[[Group], None]:
    """The disk refuses what one rank writes; the next save is whole again."""

    def body(group: Group) -> None:
        pace = Pace()
        kept = keeper(group, directory, pace)
        net, optimizer = build("fsdp", group)
        kept.add(net, "Net")
        kept.add(optimizer, "AdamW")
        step(net, optimizer, pace)
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
        if group.rank == 2:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100, unlimited[1]))
        kept.save(Place(step=1), required=False)
        step(net, optimizer, pace)
        kept.settle()
        assert kept.saved_step is None
        assert Store(directory / "checkpoints" / "fit").names() == []
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
        kept.save(Place(step=2), required=True)
        kept.settle()
        assert kept.saved_step == 2

    return body


def main(root: Path) -> None:
    torch.set_num_threads(1)
    logging.getLogger("twinhull").setLevel(logging.CRITICAL)
    for engine, loads in LOADS.items():
        directory = root / engine
        directory.mkdir(parents=True)
        ranks(4, root, save(engine, directory))
        for other, number in loads:
            ranks(number, root, load(other, directory))
            print(f"{engine} of 4 was loaded by {other} of {number}", flush=True)
    part = root / "fsdp/checkpoints/fit" / f"step-{STEP:09d}" / "__3_0.distcp"
    part.write_bytes(part.read_bytes()[:-1] + b"x")
    ranks(2, root, finds_damage(root / "fsdp"))
    print("a damaged part was refused by 2", flush=True)
    ranks(4, root, keep_files(root / "files", saving=True))
    ranks(4, root, keep_files(root / "files", saving=False))
    ranks(2, root, keep_files(root / "files", saving=False))
    print("files of its own were refused by 2", flush=True)
    ranks(4, root, one_fails(root / "fails"))
    print("a failing rank failed the save on 4, which went on", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
