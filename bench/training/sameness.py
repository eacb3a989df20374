"""Is it the same training? After kills, on fewer ranks, and with each engine."""

import json
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

from report import Result
from training import launched
from training.launched import until
from training.losses import once

Disturb = Callable[[Path, "subprocess.Popen[bytes]"], bool]


def equal(folder: Path) -> list[Result]:
    """The same weights, bit for bit, whatever happened; the same losses on fewer ranks."""
    env = {"STEPS": "200", "SAMPLES": "4096"}
    calm = _weights(folder / "calm", env)
    killed = _weights(folder / "killed", {**env, "PAUSE_S": "0.005"}, _kill_thrice)
    stopped = _weights(folder / "stopped", {**env, "PAUSE_S": "0.005"}, _stop)
    grown, once, digits = resized(folder / "resized", 600)
    return [
        Result("weights after three kills equal", float(killed == calm), "yes", "== 1", calm[:12]),
        Result("weights after a preemption and a restart equal", float(stopped == calm), "yes", "== 1"),
        Result(
            "4 -> 2 -> 4 ranks", float(grown == [4, 2, 4]), "yes", "== 1", f"generations of {grown} ranks"
        ),
        Result("4 -> 2 -> 4 ranks: every sample once", float(once), "yes", "== 1"),
        Result("4 -> 2 -> 4 ranks: losses differ by", digits, "relative", "<= 1e-6"),
    ]


def _weights(place: Path, env: dict[str, str], disturb: Disturb | None = None) -> str:
    """The sha256 of what a run publishes at its end; `disturb` says whether it must be started once more."""
    launched.system(place)
    process = launched.ours(place, 2, env)
    try:
        if disturb is not None and disturb(place, process):
            process.wait(60)
            process = launched.ours(place, 2, env)
        process.wait(120)
    finally:
        launched.end(process)
    manifest = json.loads((place / "registry" / "fit" / "1" / "manifest.json").read_text())
    return str(manifest["sha256"])


def _kill_thrice(place: Path, _: subprocess.Popen[bytes]) -> bool:
    for rank in (0, 1, 0):
        once(place, rank, signal.SIGKILL)
    return False


def _stop(place: Path, process: subprocess.Popen[bytes]) -> bool:
    until(lambda: len(launched.steps(place / "notes", 0)) > 30)
    process.send_signal(signal.SIGTERM)
    return True


def resized(place: Path, num_steps: int) -> tuple[list[int], bool, float]:
    """Two hosts of two ranks; one goes and returns: ranks of generations, samples once, error of losses."""
    env = {"STEPS": str(num_steps), "SAMPLES": str(num_steps * 24)}
    calm = place / "calm"
    launched.system(calm)
    process = launched.ours(calm, 4, env)
    process.wait(120)
    slow = {**env, "PAUSE_S": "0.03"}
    launcher, at = launched.listening(place / "run", slow)
    hosts = [launched.host(place / "run", at, name, slow) for name in ("a", "b")]
    try:
        notes = place / "run" / "notes"
        until(lambda: len(launched.steps(notes, 3)) > 20)
        launched.end(hosts[1])
        until(
            lambda: len(launched.said(place / "run", "generation started")) >= 2 and launched.grows(notes, 1)
        )
        hosts[1] = launched.host(place / "run", at, "b", slow)
        launcher.wait(120)
    finally:
        for one in (launcher, *hosts):
            launched.end(one)
    seen, expected = launched.global_losses(place / "run", 4), launched.global_losses(calm, 4)
    started = [line["ranks"] for line in launched.said(place / "run", "generation started")]
    return started, launched.each_once(place / "run", 4, num_steps * 24), _apart(seen, expected)


def engines(folder: Path) -> list[Result]:
    """Fifty steps with each engine on two ranks (hsdp: four), beside one rank alone."""
    env = {"STEPS": "50", "SAMPLES": "1203"}
    found: dict[str, dict[int, float]] = {}
    for engine in ("single", "ddp", "fsdp", "hsdp", "zero-1", "zero-2", "zero-3"):
        ranks = {"single": 1, "hsdp": 4}.get(engine, 2)
        launched.system(folder / engine, parallel={"engine": engine, "shard": 2})
        process = launched.ours(folder / engine, ranks, env)
        process.wait(180)
        found[engine] = launched.global_losses(folder / engine, ranks)
    alone = found["single"]
    return [
        Result(
            f"{engine}: losses differ by",
            _apart(losses, alone),
            "relative",
            "<= 1e-5",
        )
        for engine, losses in found.items()
        if engine != "single"
    ]


def _apart(losses: dict[int, float], expected: dict[int, float]) -> float:
    """The largest relative difference of any step."""
    return max(abs(losses[step] / expected[step] - 1) for step in expected)
