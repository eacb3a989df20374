"""Two loops that took turns on the same ranks: how do their steps compare, and how sure is that?"""

import json
import random
import statistics
import subprocess
import sys
from collections.abc import Sequence

from training.launched import ENV, HERE

_DRAWS = 2000


def turns(ranks: int = 2) -> dict[str, list[float]]:
    """Seconds of each step of each loop of bench/training/loop.py."""
    argv = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    done = subprocess.run(
        [*argv, str(HERE / "training" / "loop.py")],
        env={**ENV, "GLOO_SOCKET_IFNAME": "lo"},
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    seconds: dict[str, list[float]] = json.loads(done.stdout.strip().rpartition("\n")[2])
    return seconds


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float, float]:
    """The median ratio of paired steps, between the ends of its 95 % interval (bootstrap)."""
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    chance = random.Random(0)
    medians = sorted(statistics.median(chance.choices(ratios, k=len(ratios))) for _ in range(_DRAWS))
    return medians[int(0.025 * _DRAWS)], statistics.median(ratios), medians[int(0.975 * _DRAWS)]


def spread(again: Sequence[float], once: Sequence[float]) -> float:
    """How far the same loop seems to be from itself: the farther end of that ratio's interval from 1."""
    low, _, high = ratio(again, once)
    return max(abs(low - 1), abs(high - 1))
