"""How soon does it train again? After a kill and after a hang, beside torchrun with the same settings."""

import random
import signal
import statistics
from pathlib import Path

from report import Result
from training import launched

KILLS, KILLS_BESIDE = 50, 10
HANG_S = 5.0


def kill(folder: Path) -> list[Result]:
    """SIGKILL of a random rank until another process trains in its place."""
    chance, env = random.Random(1), {"STEPS": "1000000", "PAUSE_S": "0.005"}
    found: dict[str, list[float]] = {}
    generations = 0
    for name, kills in (("ours", KILLS), ("torchrun", KILLS_BESIDE)):
        place = folder / name
        if name == "ours":
            launched.system(place)
        process = launched.ours(place, 2, env) if name == "ours" else launched.torchrun(place, 2, env)
        try:
            found[name] = [once(place, chance.randrange(2), signal.SIGKILL) for _ in range(kills)]
        finally:
            launched.end(process)
        if name == "ours":
            generations = (place / "log").read_text().count("generation started")
    ratio = statistics.median(found["ours"]) / statistics.median(found["torchrun"])
    return [
        Result("kill to training again, median", statistics.median(found["ours"]), "s", None,
               f"torchrun {statistics.median(found['torchrun']):.2f} s"),
        Result("kill to training again, ours to torchrun", ratio, "ratio", "<= 1"),
        Result(f"of {KILLS} kills recovered at the first restart", KILLS - (generations - 1 - KILLS), "kills",
               f">= {KILLS}", f"slowest {max(found['ours']):.2f} s"),
    ]  # fmt: skip


def hang(folder: Path) -> list[Result]:
    """SIGSTOP of a rank until training goes on without it."""
    env = {"STEPS": "1000000", "PAUSE_S": "0.005", "HANG_S": str(HANG_S)}
    found: dict[str, float] = {}
    launched.system(folder / "ours", hang_timeout="5 min")
    for name in ("ours", "torchrun"):
        place = folder / name
        process = launched.ours(place, 2, env) if name == "ours" else launched.torchrun(place, 2, env)
        try:
            found[name] = once(place, 1, signal.SIGSTOP)
        finally:
            launched.end(process)
    return [
        Result("stopped rank to training again", found["ours"], "s", f"<= {HANG_S + 10:g}",
               f"torchrun with a timeout of {HANG_S:g} s: {found['torchrun']:.1f} s"),
    ]  # fmt: skip


def once(place: Path, rank: int, number: signal.Signals) -> float:
    since, pid = launched.signalled(place, rank, number, beyond=8)
    return launched.training_again(place, rank, pid, since)
