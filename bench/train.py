"""How good is the training hull? Each figure beside its peer, measured in the same run.

python bench/train.py [--json] [SECTION ...]      loop stall kill hang equal engines hosts
"""

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from report import Result, run_sections
from training import losses, sameness, speed, two_hosts

SECTIONS: dict[str, Callable[[Path], list[Result]]] = {
    "loop": speed.loop,
    "stall": speed.stall,
    "kill": losses.kill,
    "hang": losses.hang,
    "equal": sameness.equal,
    "engines": sameness.engines,
    "hosts": two_hosts.hosts,
}


def in_scratch(section: Callable[[Path], list[Result]]) -> list[Result]:
    """A section, in a folder of its own."""
    with tempfile.TemporaryDirectory() as folder:
        return section(Path(folder))


if __name__ == "__main__":
    run_sections("Training hull", {name: partial(in_scratch, one) for name, one in SECTIONS.items()})
