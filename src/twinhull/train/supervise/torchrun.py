"""torchrun's agent as a child that stays: starts one set of ranks after another when it is told to.

Each line on standard input describes one set, and the end of input ends the agent. How the ranks left is
written into a file. The agent ends with its parent, and the ranks end with the agent: they watch the process
id that it leaves in their environment.

A rank's start is mostly imports: 4 s of processor time for PyTorch and what the first optimizer brings. Where
there is no accelerator the agent imports it all once and forks its ranks, which then start within a second. A
process that has touched an accelerator's driver must not be forked, so elsewhere each rank is a new
interpreter.
"""

import argparse
import json
import logging
import os
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

import psutil

from twinhull import processes

PARENT = "TWINHULL_PARENT"  # the process whose end is the end of a rank
_DRIVERS = ("/dev/nvidiactl", "/dev/kfd", "/dev/accel", "/dev/dri/renderD128")


def main() -> None:
    """Start ranks as often as standard input says."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--nice", type=int, default=0)
    parser.add_argument("--warming", type=int, help="a descriptor that is closed when imports are done")
    arguments = parser.parse_args()
    end_with(arguments.parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if arguments.nice:
        os.nice(arguments.nice)
    logging.disable()  # torchrun's words: the launcher reports a failure once, in its own
    os.environ[PARENT] = str(os.getpid())
    forks = sys.platform == "linux" and not any(Path(driver).exists() for driver in _DRIVERS)
    if forks:
        _import_all()
    if arguments.warming is not None:
        os.close(arguments.warming)
    for line in _orders():
        order = json.loads(line)
        _note_exits(Path(order["live"]))
        exits = _run(order, forks=forks)
        beside = Path(order["exits"] + ".tmp")
        beside.write_text(json.dumps(exits), encoding="utf-8")
        beside.replace(order["exits"])


def _run(order: Mapping[str, Any], *, forks: bool) -> Mapping[int, int]:  # Any: of `hosts.LocalHost.start`
    """One generation: a fresh store on the first node, no restarts. The exits of ranks that failed here."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    job, live = order["job"], order["live"]
    config = LaunchConfig(
        min_nodes=order["nodes"],
        max_nodes=order["nodes"],
        nproc_per_node=order["ranks"],
        run_id=order["run"],
        rdzv_backend="static",  # who is there is known: nothing is to be found out or kept alive
        rdzv_endpoint=order["endpoint"],
        rdzv_configs={"rank": order["node"]},
        local_addr=order["address"],
        max_restarts=0,
        monitor_interval=0.05,
        start_method="fork",
        logs_specs=DefaultLogsSpecs(log_dir=str(Path(live) / "torchrun")),
    )
    entry: Any = sys.executable  # Any: a program's path or a function
    words = ["-u", "-m", "twinhull.train.supervise.rank", f"--job={job}", f"--live={live}"]
    if forks:
        from twinhull.train.supervise.rank import forked

        entry, words = forked, [job, live]
    try:
        elastic_launch(config, entry)(*words)
    except ChildFailedError as error:
        return {rank: failure.exitcode for rank, failure in error.failures.items()}
    except RuntimeError as error:  # no rendezvous: another node is gone, or somebody took the port
        print(f"torchrun: {error}", file=sys.stderr, flush=True)
    return {}


def _note_exits(folder: Path) -> None:
    """Leave the exit code of each rank in a file `exit-PID`: torchrun tells of the first to fail alone."""
    if not hasattr(os, "waitid"):
        return

    def look(_number: int, _frame: FrameType | None) -> None:
        for child in psutil.Process().children():
            with suppress(ChildProcessError, FileNotFoundError):
                end = os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                if end is not None:
                    code = end.si_status if end.si_code == os.CLD_EXITED else -end.si_status
                    (folder / f"exit-{child.pid}").write_text(str(code))

    signal.signal(signal.SIGCHLD, look)


def _import_all() -> None:
    """Import what every rank needs, also what PyTorch puts off until the first optimizer is made."""
    import torch

    torch.set_num_threads(1)  # a pool of threads would not survive the fork
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])


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
