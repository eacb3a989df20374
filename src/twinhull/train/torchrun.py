"""torchrun as a child that can be kept warm: imports PyTorch at once, starts its ranks when it is told to.

It reads one line from standard input, the arguments of torchrun as JSON, and leaves if there is none. It says
how each rank left in a file, since torchrun's own exit status is 1 for everything. It ends with its parent,
and its ranks end with it: they watch the process id that it leaves in their environment.
"""

import argparse
import json
import logging
import os
import signal
import sys
from pathlib import Path

from twinhull import processes

PARENT = "TWINHULL_PARENT"  # the process whose end is the end of a rank


def main() -> int:
    """Run torchrun once, as told on standard input."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--nice", type=int, default=0)
    arguments = parser.parse_args()
    end_with(arguments.parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if arguments.nice:
        os.nice(arguments.nice)
    logging.disable()  # torchrun's words: the launcher reports a failure once, in its own
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    line = sys.stdin.readline()
    if not line:
        return 0
    told = json.loads(line)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.environ[PARENT] = str(os.getpid())
    try:
        run.run(run.parse_args(told["arguments"]))
    except ChildFailedError as error:
        exits = {rank: failure.exitcode for rank, failure in error.failures.items()}
        Path(told["exits"]).write_text(json.dumps(exits), encoding="utf-8")
        return 1
    return 0


def end_with(parent: int) -> None:
    """Make this process end with `parent`, at once if it has ended already."""
    processes.die_with_parent()
    if os.getppid() != parent:
        os._exit(1)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # torch's threads must not decide how this ends
