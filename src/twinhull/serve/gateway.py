"""How is a gateway put together and ended? One process, one loop, one inherited listening socket.

`python -m twinhull.serve.gateway --run DIR --fd N`
"""

import argparse
import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import msgspec
import uvicorn
from starlette.applications import Starlette

from twinhull import broker, logs, processes
from twinhull.errors import TwinhullError
from twinhull.rundir import RunDirectory
from twinhull.serve import cache, entry, jobs, layout
from twinhull.serve.answer import Desk
from twinhull.serve.bodies import Bodies
from twinhull.serve.entry import Entry
from twinhull.serve.http import Front, app
from twinhull.serve.metrics import Queues, Serving
from twinhull.serve.plane import Plane
from twinhull.serve.record import Recorder
from twinhull.system.load import load
from twinhull.system.model import System

log = logging.getLogger(__name__)

KEEP_ALIVE_S = 75.0  # longer than clients keep idle connections: the one that closes should be the client
LEAVE_S = 2  # for answers under way when the gateway is told to leave
PATIENCE_S = 1.0  # with the broker at the start; callers wait in the socket's queue meanwhile
DEFAULT_THREADS = 4  # that run default functions, so that a slow one blocks no other request


class _Server(uvicorn.Server):
    """A server that leaves the signals to us: a told end is exit 0, and Ctrl-C is the supervisor's affair."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


async def serve(directory: RunDirectory, system: System, url: str, listener: socket.socket) -> None:
    """Answer requests on the listening socket until SIGTERM."""
    keys = broker.Keys(system.name)
    promises = layout.promises(system)
    entries = _entries(directory)
    reply_to = keys.replies(f"{socket.gethostname()}-{os.getpid()}-{os.urandom(4).hex()}")
    with_jobs = any(s.lane == "job" for p in promises.values() for stage in p.stages for s in stage)
    sender = jobs.Sender(url, system) if with_jobs else None
    pools = layout.pools(system)
    bounds = {pool: layout.queue_bound(system, pool) for pool in pools}
    plane = Plane(url, keys, bounds, None if sender is None else sender.send, reply_to)
    times = layout.cache_times(system)
    memory = cache.Memory(times.most_bytes)
    threads = ThreadPoolExecutor(DEFAULT_THREADS, thread_name_prefix="default")
    defaults = {run: entry.load(run) for p in promises.values() for run in p.defaults}
    desks = {
        name: Desk(promise, plane, keys, memory=memory, times=times, defaults=defaults, threads=threads)
        for name, promise in promises.items()
    }
    queues = Queues(plane, keys, pools)
    async with Recorder(url, keys) as recorder:
        metrics = Serving(desks, plane, recorder, queues)
        bodies = {name: Bodies(p.stages[0] if p.stages else (), entries) for name, p in promises.items()}
        server = _server(app(Front(desks, bodies, recorder, metrics, queues, plane)))
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, _leave, server)
        link = asyncio.create_task(plane.link.run())
        sampling = asyncio.create_task(_sample(metrics, queues, recorder))
        link.add_done_callback(partial(_died, server))
        await plane.link.reached(PATIENCE_S)
        gc.collect()
        gc.freeze()
        log.info("gateway ready", extra={"endpoints": sorted(desks), "port": listener.getsockname()[1]})
        await server.serve(sockets=[listener])
        sampling.cancel()
        plane.link.stop()
    await link
    if sender is not None:
        sender.close()
    threads.shutdown(wait=False, cancel_futures=True)
    log.info("gateway left", extra={"asked": sum(desk.counts.asked for desk in desks.values())})


def _entries(directory: RunDirectory) -> dict[str, Entry]:
    """What the user's functions take, as noted at the start of the run; empty accepts any object."""
    try:
        return msgspec.json.decode(directory.entries.read_bytes(), type=dict[str, Entry])
    except FileNotFoundError:
        log.warning("bodies not checked", extra={"reason": f"{directory.entries} is missing"})
        return {}
    except msgspec.MsgspecError as error:
        raise TwinhullError(
            f"{directory.entries} cannot be read: {error}.", hint="Start the run again."
        ) from error


def _server(application: Starlette) -> _Server:
    config = uvicorn.Config(
        application,
        http="httptools",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        timeout_keep_alive=int(KEEP_ALIVE_S),
        timeout_graceful_shutdown=LEAVE_S,
    )
    return _Server(config)


def _leave(server: uvicorn.Server) -> None:
    server.should_exit = True


def _died(server: uvicorn.Server, task: asyncio.Task[None]) -> None:
    """A gateway without its link would answer from its cache for ever: it leaves, and is started again."""
    if not task.cancelled() and task.exception() is not None:
        _leave(server)


async def _sample(metrics: Serving, queues: Queues, recorder: Recorder) -> None:
    while True:
        await asyncio.sleep(1.0)
        logs.sample(metrics.sample())
        queues.look()
        await recorder.look()


def _new_loop() -> asyncio.AbstractEventLoop:
    if sys.platform == "win32":
        return asyncio.new_event_loop()
    import uvloop

    return uvloop.new_event_loop()


def main(arguments: list[str] | None = None) -> int:
    """Run the gateway, as the supervisor starts it."""
    processes.die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parser = argparse.ArgumentParser(prog="python -m twinhull.serve.gateway", description=__doc__)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--fd", type=int, required=True, help="the listening socket to inherit")
    given = parser.parse_args(arguments)
    logs.setup("gateway")
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    directory = RunDirectory(given.run)
    try:
        system = load(directory.system).system
        with socket.socket(fileno=given.fd) as listener:
            # Its loop is not closed: that waits for what may hang. The process ends right after this.
            runner = asyncio.Runner(loop_factory=_new_loop)
            runner.run(serve(directory, system, os.environ[broker.VARIABLE], listener))
    except TwinhullError as error:
        log.error(str(error))  # noqa: TRY400  # one clear line
        return error.exit_code
    return 0


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    sys.stdout.flush()
    os._exit(code)  # neither a default function that hangs nor a frozen broker keeps the gateway from leaving
