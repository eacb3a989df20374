"""Saves a second checkpoint, one rank killed at its n-th file operation; prints what each kill has left."""

import json
import os
import shutil
import signal
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from twinhull.errors import CheckpointError
from twinhull.train.checkpoints.keep import Keeper
from twinhull.train.checkpoints.manifest import Place
from twinhull.train.checkpoints.restore import read_skeletons, restore
from twinhull.train.checkpoints.store import Store
from twinhull.train.group import Group
from twinhull.train.job import Job


class Held:
    def __init__(self, value: float) -> None:
        self.weight = torch.full((64,), value)

    def state_dict(self) -> dict[str, Any]:
        return {"weight": self.weight}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weight = state["weight"]


def save(directory: Path, step: int, group: Group, dies_at: int | None) -> None:
    keeper = Keeper(Job(name="fit", directory=directory, keep=1), group)
    thing = Held(0.0)
    keeper.add(thing, "Held")
    thing.weight = torch.full((64,), float(step))
    if dies_at is not None:
        die_at(dies_at)
    keeper.save(Place(step=step), required=True)
    keeper.settle()


def die_at(operation: int) -> None:
    """End at the n-th file operation from here on."""
    left = operation

    def count(event: str, _arguments: object) -> None:
        nonlocal left
        if event.startswith(("open", "os.", "shutil.")) and event != "os.kill":
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)


def forked(directory: Path, step: int, ranks: int, doomed: int = -1, operation: int = 0) -> list[int]:
    """How each rank ended, the doomed one at that file operation of its save."""
    pids = []
    for rank in range(ranks):
        pid = os.fork()
        if pid == 0:
            if ranks > 1:
                dist.init_process_group(
                    "gloo", init_method=f"file://{directory}/store", rank=rank, world_size=ranks,
                    timeout=timedelta(seconds=20),
                )  # fmt: skip
            try:
                dies_at = operation if rank == doomed else None
                save(directory, step, Group(rank, ranks, torch.device("cpu")), dies_at)
            except CheckpointError:
                os._exit(3)  # the other rank is gone
            os._exit(0)
        pids.append(pid)
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


def outcome(directory: Path, ranks: int, doomed: int, operation: int) -> dict[str, Any]:
    """What is left after the second save of so many ranks."""
    codes = forked(directory, 2, ranks, doomed, operation)
    store = Store(directory / "checkpoints" / "fit", keep=1)
    store.clean()
    found = store.newest()
    assert found is not None
    thing = Held(0.0)
    restore(thing, read_skeletons(found.path)[0], found.path)
    return {
        "ranks": ranks,
        "killed": -signal.SIGKILL in codes,
        "step": found.place.step,
        "weight": float(thing.weight.mean()),
        "left": sorted(path.name for path in store.root.iterdir()),
    }


def main(root: Path) -> None:
    torch.set_num_threads(1)
    forked(root / "first", 1, 1)
    alone, pairs = (
        [(1, 0, n) for n in range(200)],
        [(2, 0, n) for n in range(0, 29, 4)] + [(2, 1, 2), (2, 1, 4)],
    )
    survived = False
    for ranks, doomed, operation in alone + pairs:
        if survived and ranks == 1:  # it had no such operation; nor has it later ones
            continue
        directory = root / f"{ranks}-{doomed}-{operation}"
        shutil.copytree(root / "first", directory)
        found = outcome(directory, ranks, doomed, operation)
        print(json.dumps(found), flush=True)
        survived = not found["killed"]


main(Path(sys.argv[1]))
