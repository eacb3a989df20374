"""Does it float? The shop trains, hands over, serves and survives, while this program kills parts of it.

`scripts/demo [--json]` runs it for about two minutes: real purchases are replayed open-loop against the
gateway while a rank, the whole training plane, a serving worker and the broker are killed, one by one.
"""

import argparse
import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import psutil

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from shop import sales  # noqa: E402  # found beside this file
from shop.replay import purchases  # noqa: E402

from twinhull.rundir import RunDirectory  # noqa: E402
from twinhull.serve.load_generator import Generator, Shot, constant  # noqa: E402
from twinhull.serve.load_report import LoadReport, Totals  # noqa: E402
from twinhull.system.load import load  # noqa: E402
from twinhull.system.model import Endpoint  # noqa: E402
from twinhull.train.supervise import live  # noqa: E402

RATE = 150.0  # requests a second
ALLOWANCE_S = 0.020  # beyond the deadline, at the client: the way there and back on a busy machine
OUTAGE_S = 5.0
CYCLE = "40 s"  # the demo cannot wait a day for the second version
WORST_S = 1.5  # after a checkpoint, which comes every 2 s: a kill just before the next one costs most
KILLS = ("kill a rank", "kill training", "kill a worker", "stop the broker")


@dataclass(slots=True)
class Run:
    """One `twinhull up`, listened to: every JSON line that it prints is an event."""

    directory: RunDirectory
    process: subprocess.Popen[bytes]
    events: list[dict[str, Any]] = field(default_factory=list)  # Any: JSON

    async def listen(self) -> None:
        """Collect what it says until it ends."""
        assert self.process.stdout is not None
        while line := await asyncio.to_thread(self.process.stdout.readline):
            try:
                self.events.append(json.loads(line))
            except ValueError:
                continue

    def seen(self, event: str, since: float = 0.0, **facts: object) -> list[dict[str, Any]]:  # Any: JSON
        """The events of a kind after an instant whose facts are these."""
        return [
            e
            for e in list(self.events)
            if e.get("event") == event
            and e.get("t", 0.0) >= since
            and all(e.get(name) == value for name, value in facts.items())
        ]

    async def until(self, what: str, holds: Callable[[], object], limit_s: float) -> None:
        """Wait for something; say what was waited for if it does not come."""
        end = time.monotonic() + limit_s
        while not holds():
            if self.process.poll() is not None:
                raise SystemExit(f"twinhull up ended with {self.process.returncode} while waiting for {what}")
            if time.monotonic() > end:
                raise SystemExit(f"no {what} within {limit_s:.0f} s; see {self.directory.logs}")
            await asyncio.sleep(0.05)

    def pid(self, role: str) -> int:
        """The process that plays a role now."""
        return int(json.loads(self.directory.up.read_text())["processes"][role])

    @contextmanager
    def held_down(self, role: str) -> Iterator[None]:
        """Keep a process down while inside: the supervisor starts it again afterwards."""
        hold = self.directory.holds / role
        hold.touch()
        try:
            yield
        finally:
            hold.unlink()


class Shopper:
    """Posts purchases as a shop does: in small bundles, each again and again until it is accepted."""

    def __init__(self, url: str, shots: Iterator[Shot]) -> None:
        self._url, self._shots = url, shots
        self.posted = 0
        self.repeated = 0

    async def run(self, rate: float) -> None:
        """Post at a rate until cancelled."""
        bundle = max(1, round(rate / 2))
        number = 0
        while True:
            bodies = [shot.body for shot, _ in zip(self._shots, range(bundle), strict=False)]
            if not bodies:
                return
            number += 1
            while not await asyncio.to_thread(self._post, b"\n".join(bodies), f"bundle-{number}"):
                self.repeated += 1
                await asyncio.sleep(0.2)
            self.posted += len(bodies)
            await asyncio.sleep(0.5)

    def _post(self, body: bytes, key: str) -> bool:
        headers = {"Content-Type": "application/x-ndjson", "Idempotency-Key": key}
        try:
            with urlopen(Request(f"{self._url}/events/purchase", body, headers), timeout=2.0) as answer:
                return bool(answer.status == 202)
        except HTTPError as error:
            if error.code < 500:
                raise
            return False
        except (URLError, OSError):
            return False


