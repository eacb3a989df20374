"""Saves a second checkpoint, killed at its n-th file operation, for every n; prints what each has left."""

import os
import signal
import sys
from pathlib import Path

import torch

from twinhull.train.checkpoint import Place, Store


def save(store: Store, step: int) -> None:
    store.save(Place(step=step), ("Net",), [{"weight": torch.full((64,), float(step))}], world_size=2)


def save_and_die_at(store: Store, operation: int) -> int:
    pid = os.fork()
    if pid == 0:
        left = operation

        def count(event: str, _arguments: object) -> None:
            nonlocal left
            if event.startswith(("open", "os.", "shutil.")) and event != "os.kill":
                left -= 1
                if left < 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(count)
        save(store, 2)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


torch.set_num_threads(1)
for operation in range(200):
    store = Store(Path(sys.argv[1]) / str(operation), keep=1)
    save(store, 1)
    killed = save_and_die_at(store, operation) != 0
    store.clean()
    found = store.newest()
    weight = float(store.load(found)[0]["weight"][0]) if found else None
    left = sorted(path.name for path in store.root.iterdir())
    print(killed, found.place.step if found else None, weight, " ".join(left), flush=True)
    if not killed:
        break
