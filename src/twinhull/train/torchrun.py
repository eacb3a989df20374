"""torchrun as a child that stays: imports PyTorch once, starts one set of ranks after another when told.

Each line on standard input holds the arguments of one torchrun as JSON, and the end of input ends it. How the
ranks left is written into a file, since torchrun's own exit status is 1 for everything. It ends with its
parent, and the ranks end with it: they watch the process id that it leaves in their environment.
"""

import argparse
import json
import logging
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

from twinhull import processes

PARENT = "TWINHULL_PARENT"  # the process whose end is the end of a rank


def main() -> None:
    """Run torchrun as often as standard input says."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--nice", type=int, default=0)
    arguments = parser.parse_args()
    end_with(arguments.parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if arguments.nice:
        os.nice(arguments.nice)
    logging.disable()  # torchrun's words: the launcher reports a failure once, in its own
    os.environ[PARENT] = str(os.getpid())
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    for line in _orders():
        told = json.loads(line)
        exits: Mapping[int, int] = {}
        try:
            run.run(run.parse_args(told["arguments"]))
        except ChildFailedError as error:
            exits = {rank: failure.exitcode for rank, failure in error.failures.items()}
        beside = Path(told["exits"] + ".tmp")
        beside.write_text(json.dumps(exits), encoding="utf-8")
        beside.replace(told["exits"])


def _orders() -> TextIO:
    """The lines of standard input, which the ranks no longer have."""
    own = os.fdopen(os.dup(0))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return own


def end_with(parent: int) -> None:
    """Make this process end with `parent`, at once if it has ended already."""
    processes.die_with_parent()
    if os.getppid() != parent:
        os._exit(1)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # torch's threads must not decide how this ends