async def story(run: Run, endpoint: Endpoint, say: Callable[[str], None]) -> tuple[LoadReport, Shopper]:
    """The whole demo against a started run."""
    listening = asyncio.create_task(run.listen())
    await run.until("gateway", lambda: run.seen("gateway"), 60)
    url = run.seen("gateway")[0]["url"]
    await run.until("answer from the gateway", lambda: _healthy(url), 30)
    deadline_s = endpoint.deadline or 0.2
    asks, bought = purchases()
    shopper = Shopper(url, bought)
    async with Generator(url, deadline_s=deadline_s + ALLOWANCE_S) as generator:
        generator.mark("before")
        generator.start("recommend", asks, constant(RATE))
        posting = asyncio.create_task(shopper.run(RATE / 3))
        try:
            await _phases(run, generator, say)
        finally:
            posting.cancel()
        report = await generator.end()
    await asyncio.gather(posting, return_exceptions=True)
    listening.cancel()
    return report, shopper


async def _phases(run: Run, generator: Generator, say: Callable[[str], None]) -> None:
    await run.until("first training steps", lambda: _stepped(run), 90)
    await asyncio.sleep(WORST_S)

    say("killing one rank (kill -9)")
    generator.mark(KILLS[0])
    since = time.time()
    ranks = live.read(live.directory(run.directory, "fit"))
    os.kill(ranks[max(ranks)].pid, signal.SIGKILL)
    await run.until("recovery of the rank", lambda: run.seen("resumed", since), 60)
    resumed = run.seen("resumed", since)[0]["t"]
    await run.until("a step after it", lambda: run.seen("checkpoint saved", resumed), 60)
    await asyncio.sleep(WORST_S)

    say(f"killing the whole training plane, back in {OUTAGE_S:.0f} s")
    generator.mark(KILLS[1])
    since = time.time()
    with run.held_down("train:fit"):
        launcher = psutil.Process(run.pid("train:fit"))
        for process in [launcher, *launcher.children(recursive=True)]:
            _kill(process)
        await asyncio.sleep(OUTAGE_S)
    await run.until("return of training", lambda: run.seen("started", since, process="train:fit"), 60)
    say("training again; waiting for version 1")
    await run.until("version 1", lambda: run.seen("published", version=1), 150)
    await run.until("version 1 on a worker", lambda: run.seen("swapped", version=1), 30)
    await asyncio.sleep(3)

    say("killing a serving worker (kill -9)")
    generator.mark(KILLS[2])
    since = time.time()
    worker = next(name for name in json.loads(run.directory.up.read_text())["processes"] if "worker:" in name)
    os.kill(run.pid(worker), signal.SIGKILL)
    await run.until("the worker back", lambda: run.seen("swapped", since), 30)
    await asyncio.sleep(3)

    say(f"killing the broker, back in {OUTAGE_S:.0f} s")
    generator.mark(KILLS[3])
    with run.held_down("broker"):
        os.kill(run.pid("broker"), signal.SIGKILL)
        await asyncio.sleep(OUTAGE_S)
    fresh = generator.phase.sources["fresh"]
    await run.until("fresh answers", lambda: generator.phase.sources["fresh"] > fresh + 50, 30)

    say("waiting for version 2, trained also on what was bought meanwhile")
    generator.mark("after")
    await run.until("version 2", lambda: run.seen("published", version=2), 120)
    await run.until("version 2 on a worker", lambda: run.seen("swapped", version=2), 30)
    await asyncio.sleep(3)


def _stepped(run: Run) -> bool:
    """Whether training has steps to lose: more than its first checkpoint is saved."""
    return len(run.seen("checkpoint saved")) >= 2


def _environment(process: psutil.Process) -> dict[str, str]:
    try:
        return process.environ()
    except psutil.Error:
        return {}


def _kill(process: psutil.Process) -> None:
    try:
        process.kill()
    except psutil.Error:
        return


def _healthy(url: str) -> bool:
    try:
        with urlopen(f"{url}/health", timeout=1.0) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def leftovers(directory: RunDirectory) -> list[str]:
    """Command lines of processes that still belong to a run."""
    marked = [p for p in psutil.process_iter() if _environment(p).get("TWINHULL_RUN") == str(directory.root)]
    return [" ".join(p.cmdline()) for p in marked if p.status() != psutil.STATUS_ZOMBIE]


