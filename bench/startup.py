"""What does it cost to start `twinhull`, beside a bare interpreter?"""

import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import report

ROUNDS = 15
SYSTEM = """
name: shop
pools:
  trainers: {nodes: 2, gpus: 8 x H100, network: 100 GbE, market: spot}
  web:      {nodes: 4, cpus: 8}
  scorers:  {nodes: 2, gpus: 1 x L4}
workloads:
  fit:      {train: app:fit, pool: trainers, every: 4 h, checkpoint: 10 min}
  features: {task: app:features, pool: web, retries: 2}
  rank:     {task: app:rank, pool: scorers, model: fit, batch: 32 within 5 ms}
endpoints:
  recommend: {path: [features, rank], rate: 2000/s, deadline: 200 ms, fallback: [cache, app:best_sellers]}
budget: 50000 USD/month
"""


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one run, in milliseconds: on the clock, and of the processor, which others cannot stretch."""

    wall: float
    cpu: float


def cost(command: list[str]) -> Cost:
    """What one run of a command costs that must succeed."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    wall = time.perf_counter() - started
    now = resource.getrusage(resource.RUSAGE_CHILDREN)
    return Cost(wall * 1e3, (now.ru_utime - used.ru_utime + now.ru_stime - used.ru_stime) * 1e3)


def measure() -> list[report.Result]:
    """Each round runs every command once, in turn, so that all see the same machine."""
    twinhull = str(Path(sys.executable).with_name("twinhull"))
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "shop.yaml"
        file.write_text(SYSTEM)
        commands = {
            "bare": [sys.executable, "-c", "pass"],
            "help": [twinhull, "--help"],
            "check": [twinhull, "check", str(file)],
        }
        rounds = [{name: cost(command) for name, command in commands.items()} for _ in range(ROUNDS + 1)][1:]
    bare = [costs["bare"].wall for costs in rounds]
    beside = f"bare: best {min(bare):.0f}, median {statistics.median(bare):.0f} ms"
    results: list[report.Result] = []
    for name, bar in (("help", "<= 150"), ("check", None)):
        above = [
            (costs[name].wall - costs["bare"].wall, costs[name].cpu - costs["bare"].cpu) for costs in rounds
        ]
        best = min(costs[name].wall for costs in rounds) - min(bare)
        results.append(report.Result(f"{name} above bare, best of {ROUNDS}", best, "ms", bar, beside))
        results.append(
            report.Result(f"{name} above bare, median", statistics.median(a[0] for a in above), "ms")
        )
        results.append(report.Result(f"{name} above bare, processor", min(a[1] for a in above), "ms"))
    return results


if __name__ == "__main__":
    written = "not " if os.environ.get("PYTHONDONTWRITEBYTECODE") else ""
    report.run(f"Start of the command line (bytecode of our own sources {written}kept)", measure)
