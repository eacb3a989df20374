"""Does a run outlive a machine? Two network namespaces, one of which loses its power and comes back."""

import sys
import time
from pathlib import Path

from report import Result
from training import launched
from training.launched import until
from training.network import NEEDS, Network, can


def hosts(folder: Path) -> list[Result]:
    """Two machines (network namespaces); the one with the store loses its power and comes back."""
    if not can():
        print(f"hosts: {NEEDS}; left out", file=sys.stderr)
        return []
    env, place, network = (
        {"STEPS": "100000", "PAUSE_S": "0.02"},
        folder / "run",
        Network(),
    )
    try:
        network.build(["a", "b"])
        launcher, at = launched.listening(place, env, network.address)
        machines = [launched.host(place, at, name, env, network.enter(name)) for name in ("a", "b")]
        until(lambda: len(launched.steps(place / "notes", 3)) > 20)
        network.cut("a")
        lost_at = time.time()
        launched.end(machines[0])
        went_on = until(lambda: _first(place, 2)) - lost_at
        until(lambda: launched.grows(place / "notes", 1))
        network.heal("a")
        back_at = time.time()
        machines[0] = launched.host(place, at, "a", env, network.enter("a"))
        grew = until(lambda: _first(place, 3)) - back_at
        sizes = [line["ranks"] for line in launched.said(place, "generation started")]
        for one in (launcher, *machines):
            launched.end(one)
    finally:
        network.remove()
    return [
        Result("power loss of a host to training again", went_on, "s", None, "lease 2 s and a margin of 2 s"),
        Result("host back to training on both", grew, "s"),
        Result(
            "two hosts, one, two", float(sizes == [4, 2, 4]), "yes", "== 1", f"generations of {sizes} ranks"
        ),
    ]


def _first(place: Path, generation: int) -> float:
    """When the first step of a generation was completed; 0 before."""
    started = launched.said(place, "generation started")
    if len(started) < generation:
        return 0.0
    since = float(started[generation - 1]["t"])
    after = [step.at for step in launched.steps(place / "notes", 0) if step.at > since]
    return min(after, default=0.0)