def table(report: LoadReport) -> str:
    """The phases beside each other."""
    head = f"{'phase':<18}" + "".join(
        f"{name:>9}" for name in ("asked", "fresh", "cached", "default", "late", "failed", "p50 ms", "max ms")
    )
    return "\n".join([head, *(_row(t) for t in report.phases), _row(report.total)])


def _row(t: Totals) -> str:
    counts = (t.asked, t.fresh, t.cached, t.default, t.late, t.failed)
    times = (t.p50_s or 0.0, t.max_s or 0.0)
    return f"{t.phase:<18}" + "".join(f"{n:>9}" for n in counts) + "".join(f"{s * 1e3:>9.1f}" for s in times)


def summary(report: LoadReport, run: Run, left: list[str]) -> dict[str, Any]:  # Any: JSON
    """The figures of the demo, as one JSON object."""
    total = report.total
    metrics = [e.get("metrics") or {} for e in run.seen("published")]
    first = metrics[0] if metrics else {}
    return {
        "asked": total.asked,
        "answered_in_time": total.answered_in_time,
        "fresh": total.fresh,
        "cached": total.cached,
        "default": total.default,
        "failed": total.failed,
        "late": total.late,
        "recall_new": first.get("recall_new"),
        "recall_best_sellers": first.get("recall_best_sellers"),
        "versions_served": list(total.versions),
        "steps_repeated": sum(int(e.get("repeated_steps") or 0) for e in run.seen("resumed")),
        "leftover_processes": len(left),
        "slowest_ms": round((total.max_s or 0.0) * 1e3, 1),
        "load_own_lag_max_ms": round(report.own_lag_max_s * 1e3, 1),
    }


def started(root: Path) -> Run:
    """`twinhull up` on the shop, with short cycles, in a fresh run directory."""
    text = (HERE / "shop.yaml").read_text()
    file = root / "shop.yaml"
    file.write_text(text.replace("every: 24 h  # fit", f"every: {CYCLE}"))
    directory = RunDirectory(root / "run")
    command = [sys.executable, "-m", "twinhull", "up", str(file), "--run", str(directory.root)]
    command += ["--port", "0", "--plain", "--log-format", "json"]
    paths = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": paths}, start_new_session=True
    )
    return Run(directory, process)


def main() -> int:
    """Run the demo; 0 if every promise held."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    parser.add_argument("--keep", action="store_true", help="keep the run directory and say where it is")
    options = parser.parse_args()
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - began:5.1f} s] {text}", file=sys.stderr, flush=True)

    root = Path(tempfile.mkdtemp(prefix="twinhull-demo-"))
    endpoint = load(HERE / "shop.yaml").system.endpoints["recommend"]
    known = sales.find()  # a first download takes its time here, not in a start that waits
    say(f"sales: {known.source}")
    run = started(root)
    say(f"twinhull up examples/shop/shop.yaml (run directory {root})")
    try:
        report, shopper = asyncio.run(story(run, endpoint, say))
        say("stopping")
    finally:
        run.process.send_signal(signal.SIGINT)
        try:
            run.process.wait(10)
        except subprocess.TimeoutExpired:
            run.process.kill()
        left = leftovers(run.directory)
    figures = {**summary(report, run, left), "sales": "real" if known.real else "synthetic"}
    print(table(report))
    print(
        f"recall@10 on new items {figures['recall_new']:.3f}, "
        f"best sellers {figures['recall_best_sellers']:.3f}, {figures['sales']} sales"
    )
    print(f"versions served {figures['versions_served']}, steps repeated {figures['steps_repeated']}")
    print(f"purchases posted {shopper.posted}, bundles posted again {shopper.repeated}")
    print(f"left over: {'; '.join(left) or 'nothing'}")
    for reason, count in report.total.reasons.items():
        print(f"failed: {count} x {reason}")
    if options.keep:
        print(f"run directory: {root}")
    else:
        shutil.rmtree(root, ignore_errors=True)
    if options.json:
        print(json.dumps(figures))
    kept = figures["failed"] == figures["late"] == 0 and not left and len(figures["versions_served"]) >= 2
    return 0 if kept else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
